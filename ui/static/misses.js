// What was dropped from the cache in this chat's turns, why, and what that cost: newest first.

import { counted, duration, h, number, shown } from "./dom.js";
import { misses } from "./net.js";
import { CAUSES } from "./panel.js";

export class Misses {
  constructor(tab) {
    this.tab = tab;
    this.root = h("div", { class: "misses" });
    this.clear();
  }

  clear() {
    this.key = null;
    this.draw([]);
  }

  // Misses are other ones once a turn has ended.
  show(reply) {
    const { session, running } = this.tab.page;
    const key = `${session} ${reply?.id} ${this.tab.page.chat.entries.length}`;
    if (!session || !reply || running || key === this.key) return;
    this.key = key;
    this.read(session, key);
  }

  async read(session, key) {
    try {
      const found = await misses(session);
      if (this.key === key) this.draw(found.misses);
    } catch {
      // The page itself says when the server is away; the next turn asks again.
      if (this.key === key) this.key = null;
    }
  }

  draw(cards) {
    this.root.replaceChildren(...(cards.length ? cards.map(card) : [h("p", { class: "quiet" }, "None in this chat.")]));
  }
}

function card(miss) {
  const side = (label, id, text) => h("div", { class: "side" }, h("span", { class: "quiet" }, label),
    id === null || id === undefined ? h("span", { class: "quiet" }, "nothing") : h("code", { title: `id ${id}` }, shown(text)));
  const lost = counted(miss.tokens_lost, "token") + (miss.ms_lost ? `, ${duration(miss.ms_lost)}` : "");
  return h("article", { class: "miss" },
    h("p", {}, h("b", {}, lost), ` lost at position ${number(miss.position)}`, h("time", { class: "quiet" }, new Date(miss.at).toLocaleTimeString())),
    h("p", {}, `Because ${CAUSES[miss.cause] ?? miss.cause}.`, miss.detail ? ` ${miss.detail}` : ""),
    miss.text_before ? h("p", { class: "quiet before" }, "after ", h("code", {}, `…${shown(miss.text_before)}`)) : null,
    side("cached", miss.cached_token, miss.text_cached), side("wanted", miss.wanted_token, miss.text_wanted));
}

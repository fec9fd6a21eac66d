// System prompts that are computed ahead and kept on disk: what there is, and the open chat's to be added to it.

import { bytes, h, number, toast } from "./dom.js";
import { freeze, frozen, unfreeze } from "./net.js";

export class Frozen {
  constructor(page) {
    this.page = page;
    this.list = h("ul", { class: "frozen-list" });
    this.button = h("button", { type: "button", class: "plain", onclick: () => this.freeze() }, "Freeze this system prompt");
    this.note = h("p", { class: "quiet", role: "status" });
  }

  fill(element) {
    element.replaceChildren(h("div", { class: "frozen" }, this.button, this.note, this.list));
    this.tell();
    this.refresh();
  }

  // Once the model is there; until then there is nothing to ask for.
  draw() {
    const text = this.page.settings.current()?.system_prompt ?? "";
    this.button.disabled = this.busy || !text.trim();
    if (!this.read && this.page.app?.model) this.refresh();
  }

  tell(text = "Computed once and kept on disk: chats with this system prompt then load it with their first message.") {
    this.note.textContent = text;
  }

  async refresh() {
    this.read = true;
    try {
      const found = (await frozen()).frozen;
      this.list.replaceChildren(...found.map((entry) => this.row(entry)));
    } catch {
      this.read = false; // asked again when the page next hears of the model
    }
  }

  row({ name, tokens, bytes: size, refused }) {
    return h("li", { title: refused ?? "" }, h("span", { class: "frozen-name" }, name),
      h("span", { class: "quiet" }, refused ? "not usable now" : `${number(tokens)} tokens · ${bytes(size)}`),
      h("button", { type: "button", class: "plain", "aria-label": `Delete the frozen prefix ${name}`, onclick: () => this.remove(name) }, "Delete"));
  }

  async freeze() {
    const text = this.page.settings.current().system_prompt;
    this.busy = true;
    this.draw();
    this.tell("Computing it; other replies go on meanwhile.");
    try {
      const { tokens } = await freeze(text);
      this.tell(`${number(tokens)} tokens are kept.`);
    } catch (error) {
      this.tell();
      toast(error.message);
    }
    this.busy = false;
    this.draw();
    this.refresh();
  }

  async remove(name) {
    try {
      await unfreeze(name);
    } catch (error) {
      toast(error.message);
    }
    this.refresh();
  }
}

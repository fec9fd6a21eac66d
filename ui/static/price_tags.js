// Under the settings that make the next reply compute more of the chat: what changing them would cost now.

import { counted, h, setText } from "./dom.js";
import { price } from "./net.js";
import { asPrice } from "./notes.js";

export class PriceTags {
  constructor(page) {
    this.page = page;
    this.tags = { kv_format: h("p", { class: "price-tag" }), strip_thoughts: h("p", { class: "price-tag" }) };
    this.key = null;
  }

  clear() {
    this.key = null;
    for (const tag of Object.values(this.tags)) setText(tag, "");
  }

  // Asked for while the settings are on screen, once for each state of the chat.
  async refresh() {
    const { app, chat, meta, running, session } = this.page;
    if (!session) this.clear();
    if (!session || !meta || running || app?.status !== "ok" || !this.place()) return;
    const strips = meta.settings.strip_thoughts;
    const key = JSON.stringify([session, chat.entries.map((entry) => entry.id), meta.settings.kv_format, strips]);
    if (key === this.key) return;
    this.key = key;
    try {
      const [anew, strip, keep] = await Promise.all(["kv_format", "strip_thoughts", "keep_thoughts"].map((action) => price(session, action)));
      if (key !== this.key) return;
      setText(this.tags.kv_format, `With another one the next reply ${asPrice(anew)}.`);
      const saved = keep.prompt_tokens - strip.prompt_tokens;
      const [change, cost, size] = strips ? ["Sent again", keep, "longer"] : ["Without them", strip, "shorter"];
      setText(this.tags.strip_thoughts, saved > 0 ? `${change}, the prompt is ${counted(saved, "token")} ${size}; the next reply ${asPrice(cost)}.` : "No thoughts in this chat.");
    } catch {
      // The page itself says when the server is away; the next state of the chat asks again.
      if (key === this.key) this.clear();
    }
  }

  // Puts the tags under their controls, which Gradio draws in its own time; whether they can be seen.
  place() {
    for (const [name, tag] of Object.entries(this.tags)) {
      const control = document.getElementById(`kv-${name}`);
      if (control && tag.parentNode !== control) control.append(tag);
    }
    return Boolean(this.tags.kv_format.parentNode?.getClientRects().length);
  }
}

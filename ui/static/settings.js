// System prompt and sampling settings of the open chat. A chat that is not stored yet keeps them here.

import { h, setText } from "./dom.js";
import { act } from "./net.js";
import { priceOf } from "./notes.js";
import { PriceTags } from "./price_tags.js";

const SAVE_AFTER_MS = 400;
const FILLED_AFTER_MS = 150;
const HEARD_AFTER_MS = 2000;
const NAMES = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed", "stop", "kv_format", "strip_thoughts"];

export class Settings {
  constructor(page) {
    this.page = page;
    this.state = h("span", { role: "status" });
    this.own = null;
    this.shown = "";
    this.prices = new PriceTags(page);
    this.typedAt = -Infinity;
    document.addEventListener("input", (event) => {
      if (event.target.closest?.("#kv-settings")) this.typedAt = performance.now();
    }, true);
  }

  fill(element) {
    new IntersectionObserver(() => this.prices.refresh()).observe(element);
    element.replaceChildren(h("div", { class: "settings-foot" }, this.state,
      h("button", { type: "button", class: "plain", onclick: () => this.defaults() }, "Reset sampling")));
    this.draw();
  }

  reset() {
    this.flush();
    this.own = null;
    this.shown = "";
    this.unheard = null;
    this.prices.clear();
    this.tell("");
  }

  // What the server has: the chat's settings, or the defaults for a chat not stored yet; null while not known.
  stored() {
    const { app, meta, session } = this.page;
    if (session) return meta && { system_prompt: meta.system_prompt, params: meta.settings };
    return app && { system_prompt: "", params: app.defaults };
  }

  // What the controls should show.
  current() {
    return this.own ?? this.stored();
  }

  draft() {
    const { system_prompt, params } = this.own ?? { system_prompt: "", params: {} };
    return { system_prompt, params };
  }

  draw() {
    const current = this.current();
    const key = JSON.stringify(current);
    const typing = document.activeElement?.closest("#kv-settings");
    if (!current || key === this.shown || typing && this.shown) return;
    const fill = document.getElementById("kv-fill-settings");
    if (!fill) {
      setTimeout(() => this.draw(), 100);
      return;
    }
    this.shown = key;
    this.filling = true;
    fill.click();
    setTimeout(() => this.filled(), FILLED_AFTER_MS);
  }

  // What a person typed while the controls were being filled counts as if it was typed now.
  filled() {
    this.filling = false;
    const values = this.unheard;
    this.unheard = null;
    if (values) this.changed(values);
  }

  // For Gradio: one value per control, in their order.
  values() {
    const { system_prompt, params } = this.current();
    const text = (value) => (value === null || value === undefined ? "" : String(value));
    return [system_prompt, ...NAMES.map((name) => {
      if (name === "stop") return params.stop.join("\n");
      return ["max_tokens", "seed", "kv_format"].includes(name) ? text(params[name]) : params[name];
    })];
  }

  // The page puts values in one after the other too, so only what differs from the chat's settings is a change.
  changed(all) {
    this.typedAt = -Infinity;
    if (this.filling) this.unheard = all;
    if (this.filling || this.current() === null) return;
    const [system, ...values] = all;
    const params = {};
    for (const [index, name] of NAMES.entries()) {
      let value = values[index];
      if (name === "kv_format") value = value || null;
      else if (name === "stop") value = value.split("\n").filter((line) => line !== "");
      else if (name === "max_tokens" || name === "seed") {
        const text = String(value).trim();
        if (text && !/^\d{1,18}$/.test(text)) {
          this.tell(`${name === "seed" ? "The seed" : "Max new tokens"} must be a whole number, or empty.`, true);
          return;
        }
        value = text ? Number(text) : null;
      }
      params[name] = value;
    }
    const wanted = { system_prompt: system, params };
    clearTimeout(this.timer);
    this.pending = null;
    this.shown = JSON.stringify(wanted);
    if (this.shown === JSON.stringify(this.stored())) {
      this.own = null;
      this.page.frozen.draw();
      return;
    }
    this.own = wanted;
    this.page.frozen.draw();
    if (this.page.session === null) {
      this.tell("Saved with the first message.");
      return;
    }
    this.pending = { session: this.page.session, body: this.own };
    this.timer = setTimeout(() => this.flush(), SAVE_AFTER_MS);
  }

  // To be awaited before a reply is asked for: what was typed just now takes its way through the page first.
  async settled() {
    while (this.filling || performance.now() - this.typedAt < HEARD_AFTER_MS) await new Promise((done) => setTimeout(done, 10));
    await this.flush();
  }

  async flush() {
    clearTimeout(this.timer);
    if (!this.pending) return;
    const { session, body } = this.pending;
    const { kv_format: format = null, strip_thoughts: strips = false } = this.page.meta?.settings ?? {};
    this.pending = null;
    try {
      await act(session, "update", body);
      if (session === this.page.session) {
        if (this.own === body) this.own = null;
        if (this.page.meta) Object.assign(this.page.meta, { system_prompt: body.system_prompt, settings: body.params });
        this.tell("Saved for this chat.");
        if (body.params.kv_format !== format) this.tellPrice(session, "kv_format");
        else if (body.params.strip_thoughts !== strips) this.tellPrice(session, strips ? "keep_thoughts" : "strip_thoughts");
      }
      this.page.poll();
    } catch (error) {
      if (session === this.page.session) this.tell(error.message, true);
    }
  }

  // Another format of keys and values makes the next reply compute the whole chat, other thoughts a part of it.
  async tellPrice(session, action) {
    try {
      const found = await priceOf(session, action);
      if (session === this.page.session) this.tell(`Saved for this chat: its next reply ${found}.`);
    } catch {
      // What was saved has been told.
    }
  }

  defaults() {
    const { system_prompt } = this.current() ?? { system_prompt: "" };
    const { app } = this.page;
    if (!app) return;
    this.own = { system_prompt, params: app.defaults };
    document.activeElement?.blur();
    this.draw();
    this.changed(this.values());
  }

  tell(text, bad = false) {
    setText(this.state, text);
    this.state.className = bad ? "failure" : "quiet";
  }
}

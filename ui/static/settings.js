// System prompt and sampling settings of the open chat. A chat that is not stored yet keeps them here.

import { h, setText } from "./dom.js";
import { act } from "./net.js";

const SAVE_AFTER_MS = 400;
const NAMES = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "seed", "stop"];

export class Settings {
  constructor(page) {
    this.page = page;
    this.state = h("span", { role: "status" });
    this.own = null;
    this.shown = "";
  }

  fill(element) {
    element.replaceChildren(h("div", { class: "settings-foot" }, this.state,
      h("button", { type: "button", class: "plain", onclick: () => this.defaults() }, "Reset sampling")));
    this.draw();
  }

  reset() {
    this.flush();
    this.own = null;
    this.shown = "";
    this.tell("");
  }

  // What the controls should show: unsaved changes, the chat's settings, or the defaults.
  current() {
    const { app, meta, session } = this.page;
    if (this.own) return this.own;
    if (session && meta) return { system_prompt: meta.system_prompt, params: meta.settings };
    return session || !app ? null : { system_prompt: "", params: app.defaults };
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
    fill.click();
  }

  // For Gradio: one value per control, in their order.
  values() {
    const { system_prompt, params } = this.current();
    const text = (value) => (value === null || value === undefined ? "" : String(value));
    return [system_prompt, ...NAMES.map((name) => {
      if (name === "stop") return params.stop.join("\n");
      return name === "max_tokens" || name === "seed" ? text(params[name]) : params[name];
    })];
  }

  changed([system, ...values]) {
    const params = {};
    for (const [index, name] of NAMES.entries()) {
      let value = values[index];
      if (name === "stop") value = value.split("\n").filter((line) => line !== "");
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
    this.own = { system_prompt: system, params };
    this.shown = JSON.stringify(this.own);
    if (this.page.session === null) {
      this.tell("Saved with the first message.");
      return;
    }
    clearTimeout(this.timer);
    this.pending = { session: this.page.session, body: this.own };
    this.timer = setTimeout(() => this.flush(), SAVE_AFTER_MS);
  }

  async flush() {
    clearTimeout(this.timer);
    if (!this.pending) return;
    const { session, body } = this.pending;
    this.pending = null;
    try {
      await act(session, "update", body);
      if (session === this.page.session) {
        if (this.own === body) this.own = null;
        this.tell("Saved for this chat.");
      }
      this.page.poll();
    } catch (error) {
      if (session === this.page.session) this.tell(error.message, true);
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

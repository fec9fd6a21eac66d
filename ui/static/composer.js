// The text box: what is typed, what sending it would cost, and what the running reply is doing.

import { h, number, setText, toast } from "./dom.js";
import { Refusal, act } from "./net.js";

const PREVIEW_AFTER_MS = 350;
const HINT = "Enter to send · Shift+Enter for a new line";

export class Composer {
  constructor(page) {
    this.page = page;
    this.line = h("span", { class: "preview" }, HINT);
    this.note = HINT;
  }

  fill(element) {
    element.replaceChildren(this.line);
    this.watch();
  }

  // Gradio draws the text box in its own time.
  watch() {
    this.box = document.querySelector("#kv-prompt textarea");
    if (!this.box) {
      setTimeout(() => this.watch(), 50);
      return;
    }
    this.box.setAttribute("aria-label", "Message");
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      event.stopImmediatePropagation();
      this.send();
    }, true);
    this.box.addEventListener("input", () => this.preview());
    this.restoreDraft();
    if (innerWidth > 900) this.focus();
  }

  focus() {
    this.box?.focus();
  }

  set(text) {
    if (!this.box || this.box.value === text) return;
    this.box.value = text;
    this.box.dispatchEvent(new Event("input", { bubbles: true }));
  }

  // Put text back into the box, in front of whatever has been typed meanwhile.
  offer(text) {
    this.set(this.box?.value ? `${text}\n${this.box.value}` : text);
    this.focus();
  }

  async send() {
    const text = this.box?.value ?? "";
    if (!text.trim() || this.sending) return;
    if (this.page.running) {
      toast("The reply is still being written; stop it first (Esc).", "note");
      return;
    }
    this.sending = true;
    const draft = this.draftName();
    const sent = await this.page.send(text);
    this.sending = false;
    if (sent && this.box.value === text) this.set("");
    if (sent) sessionStorage.removeItem(draft);
  }

  sendText(text) {
    this.set(text);
    this.send();
  }

  // -- drafts: a text not sent yet stays with its chat, also over a reload

  draftName() {
    return `kvscope-draft-${this.page.session ?? "new"}`;
  }

  keepDraft() {
    if (!this.box) return;
    if (this.box.value) sessionStorage.setItem(this.draftName(), this.box.value);
    else sessionStorage.removeItem(this.draftName());
  }

  restoreDraft() {
    this.set(sessionStorage.getItem(this.draftName()) ?? "");
  }

  // -- the line below

  preview() {
    clearTimeout(this.timer);
    this.keepDraft();
    const text = this.box?.value ?? "";
    if (!text.trim() || this.page.session === null) {
      this.show(HINT);
      return;
    }
    this.timer = setTimeout(() => this.askPreview(text), PREVIEW_AFTER_MS);
  }

  async askPreview(text) {
    const session = this.page.session;
    if (this.page.running || this.page.app?.status !== "ok") return;
    let note;
    let kind = "";
    try {
      const cost = await act(session, "preview", { content: text });
      note = `${number(cost.prompt_tokens)} of ${number(cost.context_limit)} tokens · ${number(cost.reused_tokens)} cached`;
      const leaving = cost.dropped.length;
      if (leaving) {
        kind = "warn";
        note += leaving === 1 ? " · the oldest message will leave the prompt" : ` · the oldest ${number(leaving)} messages will leave the prompt`;
      }
    } catch (error) {
      // Only a refusal says something about this text; a server that is away is told elsewhere.
      note = error instanceof Refusal ? error.message : HINT;
      kind = error instanceof Refusal ? "bad" : "";
    }
    if (session === this.page.session && text === this.box.value) this.show(note, kind);
  }

  show(note, kind = "") {
    this.note = note;
    this.kind = kind;
    this.status(null);
  }

  status(turn) {
    let text = this.note;
    if (turn) {
      text = turn.prefill ? `Reading the prompt: ${number(turn.prefill[0])} of ${number(turn.prefill[1])} tokens` : `Writing · ${number(turn.tokens)} tokens`;
    } else if (this.page.running) {
      text = "Waiting for the engine";
    } else if (this.page.app?.status === "loading") {
      text = "The model is loading; you can already write";
    }
    setText(this.line, text);
    this.line.className = `preview ${text === this.note ? this.kind ?? "" : ""}`;
  }
}

// The conversation: stored messages once, the running reply as it grows.

import { ask, copyText, duration, h, icon, iconButton, morph, number, toast } from "./dom.js";
import { loopNote, priced } from "./notes.js";

const EXAMPLES = [
  ["Explain a key/value cache", "Explain in simple words what a language model's key/value cache is and why it makes chatting faster."],
  ["Write a short program", "Write a Python function that returns the n-th Fibonacci number, with a docstring, and show how to call it."],
  ["Plan a weekend", "Plan a relaxed weekend by the sea for two people as a short list, one line per half day."],
];
const FINISH = { length: "stopped at the token limit", cancelled: "stopped by you", interrupted: "cut off when KVScope ended", error: "ended with an error" };
const NEAR_END_PX = 80;

export class ChatLog {
  constructor(page) {
    this.page = page;
    this.entries = [];
    this.blocks = [];
    this.turn = null;
    this.pinned = true;
    this.lastTop = 0;
    this.thread = h("div", { class: "thread" });
    this.welcome = this.buildWelcome();
    this.endButton = iconButton("down", "To the newest message", () => this.follow(), { class: "icon-button to-end" });
    this.log = h("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0" }, this.welcome, this.thread);
    this.log.addEventListener("scroll", () => this.scrolled(), { passive: true });
    this.log.addEventListener("click", (event) => this.clicked(event));
  }

  fill(element) {
    element.replaceChildren(this.log, this.endButton);
    // Messages off screen have estimated heights; once they are drawn, the end is somewhere else.
    const observer = new ResizeObserver(() => {
      this.keepAtEnd();
      // The text box below is as wide as the thread, which has a scrollbar's room on both sides.
      document.body.style.setProperty("--kv-gutters", `${this.log.offsetWidth - this.log.clientWidth}px`);
    });
    observer.observe(this.thread);
    observer.observe(this.log);
  }

  buildWelcome() {
    const examples = EXAMPLES.map(([title, text]) =>
      h("button", { type: "button", class: "example", onclick: () => this.page.composer.sendText(text) }, h("b", {}, title), h("span", {}, text)));
    return h("section", { class: "welcome", hidden: true },
      h("h1", {}, "Chat, and see the memory behind it"),
      h("p", {}, "Every chat here keeps its key/value cache from turn to turn, so a new message costs only its own tokens. ",
        "The panel shows that cache while it works: how far it is filled, what was reused, and why something had to be computed again."),
      h("div", { class: "examples" }, ...examples));
  }

  clear() {
    this.entries = [];
    this.blocks = [];
    this.turn = null;
    this.pinned = true;
    this.lastTop = 0;
    this.thread.replaceChildren();
    this.welcome.hidden = true;
    this.log.classList.toggle("opening", this.page.session !== null);
  }

  // -- what the server said

  update(answer) {
    const app = this.page.app;
    if (answer.branch) this.drawBranch(answer.branch);
    if (answer.turn) this.drawTurn(answer.turn);
    else if (this.turn) this.turn = null;
    if (answer.branch || answer.session) this.drawDropped(answer.turn?.dropped ?? 0);
    this.log.classList.remove("opening");
    this.welcome.hidden = this.entries.length > 0 || this.page.session !== null && !this.page.meta;
    this.welcome.classList.toggle("waiting", app.status !== "ok");
    if (answer.branch || answer.turn) this.keepAtEnd();
  }

  drawBranch({ keep, add }) {
    this.entries = [...this.entries.slice(0, keep), ...add];
    const nodes = this.messageNodes();
    add.forEach((entry, offset) => {
      const old = nodes[keep + offset];
      let node = old;
      if (old?.dataset.id === entry.id) this.fillMessage(old, entry);
      else node = this.buildMessage(entry);
      if (!old) this.thread.append(node);
      else if (node !== old) old.replaceWith(node);
      this.page.certainty.attach(node, entry);
    });
    this.messageNodes().slice(this.entries.length).forEach((node) => node.remove());
    this.drawActs();
  }

  messageNodes() {
    return [...this.thread.querySelectorAll(":scope > .message")];
  }

  buildMessage(entry) {
    const label = { user: "You", assistant: "Reply", system: "System", tool: "Tool" }[entry.role];
    const node = h("article", { class: `message ${entry.role}`, "data-id": entry.id, "aria-label": label },
      h("div", { class: "body" }), h("footer", {}));
    this.fillMessage(node, entry);
    return node;
  }

  fillMessage(node, entry) {
    const body = node.querySelector(".body");
    if (body.querySelector("textarea")) return;
    node.classList.toggle("live", Boolean(entry.live));
    if (entry.live) {
      if (this.liveId !== entry.id) body.replaceChildren();
      this.liveId = entry.id;
    } else if (entry.html !== undefined) {
      this.showFinished(body, entry);
    } else {
      body.textContent = entry.text;
    }
  }

  showFinished(body, entry) {
    const open = [...body.querySelectorAll("details")].map((item) => item.open);
    body.className = "body md";
    body.innerHTML = entry.html;
    body.querySelectorAll("details").forEach((item, index) => { item.open = open[index] ?? false; });
    if (!entry.html && !entry.error) body.append(h("p", { class: "quiet" }, "No text."));
    if (entry.error) body.append(h("p", { class: "failure" }, entry.error));
    if (this.liveId === entry.id) this.liveId = null;
  }

  drawTurn(turn) {
    const node = this.thread.querySelector(`.message[data-id="${CSS.escape(turn.message)}"]`);
    if (!node) return;
    const body = node.querySelector(".body");
    if (this.turn !== turn.id) {
      this.turn = turn.id;
      this.blocks = [];
      body.className = "body md";
      body.replaceChildren();
    }
    if (turn.loop) this.drawLoop(node.querySelector("footer"), turn);
    const first = turn.add[0] ?? "";
    const joined = turn.at < this.blocks.length && turn.keep > 0;
    const completed = joined ? this.blocks[turn.at].slice(0, turn.keep) + first : first;
    this.blocks = [...this.blocks.slice(0, turn.at), ...(turn.add.length ? [completed, ...turn.add.slice(1)] : [])];
    while (body.childNodes.length > this.blocks.length) body.lastChild.remove();
    for (let index = turn.at; index < this.blocks.length; index += 1) {
      if (!body.childNodes[index]) body.append(h("div", { class: "block" }));
      morph(body.childNodes[index], this.blocks[index]);
    }
  }

  // A reply that is still being written and already repeats itself.
  drawLoop(footer, { loop, message }) {
    const note = loopNote(loop, () => this.page.debug.open(message));
    if (footer.firstChild) footer.firstChild.replaceWith(note);
    else footer.append(note);
  }

  // -- turns that no longer fit

  drawDropped(dropped) {
    this.thread.querySelector(".left-prompt")?.remove();
    const kept = this.page.meta?.first_kept;
    const nodes = this.messageNodes();
    const at = kept ? this.entries.findIndex((entry) => entry.id === kept) : dropped;
    nodes.forEach((node, index) => node.classList.toggle("outside", index < at));
    if (at <= 0) return;
    const count = at === 1 ? "The message above has" : `The ${number(at)} messages above have`;
    nodes[at]?.before(h("p", { class: "left-prompt" }, `${count} left the prompt: the context is full.`));
  }

  // -- acts of one message

  drawActs() {
    const nodes = this.messageNodes();
    this.entries.forEach((entry, index) => {
      const footer = nodes[index]?.querySelector("footer");
      if (!footer) return;
      const last = index === this.entries.length - 1;
      // Entries that did not change are the same objects, so a long chat is not drawn again for each turn.
      if (footer.entry === entry && footer.last === last) return;
      footer.entry = entry;
      footer.last = last;
      footer.replaceChildren(...(entry.live ? [] : this.acts(entry, last)));
    });
  }

  acts(entry, last) {
    const { page } = this;
    const reply = entry.role === "assistant";
    const button = (name, label, action, changes = true) =>
      iconButton(name, label, changes ? (event) => this.whenIdle(() => action(event)) : action, { class: `icon-button${changes ? " changes" : ""}`, "data-act": name });
    const parts = [];
    if (entry.versions > 1) {
      const step = (name, label, id) => iconButton(name, label, () => this.whenIdle(() => page.act("select", { message: id })), { class: "icon-button changes", disabled: !id });
      parts.push(h("span", { class: "versions", role: "group", "aria-label": "Versions of this message" },
        step("left", "Older version", entry.previous), h("span", {}, `${entry.version}/${entry.versions}`), step("right", "Newer version", entry.next)));
    }
    const buttons = [
      button("copy", "Copy", (event) => this.copy(entry, event.currentTarget), false),
      button("edit", reply ? "Edit this reply" : "Edit and answer anew", () => this.edit(entry)),
      reply && priced(button("again", "Regenerate", () => page.act("regenerate", { message: entry.id })), page, "regenerate", entry.id),
      reply && last && priced(button("undo", "Take back the last turn", () => this.undo()), page, "undo", entry.id),
      priced(button("fork", "Fork the chat from here", () => page.fork(page.session, entry.id), false), page, "fork", entry.id),
      button("trash", "Delete this message and what follows", () => this.remove(entry)),
    ];
    if (entry.loop) parts.push(loopNote(entry.loop, () => page.debug.open(entry.id)));
    const notes = this.notes(entry);
    if (notes) parts.push(h("span", { class: "notes", title: "Tokens of the reply, its speed, time to the first token, prompt tokens taken from the cache" }, notes));
    parts.push(h("span", { class: "acts" }, ...buttons.filter(Boolean)));
    return parts;
  }

  whenIdle(action) {
    if (this.page.running) toast("The reply is still being written; stop it first (Esc).", "note");
    else action();
  }

  notes(entry) {
    const notes = [];
    const stats = entry.stats;
    if (stats) {
      notes.push(`${number(stats.generated_tokens)} tokens`);
      if (stats.decode_tokens_per_s) notes.push(`${stats.decode_tokens_per_s.toFixed(1)}/s`);
      notes.push(`${duration(stats.ttft_ms)} to the first`);
      notes.push(`${number(stats.reused_tokens)}/${number(stats.reused_tokens + stats.computed_tokens)} reused`);
    }
    if (entry.partial) notes.push("not finished");
    if (entry.finish) notes.push(FINISH[entry.finish] ?? entry.finish);
    return notes.join(" · ");
  }

  async text(entry) {
    if (entry.text !== undefined) return entry.text;
    return (await this.page.act("text", { message: entry.id }))?.text ?? null;
  }

  async copy(entry, button) {
    const text = await this.text(entry);
    if (text === null) return;
    await copyText(text);
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  }

  async edit(entry) {
    const text = await this.text(entry);
    const node = this.thread.querySelector(`.message[data-id="${CSS.escape(entry.id)}"]`);
    if (text === null || !node) return;
    const body = node.querySelector(".body");
    const reply = entry.role === "assistant";
    const area = h("textarea", { "aria-label": reply ? "Text of the reply" : "Text of the message", rows: 3 });
    area.value = text;
    const close = () => { node.classList.remove("editing"); body.replaceChildren(); this.fillMessage(node, this.entries.find((item) => item.id === entry.id) ?? entry); };
    const save = async () => {
      if (area.value === text) return close();
      const done = await this.page.act(reply ? "edit_reply" : "edit", { message: entry.id, content: area.value });
      if (done) close();
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (!reply || event.ctrlKey || event.metaKey)) { event.preventDefault(); save(); }
    });
    const confirm = h("button", { type: "button", class: "accent", onclick: save }, reply ? "Save" : "Send");
    if (!reply) priced(confirm, this.page, "edit", entry.id, () => area.value);
    const grow = () => { area.style.height = "auto"; area.style.height = `${Math.min(area.scrollHeight + 2, 480)}px`; };
    area.addEventListener("input", grow);
    node.classList.add("editing");
    body.replaceChildren(area, h("div", { class: "edit-bar" },
      h("span", { class: "quiet" }, reply ? "The old text stays as another version." : "The old message and its replies stay as another version."),
      h("button", { type: "button", class: "plain", onclick: close }, "Cancel"),
      confirm));
    grow();
    area.focus();
  }

  async undo() {
    const result = await this.page.act("undo");
    if (result) this.page.composer.offer(result.text);
  }

  async remove(entry) {
    const index = this.entries.findIndex((item) => item.id === entry.id);
    const after = this.entries.length - index - 1;
    const text = after ? `What follows it (${number(after)} more) is deleted too. This can't be undone.` : "This can't be undone.";
    if (await ask({ title: "Delete this message?", text, confirm: "Delete", danger: true })) await this.page.act("delete", { message: entry.id });
  }

  async clicked(event) {
    const button = event.target.closest("[data-copy-code]");
    if (!button) return;
    await copyText(button.closest(".code").querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1200);
    if (!navigator.clipboard) toast("Copied.", "note");
  }

  // -- scrolling: stay with the newest text unless the person has scrolled away

  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const up = scrollTop < this.lastTop - 2;
    // Growing text moves the end away without anybody scrolling: only a move upwards lets go of it.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) this.pinned = true;
    else if (up) this.pinned = false;
    this.lastTop = scrollTop;
    this.endButton.classList.toggle("shown", !this.pinned);
  }

  keepAtEnd() {
    if (this.pinned) this.log.scrollTop = this.log.scrollHeight;
  }

  follow() {
    this.pinned = true;
    this.keepAtEnd();
  }
}

// The page: which chat is open, what the server said last, and the loop that asks for more.

import { announce, ask, toast } from "./dom.js";
import { NEW, Refusal, Unreachable, act, live } from "./net.js";
import { Certainty } from "./certainty.js";
import { ChatLog } from "./chat.js";
import { Composer } from "./composer.js";
import { DebugTab } from "./debug.js";
import { Frame } from "./frame.js";
import { Frozen } from "./frozen.js";
import { LivePanel } from "./panel.js";
import { SessionList } from "./sessions.js";
import { Settings } from "./settings.js";
import { Template } from "./template.js";

const RUNNING_MS = 120;
const IDLE_MS = 2000;
const LIST_EVERY_MS = 1800;
const REPLIED = new Set(["edit", "regenerate"]); // anew

// The chat that the address names. The word for a chat without an id is no id.
function named() {
  const session = new URL(location.href).searchParams.get("session");
  return session === NEW ? null : session;
}

class Page {
  constructor() {
    this.session = named();
    this.since = "";
    this.app = null;
    this.meta = null;
    this.running = false;
    this.search = "";
    this.failures = 0;
    this.epoch = 0;
    this.listedAt = -Infinity;
    this.frame = new Frame(this);
    this.list = new SessionList(this);
    this.certainty = new Certainty(this);
    this.chat = new ChatLog(this);
    this.composer = new Composer(this);
    this.panel = new LivePanel(this);
    this.debug = new DebugTab(this);
    this.settings = new Settings(this);
    this.template = new Template(this);
    this.frozen = new Frozen(this);
  }

  start() {
    const regions = { brand: this.frame, header: this.frame, sessions: this.list, chat: this.chat, preview: this.composer, panel: this.panel, debug: this.debug, settings: this.settings, template: this.template, frozen: this.frozen };
    const fill = ([name, element]) => regions[name].fill(element, name);
    const early = window.kvscopeRegions || [];
    window.kvscopeRegions = { push: fill };
    early.forEach(fill);
    addEventListener("popstate", () => this.open(named(), false));
    document.addEventListener("visibilitychange", () => this.poll());
    document.addEventListener("keydown", (event) => this.key(event));
    this.poll();
  }

  // -- the loop

  poll() {
    clearTimeout(this.timer);
    if (this.busy) this.again = true;
    else if (!document.hidden || this.app === null) this.ask();
  }

  async ask() {
    const epoch = this.epoch;
    const query = { since: this.since };
    const now = performance.now();
    if (now - this.listedAt > LIST_EVERY_MS) {
      query.sessions = true;
      if (this.search) query.search = this.search;
      this.listedAt = now;
    }
    if (this.panel.visible() || this.debug.visible()) Object.assign(query, { panel: true }, this.panel.selection());
    this.busy = true;
    let wait = IDLE_MS;
    try {
      const answer = await live(this.session, query);
      this.failures = 0;
      if (epoch === this.epoch) wait = this.take(answer);
      this.frame.reachable(true);
    } catch (error) {
      wait = epoch === this.epoch ? this.failed(error) : 0;
    }
    this.busy = false;
    if (this.again || epoch !== this.epoch) wait = 0;
    this.again = false;
    this.timer = setTimeout(() => this.poll(), wait);
  }

  // Apply an answer; milliseconds until the next question.
  take(answer) {
    this.since = answer.since;
    if (answer.app) {
      this.app = answer.app;
      if (answer.app.status !== "ok") this.panel.clear();
    }
    if (answer.session) this.meta = answer.session;
    if (answer.app || answer.session) {
      this.frame.draw();
      this.settings.draw();
      this.template.draw();
      this.frozen.draw();
    }
    if (answer.sessions) this.list.draw(answer.sessions);
    this.certainty.refresh();
    this.chat.update(answer);
    if (answer.panel) {
      this.panel.draw(answer.panel);
      this.debug.draw(answer.panel);
    }
    if (answer.turn) this.panel.follow(answer.turn);
    if (answer.running !== this.running) this.runs(answer.running);
    this.composer.status(answer.turn);
    if (answer.branch || !this.running) {
      this.debug.refresh();
      this.settings.prices.refresh();
    }
    if (this.app.status !== "ok") return 500;
    if (this.running) return RUNNING_MS;
    return this.panel.waiting() || this.debug.visible() && !this.panel.fresh ? 150 : IDLE_MS;
  }

  runs(running) {
    this.running = running;
    document.body.classList.toggle("kv-running", running);
    announce(running ? "The reply has started." : "The reply is complete.");
    if (!running) {
      this.listedAt = -Infinity;
      this.composer.preview();
      this.panel.expect();
    }
  }

  failed(error) {
    if (error instanceof Refusal && (error.status === 404 || error.code === "invalid_request") && this.session) {
      toast(`${error.message} Here is a new one.`, "note");
      this.open(null, true, true);
      return 0;
    }
    if (error instanceof Refusal && error.status === 401) location.reload();
    if (!(error instanceof Unreachable) && !(error instanceof Refusal)) console.error(error);
    this.failures += 1;
    if (this.failures >= 2) this.frame.reachable(false);
    return Math.min(400 * 2 ** this.failures, 4000);
  }

  // -- which chat

  open(session, push = true, replace = false) {
    this.composer.keepDraft();
    this.epoch += 1;
    this.session = session;
    this.since = "";
    this.meta = null;
    this.listedAt = -Infinity;
    const url = new URL(location.href);
    if (session) url.searchParams.set("session", session);
    else url.searchParams.delete("session");
    if (replace) history.replaceState({}, "", url);
    else if (push && url.href !== location.href) history.pushState({}, "", url);
    if (this.running) {
      this.running = false;
      document.body.classList.remove("kv-running");
    }
    this.chat.clear();
    this.panel.clear();
    this.debug.clear();
    this.settings.reset();
    this.composer.restoreDraft();
    this.frame.closeDrawers();
    this.frame.draw();
    this.list.mark();
    this.poll();
  }

  newChat() {
    this.open(null);
    this.composer.focus();
  }

  // -- acts: one way for all of them; null where the server refused, which has then been told

  async act(name, body = {}, session = this.session) {
    if (REPLIED.has(name)) await this.settings.settled();
    try {
      const result = await act(session, name, body);
      // A chat that is gone can't be asked for what is new.
      if (name === "delete_session" && session === this.session) this.open(null, true, true);
      else this.poll();
      return result;
    } catch (error) {
      toast(error.message);
      this.poll();
      return null;
    }
  }

  async send(text) {
    await this.settings.settled();
    const epoch = this.epoch;
    const first = this.session === null;
    const result = await this.act("send", { content: text, ...(first ? this.settings.draft() : {}) });
    if (result && first && epoch === this.epoch) {
      this.epoch += 1;
      this.session = result.session;
      this.listedAt = -Infinity;
      const url = new URL(location.href);
      url.searchParams.set("session", result.session);
      history.pushState({}, "", url);
      this.poll();
    }
    if (result) this.chat.follow();
    return result !== null;
  }

  stop() {
    if (this.running) this.act("stop");
  }

  async rename(session, title) {
    const wanted = await ask({ title: "Rename chat", field: title, confirm: "Rename" });
    if (wanted?.trim()) await this.act("update", { title: wanted.trim() }, session);
    this.listedAt = -Infinity;
    this.poll();
  }

  async fork(session, message = null) {
    const result = await this.act("fork", { message }, session);
    if (result) {
      toast("This is a copy of the chat up to here; the original is unchanged.", "note");
      this.open(result.session);
    }
  }

  async remove(session, title) {
    const text = `“${title}” is deleted with all its branches and its cache. This can't be undone.`;
    if (!(await ask({ title: "Delete this chat?", text, confirm: "Delete", danger: true }))) return;
    if (await this.act("delete_session", {}, session)) {
      this.listedAt = -Infinity;
      this.poll();
    }
  }

  async importFile(file) {
    let data;
    try {
      data = JSON.parse(await file.text());
    } catch {
      toast("This file is not a KVScope export: it is not JSON.");
      return;
    }
    const result = await this.act("import", { data }, null);
    if (result) this.open(result.session);
  }

  key(event) {
    if (event.key === "Escape" && !document.querySelector("dialog[open], .kv-menu")) {
      if (this.running) this.stop();
      else this.frame.closeDrawers();
    } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      this.composer.focus();
    }
  }
}

const page = new Page();
window.kvscope = {
  newChat: () => page.newChat(),
  send: () => page.composer.send(),
  stop: () => page.stop(),
  settingsChanged: (values) => page.settings.changed(values),
  settingsValues: () => page.settings.values(),
};
page.start();

// What surrounds the conversation: brand, header, notices, drawers, light and dark.

import { h, iconButton, menu, setText } from "./dom.js";
import { exportLink } from "./net.js";

const NARROW = 1100;
const MIDDLE = 1180;

export class Frame {
  constructor(page) {
    this.page = page;
    this.title = h("button", { type: "button", class: "title", title: "Rename", onclick: () => page.rename(page.session, page.meta.title) });
    this.model = h("span", { class: "model" });
    this.more = iconButton("more", "Chat menu", (event) => this.openMenu(event.currentTarget), { "aria-haspopup": "menu" });
    this.notice = h("div", { class: "notices" });
    this.offline = h("div", { class: "notice bad", role: "alert", hidden: true }, h("i", { class: "spinner" }), "The server is not answering. Trying again…");
    this.dismissed = new Set();
    document.body.classList.toggle("kv-no-panel", localStorage.getItem("kvscope-panel") === "closed");
    this.theme(localStorage.getItem("kvscope-theme"));
    addEventListener("resize", () => this.closeDrawers());
  }

  fill(element, name) {
    if (name === "brand") this.fillBrand(element);
    else this.fillHeader(element);
  }

  fillBrand(element) {
    element.replaceChildren(h("div", { class: "brand" }, h("span", { class: "mark", "aria-hidden": "true" }, "K"), h("b", {}, "KVScope"),
      iconButton("close", "Close the list of chats", () => this.closeDrawers(), { class: "icon-button drawer-close" })));
  }

  fillHeader(element) {
    const toggles = h("span", { class: "toggles" },
      iconButton("sun", "Light or dark", () => this.theme(document.body.classList.contains("dark") ? "light" : "dark")),
      iconButton("panel", "Cache and settings", () => this.togglePanel(), { id: "kv-toggle-panel" }));
    element.replaceChildren(
      h("header", {}, iconButton("menu", "Chats", () => this.toggleList(), { id: "kv-toggle-list" }), this.title, this.more, this.model, toggles),
      this.offline, this.notice);
    this.addScrim();
    this.draw();
  }

  addScrim() {
    const right = document.getElementById("kv-right");
    right?.prepend(h("div", { class: "side-close" }, iconButton("close", "Close the panel", () => this.togglePanel(false))));
    document.getElementById("kv-app")?.append(h("div", { id: "kv-scrim", onclick: () => this.closeDrawers() }));
    for (const [id, role, label] of [["kv-left", "navigation", "Chats"], ["kv-main", "main", "Chat"], ["kv-right", "complementary", "Cache and settings"]]) {
      const node = document.getElementById(id);
      node?.setAttribute("role", role);
      node?.setAttribute("aria-label", label);
    }
  }

  draw() {
    const { app, meta, session } = this.page;
    setText(this.title, session ? meta?.title ?? " " : "New chat");
    document.title = meta?.title ? `${meta.title} · KVScope` : "KVScope";
    this.title.disabled = !session || !meta;
    this.more.hidden = !session;
    if (!app) return;
    const model = app.model;
    setText(this.model, model ? `${model.model} · ${model.device} · KV ${model.kv_format}` : "");
    this.model.title = model ? `Weights ${model.dtype}, chat template ${model.chat_template}` : "";
    document.body.classList.toggle("kv-not-ready", app.status !== "ok");
    this.drawNotices(app);
  }

  drawNotices(app) {
    const notes = [];
    if (app.status === "loading") notes.push(h("div", { class: "notice" }, h("i", { class: "spinner" }), "The model is loading. Your chats are here already; sending starts in a moment."));
    if (app.status === "stopped") notes.push(h("div", { class: "notice bad", role: "alert" }, "The engine has stopped. Restart KVScope to go on; everything written is stored."));
    for (const warning of app.model?.warnings ?? []) {
      if (this.dismissed.has(warning)) continue;
      const hide = () => { this.dismissed.add(warning); this.drawNotices(app); };
      notes.push(h("div", { class: "notice warn", role: "note" }, h("span", {}, warning), iconButton("close", "Dismiss", hide)));
    }
    this.notice.replaceChildren(...notes);
  }

  reachable(yes) {
    this.offline.hidden = yes;
  }

  openMenu(anchor) {
    this.sessionMenu(anchor, this.page.session, this.page.meta?.title ?? "");
  }

  sessionMenu(anchor, session, title) {
    menu(anchor, [
      ["edit", "Rename", () => this.page.rename(session, title)],
      ["fork", "Fork", () => this.page.fork(session)],
      ["download", "Export as JSON", exportLink(session, "json")],
      ["download", "Export as Markdown", exportLink(session, "md")],
      ["trash", "Delete", () => this.page.remove(session, title)],
    ]);
  }

  // -- drawers: beside the chat where there is room, else over it, one at a time

  toggleList() {
    const open = document.body.classList.contains("kv-list-open");
    this.closeDrawers();
    if (innerWidth >= MIDDLE) document.body.classList.toggle("kv-no-list");
    else document.body.classList.toggle("kv-list-open", !open);
  }

  togglePanel(show) {
    const narrow = innerWidth < NARROW;
    const shown = narrow ? document.body.classList.contains("kv-panel-open") : !document.body.classList.contains("kv-no-panel");
    const wanted = show ?? !shown;
    this.closeDrawers();
    if (narrow) document.body.classList.toggle("kv-panel-open", wanted);
    else {
      document.body.classList.toggle("kv-no-panel", !wanted);
      localStorage.setItem("kvscope-panel", wanted ? "open" : "closed");
    }
    this.page.poll();
  }

  panelShown() {
    return innerWidth < NARROW ? document.body.classList.contains("kv-panel-open") : !document.body.classList.contains("kv-no-panel");
  }

  closeDrawers() {
    document.body.classList.remove("kv-list-open", "kv-panel-open");
  }

  theme(name) {
    if (!name) return;
    const apply = () => document.body.classList.toggle("dark", name === "dark");
    apply();
    // Gradio sets the system's choice once it has started; ours comes after.
    setTimeout(apply, 0);
    setTimeout(apply, 1500);
    localStorage.setItem("kvscope-theme", name);
  }
}

// The list of chats on the left.

import { h, icon, iconButton, number } from "./dom.js";

const SEARCH_AFTER_MS = 200;

export class SessionList {
  constructor(page) {
    this.page = page;
    this.items = [];
    this.list = h("div", { class: "session-list" });
  }

  fill(element) {
    const file = h("input", { type: "file", accept: ".json,application/json", class: "sr-only", tabindex: "-1", "aria-label": "Import a chat" });
    file.addEventListener("change", () => { if (file.files[0]) this.page.importFile(file.files[0]); file.value = ""; });
    const button = h("button", { type: "button", class: "import", onclick: () => file.click() }, icon("upload"), "Import a chat");
    element.replaceChildren(h("nav", { "aria-label": "Stored chats" }, this.list), h("div", { class: "list-foot" }, button, file));
    this.watch();
  }

  watch() {
    const box = document.querySelector("#kv-search input, #kv-search textarea");
    if (!box) {
      setTimeout(() => this.watch(), 50);
      return;
    }
    box.setAttribute("aria-label", "Search chats");
    box.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => {
        this.page.search = box.value.trim();
        this.page.listedAt = -Infinity;
        this.page.poll();
      }, SEARCH_AFTER_MS);
    });
  }

  draw(items) {
    this.items = items;
    const groups = [];
    let last = null;
    for (const item of items) {
      const name = this.page.search ? "" : age(item.at);
      if (name !== last) groups.push(h("h2", {}, last = name));
      groups.push(this.line(item));
    }
    if (!items.length) groups.push(h("p", { class: "quiet" }, this.page.search ? "Nothing found." : "No chats yet."));
    this.list.replaceChildren(...groups);
    this.mark();
  }

  line(item) {
    const open = (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.page.open(item.id);
    };
    const more = (event) => this.page.frame.sessionMenu(event.currentTarget, item.id, item.title);
    return h("div", { class: "session", "data-id": item.id },
      h("a", { href: `?session=${item.id}`, onclick: open, title: `${item.title} · ${number(item.count)} messages` },
        h("span", { class: "name" }, item.title), item.hit ? h("span", { class: "hit" }, item.hit) : null),
      iconButton("more", `Menu of ${item.title}`, more, { "aria-haspopup": "menu" }));
  }

  mark() {
    for (const node of this.list.querySelectorAll(".session")) {
      const link = node.querySelector("a");
      if (node.dataset.id === this.page.session) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
}

function age(iso) {
  const day = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate());
  const days = Math.round((day(new Date()) - day(new Date(iso))) / 864e5);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days < 7 ? "This week" : "Earlier";
}

// The Debug tab: why a reply repeats itself, whether the cache is right, what the model thought of each token, where the
// time went, what was dropped and why. Nothing is asked for while the tab is not visible.

import { counted, h, number, setText } from "./dom.js";
import { AuditView } from "./audit.js";
import { Diagnosis } from "./diagnosis.js";
import { Maps } from "./maps.js";
import { Misses } from "./misses.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";

const TAB = "Debug";

export class DebugTab {
  constructor(page) {
    this.page = page;
    this.chosen = null;
    this.build();
  }

  build() {
    this.select = h("select", { "aria-label": "Reply to look at", onchange: () => this.choose(this.select.value) });
    this.diagnosis = new Diagnosis(this);
    this.audit = new AuditView(this);
    this.maps = new Maps(this);
    this.tokens = new Tokens(this);
    this.timeline = new Timeline(this);
    this.misses = new Misses(this);
    this.lights = h("ul", { class: "dots" });
    this.lightNote = h("p", { class: "quiet" });
    const section = (title, about, ...children) => h("section", {}, h("h3", {}, title), h("p", { class: "about" }, about), ...children);
    this.root = h("div", { class: "panel debug" },
      h("section", { class: "first" }, h("h3", {}, "Why does it repeat itself?"),
        h("div", { class: "measure-bar" }, this.select, this.diagnosis.button), this.diagnosis.root),
      section("Invariants", "What must always be true of this chat’s cache.", this.lights, this.lightNote),
      section("Audit", "Does the cache hold what the model computes for these tokens?", this.audit.root),
      section("Cache map", "Rows that were copied, never written or damaged stand out.", this.maps.root),
      section("Tokens", "How sure the model was of each token; a click shows more of it.", this.tokens.root),
      section("Timeline", "Where the time went.", this.timeline.root),
      section("Misses", "What had to be computed again, and why.", this.misses.root));
  }

  fill(element) {
    element.replaceChildren(this.root);
    this.shown = element;
    new IntersectionObserver((entries) => {
      this.page.certainty.refresh();
      if (entries.at(-1).isIntersecting) this.appeared();
    }).observe(element);
    this.drawReplies();
  }

  appeared() {
    this.page.poll();
    this.refresh();
  }

  visible() {
    return this.page.frame.panelShown() && Boolean(this.shown?.getClientRects().length);
  }

  // Show the tab, with this reply.
  open(message) {
    if (!this.page.frame.panelShown()) this.page.frame.togglePanel(true);
    [...document.querySelectorAll("#kv-tabs [role=tab]")].find((tab) => tab.textContent.trim() === TAB)?.click();
    this.root.closest(".tabitem")?.scrollTo({ top: 0 });
    this.choose(message);
  }

  choose(message) {
    this.chosen = message;
    this.refresh();
  }

  // Another chat.
  clear() {
    this.chosen = null;
    for (const part of [this.diagnosis, this.audit, this.maps, this.tokens, this.timeline, this.misses]) part.clear();
    this.drawReplies();
    this.drawLights(null);
  }

  // -- which reply is looked at: the chosen one, else the newest that is complete

  replies() {
    return this.page.chat.entries.filter((entry) => entry.role === "assistant");
  }

  reply() {
    const replies = this.replies();
    return replies.find((entry) => entry.id === this.chosen) ?? replies.at(-1) ?? null;
  }

  drawReplies() {
    const replies = this.replies();
    const label = (entry, index) => `Reply ${number(index + 1)}${entry.loop ? " · repeats itself" : ""}${index === replies.length - 1 ? " · newest" : ""}`;
    const options = replies.map((entry, index) => h("option", { value: entry.id }, label(entry, index))).reverse();
    const key = options.map((option) => option.value + option.textContent).join();
    if (key !== this.select.dataset.key) this.select.replaceChildren(...options.length ? options : [h("option", {}, "No reply yet")]);
    this.select.dataset.key = key;
    this.select.disabled = options.length === 0;
    this.select.value = this.reply()?.id ?? "No reply yet";
  }

  // The branch may be another one: ask again for what is no longer that of the reply.
  refresh() {
    if (!this.visible() || this.page.app?.status !== "ok") return;
    const reply = this.reply();
    this.drawReplies();
    this.diagnosis.show(reply);
    this.tokens.show(reply);
    this.timeline.show(reply);
    this.misses.show(reply);
    this.audit.drawState();
    this.maps.drawState();
  }

  // A reading of the cache: only the sections that changed.
  draw(changes) {
    if (changes.cache !== undefined) this.drawLights(changes.cache);
    if (changes.audit !== undefined) this.audit.take(changes.audit);
    if (changes.audit !== undefined || changes.blocks) this.audit.covers(this.page.panel.facts.blocks ?? []);
  }

  drawLights(cache) {
    const entries = Object.entries(cache?.invariants ?? {});
    const broken = entries.filter(([, holds]) => !holds).length;
    this.lights.replaceChildren(...entries.map(([name, holds]) =>
      h("li", { class: holds ? "light" : "light bad", title: holds ? "holds" : "broken" }, name.replaceAll("_", " "))));
    const all = entries.length ? `All ${counted(entries.length, "invariant")} hold; looked at in every step.` : "Nothing in the cache yet.";
    setText(this.lightNote, broken ? cache.violation ?? `${counted(broken, "invariant")} broken.` : all);
    this.lightNote.className = broken ? "failure" : "quiet";
  }
}

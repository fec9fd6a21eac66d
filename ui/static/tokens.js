// A reply token by token, a page at a time: how sure the model was, and for one token where its keys lie and what else it
// might have been.

import { fillFacts, h, iconButton, number, setText, short, shown, toast } from "./dom.js";
import { probe, tokens } from "./net.js";

const PAGE = 128;
const LOOKED_UP = 16;
const UNSURE_NATS = 4;
const PROBE_DIMS = 10;
const ORIGINS = { prefill: "evaluated with a prompt", decode: "evaluated when it was sampled", snapshot: "read from disk", shared: "a block that another chat wrote" };

export class Tokens {
  constructor(tab) {
    this.tab = tab;
    this.by = "entropy";
    this.build();
    this.clear();
  }

  build() {
    const choice = (name, label) => h("button", { type: "button", "aria-pressed": String(name === this.by), onclick: () => this.colourBy(name) }, label);
    this.choices = { entropy: choice("entropy", "entropy"), top1: choice("top1", "top-1 probability") };
    this.earlier = iconButton("left", "Earlier tokens", () => this.load(this.start - PAGE));
    this.later = iconButton("right", "Later tokens", () => this.load(this.start + PAGE));
    this.range = h("span", { class: "quiet" });
    this.toLoop = h("button", { type: "button", class: "link", hidden: true, onclick: () => this.load(this.loop.start) }, "to the loop");
    this.strip = h("div", { class: "strip", role: "listbox", "aria-label": "Tokens of the reply", onclick: (event) => this.clicked(event), onkeydown: (event) => this.key(event) });
    this.note = h("p", { class: "quiet", role: "status" });
    this.layer = h("select", { "aria-label": "Layer of the probe", onchange: () => this.readProbe() });
    this.head = h("select", { "aria-label": "KV head of the probe", onchange: () => this.readProbe() });
    this.title = h("b", {});
    this.facts = h("dl", { class: "facts" });
    this.others = h("ol", { class: "others" });
    this.probeTitle = h("code", {});
    this.values = h("div", { class: "values" });
    this.detail = h("div", { class: "token-detail", hidden: true }, this.title, this.facts, this.others,
      h("div", { class: "probe-bar" }, h("label", {}, "layer", this.layer), h("label", {}, "KV head", this.head), this.probeTitle), this.values);
    this.root = h("div", {},
      h("div", { class: "strip-bar" }, h("span", { class: "choice", role: "group", "aria-label": "Colour tokens by" }, ...Object.values(this.choices)),
        h("span", { class: "scale", title: "How sure the model was" }, "sure", h("i"), "unsure")),
      this.strip, h("div", { class: "strip-bar" }, h("span", { class: "pager" }, this.earlier, this.range, this.later, this.toLoop), this.note), this.tab.page.certainty.choice, this.detail);
  }

  clear() {
    this.key = null;
    this.loop = null;
    this.start = 0;
    this.total = 0;
    this.rows = [];
    this.chosen = null;
    this.known = new Map();
    this.looking = null;
    this.drawPage();
    setText(this.note, "The tokens of the newest reply will stand here.");
  }

  // Tokens of another reply, or of one that is over now.
  show(reply) {
    const key = reply && !reply.live ? reply.id : null;
    if (key === this.key) return;
    this.clear();
    this.key = key;
    this.loop = reply?.loop ?? null;
    if (reply?.live) setText(this.note, "The reply is still being written.");
    if (reply?.error && !reply.html) setText(this.note, "No token was written.");
    else if (key) this.load(this.wanted?.key === key ? this.wanted.index : 0);
  }

  // Choose one token, of a reply that may still have to be shown.
  look(key, index) {
    this.wanted = { key, index };
    if (key === this.key) this.load(index);
  }

  async load(start) {
    const { key } = this;
    const { session } = this.tab.page;
    const asked = this.asked = {};
    setText(this.note, "Reading…");
    const first = Math.max(0, Math.floor(start / PAGE) * PAGE);
    try {
      const found = await tokens(session, { message_id: key, start: first, count: PAGE, alternatives: false });
      if (this.asked !== asked || this.key !== key) return;
      [this.start, this.total, this.rows] = [first, found.total, found.tokens];
      setText(this.note, found.same_prompt ? "" : "The prompt is rendered differently by now.");
      this.drawPage();
      this.chooseWanted();
    } catch (error) {
      if (this.asked === asked && this.key === key) setText(this.note, error.message);
    }
  }

  chooseWanted() {
    const { wanted } = this;
    this.wanted = null;
    if (wanted?.key !== this.key) return;
    this.choose(wanted.index);
    this.root.scrollIntoView({ block: "start" });
    this.strip.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }

  colourBy(name) {
    this.by = name;
    for (const [other, button] of Object.entries(this.choices)) button.setAttribute("aria-pressed", String(other === name));
    for (const [index, node] of [...this.strip.children].entries()) node.style.background = shade(this.rows[index], name);
  }

  drawPage() {
    this.strip.replaceChildren(...this.rows.map((row) => this.tokenNode(row)));
    this.strip.hidden = !this.rows.length;
    const end = this.start + this.rows.length;
    setText(this.range, this.rows.length ? `${number(this.start)}–${number(end - 1)} of ${number(this.total)}` : "");
    this.earlier.hidden = this.later.hidden = this.total <= PAGE;
    this.earlier.disabled = this.start === 0;
    this.later.disabled = end >= this.total;
    this.toLoop.hidden = !this.loop || this.loop.start >= this.start && this.loop.start < end;
    if (!this.rows.some((row) => row.index === this.chosen)) this.choose(null);
  }

  tokenNode(row) {
    const { loop } = this;
    const inside = loop && row.index >= loop.start;
    const begins = inside && (row.index === loop.start ? " first" : !loop.near && (row.index - loop.start) % loop.period === 0 ? " again" : "");
    const title = `token ${number(row.index)}${row.index === loop?.start ? ", the loop begins here" : ""} · entropy ${row.entropy.toFixed(2)} · likeliest ${(100 * row.top1).toFixed(1)} %`;
    // Line ends break the strip as they broke the text.
    const text = row.token.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
    const node = h("span", { class: `token${inside ? " looped" : ""}${begins || ""}`, role: "option", tabindex: row.index === this.start ? "0" : "-1", "data-index": row.index, title }, text || "∅");
    node.style.background = shade(row, this.by);
    node.setAttribute("aria-selected", String(row.index === this.chosen));
    return node;
  }

  clicked(event) {
    const node = event.target.closest(".token");
    if (node) this.choose(Number(node.dataset.index));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
    const node = event.target.closest(".token");
    if (!node || !step && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    const next = step ? this.strip.children[[...this.strip.children].indexOf(node) + step] : node;
    if (!next) return;
    next.focus();
    this.choose(Number(next.dataset.index));
  }

  // -- one token

  choose(index) {
    this.chosen = index;
    for (const node of this.strip.children) {
      const selected = Number(node.dataset.index) === index;
      node.setAttribute("aria-selected", String(selected));
      if (selected) node.tabIndex = 0;
    }
    const row = this.rows.find((item) => item.index === index);
    this.detail.hidden = !row;
    if (!row) return;
    this.drawFacts(row);
    this.drawOthers(row.top ?? this.known.get(index));
    if (!row.top) this.lookUp();
    this.readProbe();
  }

  drawFacts(row) {
    this.title.replaceChildren(h("code", {}, shown(row.token)), ` token ${number(row.index)} of the reply`);
    const place = row.slot === null ? "not in the cache now" : row.block === null ? `slot ${row.slot}` : `block ${row.block}, slot ${row.slot}`;
    fillFacts(this.facts, [
      ["id · position", `${row.token_id} · ${number(row.position)}`], ["place", place], ["keys and values", ORIGINS[row.origin] ?? row.origin ?? "–"],
      ["probability · rank", `${percent(Math.exp(row.logprob))} · ${number(row.rank + 1)}`],
      ["logprob · entropy", `${row.logprob.toFixed(3)} · ${row.entropy.toFixed(3)} nats`], ["measured", row.measured === "live" ? "while it was sampled" : "now, by a replay"],
    ]);
  }

  // The alternatives of the chosen token and a few around it. One run at a time, however many tokens are clicked meanwhile.
  async lookUp() {
    const { key, chosen } = this;
    if (this.looking || chosen === null || this.known.has(chosen)) return;
    const looking = this.looking = {};
    const start = Math.floor(chosen / LOOKED_UP) * LOOKED_UP;
    try {
      const found = await tokens(this.tab.page.session, { message_id: key, start, count: LOOKED_UP });
      if (this.looking !== looking) return;
      for (const row of found.tokens) this.known.set(row.index, row.top ?? []);
      this.looking = null;
      if (this.chosen !== null) this.drawOthers(this.known.get(this.chosen));
      this.lookUp();
    } catch (error) {
      if (this.looking !== looking) return;
      this.looking = null;
      toast(error.message);
    }
  }

  drawOthers(top) {
    const row = this.rows.find((item) => item.index === this.chosen);
    if (!top) {
      this.others.replaceChildren(h("li", { class: "quiet" }, "Running this token again behind the cache…"));
      return;
    }
    this.others.replaceChildren(...top.map((other) => {
      const bar = h("i");
      const likely = Math.exp(other.logprob);
      bar.style.width = `${100 * likely}%`;
      return h("li", { class: other.token_id === row?.token_id ? "taken" : "", title: `id ${other.token_id} · logprob ${other.logprob}` },
        h("code", {}, shown(other.token)), h("span", { class: "bar" }, bar), h("span", {}, percent(likely)));
    }));
  }

  async readProbe() {
    const { app, panel } = this.tab.page;
    const model = panel.facts.model ?? app?.model ?? {}; // the panel may not have been read yet
    fillOptions(this.layer, model.num_layers ?? 0);
    fillOptions(this.head, model.num_kv_heads ?? 0);
    const row = this.rows.find((item) => item.index === this.chosen);
    const known = row && row.slot !== null && this.layer.options.length;
    setText(this.probeTitle, known ? `k_cache[${this.layer.value}][${this.head.value}][${row.position}][:${PROBE_DIMS}]` : "");
    this.values.replaceChildren();
    if (!known) return;
    const asked = this.probing = {};
    try {
      const { positions } = await probe(this.tab.page.session, { layer: this.layer.value, head: this.head.value, start: row.position, count: 1, dims: PROBE_DIMS });
      if (this.probing === asked) this.values.replaceChildren(...(positions[0]?.values ?? []).map(valueCell));
    } catch (error) {
      if (this.probing === asked) toast(error.message);
    }
  }
}

// Teal where the model was sure, orange where it was not.
export function shade(row, by) {
  const unsure = by === "entropy" ? Math.min(1, row.entropy / UNSURE_NATS) : 1 - row.top1;
  return unsure < 0.5 ? `rgb(33 150 135 / ${(0.9 * (0.5 - unsure)).toFixed(3)})` : `rgb(226 122 30 / ${(1.1 * (unsure - 0.5)).toFixed(3)})`;
}

function valueCell(value) {
  if (value === null) return h("span", { class: "bad" }, "NaN");
  const cell = h("span", { class: value < 0 ? "low" : "high", title: String(value) }, short(value));
  cell.style.setProperty("--strength", String(Math.min(1, Math.abs(value) / 4)));
  return cell;
}

function fillOptions(select, count) {
  if (select.options.length !== count) select.replaceChildren(...Array.from({ length: count }, (_, index) => h("option", { value: index }, String(index))));
}

const percent = (share) => (share >= 0.001 ? `${(100 * share).toFixed(1)} %` : `${(100 * share).toExponential(1)} %`);

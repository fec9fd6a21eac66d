// What the cache holds as a picture: norms of keys and values, how alike neighbours are, and one row before and after it
// was rounded to the cache's format.

import { fillFacts, h, number, setText, short } from "./dom.js";
import { Heat, stretch } from "./heat.js";
import { cacheMap, cachedValues } from "./net.js";

const WHAT = {
  k_norm: "norms of keys", v_norm: "norms of values", k_similarity: "likeness of keys", v_similarity: "likeness of values",
};
const COLUMNS = 192;
const ALIKE = 0.99999;
const EQUAL = [211, 55, 45, 1];

export class Maps {
  constructor(tab) {
    this.tab = tab;
    this.what = h("select", { "aria-label": "What to draw", onchange: () => this.redraw() }, ...Object.entries(WHAT).map(([name, label]) => h("option", { value: name }, label)));
    this.head = h("select", { "aria-label": "KV head of the map", onchange: () => this.redraw() });
    this.button = h("button", { type: "button", class: "plain", onclick: () => this.read() }, "Draw");
    this.sentence = h("p", { class: "quiet", role: "status" });
    this.heat = new Heat({
      colour: (value, layer, column) => this.colour(value, layer, column), tell: (layer, column) => this.tell(layer, column),
      rest: () => this.rest(), label: () => WHAT[this.found.what], pick: (layer, column) => this.readValues(layer, column),
    });
    this.title = h("b", {});
    this.facts = h("dl", { class: "facts" });
    this.values = h("div", { class: "pairs" });
    this.source = h("p", { class: "quiet" });
    this.detail = h("div", { class: "token-detail", hidden: true }, this.title, this.facts, this.values, this.source);
    this.root = h("div", { class: "maps" }, h("div", { class: "measure-bar" }, this.what, this.head, this.button), this.sentence, this.heat.map, this.heat.under, this.detail);
    this.clear();
  }

  clear() {
    this.asked = null;
    this.found = null;
    this.bad = new Set();
    this.heat.draw({ columns: [], values: [] });
    this.detail.hidden = true;
    setText(this.sentence, "Draws every cached position of every layer.");
    this.drawState();
  }

  drawState() {
    const heads = this.tab.page.panel.facts.model?.num_kv_heads ?? 0;
    if (this.head.options.length !== heads + 1) {
      this.head.replaceChildren(h("option", { value: "" }, "all heads"), ...Array.from({ length: heads }, (_, index) => h("option", { value: index }, `head ${index}`)));
    }
    this.button.disabled = Boolean(this.asked) || !this.tab.page.session;
  }

  redraw() {
    if (this.found) this.read();
  }

  async read() {
    const { session } = this.tab.page;
    if (!session) return;
    const asked = this.asked = {};
    this.drawState();
    setText(this.sentence, "Reading the cache…");
    const query = { what: this.what.value, columns: COLUMNS, ...(this.head.value === "" ? {} : { head: this.head.value }) };
    let found = null;
    let refusal = "";
    try {
      found = await cacheMap(session, query);
    } catch (error) {
      refusal = error.message;
    }
    if (this.asked !== asked) return;
    this.asked = null;
    this.drawState();
    this.detail.hidden = true;
    this.found = found;
    this.bad = new Set((found?.bad ?? []).map(String));
    this.heat.draw(found ?? { columns: [], values: [] });
    setText(this.sentence, refusal || this.summary());
    this.sentence.className = refusal || this.odd() ? "failure" : "quiet";
  }

  // -- the map

  similar() {
    return this.found.what.endsWith("similarity");
  }

  odd() {
    return this.bad.size || this.similar() && this.found.values.some((row) => row.some((value) => value >= ALIKE));
  }

  summary() {
    const { cache_pos: count, values, positions } = this.found;
    if (this.bad.size) return `${number(this.bad.size)} cells hold values that are not finite.`;
    if (this.similar()) {
      for (const [layer, row] of values.entries()) {
        const column = row.findIndex((value) => value >= ALIKE);
        if (column >= 0) return `In layer ${layer} position ${number(positions[layer][column])} holds what the one before holds: copied, or not written.`;
      }
    }
    return `${number(count)} positions; each cell is the one of its stretch that is ${this.similar() ? "most like its neighbour" : "farthest from the layer's median"}.`;
  }

  // Norms: how many times larger (orange) or smaller (teal) than the layer's median; likeness: the more, the darker.
  colour(value, layer, column) {
    if (value === null) return this.bad.has(`${layer},${column}`) ? [140, 80, 220, 1] : [128, 128, 128, 0.08];
    if (this.similar()) return value >= ALIKE ? EQUAL : [33, 150, 135, 0.05 + 0.75 * Math.max(0, value) ** 2];
    if (!value) return EQUAL;
    const steps = Math.log2(value / this.found.medians[layer]);
    const strength = Math.min(1, 0.1 + 0.45 * Math.abs(steps));
    return steps > 0 ? [226, 122, 30, strength] : [33, 150, 135, strength];
  }

  rest() {
    const ends = "violet: not finite; grey: not held by the layer. A click shows the row.";
    return this.similar() ? `The darker, the more alike; red: equal; ${ends}` : `Orange: above the layer's median; teal: below it; red: zero; ${ends}`;
  }

  tell(layer, column) {
    const { values, positions, columns, medians } = this.found;
    const at = positions[layer][column];
    const where = `layer ${layer} · ${stretch(columns[column])}`;
    if (at === null) return `${where} · not held`;
    const value = values[layer][column];
    const what = value === null ? "not finite" : this.similar() ? `likeness ${value.toFixed(4)}` : `norm ${short(value)}, median ${short(medians[layer])}`;
    return `${where} · ${what}${columns[column][0] === columns[column][1] ? "" : ` at ${number(at)}`}`;
  }

  // -- one row, stored and exact

  async readValues(layer, column) {
    const position = this.found.positions[layer][column];
    if (position === null) return;
    const asked = this.reading = {};
    const query = { tensor: this.found.what[0], layer, head: this.found.head ?? 0, position };
    this.detail.hidden = false;
    setText(this.title, `${query.tensor}_cache[${layer}][${query.head}][${position}]`);
    fillFacts(this.facts, []);
    this.values.replaceChildren();
    setText(this.source, "Computing the exact values…");
    try {
      const found = await cachedValues(this.tab.page.session, query);
      if (this.reading === asked) this.drawValues(found);
    } catch (error) {
      if (this.reading === asked) setText(this.source, error.message);
    }
  }

  drawValues({ kv_format: format, stored, exact, max_error: worst, relative_error: relative, sentence }) {
    fillFacts(this.facts, [
      ["kept as", format], ["largest difference", worst === null ? "not finite" : worst.toPrecision(3)],
      ["relative difference", relative === null ? "–" : `${(100 * relative).toPrecision(2)} %`],
    ]);
    const row = (name, values) => [h("span", { class: "quiet" }, name), ...values.map((value) => h("span", { title: String(value) }, value === null ? "NaN" : short(value)))];
    this.values.replaceChildren(...pieces(exact, stored).map(([first, before, after]) =>
      h("div", { title: `channels from ${first}` }, ...row("before", before), ...row("after", after))));
    setText(this.source, sentence);
  }
}

// Eight channels a line.
function pieces(exact, stored) {
  const starts = Array.from({ length: Math.ceil(exact.length / 8) }, (_, index) => 8 * index);
  return starts.map((first) => [first, exact.slice(first, first + 8), stored.slice(first, first + 8)]);
}

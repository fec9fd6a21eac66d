// What the panel measures on request: which context limit the turns so far would have needed, and what the cache's format
// costs this chat in precision.

import { bytes, fillFacts, h, number, toast } from "./dom.js";
import { advice, compare } from "./net.js";

const WIDTH = 384;
const HEIGHT = 96;
const FOOT = 14;
const TOP = 4;

export class Measures {
  constructor(page) {
    this.page = page;
    this.curve = h("div", { class: "cdf" });
    this.lengths = h("dl", { class: "facts" });
    this.advice = h("p", { class: "quiet" }, "Not read yet.");
    this.format = h("select", { "aria-label": "KV format to compare" });
    this.button = h("button", { type: "button", class: "plain", onclick: () => this.compare() }, "Compare precision");
    this.loss = h("dl", { class: "facts" });
    this.verdict = h("p", { class: "quiet", role: "status" });
    this.clear();
  }

  // Another chat: its precision is not known.
  clear() {
    this.asked = null;
    this.button.disabled = false;
    fillFacts(this.loss, []);
    this.verdict.textContent = "Runs this chat's tokens again in float32 and in the chosen format.";
  }

  drawModel(model) {
    const names = model.kv_formats ?? [];
    this.format.replaceChildren(...names.map((name) => h("option", { value: name }, name === model.kv_format ? `${name} (in use)` : name)));
    this.format.value = model.kv_format;
  }

  async refresh() {
    try {
      this.drawAdvice(await advice());
    } catch {
      // The page itself says when the server or the model is away; the figures are read again after the next turn.
    }
  }

  drawAdvice(found) {
    const some = found.cdf.length > 0;
    const tokens = (value) => `${number(value)} tokens`;
    this.curve.replaceChildren(...(some ? [drawCurve(found)] : []));
    fillFacts(this.lengths, some ? [
      ["turns", number(found.turns)], ["P50 · P95 · P99", [found.p50, found.p95, found.p99].map(number).join(" · ")],
      ...(found.at_limit ? [["cut by the limit", number(found.at_limit)]] : []),
      ["recommended", tokens(found.recommended)], ["saves per session, at most", bytes(found.saved_bytes)],
    ] : []);
    this.advice.textContent = found.text;
    this.advice.title = some ? `Recommended is ${found.rule}.` : "";
  }

  async compare() {
    const { session } = this.page;
    if (!session) return;
    const asked = {};
    this.asked = asked;
    this.button.disabled = true;
    this.verdict.textContent = "Comparing; other replies go on meanwhile.";
    try {
      const found = await compare(session, this.format.value);
      if (this.asked === asked) this.drawLoss(found);
    } catch (error) {
      if (this.asked !== asked) return;
      this.clear();
      toast(error.message);
    }
    this.button.disabled = false;
  }

  drawLoss(found) {
    fillFacts(this.loss, [
      ["compared", `${number(found.tokens)} tokens, ${found.kv_format} with ${found.reference}`],
      ["KL divergence, mean · largest", `${small(found.mean_kl)} · ${small(found.max_kl)}`],
      ["same likeliest token", percent(found.top1_agreement)],
      ...(found.floor ? [["an fp16 cache, for comparison", `${small(found.floor.mean_kl)} · ${small(found.floor.max_kl)} · ${percent(found.floor.top1_agreement)}`]] : []),
    ]);
    this.verdict.textContent = found.parts_at === null
      ? `The likeliest text is the same for ${number(found.greedy_tokens)} tokens.`
      : `The likeliest text parts after ${number(found.parts_at)} ${found.parts_at === 1 ? "token" : "tokens"}.`;
  }
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function small(value) {
  return value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(4);
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// The share of turns that are not longer than so many tokens, as a rising line of steps.
function drawCurve({ cdf, p50, p95, p99, recommended }) {
  const most = Math.max(recommended, cdf.at(-1)[0]);
  const x = (length) => (WIDTH * length / most).toFixed(1);
  const y = (share) => (TOP + (HEIGHT - TOP) * (1 - share)).toFixed(1);
  const line = `M0 ${y(0)}${cdf.map(([length, share]) => `H${x(length)}V${y(share)}`).join("")}H${WIDTH}`;
  const mark = (length, label, kind = "mark") => svg("path", { class: kind, d: `M${x(length)} ${TOP}V${HEIGHT}` }, titled(`${label}: ${number(length)} tokens`));
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + FOOT}`, role: "img", "aria-label": `Lengths of turns: half have up to ${number(p50)} tokens, 99 % up to ${number(p99)}` },
    svg("path", { class: "area", d: `${line}V${HEIGHT}H0Z` }), svg("path", { class: "line", d: line }),
    mark(p50, "P50"), mark(p95, "P95"), mark(p99, "P99"), mark(recommended, "recommended", "limit"),
    svg("path", { class: "axis", d: `M0 ${HEIGHT}H${WIDTH}` }),
    svg("text", { x: 0, y: HEIGHT + FOOT - 2 }, "0"), svg("text", { x: WIDTH, y: HEIGHT + FOOT - 2, "text-anchor": "end" }, `${number(most)} tokens`));
}

function titled(text) {
  const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
  title.textContent = text;
  return title;
}

// Where the time of the last turns went, as a flame chart: turn, phase, step and parts, with the pauses between turns left out.

import { counted, duration, h, icon, number, setText } from "./dom.js";
import { trace, traceLink } from "./net.js";

const ROWS = 4;
const THIN_PX = 2; // the least width of a bar
const LABEL_PX = 28;
const BETWEEN = 0.012; // of the whole, between two turns
const CALLER = 1;
const LABELS = { device: "wait for the card", copy: "copy blocks" };

export class Timeline {
  constructor(tab) {
    this.tab = tab;
    const choice = (all, label) => h("button", { type: "button", onclick: () => this.choose(all) }, label);
    this.choices = [choice(false, "last turn"), choice(true, "last turns")];
    this.out = h("button", { type: "button", class: "link", onclick: () => this.zoomOut() }, "zoom out");
    this.link = h("a", { class: "link", title: "For ui.perfetto.dev, or “Load trace” in the Performance panel of Chrome’s developer tools" }, icon("download"), "Trace");
    this.chart = h("div", { class: "flame", tabindex: "0", role: "application",
      onclick: (event) => this.clicked(event), onkeydown: (event) => this.key(event),
      onpointermove: (event) => this.point(this.spanOf(event)), onpointerleave: () => this.point(null) });
    this.axis = [h("span"), h("span")];
    this.note = h("p", { class: "quiet flame-note", role: "status" });
    this.sums = h("ul", { class: "flame-sums" });
    this.drawing = h("div", {}, h("div", { class: "strip-bar" }, h("span", { class: "choice", role: "group", "aria-label": "Turns to show" }, ...this.choices), this.out, this.link),
      this.chart, h("div", { class: "flame-axis" }, ...this.axis), this.note, this.sums);
    this.empty = h("p", { class: "quiet" }, "No turn since the app was started.");
    this.root = h("div", { class: "timeline" }, this.drawing, this.empty);
    new ResizeObserver(() => this.draw()).observe(this.chart);
    this.all = false;
    this.clear();
  }

  clear() {
    this.known = null;
    this.take({ traceEvents: [] });
  }

  // Read again once a turn has ended.
  show(reply) {
    const { session, running } = this.tab.page;
    const key = `${session} ${reply?.id} ${this.tab.page.chat.entries.length}`;
    if (!session || running || key === this.known) return;
    this.known = key;
    this.read(session, key);
  }

  async read(session, key) {
    try {
      const found = await trace(session);
      if (this.known !== key) return;
      this.take(found);
      for (const [name, value] of Object.entries(traceLink(session))) this.link.setAttribute(name, value);
    } catch {
      // The page itself says when the server is away; the next turn asks again.
      if (this.known === key) this.known = null;
    }
  }

  // What is there already stays as it is, zoomed into or not: a turn's end is told in more than one way.
  take(found) {
    const told = JSON.stringify(found.traceEvents);
    if (told === this.told) return;
    this.told = told;
    this.started = found.otherData?.started_at ?? 0;
    this.spans = layOut(found.traceEvents);
    this.turns = this.spans.filter((span) => span.depth === 0);
    this.drawing.hidden = !this.turns.length;
    this.empty.hidden = Boolean(this.turns.length);
    this.chart.setAttribute("aria-label", `Time of the last ${counted(this.turns.length, "turn")}; arrow keys read it, Enter zooms in, Escape out`);
    this.choose(this.all);
  }

  choose(all) {
    this.all = all;
    this.choices.forEach((button, index) => button.setAttribute("aria-pressed", String(Boolean(index) === all)));
    this.zooms = [];
    this.at = null;
    this.draw();
  }

  // What is shown: the innermost span that was zoomed into, else the last turn, or all of them.
  view() {
    const whole = this.all ? { start: 0, end: this.turns.at(-1)?.end ?? 0 } : this.turns.at(-1);
    return this.zooms.at(-1) ?? whole ?? { start: 0, end: 0 };
  }

  zoomIn(span) {
    if (span && span.end > span.start && span !== this.view()) this.zooms.push(span);
    this.draw();
  }

  zoomOut() {
    this.zooms.pop();
    this.draw();
  }

  draw() {
    const { start, end } = this.view();
    const width = this.chart.clientWidth;
    if (!width || end <= start) return;
    const scale = width / (end - start);
    this.chart.replaceChildren(...this.bars(start, end, scale).map((span) => this.bar(span, start, end, scale)));
    this.out.hidden = !this.zooms.length;
    setText(this.axis[0], this.clock(start));
    setText(this.axis[1], precise(end - start));
    this.drawSums(start, end);
    this.point(this.at);
  }

  // What is drawn: every span that is wide enough, and of thin ones the longest in each place.
  bars(start, end, scale) {
    const places = new Map();
    return this.spans.filter((span) => span.end > start && span.start < end).filter((span) => {
      if ((span.end - span.start) * scale >= THIN_PX) return true;
      const place = `${span.depth} ${Math.floor((span.start - start) * scale / THIN_PX)}`;
      const other = places.get(place);
      if (!other || span.end - span.start > other.end - other.start) places.set(place, span);
      return false;
    }).concat(...places.values()).sort((one, other) => one.index - other.index);
  }

  bar(span, start, end, scale) {
    const left = Math.max(span.start, start);
    const wide = Math.max((Math.min(span.end, end) - left) * scale, THIN_PX);
    const node = h("i", { class: `t-${span.name}${wide < 3 ? " thin" : ""}`, "data-span": span.index }, wide >= LABEL_PX ? label(span) : "");
    Object.assign(node.style, { left: `${100 * (left - start) / (end - start)}%`, width: `${wide}px`, top: `${25 * span.depth}%` });
    return node;
  }

  // How long each phase and each part took within what is shown.
  drawSums(start, end) {
    // There is less to tell of a part: the list keeps its height, else a panel that is scrolled to its end moves the
    // chart away under the pointer.
    this.sums.style.minHeight = this.zooms.length ? this.sums.style.minHeight || `${this.sums.offsetHeight}px` : "";
    const rows = [new Map(), new Map()];
    for (const span of this.spans) {
      const sums = { 1: rows[0], 3: rows[1] }[span.depth];
      if (!sums || span.end <= start || span.start >= end) continue;
      const took = Math.min(span.end, end) - Math.max(span.start, start);
      sums.set(span.name, (sums.get(span.name) ?? 0) + took);
    }
    this.sums.replaceChildren(...rows.flatMap((sums) => [...sums]).map(([name, took]) => h("li", {}, h("i", { class: `t-${name}` }), `${LABELS[name] ?? name} `, h("b", {}, precise(took)))));
  }

  // When a place of the axis was, on the clock.
  clock(at) {
    const turn = this.turns.findLast((item) => item.start <= at) ?? this.turns[0];
    return new Date(1000 * this.started + (turn.clock + at - turn.start) / 1000).toLocaleTimeString();
  }

  spanOf(event) {
    return this.spans[event.target.closest("[data-span]")?.dataset.span] ?? null;
  }

  clicked(event) {
    const span = this.spanOf(event);
    this.at = span;
    if (span) this.zoomIn(span);
  }

  key(event) {
    if (event.key === "Escape" && this.zooms.length) this.zoomOut();
    else if (event.key === "Enter" && this.at) this.zoomIn(this.at);
    else if (event.key.startsWith("Arrow")) this.point(this.beside(event.key));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // The next span in the same row, or the one above or below.
  beside(key) {
    const { start, end } = this.view();
    const shown = this.spans.filter((span) => span.end > start && span.start < end);
    if (!this.at || !shown.includes(this.at)) return shown[0] ?? null;
    const { depth } = this.at;
    const row = (wanted) => shown.filter((span) => span.depth === wanted);
    const inside = (span) => span.start < this.at.end && span.end > this.at.start;
    const found = {
      ArrowLeft: () => row(depth).findLast((span) => span.start < this.at.start),
      ArrowRight: () => row(depth).find((span) => span.start > this.at.start),
      ArrowUp: () => row(depth - 1).find(inside),
      ArrowDown: () => row(depth + 1).find(inside),
    }[key]();
    return found ?? this.at;
  }

  // Tell one span, else the one that is zoomed into.
  point(pointed) {
    if (pointed !== undefined) this.at = pointed;
    const span = pointed ?? this.zooms.at(-1);
    for (const node of this.chart.querySelectorAll(".chosen")) node.classList.remove("chosen");
    if (!span) {
      setText(this.note, "A click zooms in; Escape, or “zoom out”, goes back.");
      return;
    }
    this.chart.querySelector(`[data-span="${span.index}"]`)?.classList.add("chosen");
    const whole = this.view();
    setText(this.note, [`${label(span)}: ${precise(span.end - span.start)}`, `${share(span, whole)} of what is shown`, ...details(span.args)].join(" · "));
  }
}

// `[{index, name, depth, start, end, clock, args}]` in µs on an axis without the pauses between turns; `clock` is the
// turn's beginning on the real one. Events come turn by turn, what was done before a turn first.
export function layOut(events) {
  const complete = events.filter((event) => event.ph === "X");
  const turns = complete.filter((event) => event.name === "turn").map((event) => {
    const before = complete.filter((other) => other.tid === CALLER && other.args?.turn === event.args.turn);
    const from = Math.min(event.ts, ...before.map((other) => other.ts));
    return { event, from, to: event.ts + event.dur };
  });
  const gap = BETWEEN * turns.reduce((sum, { from, to }) => sum + to - from, 0);
  const spans = [];
  let offset = 0;
  for (const { event, from, to } of turns) {
    const shift = offset - from;
    const inside = complete.filter((other) => other !== event && (other.tid === CALLER ? other.args?.turn === event.args.turn : other.ts >= event.ts && other.ts < to));
    spans.push({ name: "turn", depth: 0, start: offset, end: to + shift, clock: from, args: event.args });
    const open = [];
    for (const other of inside) {
      while (open.length && open.at(-1) <= other.ts + 1e-3) open.pop();
      spans.push({ name: other.name, depth: Math.min(1 + open.length, ROWS - 1), start: other.ts + shift, end: other.ts + other.dur + shift, args: other.args });
      if (other.tid !== CALLER) open.push(other.ts + other.dur);
    }
    offset = to + shift + gap;
  }
  spans.forEach((span, index) => { span.index = index; });
  return spans;
}

const label = (span) => span.name === "steps" ? counted(span.args.steps, "step") : LABELS[span.name] ?? span.name;

function share(span, whole) {
  const part = 100 * (Math.min(span.end, whole.end) - Math.max(span.start, whole.start)) / (whole.end - whole.start);
  return `${part >= 10 ? Math.round(part) : part.toFixed(1)} %`;
}

function details(args = {}) {
  const found = [];
  if (args.prompt_tokens !== undefined) found.push(`prompt ${number(args.prompt_tokens)}, reused ${number(args.reused_tokens)}, generated ${number(args.generated_tokens)}`, args.finish_reason);
  if (args.steps) found.push(counted(args.steps, "step"), counted(args.tokens, "token"));
  return found.filter(Boolean);
}

// µs with as many digits as tell something.
function precise(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 100_000 ? `${(us / 1000).toFixed(us < 10_000 ? 2 : 1)} ms` : duration(us / 1000);
}

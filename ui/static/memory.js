// The memory ledger: what is where, the process's parts beside its resident set, and how they grew.

import { bytes, h, number, setText } from "./dom.js";
import { memoryHistory } from "./net.js";

const PARTS = [
  ["weights", "weights"], ["weights_file", "model file"], ["kv", "KV cache"], ["states", "states"], ["workspace", "workspace"],
  ["python", "Python objects"], ["libraries", "libraries"], ["buffers", "native buffers"], ["compiled", "compiled code"],
  ["heap_free", "free in the heap"],
];
// Of the card, beside what is our own; the last one is what remains of what the driver says.
const CARD = [["buffers", "other buffers"], ["allocator_free", "allocator, free"], ["context", "context (the rest)"]];
// What the chart stacks, from below.
const LAYERS = [["libraries", "libraries"], ["python", "Python"], ["buffers", "buffers"], ["heap_free", "free heap"], ["weights", "weights"], ["kv", "KV cache"]];
const WIDTH = 384;
const HEIGHT = 96;
const EVERY_MS = 5000;

export class Memory {
  constructor(page, visible) {
    this.page = page;
    this.visible = visible;
    this.rows = h("div", { class: "ledger" });
    this.total = h("p", { class: "quiet" });
    this.sum = h("p", { class: "quiet", title: "The resident set less all parts, each of which is measured in its own way" });
    this.parts = h("div", { class: "ledger" });
    this.chart = h("div", { class: "memory-chart", hidden: true });
    this.note = h("p", { class: "quiet" });
    this.process = h("details", { open: true }, h("summary", {}, "The process, by part"), this.parts, this.sum, this.chart, this.note);
    this.root = h("div", { class: "memory" }, this.rows, this.total, this.process);
    this.read = -EVERY_MS;
  }

  draw(memory, card) {
    const rows = [
      ["weights", memory.weights, memory.total_device], ["KV used", memory.kv_used, memory.total_device], ["KV reserved", memory.kv_reserved, memory.total_device],
      ...(memory.state_reserved ? [["states", memory.state_reserved, memory.total_device]] : []),
      ["KV empty", memory.kv_empty ?? 0, memory.total_device], ["KV in RAM", memory.kv_ram, memory.ram_total], ["KV on disk", memory.kv_disk, 0],
      ["workspace", memory.workspace, memory.total_device], ...(memory.card ? CARD.map(([name, label]) => [label, memory.card[name], memory.total_device]) : []),
      ["other programs", memory.other_processes, memory.total_device], [card ? "free on the card" : "free RAM", memory.free_device, memory.total_device],
    ];
    if (card && memory.ram_total) rows.push(["RAM free", memory.ram_available, memory.ram_total]);
    this.rows.replaceChildren(...rows.map(rowOf));
    setText(this.total, `${bytes(memory.total_device)} ${card ? "on the card" : "of RAM"} in all`);
    this.drawParts(memory.process);
    this.drawHistory();
  }

  drawParts(process) {
    this.process.hidden = !process?.parts;
    if (!process?.parts) return;
    const { parts, rss, unexplained, exact } = process;
    this.parts.replaceChildren(...PARTS.filter(([name]) => parts[name]).map(([name, label]) => rowOf([label, parts[name], rss])),
      rowOf(["unexplained", unexplained, rss]), rowOf(["process (RSS)", rss, rss]));
    const share = `${(100 * unexplained / rss).toFixed(1)} % of the resident set`;
    setText(this.sum, exact ? `The parts are measured one by one; ${share} is in none of them.` : `This system does not tell all parts; ${share} is in none of them.`);
  }

  async drawHistory() {
    if (performance.now() - this.read < EVERY_MS || !this.visible() || !this.process.open) return;
    this.read = performance.now();
    try {
      const { points } = await memoryHistory();
      this.chart.hidden = points.length < 2;
      if (points.length < 2) return;
      const most = Math.max(...points.map((point) => point.rss));
      this.chart.replaceChildren(chartOf(points, most));
      const span = points.at(-1).at - points[0].at;
      setText(this.note, `The last ${span < 90 ? `${number(span)} s` : span < 5400 ? `${number(span / 60)} min` : `${number(span / 3600)} h`}; at most ${bytes(most)}`);
    } catch {
      // The next reading asks again.
    }
  }
}

function rowOf([name, value, total]) {
  const fill = h("i");
  fill.style.width = `${total ? Math.max(0, Math.min(100, 100 * value / total)) : 0}%`;
  return h("div", {}, h("span", {}, name), h("div", { class: "bar" }, fill), h("b", {}, value < 0 ? `−${bytes(-value)}` : bytes(value)));
}

// Stacked areas, and the resident set as a line above them.
function chartOf(points, most) {
  const [first, last] = [points[0].at, points.at(-1).at];
  const x = (point) => (WIDTH * (point.at - first) / Math.max(last - first, 1e-9)).toFixed(1);
  const y = (value) => (HEIGHT * (1 - value / most)).toFixed(1);
  const line = (value, list) => list.map((point) => `${x(point)} ${y(value(point))}`).join("L");
  const reversed = [...points].reverse();
  const upTo = (count) => (point) => LAYERS.slice(0, count).reduce((sum, [name]) => sum + point[name], 0);
  const areas = LAYERS.map(([name, label], index) =>
    svg("path", { class: `layer-${index}`, d: `M${line(upTo(index + 1), points)}L${line(upTo(index), reversed)}Z` }, svg("title", {}, label)));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Memory of the process, now ${bytes(points.at(-1).rss)}` },
    ...areas, svg("path", { class: "rss", d: `M${line((point) => point.rss, points)}` }));
  const keys = h("p", { class: "quiet chart-keys" }, ...LAYERS.map(([, label], index) => h("span", { class: `key layer-${index}` }, label)), h("span", { class: "key rss" }, "RSS"));
  return h("div", {}, picture, keys);
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...(tag === "title" ? [children[0]] : children));
  return node;
}

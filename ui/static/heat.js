// A heat map of layers and positions: a canvas that mouse, finger and arrow keys read cell by cell.

import { counted, h, number, setText } from "./dom.js";

const CELL_HEIGHT = 5;
const WIDTH = 384;

export class Heat {
  // `colour(value, layer, column)` of a cell, `tell(layer, column)` what stands below while it is pointed at, `rest()`
  // what stands there otherwise, `label` what is drawn, `pick(layer, column)` for a click or Enter, if that does anything.
  constructor({ colour, tell, rest, label, pick = null }) {
    Object.assign(this, { colour, tell, rest, label, pick });
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.point(this.chosen ?? null); });
    this.canvas.addEventListener("pointerdown", (event) => this.pointed(event));
    this.canvas.addEventListener("click", () => this.choose());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.cursor = h("i", { hidden: true });
    this.corners = Array.from({ length: 4 }, () => h("span"));
    this.under = h("p", { class: "quiet heat-note" });
    this.map = h("div", { class: "heat", hidden: true }, h("div", { class: "heat-layers" }, this.corners[0], this.corners[1]),
      h("div", { class: "heat-map" }, this.canvas, this.cursor), h("div", { class: "heat-positions" }, this.corners[2], this.corners[3]));
    this.columns = [];
    this.values = [];
  }

  draw({ columns, values }) {
    this.columns = columns;
    this.values = values;
    this.chosen = null;
    this.map.hidden = !values.length;
    this.point(null);
    if (!values.length) return;
    const ratio = Math.max(1, Math.round(devicePixelRatio));
    const width = Math.max(1, Math.floor(WIDTH / columns.length));
    this.canvas.width = columns.length * width * ratio;
    this.canvas.height = values.length * CELL_HEIGHT * ratio;
    this.canvas.style.height = `${Math.max(60, values.length * CELL_HEIGHT)}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    values.forEach((row, layer) => row.forEach((value, column) => {
      context.fillStyle = this.colour(value, layer, column);
      context.fillRect(column * width, layer * CELL_HEIGHT, width - (width > 3 ? 0.5 : 0), CELL_HEIGHT - 0.5);
    }));
    const last = columns.at(-1)[1];
    ["layer 0", `layer ${number(values.length - 1)}`, `position ${number(columns[0][0])}`, number(last)].forEach((text, index) => setText(this.corners[index], text));
    this.canvas.setAttribute("aria-label", `${this.label()} of ${counted(values.length, "layer")} at positions up to ${number(last)}; arrow keys read them one by one`);
  }

  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const at = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor(count * offset / size)));
    this.point([at(event.clientY - box.top, box.height, this.values.length), at(event.clientX - box.left, box.width, this.columns.length)]);
  }

  key(event) {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose();
      return;
    }
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const limit = (value, count) => Math.min(count - 1, Math.max(0, value));
    const [layer, column] = this.at ?? [-step[0], -step[1]];
    this.point([limit(layer + step[0], this.values.length), limit(column + step[1], this.columns.length)]);
  }

  choose() {
    if (!this.at || !this.pick) return;
    this.chosen = this.at;
    this.pick(...this.at);
  }

  // Tell one cell of the map.
  point(at) {
    this.at = at;
    this.cursor.hidden = !at;
    if (!at) {
      setText(this.under, this.values.length ? this.rest() : "");
      return;
    }
    const [layer, column] = at;
    setText(this.under, this.tell(layer, column));
    Object.assign(this.cursor.style, {
      left: `${100 * column / this.columns.length}%`, width: `${100 / this.columns.length}%`,
      top: `${100 * layer / this.values.length}%`, height: `${100 / this.values.length}%`,
    });
  }
}

export const stretch = ([first, last]) => (first === last ? `position ${number(first)}` : `positions ${number(first)}–${number(last)}`);

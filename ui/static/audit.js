// The cache against what the model computes anew: a sentence, a heat map of layers and positions, faults and their repair.

import { counted, duration, h, number, setText, toast } from "./dom.js";
import { audit, repair } from "./net.js";

const CELL_HEIGHT = 5;
const WIDTH = 384;
const SCOPES = { audit: "Audited", restore: "Spot-checked after a restore" };

export class AuditView {
  constructor(tab) {
    this.tab = tab;
    this.button = h("button", { type: "button", class: "plain", onclick: () => this.audit() }, "Audit");
    this.repairButton = h("button", { type: "button", class: "accent", hidden: true, onclick: () => this.repair() }, "Repair");
    this.sentence = h("p", { role: "status" });
    this.canvas = h("canvas", { tabindex: "0", role: "img" });
    this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.cursor = h("i", { hidden: true });
    this.corners = Array.from({ length: 4 }, () => h("span"));
    this.under = h("p", { class: "quiet heat-note" });
    this.heat = h("div", { class: "heat", hidden: true }, h("div", { class: "heat-layers" }, this.corners[0], this.corners[1]),
      h("div", { class: "heat-map" }, this.canvas, this.cursor), h("div", { class: "heat-positions" }, this.corners[2], this.corners[3]));
    this.faults = h("ul", { class: "faults" });
    this.root = h("div", { class: "audit" }, h("div", { class: "measure-bar" }, this.button, this.repairButton), this.sentence, this.heat, this.under, this.faults);
    this.clear();
  }

  clear() {
    this.asked = null;
    this.unseen = 0;
    this.take(null);
    this.drawState();
  }

  drawState() {
    this.button.disabled = Boolean(this.asked) || !this.tab.page.session || this.tab.page.running;
    this.repairButton.disabled = this.button.disabled;
  }

  // `{verdict, sentence, heat, faults, ...}`; null: the cache was not looked at since it was changed.
  take(found) {
    this.found = found;
    if (found) this.told = null;
    this.draw();
  }

  // Blocks `[id, start, count, owners, verdict]` of the cache now: those without a verdict were written since.
  covers(blocks) {
    this.unseen = blocks.filter(([, , count, , verdict]) => count && !verdict).length;
    this.draw();
  }

  async audit() {
    const found = await this.ask(audit, "Computing this chat's tokens again beside the cache; other replies go on.");
    if (!found) return;
    this.unseen = 0;
    this.take({ ...found, at: Date.now() / 1000 });
    this.tab.page.panel.expect();
    this.tab.page.poll();
  }

  // The sentence of what was done; null where it was refused, which has then been told.
  async repair() {
    const done = await this.ask(repair, "Repairing.");
    if (!done) return null;
    this.told = done.sentence;
    this.found = null;
    this.draw();
    this.tab.page.panel.expect();
    this.tab.page.poll();
    return done.sentence;
  }

  async ask(what, meanwhile) {
    const { session } = this.tab.page;
    if (!session) return null;
    const asked = {};
    this.asked = asked;
    this.drawState();
    setText(this.sentence, meanwhile);
    this.sentence.className = "quiet";
    let answer = null;
    try {
      answer = await what(session);
    } catch (error) {
      if (this.asked === asked) toast(error.message);
    }
    if (this.asked !== asked) return null;
    this.asked = null;
    this.drawState();
    this.draw();
    return answer;
  }

  // -- drawing

  draw() {
    const { found } = this;
    if (!this.asked) {
      const since = found?.at ? ` ${SCOPES[found.scope]} ${new Date(1000 * found.at).toLocaleTimeString()}${found.ms ? `, in ${duration(found.ms)}` : ""}.` : "";
      const unseen = found?.scope === "audit" && this.unseen ? ` ${counted(this.unseen, "block")} written since.` : "";
      setText(this.sentence, found ? found.sentence + since + unseen : this.told ?? "Runs this chat's tokens again on scratch blocks and compares keys, values and logits with what is cached.");
      this.sentence.className = found?.verdict === "fault" ? "failure" : found || this.told ? "" : "quiet";
    }
    const faults = found?.faults ?? [];
    this.repairButton.hidden = !faults.length;
    this.faults.replaceChildren(...faults.map((fault) => faultRow(fault)));
    this.drawHeat(found?.heat ?? { columns: [], values: [] });
  }

  drawHeat({ columns, values }) {
    // The same map again keeps the cell that is pointed at.
    const key = JSON.stringify([columns, values]);
    if (key === this.mapKey) return;
    this.mapKey = key;
    this.map = { columns, values };
    this.heat.hidden = !values.length;
    this.point(null);
    if (!values.length) return;
    const ratio = Math.max(1, Math.round(devicePixelRatio));
    const width = Math.floor(WIDTH / columns.length);
    this.canvas.width = columns.length * width * ratio;
    this.canvas.height = values.length * CELL_HEIGHT * ratio;
    this.canvas.style.height = `${Math.max(60, values.length * CELL_HEIGHT)}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    values.forEach((row, layer) => row.forEach((value, column) => {
      context.fillStyle = colour(value);
      context.fillRect(column * width, layer * CELL_HEIGHT, width - (width > 3 ? 0.5 : 0), CELL_HEIGHT - 0.5);
    }));
    const last = columns.at(-1)[1];
    ["layer 0", `layer ${number(values.length - 1)}`, `position ${number(columns[0][0])}`, number(last)].forEach((text, index) => setText(this.corners[index], text));
    this.canvas.setAttribute("aria-label", `Errors of ${counted(values.length, "layer")} at positions up to ${number(last)}; arrow keys read them one by one`);
  }

  pointed(event) {
    const box = this.canvas.getBoundingClientRect();
    const { columns, values } = this.map;
    const at = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor(count * offset / size)));
    this.point([at(event.clientY - box.top, box.height, values.length), at(event.clientX - box.left, box.width, columns.length)]);
  }

  key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const limit = (value, count) => Math.min(count - 1, Math.max(0, value));
    const [layer, column] = this.at ?? [-step[0], -step[1]];
    this.point([limit(layer + step[0], this.map.values.length), limit(column + step[1], this.map.columns.length)]);
  }

  // Tell one cell of the map.
  point(at) {
    this.at = at;
    this.cursor.hidden = !at;
    const { columns, values } = this.map ?? { columns: [], values: [] };
    if (!at) {
      setText(this.under, values.length ? "Green: within what rounding may do; red: above it; violet: not finite." : "");
      return;
    }
    const [layer, column] = at;
    const [first, last] = columns[column];
    const value = values[layer][column];
    const error = value === null ? "not finite" : `error ${share(value)} what is tolerated`;
    const floor = this.found.noise_floor === null ? "" : `; noise floor ${this.found.noise_floor.toPrecision(2)}`;
    setText(this.under, `layer ${layer} · ${first === last ? `position ${number(first)}` : `positions ${number(first)}–${number(last)}`} · ${error}${floor}`);
    Object.assign(this.cursor.style, {
      left: `${100 * column / columns.length}%`, width: `${100 / columns.length}%`, top: `${100 * layer / values.length}%`, height: `${100 / values.length}%`,
    });
  }
}

// Shades that can be told from each other on light and dark ground.
export function colour(value) {
  if (value === null) return "rgb(140 80 220)";
  if (value <= 1) return `rgb(33 150 135 / ${(0.12 + 0.6 * value).toFixed(3)})`;
  return `rgb(211 55 45 / ${Math.min(1, 0.6 + 0.15 * Math.log10(value)).toFixed(3)})`;
}

function share(value) {
  return value >= 10 ? `${number(value)} ×` : value > 1 ? `${value.toFixed(1)} ×` : `${Math.round(100 * value)} % of`;
}

function faultRow({ kind, tensor, layers, first_position: first, last_position: last, max_error: error }) {
  const where = tensor === "state" ? "recurrent state" : layerNames(layers);
  return h("li", {}, h("b", {}, kind.replaceAll("_", " ")), h("span", {}, where),
    h("span", {}, first === last ? `position ${number(first)}` : `positions ${number(first)}–${number(last)}`),
    h("span", { class: "quiet" }, error === null ? "not finite" : `error ${error.toPrecision(2)}`));
}

function layerNames(layers) {
  const run = layers.length > 1 && layers.at(-1) - layers[0] === layers.length - 1;
  return layers.length === 1 ? `layer ${layers[0]}` : `layers ${run ? `${layers[0]}–${layers.at(-1)}` : layers.join(", ")}`;
}

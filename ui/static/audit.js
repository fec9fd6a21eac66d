// The cache against what the model computes anew: a sentence, a heat map of layers and positions, faults and their repair.

import { counted, duration, h, number, setText, toast } from "./dom.js";
import { Heat, stretch } from "./heat.js";
import { audit, repair, stopAudit, stopWhile } from "./net.js";

const SCOPES = { audit: "Audited", restore: "Spot-checked after a restore", loop: "Audited by itself, as a reply repeats itself," };

export class AuditView {
  constructor(tab) {
    this.tab = tab;
    this.button = h("button", { type: "button", class: "plain", onclick: () => (this.asked ? this.stop() : this.audit()) }, "Audit");
    this.repairButton = h("button", { type: "button", class: "accent", hidden: true, onclick: () => this.repair() }, "Repair");
    this.sentence = h("p", { role: "status" });
    this.heat = new Heat({
      colour, tell: (layer, column) => this.tell(layer, column), label: () => "Errors",
      rest: () => "Green: within what rounding may do; red: above it; violet: not finite.",
    });
    this.faults = h("ul", { class: "faults" });
    this.root = h("div", { class: "audit" }, h("div", { class: "measure-bar" }, this.button, this.repairButton), this.sentence, this.heat.map, this.heat.under, this.faults);
    this.clear();
  }

  clear() {
    this.asked?.controller.abort();
    this.asked = null;
    this.stopped = false;
    this.unseen = 0;
    this.take(null);
    this.drawState();
  }

  drawState() {
    const idle = !this.asked;
    setText(this.button, idle ? "Audit" : this.asked.stopping ? "Stopping…" : "Stop");
    this.button.disabled = idle ? !this.tab.page.session || this.tab.page.running : this.asked.stopping;
    this.repairButton.disabled = !idle || this.button.disabled;
  }

  // `{verdict, sentence, heat, faults, ...}`; null: the cache was not looked at since it was changed.
  take(found) {
    this.found = found;
    if (found) this.told = null;
    this.draw();
  }

  // Blocks `[id, start, count, owners, verdict]` of the cache now: those in the pool without a verdict were written since.
  covers(blocks) {
    this.unseen = blocks.filter(([id, , count, , verdict]) => id !== null && count && !verdict).length;
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
    const asked = { session, controller: new AbortController(), stopping: false };
    this.asked = asked;
    this.stopped = false;
    this.drawState();
    setText(this.sentence, meanwhile);
    this.sentence.className = "quiet";
    let answer = null;
    try {
      answer = await what(session, asked.controller.signal);
    } catch (error) {
      if (this.asked === asked && error.code === "stopped") this.stopped = true;
      else if (this.asked === asked) toast(error.message);
    }
    if (this.asked !== asked) return null;
    this.asked = null;
    this.drawState();
    this.draw();
    return answer;
  }

  async stop() {
    const { asked } = this;
    asked.stopping = true;
    this.drawState();
    try {
      await stopWhile(() => this.asked === asked, () => stopAudit(asked.session));
    } catch (error) {
      toast(error.message);
    }
  }

  // -- drawing

  draw() {
    const { found } = this;
    if (!this.asked) {
      const since = found?.at ? ` ${SCOPES[found.scope]} ${new Date(1000 * found.at).toLocaleTimeString()}${found.ms ? `, in ${duration(found.ms)}` : ""}.` : "";
      const unseen = found && found.scope !== "restore" && this.unseen ? ` ${counted(this.unseen, "block")} written since.` : "";
      setText(this.sentence, this.stopped ? "Stopped." : found ? found.sentence + since + unseen : this.told ?? "Runs this chat's tokens again on scratch blocks and compares keys, values and logits with what is cached.");
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
    this.heat.draw({ columns, values });
  }

  tell(layer, column) {
    const value = this.heat.values[layer][column];
    const error = value === null ? "not finite" : `error ${share(value)} what is tolerated`;
    const floor = this.found.noise_floor === null ? "" : `; noise floor ${this.found.noise_floor.toPrecision(2)}`;
    return `layer ${layer} · ${stretch(this.heat.columns[column])} · ${error}${floor}`;
  }
}

// Shades that can be told from each other on light and dark ground.
function colour(value) {
  if (value === null) return [140, 80, 220, 1];
  return value <= 1 ? [33, 150, 135, 0.12 + 0.6 * value] : [211, 55, 45, Math.min(1, 0.6 + 0.15 * Math.log10(value))];
}

function share(value) {
  return value >= 10 ? `${number(value)} ×` : value > 1 ? `${value.toFixed(1)} ×` : `${Math.round(100 * value)} % of`;
}

function faultRow({ kind, tensor, layers, first_position: first, last_position: last, max_error: error }) {
  const where = tensor === "state" ? "recurrent state" : layerNames(layers);
  return h("li", {}, h("b", {}, kind.replaceAll("_", " ")), h("span", {}, where),
    h("span", {}, stretch([first, last])),
    h("span", { class: "quiet" }, error === null ? "not finite" : `error ${error.toPrecision(2)}`));
}

function layerNames(layers) {
  const run = layers.length > 1 && layers.at(-1) - layers[0] === layers.length - 1;
  return layers.length === 1 ? `layer ${layers[0]}` : `layers ${run ? `${layers[0]}–${layers.at(-1)}` : layers.join(", ")}`;
}

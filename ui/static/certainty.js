// Under each reply, how sure the model was of its tokens: above the line the likeliest token's probability, below it the
// entropy. Drawn while the Debug tab is open, or always if that was chosen; never of a reply that is being written.

import { counted, h, number, setText, shown } from "./dom.js";
import { certainty } from "./net.js";

const COLUMNS = 256;
const MOST_NATS = 4;
const HALF = 50; // of the drawing's height
const WIDEST_PX = 9; // of a token, so that a short reply is no row of slabs
const ALWAYS = "kvscope-certainty";
const REST = "above: likeliest token’s probability · below: entropy";

export class Certainty {
  constructor(page) {
    this.page = page;
    const box = h("input", { type: "checkbox", onchange: () => this.choose(box.checked) });
    box.checked = localStorage.getItem(ALWAYS) === "on";
    this.always = box;
    this.choice = h("label", { class: "quiet check" }, box, "Draw this under replies also while the tab is closed");
  }

  choose(always) {
    localStorage.setItem(ALWAYS, always ? "on" : "off");
    this.refresh();
  }

  refresh() {
    document.body.classList.toggle("kv-certainty", this.always.checked || this.page.debug.visible());
    const ready = this.page.app?.status === "ok";
    if (ready && !this.ready) this.page.chat.thread.querySelectorAll(".certainty").forEach((root) => this.watch(root));
    this.ready = ready;
  }

  // Tells at once, too, whether it is on screen.
  watch(root) {
    this.observer ??= new IntersectionObserver((seen) => seen.forEach((item) => item.isIntersecting && item.target.strip.read()), { root: this.page.chat.log });
    this.observer.unobserve(root);
    this.observer.observe(root);
  }

  // The strip of a message of the conversation, which is asked for once it is on screen.
  attach(node, entry) {
    if (entry.role !== "assistant") return;
    const strip = node.strip ??= new Strip(this.page, node);
    if (strip.entry && strip.entry.live === entry.live) {
      strip.entry = entry;
      return;
    }
    strip.show(entry);
    this.watch(strip.root);
  }
}

class Strip {
  constructor(page, node) {
    this.page = page;
    this.root = h("figure", { class: "certainty" });
    this.root.strip = this;
    node.querySelector("footer").before(this.root);
  }

  show(entry) {
    this.entry = entry;
    this.asked = false;
    this.root.replaceChildren();
    this.root.hidden = Boolean(entry.live);
  }

  async read() {
    const { entry } = this;
    if (this.asked || entry.live || this.page.app?.status !== "ok") return;
    this.asked = true;
    try {
      const found = await certainty(this.page.session, { message_id: entry.id, columns: COLUMNS });
      if (this.entry.id === entry.id) this.draw(found);
    } catch {
      // The page itself says when the server is away; the next time this is on screen asks again.
      this.asked = false;
    }
  }

  draw(found) {
    this.found = found;
    this.root.hidden = !found.total;
    if (!found.total) return;
    this.cursor = h("i", { hidden: true });
    this.caption = h("figcaption", {});
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `How sure the model was of ${counted(found.total, "token")}; arrow keys read them, Enter opens the token table`,
      onpointermove: (event) => this.point(this.columnOf(event)), onpointerleave: () => this.point(null),
      onclick: (event) => this.open(this.columnOf(event)), onkeydown: (event) => this.key(event), onblur: () => this.point(null) });
    this.plot.style.maxWidth = `${WIDEST_PX * found.columns.length}px`;
    this.plot.append(drawing(found, this.entry.loop), this.cursor);
    this.root.replaceChildren(this.plot, this.caption);
    this.point(null);
  }

  columnOf(event) {
    const box = this.plot.getBoundingClientRect();
    const count = this.found.columns.length;
    return Math.min(count - 1, Math.max(0, Math.floor(count * (event.clientX - box.left) / box.width)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step && event.key !== "Enter") return;
    event.preventDefault();
    const last = this.found.columns.length - 1;
    if (step) this.point(Math.min(last, Math.max(0, (this.at ?? -step) + step)));
    else if (this.at !== null) this.open(this.at);
  }

  // Tell one column.
  point(at) {
    this.at = at;
    this.cursor.hidden = at === null;
    if (at === null) return setText(this.caption, REST);
    const { columns, entropy, text, top1 } = this.found;
    const [first, last] = columns[at];
    const which = first === last ? `token ${number(first)} ` : `tokens ${number(first)}–${number(last)}, mean · `;
    this.caption.replaceChildren(which, h("code", {}, shown(text[at])), ` · likeliest ${(100 * top1[at]).toFixed(1)} % · entropy ${entropy[at].toFixed(2)} nats`);
    Object.assign(this.cursor.style, { left: `${100 * at / columns.length}%`, width: `${100 / columns.length}%` });
  }

  open(at) {
    this.page.debug.open(this.entry.id);
    this.page.debug.tokens.look(this.entry.id, this.found.columns[at][0]);
  }
}

// Two rows of bars, a path each, that follow the page's colours by themselves.
function drawing({ columns, entropy, top1, total }, loop) {
  const bars = (values, towards) => values.map((value, index) => `M${index} ${HALF}V${(HALF + towards * HALF * value).toFixed(1)}h1V${HALF}`).join("");
  const svg = node("svg", { viewBox: `0 0 ${columns.length} ${2 * HALF}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(node("path", { class: "sure", d: bars(top1, -1) }), node("path", { class: "unsure", d: bars(entropy.map((nats) => Math.min(1, nats / MOST_NATS)), 1) }));
  if (loop && loop.start < total) {
    const start = columns.findIndex(([, last]) => last >= loop.start);
    svg.append(node("path", { class: "loop", d: `M${start} ${2 * HALF}H${columns.length}` }));
  }
  return svg;
}

function node(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

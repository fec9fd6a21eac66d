// The block map: a cell for each block of the cache, and who wrote the one that is pointed at, where it lies, its text.

import { h, number, setText, shown } from "./dom.js";
import { block } from "./net.js";

const TIERS = { gpu: "on the card", ram: "in RAM", disk: "on disk" };
const KEPT = 64;
const REST_MS = 120;

export class Blocks {
  constructor(page) {
    this.page = page;
    this.cells = h("div", { class: "cells", role: "group", tabindex: "0", "aria-label": "No block" });
    const at = (event) => [...this.cells.children].indexOf(event.target.closest(".cells > i"));
    this.cells.addEventListener("pointerover", (event) => this.point(at(event)));
    this.cells.addEventListener("pointerdown", (event) => this.point(at(event)));
    this.cells.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse" && document.activeElement !== this.cells) this.point(-1); });
    this.cells.addEventListener("keydown", (event) => this.key(event));
    this.cells.addEventListener("blur", () => this.point(-1));
    this.note = h("p", { class: "quiet" });
    this.facts = h("p", { "aria-live": "polite" });
    this.text = h("code", {});
    this.detail = h("div", { class: "block-detail", hidden: true }, this.facts, this.text);
    this.root = h("div", {}, this.cells, this.note, this.detail);
    this.known = new Map();
    this.blocks = [];
    this.at = -1;
  }

  // Blocks `[id, start, count, owners, verdict, tier]`; the first `keep` are those of before.
  draw(blocks, keep, model) {
    this.blocks = blocks;
    const size = model?.block_size ?? 16;
    while (this.cells.childNodes.length > keep) this.cells.lastChild.remove();
    for (const one of blocks.slice(keep)) this.cells.append(cellOf(one, size));
    const shared = blocks.filter(([, , , owners]) => owners > 1).length;
    const away = blocks.filter(([id]) => id === null);
    this.cells.setAttribute("aria-label", `${blocks.length} blocks, ${shared} shared; arrow keys read them one by one`);
    this.cells.hidden = !blocks.length;
    const key = (name, text) => h("span", { class: `key ${name}` }, text);
    this.note.replaceChildren(...(!blocks.length ? [model?.num_layers === 0 ? "Recurrent layers only: no keys and values, so no blocks." : "No block yet."] : [
      `${number(blocks.length)} blocks of ${size} tokens`,
      ...(away.length ? [key("away", TIERS[away[0][5]] ?? away[0][5])] : [key("own", "own"), key("shared", `shared ${number(shared)}`), key("partial", "partly filled")]),
    ]));
    if (this.at >= keep) this.point(this.at < blocks.length ? this.at : -1);
    else this.mark();
  }

  clear() {
    this.known.clear();
    this.point(-1);
  }

  key(event) {
    if (event.key === "Escape") this.point(-1);
    const row = Math.max(1, Math.floor((this.cells.clientWidth + 2) / 13));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row }[event.key];
    if (!step || !this.blocks.length) return;
    event.preventDefault();
    this.point(Math.min(this.blocks.length - 1, Math.max(0, this.at < 0 ? 0 : this.at + step)));
  }

  // Tell about one block; -1: none.
  point(at) {
    if (at === this.at && at < 0) return;
    this.at = at;
    this.mark();
    this.detail.hidden = at < 0;
    clearTimeout(this.timer);
    if (at < 0) return;
    const [id, start, count, owners, verdict, tier] = this.blocks[at];
    const known = this.known.get(this.name());
    const facts = [
      id === null ? TIERS[tier] ?? tier : `block ${id}, ${TIERS[tier] ?? tier}`,
      count ? `tokens ${number(start)}–${number(start + count - 1)}` : "no tokens yet",
      known ? known.format : null,
      known ? `written by turn ${known.turn} of ${known.turns}` : null,
      id === null ? null : owners === 1 ? "1 owner" : `${owners} owners`,
      verdict ? `audited${known?.last_audit ? ` ${new Date(1000 * known.last_audit.at).toLocaleTimeString()}` : ""}: ${verdict}` : "not audited",
    ];
    setText(this.facts, facts.filter(Boolean).join(" · "));
    setText(this.text, known ? shown(known.text) : " ");
    // Passing over cells asks for none of them.
    if (!known && count) this.timer = setTimeout(() => this.read(), REST_MS);
  }

  mark() {
    for (const node of this.cells.querySelectorAll(".at")) node.classList.remove("at");
    this.cells.children[this.at]?.classList.add("at");
  }

  name() {
    return this.blocks[this.at]?.join();
  }

  async read() {
    const { session } = this.page;
    const name = this.name();
    let found;
    try {
      found = await block(session, this.blocks[this.at][1]);
    } catch (error) {
      if (this.page.session === session && this.name() === name) setText(this.text, error.message);
      return;
    }
    if (this.page.session !== session) return;
    this.known.set(name, found);
    if (this.known.size > KEPT) this.known.delete(this.known.keys().next().value);
    if (this.name() === name) this.point(this.at);
  }
}

function cellOf([id, start, count, owners, audit, tier], size) {
  const kind = id === null ? "away" : owners > 1 ? "shared" : count < size ? "partial" : "own";
  const place = id === null ? TIERS[tier] ?? tier : `block ${id}`;
  const tokens = count ? `tokens ${number(start)}–${number(start + count - 1)}` : "no tokens yet";
  const found = audit ? ` · last audit: ${audit}` : "";
  const cell = h("i", { class: `${kind}${audit === "fault" ? " faulty" : ""}`, title: `${place} · ${tokens} · ${owners} ${owners === 1 ? "owner" : "owners"}${found}` });
  if (kind === "partial") cell.style.setProperty("--filled", `${100 * count / size}%`);
  return cell;
}

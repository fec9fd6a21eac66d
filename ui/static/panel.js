// The live panel: what is in the cache, what the last turn cost, where the memory is.

import { bytes, copyText, duration, fillFacts, h, iconButton, number, setText, short, shown } from "./dom.js";
import { Blocks } from "./blocks.js";
import { Measures } from "./measures.js";
import { Memory } from "./memory.js";

export const CAUSES = {
  edit: "a message was edited", regenerate: "the reply was regenerated", undo: "a turn was taken back", branch: "another branch was chosen",
  delete: "a message was deleted", system_prompt: "the system prompt was changed", template: "the chat template renders an earlier turn differently",
  retokenised: "the same text was split into other tokens", context_full: "the oldest turns left the full context",
  evicted: "another chat needed the memory", kv_format: "the chat is kept in another KV format now", restart: "KVScope was restarted",
  snapshot: "what was kept on disk could not be used", model: "another model is loaded",
  thoughts: "the thoughts of an earlier reply are left out, or sent again",
};
const FINISH = { stop: "end of reply", length: "token limit", cancelled: "stopped by you", interrupted: "cut off", error: "error" };
const PLACES = { ram: "in RAM", disk: "on disk" };
const PROBE_DIMS = 10;
// Of the tokens guessed and run ahead, those that came true.
const drafts = ({ drafted_tokens: all, accepted_tokens: kept }) => (all ? `${number(kept)} of ${number(all)} (${(100 * kept / all).toFixed(0)} %)` : "none");
const LIST_SECTIONS = ["blocks", "head", "tail"];

export class LivePanel {
  constructor(page) {
    this.page = page;
    this.facts = {};
    this.fresh = false;
    this.build();
  }

  fill(element) {
    element.replaceChildren(this.root);
    this.shown = element;
    this.page.poll();
  }

  build() {
    this.id = h("code", { class: "uuid" }, "not stored yet");
    this.copyId = iconButton("copy", "Copy the session's UUID", async () => { await copyText(this.page.session); this.copyId.classList.add("done"); setTimeout(() => this.copyId.classList.remove("done"), 1000); });
    this.fill_ = h("i");
    this.bar = h("div", { class: "bar", role: "progressbar", "aria-label": "Tokens in the cache", "aria-valuemin": 0 }, this.fill_);
    this.cachePos = h("b", {}, "0");
    this.capacity = h("span", { class: "quiet" }, "");
    this.away = h("p", { class: "quiet away", hidden: true });
    this.numbers = this.tiles([["reused", "reused"], ["computed", "computed"], ["generated", "generated"], ["ttft", "first token"], ["speed", "tokens/s"], ["prefill", "prefill"]]);
    this.turnFacts = h("dl", { class: "facts" });
    this.miss = h("div", { class: "miss", hidden: true });
    this.model = h("dl", { class: "facts" });
    this.memory = new Memory(this.page, () => this.visible());
    this.blocks = new Blocks(this.page);
    this.state = h("p", { class: "quiet", hidden: true });
    this.invariants = h("div", { class: "lights" });
    this.measures = new Measures(this.page);
    this.buildProbe();
    const section = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);
    this.root = h("div", { class: "panel" },
      h("section", { class: "first" },
        h("div", { class: "session-id" }, this.id, this.copyId),
        h("div", { class: "cache-pos" }, h("span", {}, h("code", {}, "cache_pos "), this.cachePos), this.capacity),
        this.bar, this.away),
      section("Last turn", this.numbers.root, this.miss, this.turnFacts),
      section("Blocks", this.blocks.root, this.state, this.invariants),
      h("section", {}, h("h3", {}, "Probe"), this.probeBar, this.probe),
      section("Memory", this.memory.root),
      section("Precision", h("div", { class: "measure-bar" }, this.measures.format, this.measures.button), this.measures.loss, this.measures.verdict),
      section("Context limit", this.measures.curve, this.measures.lengths, this.measures.advice),
      section("Model", this.model));
  }

  buildProbe() {
    const select = (label, name) => h("label", {}, label, h("select", { "aria-label": label, "data-name": name, onchange: () => this.page.poll() }));
    this.selects = { tensor: select("tensor", "tensor"), layer: select("layer", "layer"), head: select("KV head", "head") };
    this.selects.tensor.lastChild.append(h("option", { value: "k" }, "k"), h("option", { value: "v" }, "v"));
    this.probeTitle = h("code", { class: "probe-title" });
    this.probeBar = h("div", { class: "probe-bar" }, ...Object.values(this.selects), this.probeTitle);
    this.probeBody = h("tbody");
    this.probe = h("div", { class: "probe", tabindex: "0", "aria-label": "Cached values" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "pos"), h("th", {}, "token"), ...Array.from({ length: PROBE_DIMS }, (_, index) => h("th", {}, String(index))))), this.probeBody));
    this.rows = [];
  }

  tiles(names) {
    const values = {};
    const root = h("div", { class: "tiles" }, ...names.map(([name, label]) => h("div", {}, values[name] = h("b", {}, "–"), h("span", {}, label))));
    return { root, set: (name, text) => setText(values[name], text) };
  }

  visible() {
    return this.page.frame.panelShown() && Boolean(this.shown?.offsetParent ?? this.shown?.getClientRects().length);
  }

  selection() {
    const value = (name) => this.selects[name].lastChild.value || (name === "tensor" ? "k" : "0");
    return { tensor: value("tensor"), layer: value("layer"), head: value("head") };
  }

  // True while a reading that was asked for has not arrived yet.
  waiting() {
    return this.visible() && !this.fresh;
  }

  // Something has happened that the next reading will show.
  expect() {
    this.fresh = false;
  }

  // Another chat: what is known of model and memory stays until its own reading is there.
  clear() {
    const empty = { keep: 0, add: [] };
    this.draw({ turn: null, cache: null, blocks: empty, head: empty, tail: empty });
    this.blocks.clear();
    this.measures.clear();
    this.expect();
  }

  // What a running turn tells with each answer, and is newer than any reading.
  follow(turn) {
    if (turn.cache_pos === undefined) return;
    this.drawUsed(turn.cache_pos);
    this.numbers.set("generated", number(turn.tokens));
  }

  draw(changes) {
    this.fresh = true;
    for (const name of LIST_SECTIONS) {
      if (!changes[name]) continue;
      const { keep, add } = changes[name];
      this.facts[name] = [...(this.facts[name] ?? []).slice(0, keep), ...add];
    }
    for (const name of ["model", "turn", "cache", "memory"]) if (changes[name] !== undefined) this.facts[name] = changes[name];
    this.drawSession();
    if (changes.model) {
      this.drawModel();
      this.measures.drawModel(changes.model);
    }
    // The lengths of all turns are other ones once a turn has ended.
    if (changes.model || (changes.turn && !changes.turn.running)) this.measures.refresh();
    if (changes.turn !== undefined) this.drawTurn();
    if (changes.memory) this.memory.draw(changes.memory, Boolean(this.facts.model && this.facts.model.device !== "cpu"));
    if (changes.blocks) this.blocks.draw(this.facts.blocks, changes.blocks.keep, this.facts.model);
    if (changes.cache !== undefined) this.drawState();
    if (changes.cache !== undefined) this.drawInvariants();
    if (changes.head || changes.tail) this.drawProbe();
    if (changes.model || changes.head || changes.tail) this.drawProbeTitle();
  }

  drawSession() {
    const { cache } = this.facts;
    const { session } = this.page;
    setText(this.id, session ?? "not stored yet");
    this.copyId.hidden = !session;
    this.drawUsed(cache?.cache_pos ?? 0);
    const away = cache?.away;
    setText(this.away, cache?.refused ?? (away ? `${number(away.tokens)} tokens are kept ${PLACES[away.tier]}; the next turn brings them back.` : ""));
    this.away.hidden = !this.away.textContent;
  }

  drawUsed(used) {
    const most = this.facts.model?.max_seq_len ?? 0;
    setText(this.cachePos, number(used));
    setText(this.capacity, most ? `of ${number(most)} · ${(100 * used / most).toFixed(1)} %` : "");
    this.fill_.style.width = `${most ? Math.min(100, 100 * used / most) : 0}%`;
    this.bar.setAttribute("aria-valuemax", most);
    this.bar.setAttribute("aria-valuenow", used);
  }

  drawTurn() {
    const turn = this.facts.turn ?? {};
    const count = (value) => (value === undefined || value === null ? "–" : number(value));
    this.numbers.set("reused", count(turn.reused_tokens));
    this.numbers.set("computed", count(turn.computed_tokens));
    this.numbers.set("generated", count(turn.generated_tokens));
    this.numbers.set("ttft", duration(turn.ttft_ms));
    this.numbers.set("speed", turn.decode_tokens_per_s ? turn.decode_tokens_per_s.toFixed(1) : "–");
    this.numbers.set("prefill", turn.prefill_ms === undefined ? "–" : duration(turn.prefill_ms));
    const facts = [];
    if (turn.prompt_tokens !== undefined) {
      facts.push(["prompt", `${number(turn.prompt_tokens)} tokens`], ["max new tokens", number(turn.max_new_tokens ?? 0)], ["seed", String(turn.seed)],
        ["finish", turn.running ? "still writing" : FINISH[turn.finish_reason] ?? turn.finish_reason ?? "–"]);
      // Turns of earlier versions have no such numbers.
      if (turn.drafted_tokens !== undefined) facts.push(["drafts accepted", drafts(turn)]);
    }
    fillFacts(this.turnFacts, facts);
    this.drawMiss(turn.miss);
  }

  drawMiss(miss) {
    this.miss.hidden = !miss;
    if (!miss) return;
    const token = (id, text) => (id === null ? h("span", { class: "quiet" }, "nothing") : h("code", { title: `id ${id}` }, shown(text)));
    this.miss.replaceChildren(
      h("p", {}, h("b", {}, `${number(miss.tokens_lost)} cached ${miss.tokens_lost === 1 ? "token" : "tokens"} dropped`), ` at position ${number(miss.position)}`),
      h("p", {}, `Because ${CAUSES[miss.cause] ?? miss.cause}.`),
      h("p", {}, "cached ", token(miss.cached_token, miss.cached_text), " wanted ", token(miss.wanted_token, miss.wanted_text)));
  }

  drawModel() {
    const { model } = this.facts;
    fillFacts(this.model, [
      ["model", model.model], ["device", model.device], ["weights", model.dtype], ["KV format", model.kv_format],
      ["context", `${number(model.max_seq_len)} tokens`], ["block", `${model.block_size} tokens`], ["template", model.chat_template ?? "–"],
      ["bytes per token", `${number(model.bytes_per_token)} B`], ...(model.formula ? [["", `= ${model.formula}`]] : []),
      ["speculation", model.speculation ?? "–"],
      ...(model.state_layers ? [["state", `${bytes(model.state_bytes)} a session, ${number(model.state_layers)} recurrent layers`]] : []),
    ]);
    const options = (select, count) => {
      if (select.options.length === count) return;
      const before = Math.min(Number(select.value) || 0, count - 1);
      select.replaceChildren(...Array.from({ length: count }, (_, index) => h("option", { value: index }, String(index))));
      select.value = String(before);
    };
    options(this.selects.layer.lastChild, model.num_layers);
    options(this.selects.head.lastChild, model.num_kv_heads);
  }

  drawState() {
    const state = this.facts.cache?.state;
    this.state.hidden = !state;
    if (!state) return;
    const earlier = state.count > state.last.length ? "…, " : "";
    const places = state.count ? `can be taken up again at ${earlier}${state.last.map(number).join(", ")}` : "not kept anywhere yet";
    setText(this.state, `recurrent state ${bytes(state.bytes)}, ${places}`);
  }

  drawInvariants() {
    const { cache } = this.facts;
    const entries = Object.entries(cache?.invariants ?? {});
    const broken = entries.filter(([, holds]) => !holds);
    const ratio = cache?.kv_ratio ? ` · max|K| / max|V| ${cache.kv_ratio}` : "";
    const size = cache ? `${bytes(cache.bytes_used)} used of ${bytes(cache.bytes_reserved)} reserved${ratio}` : "";
    const all = entries.map(([name, holds]) => `${holds ? "holds" : "BROKEN"}: ${name.replaceAll("_", " ")}`).join("\n");
    this.invariants.replaceChildren(...(entries.length ? [
      h("span", { class: broken.length ? "light bad" : "light", title: all }, broken.length ? `broken: ${broken.map(([name]) => name.replaceAll("_", " ")).join(", ")}` : `${entries.length} invariants hold`),
      h("span", { class: "quiet" }, size)] : []));
  }

  drawProbeTitle() {
    const { tensor, layer, head } = this.selection();
    setText(this.probeTitle, `${tensor}_cache[${layer}][${head}][pos][:${PROBE_DIMS}]`);
  }

  drawProbe() {
    const { head = [], tail = [] } = this.facts;
    const gap = head.length && tail.length && tail[0][0] > head.length;
    const wanted = [...head, ...(gap ? [null] : []), ...tail];
    const last = wanted.at(-1)?.[0];
    while (this.rows.length > wanted.length) this.rows.pop().remove();
    wanted.forEach((row, index) => {
      const key = JSON.stringify([row, row?.[0] === last]);
      if (this.rows[index]?.dataset.key === key) return;
      const node = row ? probeRow(row, row[0] === last) : h("tr", { class: "gap" }, h("td", { colspan: 2 + PROBE_DIMS }, "⋯"));
      node.dataset.key = key;
      if (this.rows[index]) this.rows[index].replaceWith(node);
      else this.probeBody.append(node);
      this.rows[index] = node;
    });
    this.probe.classList.toggle("empty", !wanted.length);
    if (!wanted.length) this.probeBody.replaceChildren(h("tr", { class: "gap" }, h("td", { colspan: 2 + PROBE_DIMS }, "Nothing in the cache yet.")));
    else this.probeBody.querySelectorAll(".gap").forEach((node) => { if (!this.rows.includes(node)) node.remove(); });
  }
}

function probeRow([position, id, token, norm, ...values], isCursor) {
  return h("tr", { class: isCursor ? "cursor" : "", title: `id ${id} · norm ${norm}` }, h("td", {}, String(position)), h("td", {}, shown(token)),
    ...values.map((value) => {
      const cell = h("td", { class: value < 0 ? "low" : "high", title: String(value) }, short(value));
      cell.style.setProperty("--strength", String(Math.min(1, Math.abs(value) / 4)));
      return cell;
    }));
}

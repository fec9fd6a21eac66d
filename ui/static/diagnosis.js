// Whose fault a repetition is: the loop, the diagnosis on request, its verdict with the evidence, and the cure.

import { counted, duration, h, number, setText, toast } from "./dom.js";
import { diagnose, repair, stopDiagnosis, stopWhile, tokens } from "./net.js";

const VERDICTS = {
  none: ["No loop", "This reply does not repeat itself."],
  model: ["The model", "With a sound cache and sane settings it goes on like this all the same."],
  sampler: ["The sampler", "The model has other things to say; the settings don't let it."],
  precision: ["The precision", "With an exact cache the same draw does not loop."],
  cache: ["The cache", "What is stored is not what the model computes of these tokens."],
};
const RUNS = {
  audit: "Audit", measures: "Live numbers", fresh: "Fresh prefill", fp32: "float32 cache", fp16: "fp16 cache", greedy: "Greedy",
  fresh_anew: "Whole reply", fp32_anew: "float32, whole reply",
  advised: "Advised settings", anew: "Advised, whole reply", stronger: "Stronger penalties",
};
const LONGEST_TEXT = 64;

export class Diagnosis {
  constructor(tab) {
    this.tab = tab;
    this.found = new Map();
    this.texts = new Map();
    this.run = null;
    this.reply = null;
    this.button = h("button", { type: "button", class: "accent", onclick: () => (this.run ? this.stop() : this.diagnose()) }, "Diagnose");
    this.state = h("p", { class: "quiet", role: "status" });
    this.loop = h("div", { class: "loop" });
    this.result = h("div", { class: "diagnosis" });
    this.root = h("div", {}, this.loop, this.state, this.result);
  }

  // Another chat: hanging up ends a diagnosis.
  clear() {
    this.run?.controller.abort();
    this.ended();
    this.show(null);
  }

  show(reply) {
    const changed = reply !== this.reply;
    this.reply = reply;
    if (changed) this.draw();
    else this.drawState();
  }

  async diagnose() {
    const { reply } = this;
    const { session } = this.tab.page;
    if (!session || !reply) return;
    const run = { reply, session, began: performance.now(), controller: new AbortController() };
    this.run = run;
    this.found.delete(reply.id);
    this.timer = setInterval(() => this.drawState(), 1000);
    this.draw();
    try {
      this.found.set(reply.id, { result: await diagnose(session, reply.id, run.controller.signal) });
    } catch (error) {
      if (this.run !== run) return;
      this.found.set(reply.id, { note: error.code === "stopped" ? "Stopped." : error.message });
    }
    if (this.run !== run) return;
    this.ended();
    this.draw();
  }

  async stop() {
    const { run } = this;
    run.stopping = true;
    this.drawState();
    try {
      await stopWhile(() => this.run === run, () => stopDiagnosis(run.session));
    } catch (error) {
      toast(error.message);
    }
  }

  ended() {
    clearInterval(this.timer);
    this.run = null;
  }

  // -- drawing

  draw() {
    const { result } = this.found.get(this.reply?.id) ?? {};
    this.drawState();
    this.drawLoop(result ? result.loop : this.reply?.loop ?? null);
    this.result.replaceChildren(...(result ? this.verdict(result) : []));
  }

  drawState() {
    const { reply, run } = this;
    const live = Boolean(reply?.live);
    setText(this.button, run ? "Stop" : "Diagnose");
    this.button.className = run ? "plain" : "accent";
    this.button.disabled = !reply || live || Boolean(run?.stopping);
    setText(this.state, this.sentence(reply, live));
    this.state.hidden = !this.state.textContent;
  }

  sentence(reply, live) {
    const { run } = this;
    if (run?.stopping) return "Stopping…";
    if (run) return `Running the reply again with one thing changed at a time · ${duration(performance.now() - run.began)}. Other replies go on.`;
    if (!reply) return "Diagnose tells whether the model, the sampler, the precision or the cache makes a reply repeat itself.";
    if (live) return "The reply is still being written; it can be diagnosed as soon as it is over.";
    const found = this.found.get(reply.id);
    if (found?.note) return found.note;
    if (found?.result) return `Diagnosed in ${duration(found.result.ms)}.${found.result.same_prompt ? "" : " The prompt is rendered differently by now, so live numbers do not count."}`;
    return reply.loop ? "" : "No repetition was noticed while this reply was written.";
  }

  drawLoop(loop) {
    this.loop.hidden = !loop;
    if (!loop) return;
    const { reply } = this;
    const known = this.texts.get(reply.id);
    const text = h("p", { class: "loop-text" }, known ?? "…");
    this.loop.replaceChildren(
      h("dl", { class: "tiles" }, ...[["period", counted(loop.period, "token")], ["begins at", `token ${number(loop.start)}`], ["repeats", loop.near ? "nearly" : `${number(loop.repeats)} times`]]
        .map(([name, value]) => h("div", {}, h("b", {}, value), h("span", {}, name)))), text);
    if (known === undefined) this.readText(reply, loop);
  }

  // The repeated text is that of one period; it is in no message as such.
  async readText(reply, loop) {
    const { page } = this.tab;
    if (!this.tab.visible() || reply.live) return;
    this.texts.set(reply.id, "…");
    try {
      const query = { message_id: reply.id, start: loop.start, count: Math.min(loop.period, LONGEST_TEXT), alternatives: false };
      const found = await tokens(page.session, query);
      this.texts.set(reply.id, found.tokens.map((token) => token.token).join("").trim().replaceAll("\n", "↵"));
    } catch {
      this.texts.delete(reply.id);
      return;
    }
    if (reply === this.reply) this.draw();
  }

  verdict(result) {
    const [name, meaning] = VERDICTS[result.verdict];
    return [
      h("div", { class: `verdict ${result.verdict}` }, h("b", {}, name), h("span", {}, meaning)),
      ...(result.cure ? [this.cure(result)] : result.loop ? [h("p", {}, "Nothing that was tried helps; another question may.")] : []),
      ...(result.evidence.length ? [h("ul", { class: "evidence" }, ...result.evidence.map(evidence))] : []),
    ];
  }

  // -- the cure, with one click

  cure(result) {
    const { cure } = result;
    const label = cure.repair ? "Repair the cache" : "Apply and regenerate";
    const done = h("p", { class: "quiet", role: "status" });
    const button = h("button", { type: "button", class: "accent" }, label);
    button.addEventListener("click", async () => {
      button.disabled = true;
      setText(done, await this.apply(cure, result.message_id) ?? "");
      button.disabled = false;
    });
    return h("div", { class: "cure" }, h("p", {}, cure.sentence), button, done);
  }

  // What was done, as a sentence; null where it was refused, which has then been told.
  async apply(cure, message) {
    const { page } = this.tab;
    if (page.running) {
      toast("The reply is still being written; stop it first (Esc).", "note");
      return null;
    }
    if (cure.repair) return this.tab.audit.repair();
    await page.settings.flush();
    if (!await page.act("update", { params: { ...page.meta.settings, ...cure.params } })) return null;
    if (!await page.act("regenerate", { message })) return null;
    this.tab.choose(null);
    return "Applied; the reply is being written anew.";
  }
}

// A run with its result; what it wrote can be opened. Texts only ever go in as text.
function evidence({ run, runs, looped, faults, first, sentence, text, changed }) {
  let bad = looped * 2 > runs;
  let tag = looped === runs ? "loops" : looped === 0 ? "no loop" : `${looped} of ${runs} loop`;
  if (run === "audit") [bad, tag] = [faults > 0, faults ? counted(faults, "fault") : "sound"];
  if (run === "measures") [bad, tag] = [first !== null, first === null ? "the same" : "differ"];
  const settings = Object.entries(changed ?? {}).map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ");
  const head = [h("b", {}, RUNS[run] ?? run), h("span", { class: bad ? "tag bad" : "tag" }, tag), h("span", { class: "quiet" }, sentence, settings && ` (${settings})`)];
  if (!text) return h("li", {}, h("div", {}, ...head));
  return h("li", {}, h("details", {}, h("summary", { title: "What this run wrote" }, ...head), h("p", { class: "loop-text" }, shownLines(text))));
}

const shownLines = (text) => text.trim().split("\n").map((line) => line || " ").join("↵");

// Which chat template prompts are rendered by, and what the model's file lacked. It holds for all chats, so no chat keeps it.

import { h, toast } from "./dom.js";
import { useTemplate } from "./net.js";

export class Template {
  constructor(page) {
    this.page = page;
    this.select = h("select", { id: "kv-template-name", "aria-describedby": "kv-template-note", onchange: () => this.choose() });
    this.warnings = h("div", { class: "template-warnings" });
    this.drawn = "";
  }

  fill(element) {
    element.replaceChildren(h("div", { class: "template" },
      h("label", { for: "kv-template-name" }, "Chat template"), this.select,
      h("p", { id: "kv-template-note", class: "quiet" },
        "For all chats. Picking another one renders every prompt anew, so each cache is cut where its prompt differs."),
      this.warnings));
    this.draw();
  }

  draw() {
    const model = this.page.app?.model;
    const names = model?.chat_templates ?? [];
    const key = JSON.stringify([names, model?.chat_template, model?.warnings]);
    if (key === this.drawn) return;
    this.drawn = key;
    this.select.disabled = !names.length;
    this.select.replaceChildren(...names.map((name) => h("option", { value: name }, name === "model" ? "the model's own" : name)));
    this.select.value = model?.chat_template ?? "";
    this.warnings.replaceChildren(...(model?.warnings ?? []).map((warning) => h("p", { class: "template-warning", role: "note" }, warning)));
  }

  async choose() {
    try {
      await useTemplate(this.select.value);
    } catch (error) {
      this.select.value = this.page.app.model.chat_template;
      toast(error.message);
    }
    this.page.poll();
  }
}

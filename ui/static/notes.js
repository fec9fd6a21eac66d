// Small things at a message: that a reply repeats itself, and what an act on it would cost.

import { counted, duration, h, icon } from "./dom.js";
import { price } from "./net.js";

export function loopNote({ period, repeats, near }, open) {
  const what = near ? `nearly the same ${counted(period, "token")} again and again` : `the same ${counted(period, "token")} ${repeats} times`;
  return h("button", { type: "button", class: "loop-note", onclick: open, title: "Open the Debug tab" }, icon("again"), `Repeats itself: ${what}. `, h("b", {}, "Why?"));
}

// What an act will compute, as the end of a sentence.
export function asPrice({ tokens, seconds }) {
  return `computes ${counted(tokens, "token")} of the prompt${seconds === null ? "" : `, about ${duration(1000 * seconds)}`}`;
}

export async function priceOf(session, action, message, content) {
  return asPrice(await price(session, action, message, content));
}

// The price is asked for when the pointer or the focus gets to the button, and stands in its title. `content`: the text
// that an edit would bring by then.
export function priced(button, page, action, message, content = () => undefined) {
  const label = button.title || button.textContent;
  const tell = async () => {
    if (page.running || page.app?.status !== "ok" || content()?.trim() === "") return;
    try {
      button.title = `${label}: ${await priceOf(page.session, action, message, content())}`;
    } catch {
      button.title = label;
    }
  };
  button.addEventListener("pointerenter", tell);
  button.addEventListener("focus", tell);
  return button;
}

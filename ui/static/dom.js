// Small helpers over the DOM. Text always goes in as text; `html` is only ever what the server made safe.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "html") node.innerHTML = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PATHS = {
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 12.5l4.500 4.500L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13.500 6.500l4 4",
  again: "M20 11a8 8 0 1 0-2.300 6.300M20 5v6h-6",
  undo: "M8 5L4 9l4 4M4 9h10a5 5 0 0 1 0 10h-4",
  fork: "M7 4v16M7 14c8 0 10-3 10-8M14 8l3-3 3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  more: "M6 12h.010M12 12h.010M18 12h.010",
  menu: "M4 7h16M4 12h16M4 17h16",
  panel: "M4 5h16v14H4zM14 5v14",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v1.500M12 19.500V21M3 12h1.500M19.500 12H21M5.600 5.600l1 1M17.400 17.400l1 1M5.600 18.400l1-1M17.400 6.600l1-1",
  close: "M6 6l12 12M18 6L6 18",
  upload: "M12 16V5M7 10l5-5 5 5M5 20h14",
  download: "M12 5v11M7 11l5 5 5-5M5 20h14",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon", `icon-${name}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

// Make the children of `target` equal to `html` and leave alone what already is: a selection, a scrolled code block or
// an opened thought survives the next tokens.
export function morph(target, html) {
  const wanted = document.createElement("template");
  wanted.innerHTML = html;
  morphChildren(target, wanted.content);
}

function morphChildren(have, want) {
  const wanted = [...want.childNodes];
  wanted.forEach((node, index) => {
    const old = have.childNodes[index];
    if (!old) have.append(node);
    else if (!old.isEqualNode(node)) morphNode(old, node);
  });
  while (have.childNodes.length > wanted.length) have.lastChild.remove();
}

function morphNode(old, node) {
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName || !sameAttributes(old, node)) old.replaceWith(node);
  else if (old.nodeType === Node.TEXT_NODE) old.data = node.data;
  else morphChildren(old, node);
}

function sameAttributes(old, node) {
  if (old.nodeType !== Node.ELEMENT_NODE) return true;
  const names = (element) => element.getAttributeNames().filter((name) => !(name === "open" && element.nodeName === "DETAILS"));
  const left = names(old);
  const right = names(node);
  return left.length === right.length && left.every((name) => old.getAttribute(name) === node.getAttribute(name));
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const overlay = () => document.getElementById("kv-overlay") || document.body.appendChild(
  h("div", { id: "kv-overlay" }, h("div", { class: "toasts", role: "alert" }), h("div", { class: "sr-only", role: "status", "aria-live": "polite" })),
);

export function toast(text, kind = "error") {
  const close = () => note.remove();
  const note = h("div", { class: `toast ${kind}` }, h("span", {}, text), iconButton("close", "Dismiss", close));
  overlay().firstChild.append(note);
  setTimeout(close, kind === "error" ? 9000 : 3500);
}

export function announce(text) {
  setText(overlay().lastChild, text);
}

// A modal question; resolves to the text of the field (if `field` is given), true, or null when it was called off.
export function ask({ title, text, confirm, danger = false, field = null }) {
  return new Promise((resolve) => {
    const input = field === null ? null : h("input", { type: "text", value: field, maxlength: 200, "aria-label": title });
    const finish = (value) => { dialog.close(); dialog.remove(); resolve(value); };
    const form = h(
      "form",
      { method: "dialog", onsubmit: (event) => { event.preventDefault(); finish(input ? input.value : true); } },
      h("h2", {}, title), text ? h("p", {}, text) : null, input,
      h("div", { class: "dialog-buttons" },
        h("button", { type: "button", class: "plain", onclick: () => finish(null) }, "Cancel"),
        h("button", { type: "submit", class: danger ? "danger" : "accent" }, confirm)),
    );
    const dialog = h("dialog", { class: "kv-dialog", oncancel: (event) => { event.preventDefault(); finish(null); } }, form);
    overlay().append(dialog);
    dialog.showModal();
    if (input) input.select();
    else if (danger) form.querySelector(".plain").focus();
  });
}

// A menu under `anchor`; `items` are [icon, label, action] or [icon, label, {href, download}].
export function menu(anchor, items) {
  document.querySelector(".kv-menu")?.remove();
  const close = () => { list.remove(); document.removeEventListener("pointerdown", outside, true); anchor.focus(); };
  const outside = (event) => { if (!list.contains(event.target)) { list.remove(); document.removeEventListener("pointerdown", outside, true); } };
  const entries = items.map(([name, label, action]) => {
    const link = typeof action === "object";
    const attributes = { role: "menuitem", class: name === "trash" ? "risky" : "", onclick: () => { close(); if (!link) action(); } };
    return link ? h("a", { ...attributes, ...action }, icon(name), label) : h("button", { type: "button", ...attributes }, icon(name), label);
  });
  const list = h("div", { class: "kv-menu", role: "menu", onkeydown: (event) => {
    const at = entries.indexOf(document.activeElement);
    if (event.key === "Escape") { event.stopPropagation(); close(); }
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      entries[(at + (event.key === "ArrowDown" ? 1 : entries.length - 1)) % entries.length].focus();
    }
  } }, ...entries);
  overlay().append(list);
  const box = anchor.getBoundingClientRect();
  list.style.top = `${Math.min(box.bottom + 4, innerHeight - list.offsetHeight - 8)}px`;
  list.style.left = `${Math.max(8, Math.min(box.left, innerWidth - list.offsetWidth - 8))}px`;
  entries[0].focus();
  document.addEventListener("pointerdown", outside, true);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without a secure context there is no clipboard object.
    const area = h("textarea", { class: "sr-only" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// Names and values of a <dl>.
export function fillFacts(list, facts) {
  const key = JSON.stringify(facts);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export const number = (value) => Math.round(value).toLocaleString("en-US");

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

// Blanks and line ends of a token are part of it, so they are made visible.
export function shown(text) {
  return (text ?? "").replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

export function short(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

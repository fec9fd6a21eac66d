// The page's requests: what is new, an act, another chat template. Paths are relative to the page, so it may live behind a proxy.

export class Refusal extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Unreachable extends Error {}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...options });
  } catch {
    throw new Unreachable("The server is not answering.");
  }
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const error = body?.error;
  if (!error) throw new Unreachable(`The server answered with status ${response.status}.`);
  throw new Refusal(response.status, error.code, error.message);
}

export const NEW = "new";

// What stands in the address bar may be anything; it must not lead to another path.
const path = (session, rest) => `api/sessions/${encodeURIComponent(session ?? NEW)}/${rest}`;

export function live(session, query) {
  return request(path(session, `live?${new URLSearchParams(query)}`), {});
}

export function act(session, name, body = {}) {
  return send(path(session, "acts"), { act: name, ...body });
}

const send = (where, body, options = {}) => request(where, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), ...options });

export function advice() {
  return request("api/advice", {});
}

export function compare(session, kvFormat) {
  return send(path(session, "compare"), { kv_format: kvFormat });
}

export function frozen() {
  return request("api/frozen", {});
}

export function freeze(text) {
  return request("api/frozen", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ text }) });
}

export function unfreeze(name) {
  return request(`api/frozen/${encodeURIComponent(name)}`, { method: "DELETE" });
}

export function useTemplate(name) {
  return send("api/template", { name }, { method: "PUT" });
}

// -- the debugging view; hanging up (`signal`) ends a diagnosis or an audit

export function diagnose(session, message, signal) {
  return send(path(session, "diagnose"), { message_id: message }, { signal });
}

export function stopDiagnosis(session) {
  return send(path(session, "diagnose/stop"), {});
}

export function audit(session, signal) {
  return send(path(session, "audit"), {}, { signal });
}

export function repair(session, signal) {
  return send(path(session, "repair"), {}, { signal });
}

export function stopAudit(session) {
  return send(path(session, "audit/stop"), {});
}

// Ask to stop what is under way as long as it `goesOn`: the first time may be there before what it is to stop.
export async function stopWhile(goesOn, stop) {
  while (goesOn() && !(await stop()).stopped) await new Promise((done) => setTimeout(done, 100));
}

export function cacheMap(session, query) {
  return request(path(session, `cache/map?${new URLSearchParams(query)}`), {});
}

export function cachedValues(session, query) {
  return request(path(session, `cache/values?${new URLSearchParams(query)}`), {});
}

export function block(session, start) {
  return request(path(session, `cache/block?${new URLSearchParams({ start })}`), {});
}

export function memoryHistory() {
  return request("api/memory/history", {});
}

export function tokens(session, query) {
  return request(path(session, `tokens?${new URLSearchParams(query)}`), {});
}

export function certainty(session, query) {
  return request(path(session, `certainty?${new URLSearchParams(query)}`), {});
}

export function probe(session, query) {
  return request(path(session, `cache/probe?${new URLSearchParams(query)}`), {});
}

export function misses(session) {
  return request(path(session, "misses"), {});
}

export function trace(session) {
  return request(path(session, "trace"), {});
}

export function traceLink(session) {
  return { href: path(session, "trace"), download: `kvscope-${session.slice(0, 8)}.trace.json` };
}

export function price(session, action, message, content) {
  return send(path(session, "price"), { action, message_id: message, content });
}

export function exportLink(session, format) {
  return { href: `api/sessions/${session}/export${format === "md" ? "?format=md" : ""}`, download: `kvscope-${session.slice(0, 8)}.${format}` };
}

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
  return request(path(session, "acts"), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ act: name, ...body }),
  });
}

export function advice() {
  return request("api/advice", {});
}

export function compare(session, kvFormat) {
  return request(path(session, "compare"), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ kv_format: kvFormat }) });
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
  return request("api/template", { method: "PUT", headers: { "content-type": "application/json" }, body: JSON.stringify({ name }) });
}

export function exportLink(session, format) {
  return { href: `api/sessions/${session}/export${format === "md" ? "?format=md" : ""}`, download: `kvscope-${session.slice(0, 8)}.${format}` };
}

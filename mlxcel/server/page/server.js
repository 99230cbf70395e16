// The one place that talks to the server: the key goes along, and whatever is no success becomes a Refusal.
import { storedKey } from "./key.js";

/** What the server said instead of a reply. `status` is 0 when nothing was heard from it, `retryAfter` in seconds. */
export class Refusal extends Error {
  constructor(message, { status = 0, code = null, requestId = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, requestId, retryAfter });
  }
}

/** The reply to GET, or to POST where there is a body. Throws a Refusal, or the signal's own error when it fired. */
export async function call(path, { body, signal } = {}) {
  const headers = new Headers();
  if (body !== undefined) headers.set("Content-Type", "application/json");
  if (storedKey()) headers.set("Authorization", `Bearer ${storedKey()}`);
  const method = body === undefined ? "GET" : "POST";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: JSON.stringify(body), cache: "no-store" });
  } catch (fault) {
    if (signal?.aborted) throw fault;
    throw new Refusal("The server cannot be reached. It may have been stopped.", { code: "unreachable" });
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw refusal(said, {
    status: response.status,
    requestId: response.headers.get("X-Request-Id"),
    retryAfter: seconds(response.headers.get("Retry-After")),
  });
}

/** A Refusal from an error body, or from an error event of a stream: both are `{error: {message, code}}`. */
export function refusal(said, { status = 0, requestId = null, retryAfter = null } = {}) {
  const error = said?.error ?? {};
  const message = typeof error.message === "string" && error.message ? error.message : `The server answered ${status}.`;
  const code = typeof error.code === "string" ? error.code : null;
  return new Refusal(message, { status, code, requestId, retryAfter });
}

function seconds(header) {
  const value = Number(header);
  return header !== null && Number.isFinite(value) && value > 0 ? Math.min(Math.ceil(value), 600) : null;
}

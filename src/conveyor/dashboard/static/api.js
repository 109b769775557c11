/** The API client: JSON, in the session of the cookie. */

// Other sites cannot make a browser send this header; without it, the server refuses changes.
const PROOF = { "X-Conveyor-Dashboard": "1" };
const TIMEOUT = 20_000;

/** An error response of the server. */
export class Problem extends Error {
  /** @param {number} status @param {any} body */
  constructor(status, body) {
    super(body.detail ?? `The server responded with status ${status}.`);
    this.status = status;
    this.code = body.code ?? "unknown";
    this.body = body;
  }
}

/** The server is unreachable. */
export class Unreachable extends Error {
  constructor() {
    super("The server does not respond. Try again.");
  }
}

/** Events about requests: `answered`, `unreachable`, `signed-out`. */
export const news = new EventTarget();

/**
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query] empty values are omitted
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function get(path, query = {}, signal) {
  return exchange(path + queryText(query), { signal });
}

/**
 * @param {"POST" | "PATCH" | "DELETE"} method
 * @param {string} path
 * @param {unknown} [body]
 * @param {{signal?: AbortSignal, key?: string}} [options] `key` is the Idempotency-Key
 * @returns {Promise<any>}
 */
export function send(method, path, body, { signal, key } = {}) {
  const headers = {
    ...PROOF,
    ...(body === undefined ? {} : { "Content-Type": "application/json" }),
    ...(key ? { "Idempotency-Key": key } : {}),
  };
  return exchange(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal });
}

/** A new Idempotency-Key. */
export function newKey() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `web_${[...random].map((each) => each.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * The first bytes of a stored body.
 * @param {string} path
 * @param {number} length
 * @param {AbortSignal} signal
 */
export async function beginning(path, length, signal) {
  const response = await request(path, { headers: { Range: `bytes=0-${length - 1}` }, signal });
  return new Uint8Array(await response.arrayBuffer());
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function exchange(path, options) {
  const response = await request(path, options);
  return response.status === 204 ? null : response.json();
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function request(path, options) {
  const patience = AbortSignal.timeout(TIMEOUT);
  const signal = options.signal ? AbortSignal.any([options.signal, patience]) : patience;
  /** @type {Response} */
  let response;
  try {
    response = await fetch(path, { ...options, signal, cache: "no-store", redirect: "error" });
  } catch {
    options.signal?.throwIfAborted();
    news.dispatchEvent(new Event("unreachable"));
    throw new Unreachable();
  }
  news.dispatchEvent(new Event("answered"));
  if (response.ok) return response;
  const problem = new Problem(response.status, await response.json().catch(() => ({})));
  if (response.status === 401) news.dispatchEvent(new Event("signed-out"));
  throw problem;
}

/** @param {Record<string, string | number | null | undefined>} query */
function queryText(query) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return pairs.length ? `?${new URLSearchParams(pairs.map(([name, value]) => [name, String(value)]))}` : "";
}

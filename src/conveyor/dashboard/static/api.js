/** The way to the API: JSON, in the session that the cookie stands for. */

// No other site can make a browser send this; without it, the server changes nothing.
const PROOF = { "X-Conveyor-Dashboard": "1" };
const PATIENCE = 20_000;

/** What the server answered that is no success. */
export class Problem extends Error {
  /** @param {number} status @param {any} body */
  constructor(status, body) {
    super(body.detail ?? `The server answered ${status}.`);
    this.status = status;
    this.code = body.code ?? "unknown";
    this.body = body;
  }
}

/** The server did not answer. */
export class Unreachable extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

/** Tells of every answer: `answered`, `unreachable`, `signed-out`. */
export const news = new EventTarget();

/**
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} [query] what is empty is left out
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
 * @param {{signal?: AbortSignal, key?: string}} [options] `key` makes a request that is sent twice count once
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

/** A name for a request that nobody else has. */
export function newKey() {
  const random = crypto.getRandomValues(new Uint8Array(16));
  return `web_${[...random].map((each) => each.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * The beginning of a body, as it was stored.
 * @param {string} path
 * @param {number} most
 * @param {AbortSignal} signal
 */
export async function beginning(path, most, signal) {
  const response = await request(path, { headers: { Range: `bytes=0-${most - 1}` }, signal });
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
  const patience = AbortSignal.timeout(PATIENCE);
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
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

/** From a file to a job: hash it, have a place promised for it, send it there, and make a job of it. Flat in memory. */

import { newKey, send, Unreachable } from "./api.js";
import { Sha256 } from "./sha256.js";

const PIECE = 4 * 1024 * 1024;

/** @typedef {(what: string, done: number, total: number) => void} Progress */

/**
 * The job that was made of the list.
 * @param {Blob} list
 * @param {Record<string, unknown>} options of the job
 * @param {{format?: string, compression?: string}} form
 * @param {Progress} progress
 * @param {AbortSignal} signal
 */
export async function submitList(list, options, form, progress, signal) {
  const sha256 = await digest(list, progress, signal);
  const promise = await send("POST", "/v1/uploads", { size: list.size, sha256 }, { signal, key: newKey() });
  await put(promise, list, progress, signal);
  return send("POST", "/v1/jobs", { ...options, source: { upload_id: promise.upload_id, ...form } }, {
    signal,
    key: newKey(),
  });
}

/** What a name tells of a list. @param {string} name */
export function formOf(name) {
  const match = /\.(txt|jsonl|ndjson|csv)?(?:\.?(gz|zst))?$/i.exec(name.toLowerCase());
  const formats = /** @type {Record<string, string>} */ ({ txt: "text", jsonl: "jsonl", ndjson: "jsonl", csv: "csv" });
  const compressions = /** @type {Record<string, string>} */ ({ gz: "gzip", zst: "zstd" });
  return { format: formats[match?.[1] ?? ""], compression: compressions[match?.[2] ?? ""] };
}

/** @param {Blob} list @param {Progress} progress @param {AbortSignal} signal */
async function digest(list, progress, signal) {
  const hash = new Sha256();
  for (let at = 0; at < list.size; at += PIECE) {
    signal.throwIfAborted();
    hash.update(new Uint8Array(await list.slice(at, at + PIECE).arrayBuffer()));
    progress("Checking", Math.min(at + PIECE, list.size), list.size);
  }
  return hash.hex();
}

/**
 * fetch does not tell how much was sent; this does.
 * @param {{url: string, method: string, headers: Record<string, string>}} promise
 * @param {Blob} list
 * @param {Progress} progress
 * @param {AbortSignal} signal
 */
function put(promise, list, progress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(promise.method, here(promise.url));
    for (const [name, value] of Object.entries(promise.headers)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => progress("Sending", event.loaded, list.size));
    request.addEventListener(
      "load",
      () => (request.status < 300
        ? resolve(undefined)
        : reject(new Error(`The list was not taken: ${request.status}.`))),
    );
    request.addEventListener("error", () => reject(new Unreachable()));
    signal.addEventListener("abort", () => (request.abort(), reject(signal.reason)), { once: true });
    request.send(list);
  });
}

/**
 * A link to this server as this page knows it: it may have been reached by TLS that the server knows nothing of.
 * @param {string} url
 */
function here(url) {
  const link = new URL(url, location.href);
  return link.host === location.host ? link.pathname + link.search : link.href;
}

/** From a file to a job: hash it, create an upload, send it, create the job. Memory use is constant. */

import { newKey, send, Unreachable } from "./api.js";
import { Sha256 } from "./sha256.js";

const PIECE = 4 * 1024 * 1024;

/** @typedef {(what: string, done: number, total: number) => void} Progress */

/**
 * Upload the list and create a job from it.
 * @param {Blob} list
 * @param {Record<string, unknown>} options of the job
 * @param {{format?: string, compression?: string}} form
 * @param {Progress} progress
 * @param {AbortSignal} signal
 */
export async function submitList(list, options, form, progress, signal) {
  const sha256 = await digest(list, progress, signal);
  const upload = await send("POST", "/v1/uploads", { size: list.size, sha256 }, { signal, key: newKey() });
  await put(upload, list, progress, signal);
  return send("POST", "/v1/jobs", { ...options, source: { upload_id: upload.upload_id, ...form } }, {
    signal,
    key: newKey(),
  });
}

/** Format and compression of a list, by its file name. @param {string} name */
export function formOf(name) {
  const match = /\.(txt|jsonl|ndjson|csv|tsv)?(?:\.?(gz|zst|bz2))?$/i.exec(name.toLowerCase());
  const formats =
    /** @type {Record<string, string>} */ ({ txt: "text", jsonl: "jsonl", ndjson: "jsonl", csv: "csv", tsv: "csv" });
  const compressions = /** @type {Record<string, string>} */ ({ gz: "gzip", zst: "zstd", bz2: "bzip2" });
  return { format: formats[match?.[1] ?? ""], compression: compressions[match?.[2] ?? ""] };
}

/** @param {Blob} list @param {Progress} progress @param {AbortSignal} signal */
async function digest(list, progress, signal) {
  const hash = new Sha256();
  for (let at = 0; at < list.size; at += PIECE) {
    signal.throwIfAborted();
    hash.update(new Uint8Array(await list.slice(at, at + PIECE).arrayBuffer()));
    progress("Hashing", Math.min(at + PIECE, list.size), list.size);
  }
  return hash.hex();
}

/**
 * XMLHttpRequest rather than fetch, which reports no upload progress.
 * @param {{url: string, method: string, headers: Record<string, string>}} upload
 * @param {Blob} list
 * @param {Progress} progress
 * @param {AbortSignal} signal
 */
function put(upload, list, progress, signal) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(upload.method, here(upload.url));
    for (const [name, value] of Object.entries(upload.headers)) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => progress("Sending", event.loaded, list.size));
    request.addEventListener(
      "load",
      () => (request.status < 300
        ? resolve(undefined)
        : reject(new Error(`The upload failed with status ${request.status}. Try again.`))),
    );
    request.addEventListener("error", () => reject(new Unreachable()));
    signal.addEventListener("abort", () => (request.abort(), reject(signal.reason)), { once: true });
    request.send(list);
  });
}

/**
 * A link to this server as the page knows it: a proxy may terminate TLS, and the server does not know about it.
 * @param {string} url
 */
function here(url) {
  const link = new URL(url, location.href);
  return link.host === location.host ? link.pathname + link.search : link.href;
}

/** Copy: the URL of a task, or its request as a curl command. Secrets are placeholders: the server does not show them. */

/** @import { Task } from "../shapes.js" */

import { get } from "../api.js";
import { h } from "../dom.js";
import { attempt, toast } from "./says.js";

/**
 * @param {string} jobId
 * @param {Task} task
 */
export function copyButtons(jobId, task) {
  const url = urlOf(task.input);
  if (!url) return null;
  const button = (/** @type {string} */ label, /** @type {() => Promise<string>} */ text) =>
    h(
      "button",
      { type: "button", class: "small", on: { click: () => attempt(async () => copy(await text())) } },
      label,
    );
  const curl = async () => curlOf(task.input, url, (await get(`/v1/jobs/${jobId}`)).options);
  return [button("Copy URL", () => Promise.resolve(url)), button("Copy as curl", curl)];
}

/** @param {string} text */
async function copy(text) {
  if (!navigator.clipboard) throw new Error("This page cannot copy: the browser allows it only over HTTPS.");
  await navigator.clipboard.writeText(text);
  toast("Copied.");
}

/** @param {any} input */
function urlOf(input) {
  const url = typeof input === "string" ? input : input?.url;
  return typeof url === "string" && /^https?:/i.test(url) ? url : null;
}

/**
 * The request that an attempt sends: with the headers of the job, which those of the task replace, and through its proxy.
 * @param {any} input
 * @param {string} url
 * @param {Record<string, any>} options of the job
 */
export function curlOf(input, url, options) {
  const parts = ["curl"];
  if (options.gateway?.proxy) parts.push("--proxy", '"$PROXY"');
  if (options.insecure) parts.push("--insecure");
  if (input?.method && input.method !== "GET") parts.push("-X", quoted(String(input.method)));
  const own = Array.isArray(input?.headers) ? input.headers : Object.entries(input?.headers ?? {});
  const names = new Set(own.map((/** @type {[string, string]} */ [name]) => name.toLowerCase()));
  const shared = Object.entries(options.headers ?? {}).filter(([name]) => !names.has(name.toLowerCase()));
  for (const [name, value] of [...shared, ...own]) {
    const shown = value === "[hidden]" ? `$${placeholder(name)}` : value;
    parts.push("-H", value === "[hidden]" ? `"${name}: ${shown}"` : quoted(`${name}: ${shown}`));
  }
  if (typeof input?.body === "string") parts.push("--data-raw", quoted(input.body));
  return [...parts, quoted(url)].join(" ");
}

/** The name of a variable of the shell. @param {string} name */
const placeholder = (name) => name.toUpperCase().replaceAll(/[^A-Z0-9]/g, "_");

/** For a shell. @param {string} text */
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

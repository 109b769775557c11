/** Copy: the URL of a task, or its request as a curl command. Secrets are placeholders: the server does not show them. */

/** @import { Task } from "../shapes.js" */

import { h } from "../dom.js";
import { attempt, toast } from "./says.js";

/** @param {Task} task */
export function copyButtons(task) {
  const url = urlOf(task.input);
  if (!url) return null;
  const button = (/** @type {string} */ label, /** @type {() => string} */ text) =>
    h("button", { type: "button", class: "small", on: { click: () => attempt(() => copy(text())) } }, label);
  return [button("Copy URL", () => url), button("Copy as curl", () => curlOf(task.input, url))];
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

/** @param {any} input @param {string} url */
export function curlOf(input, url) {
  const parts = ["curl"];
  if (input?.method && input.method !== "GET") parts.push("-X", quoted(String(input.method)));
  const headers = Array.isArray(input?.headers) ? input.headers : Object.entries(input?.headers ?? {});
  for (const [name, value] of headers) {
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

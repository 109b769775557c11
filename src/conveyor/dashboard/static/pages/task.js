/** One task: result, events, body preview (as plain text only), input and response headers. */

/** @import { Task } from "../shapes.js" */

import { beginning, get, Problem } from "../api.js";
import { h, renew } from "../dom.js";
import { bytes, count, duration, input, moment } from "../format.js";
import { poll } from "../live.js";
import { words } from "../parts/says.js";
import { pill } from "../parts/state.js";
import { trail } from "../parts/trail.js";

const PREVIEW_BYTES = 64 * 1024;

/** @type {import("../main.js").Page} */
export async function taskPage(root, signal, jobId, taskId) {
  const path = `/v1/jobs/${jobId}/tasks/${taskId}`;
  /** @type {Task} */
  let task = await get(path, {}, signal);
  const state = h("span");
  const facts = h("dl", { class: "facts" });
  const body = h("div");
  const headers = h("div");
  const events = trail(`/v1/jobs/${jobId}/events`, signal, { task: taskId });
  let previewed = "";

  const draw = async () => {
    renew(state, pill(task.status));
    renew(facts, factsOf(task));
    renew(headers, headersOf(task.headers));
    if (previewed !== (task.sha256 ?? "none")) {
      previewed = task.sha256 ?? "none";
      renew(body, await previewOf(task, `${path}/body`, signal));
    }
  };
  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs"), " / ", h("a", { href: `#/jobs/${jobId}` }, "Job")),
    h("div", { class: "title" }, h("div", { class: "title-text" }, h("h1", {}, `Task ${count(task.index)}`), state)),
    h("p", { class: "input-text" }, input(task.input)),
    h("section", { class: "card" }, h("h2", {}, "Result"), facts),
    h("section", { class: "card" }, h("h2", {}, "Events"), events.node),
    h("section", { class: "card" }, h("h2", {}, "Body"), body),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Input"),
      h("pre", { tabindex: "0", "aria-label": "Input" }, JSON.stringify(task.input, null, 2)),
    ),
    h("section", { class: "card" }, h("h2", {}, "Response headers"), headers),
  );
  await Promise.all([draw(), events.refresh()]);
  const refresh = async () => {
    // A finished task does not change.
    if (task.status !== "pending") return;
    task = await get(path, {}, signal);
    await Promise.all([draw(), events.refresh()]);
  };
  void poll(refresh, signal);
}

/** @param {Task} task */
function factsOf(task) {
  const progress = task.progress;
  return [
    fact("Task", h("code", {}, task.task_id)),
    fact("Attempts", count(task.attempts)),
    task.http_status !== null && fact("HTTP status", task.http_status),
    task.error &&
    fact("Error", h("code", { class: "error-code" }, task.error.code), task.error.message && ` ${task.error.message}`),
    task.final_url && fact("Final URL", task.final_url),
    task.elapsed !== null && fact("Duration", duration(task.elapsed)),
    task.finished_at && fact("Finished", moment(task.finished_at)),
    task.content_type && fact("Content type", task.content_type),
    task.size !== null && fact("Size", bytes(task.size)),
    task.sha256 && fact("sha256", h("code", {}, task.sha256)),
    progress &&
    fact(
      "Progress",
      `${count(progress.done)}${progress.total === null ? "" : ` of ${count(progress.total)}`}${
        progress.note ? `, ${progress.note}` : ""
      }`,
    ),
  ];
}

/** @param {string} name @param {...import("../dom.js").Child} value */
function fact(name, ...value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

/** @param {Task} task @param {string} path @param {AbortSignal} signal */
async function previewOf(task, path, signal) {
  if (task.size === null) return h("p", { class: "muted" }, "The task has no body.");
  const link = h("a", { class: "button small", href: path, download: true }, "Download");
  if (task.size === 0) return h("p", { class: "muted" }, "The body is empty.");
  try {
    const shown = textOf(await beginning(path, PREVIEW_BYTES, signal));
    const note = task.size > PREVIEW_BYTES
      ? `The first ${bytes(PREVIEW_BYTES)} of ${bytes(task.size)}.`
      : bytes(task.size);
    return h(
      "div",
      {},
      h(
        "div",
        { class: "title" },
        h("p", { class: "muted" }, shown === null ? `${bytes(task.size)}, not text.` : note),
        link,
      ),
      shown !== null && h("pre", { class: "body", tabindex: "0", "aria-label": "Body" }, shown),
    );
  } catch (error) {
    if (error instanceof Problem || !signal.aborted) return h("p", { class: "problem" }, words(error));
    throw error;
  }
}

/**
 * The bytes as text; null if they are not text.
 * @param {Uint8Array} data
 */
function textOf(data) {
  try {
    // The last character may be incomplete.
    const text = new TextDecoder("utf-8", { fatal: true }).decode(data, { stream: true });
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/** @param {[string, string][] | null} pairs */
function headersOf(pairs) {
  if (!pairs?.length) return h("p", { class: "muted" }, "None.");
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => fact(name, value)));
}

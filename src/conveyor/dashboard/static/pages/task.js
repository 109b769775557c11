/** One task: result, events, body preview (as plain text only), input and response headers. */

/** @import { Job, Task } from "../shapes.js" */

import { address } from "../address.js";
import { beginning, get, Problem } from "../api.js";
import { h, renew } from "../dom.js";
import { bytes, count, duration, input, moment } from "../format.js";
import { poll } from "../live.js";
import { attemptList, isFailure, nextRetry } from "../parts/attempts.js";
import { copyButtons } from "../parts/copy.js";
import { rerunTasks } from "../parts/rerun.js";
import { attempt, toast, words } from "../parts/says.js";
import { progressText } from "../parts/progress.js";
import { hasEnded, taskPill } from "../parts/state.js";
import { trail } from "../parts/trail.js";

const PREVIEW_BYTES = 64 * 1024;

// Pages that a look for a failed task reads at most, one after the other.
const MAX_READS = 20;
// Tasks that the first look for the failed one before reads.
const NEAR = 100;

/** @type {import("../main.js").Page} */
export async function taskPage(root, signal, jobId, taskId) {
  const path = `/v1/jobs/${jobId}/tasks/${taskId}`;
  /** @type {[Task, Job]} */
  let [task, job] = await Promise.all([get(path, {}, signal), get(`/v1/jobs/${jobId}`, {}, signal)]);
  const state = h("span");
  const facts = h("dl", { class: "facts" });
  const body = h("div");
  const headers = h("div");
  const extracted = extractedCard();
  const events = trail(`/v1/jobs/${jobId}/events`, signal, { task: taskId });
  let previewed = "";

  const attempts = h("div");
  const buttons = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
  const rerun = async () => {
    job = await get(`/v1/jobs/${jobId}`, {}, signal);
    if (!hasEnded(job.state)) return toast("The latest run has not finished. Rerun the task after it.", "bad");
    const done = await rerunTasks(jobId, `task ${count(task.index)}`, { indexes: [task.index] });
    if (done) location.hash = `#/jobs/${jobId}`;
  };
  /** The failed task before or after this one, in the order of the list. */
  const neighbour = async (/** @type {1 | -1} */ step) => {
    const found = await failedBeside(jobId, task, step, signal);
    if (!found) return toast(step > 0 ? "No failed task after this one." : "No failed task before this one.");
    location.hash = `#/jobs/${jobId}/tasks/${found.task_id}`;
  };
  const act = (/** @type {string} */ label, /** @type {() => Promise<unknown>} */ work) =>
    h("button", { type: "button", class: "small", on: { click: () => attempt(work) } }, label);
  renew(
    buttons,
    copyButtons(jobId, task),
    act("Rerun task", rerun),
    act("Previous failed", () => neighbour(-1)),
    act("Next failed", () => neighbour(1)),
  );

  const draw = async () => {
    renew(state, nextRetry(events.events) ? taskPill({ status: task.status }) : taskPill(task));
    renew(facts, factsOf(task, events.events.filter(isFailure).length, job.kind));
    extracted.show(task);
    renew(attempts, attemptList(task, events.events));
    renew(headers, headersOf(task.headers));
    if (previewed !== (task.sha256 ?? "none")) {
      previewed = task.sha256 ?? "none";
      renew(body, await previewOf(task, `${path}/body`, signal));
    }
  };
  root.append(
    h(
      "p",
      { class: "crumbs" },
      h("a", { href: "#/jobs" }, "Jobs"),
      " / ",
      h("a", { href: `#/jobs/${jobId}` }, job.name ?? "Job"),
    ),
    h(
      "div",
      { class: "title" },
      h("div", { class: "title-text" }, h("h1", {}, `Task ${count(task.index)}`), state),
      buttons,
    ),
    h("p", { class: "input-text" }, input(task.input)),
    h("section", { class: "card" }, h("h2", {}, "Result"), facts),
    h("section", { class: "card" }, h("h2", {}, "Attempts"), attempts),
    h("section", { class: "card" }, h("h2", {}, "Events"), events.node),
    extracted.node,
    h("section", { class: "card" }, h("h2", {}, "Body"), body),
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Input"),
      h("pre", { tabindex: "0", "aria-label": "Input" }, JSON.stringify(task.input, null, 2)),
    ),
    h("section", { class: "card" }, h("h2", {}, "Response headers"), headers),
  );
  await events.refresh();
  await draw();
  const refresh = async () => {
    // A finished task does not change.
    if (task.status !== "pending") return;
    task = await get(path, {}, signal);
    await events.refresh();
    await draw();
  };
  void poll(refresh, signal);
}

/**
 * What the job's function made of the body; hidden where there is nothing.
 */
function extractedCard() {
  const content = h("div");
  const node = h("section", { class: "card", hidden: true }, h("h2", {}, "Extracted"), content);
  return {
    node,
    /** @param {Task} task */
    show({ extracted, extracted_url: link }) {
      node.hidden = link === null;
      renew(
        content,
        link !== null && h("a", { class: "button small", href: link, download: true }, "Download"),
        extracted !== null &&
          h("pre", { class: "body", tabindex: "0", "aria-label": "Extracted" }, JSON.stringify(extracted, null, 2)),
      );
    },
  };
}

/**
 * @param {Task} task
 * @param {number} failed attempts that its events tell of: the row of an unfinished task has none
 * @param {string} kind of its job
 */
function factsOf(task, failed, kind) {
  const progress = task.progress;
  return [
    fact("Task", h("code", {}, task.task_id)),
    fact("Attempts", count(task.status === "pending" ? failed : task.attempts)),
    task.http_status !== null && fact("HTTP status", task.http_status),
    task.unchanged && fact("Unchanged", "The page is the one of an earlier run."),
    task.error &&
    fact("Error", h("code", { class: "error-code" }, task.error.code), task.error.message && ` ${task.error.message}`),
    task.final_url && fact("Final URL", task.final_url),
    task.elapsed !== null && task.attempts > 0 && fact("Duration", duration(task.elapsed)),
    task.finished_at && fact("Finished", moment(task.finished_at)),
    task.content_type && fact("Content type", task.content_type),
    task.size !== null && fact("Size", bytes(task.size)),
    task.sha256 && fact("sha256", h("code", {}, task.sha256)),
    progress &&
    fact("Progress", progressText(progress, kind)),
  ];
}

/**
 * The nearest failed task before or after a task. Where the engine has no list order, the nearest of the first page.
 * @param {string} jobId
 * @param {Task} task
 * @param {1 | -1} step
 * @param {AbortSignal} signal
 */
async function failedBeside(jobId, task, step, signal) {
  const query = { status: "failed", run: address().state.get("run") };
  const read = (/** @type {string | null} */ cursor, /** @type {number} */ limit, end = Infinity) =>
    pageWithItems(`/v1/jobs/${jobId}/results`, { ...query, limit }, cursor, end, signal);
  const inOrder = await (step > 0 ? firstAfter(task.index, read) : lastBefore(task.index, read));
  if (inOrder !== undefined) return inOrder;
  const page = await read(null, 1000);
  return (page?.items ?? [])
    .filter((/** @type {Task} */ each) => (step > 0 ? each.index > task.index : each.index < task.index))
    .sort((/** @type {Task} */ a, /** @type {Task} */ b) => step * (a.index - b.index))[0] ?? null;
}

/**
 * Reads the first failed tasks after a cursor, as far as one index; null without list order.
 * @typedef {(cursor: string | null, limit: number, end?: number) => Promise<{items: Task[], order: string} | null>} Read
 */

/** @param {number} index @param {Read} read @returns {Promise<Task | null | undefined>} undefined without list order */
async function firstAfter(index, read) {
  const page = await read(`ix:${index}`, 1);
  return page === null ? undefined : (page.items[0] ?? null);
}

/**
 * Listings go forward only: ever larger steps back find a stretch that has a failed task, halves of it the last one.
 * @param {number} index
 * @param {Read} read
 * @returns {Promise<Task | null | undefined>} undefined without list order
 */
async function lastBefore(index, read) {
  /** The first failed one from `from` on that is before `end`. */
  const probe = async (/** @type {number} */ from, /** @type {number} */ end) => {
    const page = await read(from > 0 ? `ix:${from - 1}` : null, 1, end);
    if (page === null || page.order === "task_id") return undefined;
    return page.items[0]?.index < end ? page.items[0] : null;
  };
  let [from, end] = [index, index];
  /** @type {Task | null | undefined} */
  let found = null;
  for (let back = NEAR; from > 0 && found === null; back *= 2) {
    end = from;
    from = Math.max(index - back, 0);
    found = await probe(from, end);
  }
  // None is in [end, index), and the found one is in [from, end).
  while (found && end - found.index > 1) {
    const middle = Math.ceil((found.index + end) / 2);
    const later = await probe(middle, end);
    if (later) found = later;
    else end = middle;
  }
  return found;
}

/**
 * The first page that has items: one with a filter may be empty and have a next one. Null if the engine lists by task
 * id, where such a cursor is invalid.
 * @param {string} path
 * @param {Record<string, any>} query
 * @param {string | null} cursor
 * @param {number} end an index from which on nothing is of interest
 * @param {AbortSignal} signal
 */
async function pageWithItems(path, query, cursor, end, signal) {
  try {
    for (let turn = 0;; turn += 1) {
      const page = await get(path, { ...query, cursor }, signal);
      cursor = page.next_cursor;
      const isPast = Number(cursor?.replace("ix:", "")) + 1 >= end;
      if (page.items.length || cursor === null || isPast || turn === MAX_READS) return page;
    }
  } catch (error) {
    if (error instanceof Problem && error.code === "bad_cursor") return null;
    throw error;
  }
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
    const shown = pretty(textOf(await beginning(path, PREVIEW_BYTES, signal)), task);
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

/** JSON with indents, if the text is a whole JSON value. @param {string | null} text @param {Task} task */
function pretty(text, task) {
  if (text === null || (task.size ?? 0) > PREVIEW_BYTES || !/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
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

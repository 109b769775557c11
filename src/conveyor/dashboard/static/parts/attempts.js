/** The attempts of a task, in order: when each ended, how, and how long the next one waited. */

/** @import { Event, Task } from "../shapes.js" */

import { h } from "../dom.js";
import { clock, count, duration, moment } from "../format.js";
import { pill, taskPill } from "./state.js";

const FAILURES = new Set(["task.retried", "task.failed", "task.dead_lettered"]);

/**
 * @param {Task} task
 * @param {Event[]} events of the task, oldest first
 */
export function attemptList(task, events) {
  const failures = events.filter((each) => FAILURES.has(each.event));
  const rows = failures.map((each) => failed(each));
  const last = failures[failures.length - 1];
  const isOver = task.finished_at !== null;
  if (isOver && task.status === "succeeded") rows.push(succeeded(task));
  if (!isOver) rows.push(h("li", {}, h("b", {}, `Attempt ${count(failures.length + 1)}`), next(task, last)));
  if (!rows.length) return h("p", { class: "muted" }, "No attempt yet.");
  return h("ol", { class: "attempts" }, rows);
}

/** @param {Event} event */
function failed({ at, event, data }) {
  return h(
    "li",
    {},
    h("b", {}, `Attempt ${count(data.attempt)}`),
    pill("failed"),
    h(
      "span",
      { class: "attempt-what" },
      data.error && h("code", { class: "error-code" }, data.error.code),
      data.error?.message && ` ${data.error.message}`,
      data.http_status ? ` · HTTP ${data.http_status}` : "",
    ),
    h("span", { class: "muted" }, clock(at), ", ", moment(at)),
    event === "task.retried" && h("span", { class: "muted" }, `backoff ${duration(data.retry_in)}`),
    event === "task.dead_lettered" && h("span", { class: "muted" }, "dead letter"),
  );
}

/** @param {Task} task */
function succeeded(task) {
  return h(
    "li",
    {},
    h("b", {}, `Attempt ${count(task.attempts)}`),
    pill("succeeded"),
    h(
      "span",
      { class: "attempt-what" },
      task.http_status !== null && `HTTP ${task.http_status}`,
      task.elapsed !== null && ` in ${duration(task.elapsed)}`,
    ),
    h("span", { class: "muted" }, task.finished_at && clock(task.finished_at), ", ", moment(task.finished_at)),
  );
}

/** @param {Task} task @param {Event | undefined} last */
function next(task, last) {
  const due = last && last.data.retry_in !== undefined ? Date.parse(last.at) + 1000 * last.data.retry_in : 0;
  const left = (due - Date.now()) / 1000;
  if (left > 0) return h("span", { class: "muted" }, `next retry in ${duration(left)}`);
  return taskPill({ ...task, in_progress: task.in_progress ?? task.progress !== undefined });
}

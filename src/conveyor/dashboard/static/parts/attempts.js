/**
 * The attempts of a task on one time line: how long each waited for a slot, for the first byte and for the rest, the
 * backoff before the next one, and the worker.
 */

/** @import { Event, Task } from "../shapes.js" */

import { h, svg } from "../dom.js";
import { clock, count, duration, moment } from "../format.js";
import { pill, taskPill } from "./state.js";

const FAILURES = new Set(["task.retried", "task.failed", "task.dead_lettered"]);

/** Whether an event is the end of an attempt that failed. @param {Event} event */
export const isFailure = ({ event }) => FAILURES.has(event);

/**
 * Seconds of the parts of an attempt, as far as they are known. Times are in milliseconds. `rest` is what followed the
 * first byte, or all of it; of an attempt that ended without a connection, it is the connecting. The HTTP client does not
 * tell when it has connected: until the first byte is the time for a connection, if it is a new one, too.
 * @typedef {{began: number, end: number, wait: number | null, first: number | null, rest: number, connecting: boolean, backoff: number | null}} Timing
 */

/** Codes of attempts that ended before they had a connection: with name lookup and TLS. */
const CONNECTING = new Set(["dns_failed", "connect_failed", "connect_timeout", "tls_failed"]);

/**
 * @param {Task} task
 * @param {Event[]} events of the task, oldest first
 */
export function attemptList(task, events) {
  const failures = events.filter(isFailure);
  const timings = failures.map((each, at) => timingOf(each, failures[at - 1]));
  const last = failures[failures.length - 1];
  const isOver = task.finished_at !== null;
  const hasSucceeded = isOver && task.status === "succeeded";
  if (hasSucceeded) timings.push(lastTiming(task, last));
  const span = spanOf(timings);
  const rows = failures.map((each, at) => failed(each, timings[at], span));
  if (hasSucceeded) rows.push(succeeded(task, timings[timings.length - 1], span));
  if (!isOver) rows.push(h("li", {}, h("b", {}, `Attempt ${count(failures.length + 1)}`), next(task, failures)));
  if (!rows.length) return h("p", { class: "muted" }, "No attempt yet.");
  return [h("ol", { class: "attempts" }, rows), span && keys()];
}

/** @param {Event} event @param {Event | undefined} before @returns {Timing | null} */
function timingOf({ at, data }, before) {
  if (data.elapsed === undefined) return null;
  return made(Date.parse(at), data.elapsed, data.first_byte, before, data.retry_in, CONNECTING.has(data.error?.code));
}

/** @param {Task} task @param {Event | undefined} before @returns {Timing | null} */
function lastTiming(task, before) {
  if (task.finished_at === null || task.elapsed === null) return null;
  return made(Date.parse(task.finished_at), task.elapsed, task.first_byte, before, undefined);
}

/**
 * @param {number} end
 * @param {number} elapsed
 * @param {number | undefined} first
 * @param {Event | undefined} before
 * @param {number | undefined} backoff
 * @param {boolean} connecting
 * @returns {Timing}
 */
function made(end, elapsed, first, before, backoff, connecting = false) {
  const began = end - 1000 * elapsed;
  const due = before?.data.retry_in === undefined ? null : Date.parse(before.at) + 1000 * before.data.retry_in;
  return {
    began,
    end,
    wait: due === null ? null : Math.max(0, (began - due) / 1000),
    first: first ?? null,
    rest: elapsed - (first ?? 0),
    connecting,
    backoff: backoff ?? null,
  };
}

/** From the start of the first attempt to the end of the last, with its backoff. @param {(Timing | null)[]} timings */
function spanOf(timings) {
  const known = timings.filter((each) => each !== null);
  if (!known.length) return null;
  const from = Math.min(...known.map((each) => each.began - 1000 * (each.wait ?? 0)));
  const to = Math.max(...known.map((each) => each.end + 1000 * (each.backoff ?? 0)));
  return { from, length: Math.max(to - from, 1) };
}

/** @param {Event} event @param {Timing | null} timing @param {ReturnType<typeof spanOf>} span */
function failed({ at, event, data }, timing, span) {
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
    event === "task.dead_lettered" && h("span", { class: "muted" }, "dead letter"),
    timing ? line(timing, span, "failed", data.worker) : backoffText(data.retry_in),
  );
}

/** @param {Task} task @param {Timing | null} timing @param {ReturnType<typeof spanOf>} span */
function succeeded(task, timing, span) {
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
    timing && line(timing, span, "succeeded", task.worker),
  );
}

/** An event of an earlier version has no more. @param {number | undefined} seconds */
function backoffText(seconds) {
  return seconds === undefined ? null : h("span", { class: "muted" }, `backoff ${duration(seconds)}`);
}

/**
 * The parts of an attempt, drawn at their time and in words.
 * @param {Timing} timing
 * @param {ReturnType<typeof spanOf>} span
 * @param {string} look
 * @param {string | undefined} worker
 */
function line({ began, wait, first, rest, connecting, backoff }, span, look, worker) {
  if (!span) return null;
  const x = (/** @type {number} */ at) => (1000 * (at - span.from)) / span.length;
  let at = began - 1000 * (wait ?? 0);
  const part = (/** @type {string} */ name, /** @type {number | null} */ seconds) => {
    const from = at;
    at += 1000 * (seconds ?? 0);
    return seconds ? svg("rect", { class: name, x: x(from), width: Math.max(x(at) - x(from), 2), height: 10 }) : null;
  };
  const words = [
    wait !== null && `wait ${duration(wait)}`,
    first !== null && `connect and first byte ${duration(first)}`,
    `${connecting ? "connect" : first !== null ? "read" : "total"} ${duration(rest)}`,
    backoff !== null && `backoff ${duration(backoff)}`,
    worker,
  ].filter(Boolean).join(" · ");
  return h(
    "div",
    { class: "attempt-line" },
    svg(
      "svg",
      { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      part("waited", wait),
      part("speed", first),
      part(look, rest),
      part("backoff", backoff),
    ),
    h("span", { class: "muted" }, words),
  );
}

/** What the colours mean. */
function keys() {
  const key = (/** @type {string} */ look, /** @type {string} */ text) =>
    h(
      "span",
      {},
      svg(
        "svg",
        { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
        svg("rect", { class: look, width: 10, height: 10, rx: 2 }),
      ),
      text,
    );
  return h(
    "p",
    { class: "legend" },
    key("waited", "waited for a slot"),
    key("speed", "connect and first byte"),
    key("succeeded", "read, or the whole attempt"),
    key("failed", "the same of a failed attempt"),
    key("backoff", "backoff"),
  );
}

/** Seconds until the next retry; 0 if none waits for its backoff. @param {Event[]} events of the task, oldest first */
export function nextRetry(events) {
  const last = events.filter(isFailure).pop();
  if (last?.data.retry_in === undefined) return 0;
  return Math.max(0, (Date.parse(last.at) + 1000 * last.data.retry_in - Date.now()) / 1000);
}

/** @param {Task} task @param {Event[]} events */
function next(task, events) {
  const left = nextRetry(events);
  if (left > 0) return h("span", { class: "muted" }, `next retry in ${duration(left)}`);
  return [taskPill(task), task.running && h("span", { class: "muted" }, task.worker)];
}

/** Shared indicators: state pills and progress bars. */

import { h, svg } from "../dom.js";
import { count, duration, percent } from "../format.js";

/** @import { Counts, Ended, Job } from "../shapes.js" */

/** The CSS class of each state. */
const LOOKS = {
  running: "busy",
  ingesting: "busy",
  queued: "idle",
  pending: "idle",
  paused: "held",
  half_open: "held",
  active: "good",
  completed: "good",
  succeeded: "good",
  delivered: "good",
  ready: "good",
  closed: "good",
  failed: "bad",
  failing: "bad",
  open: "bad",
  disabled: "idle",
  cancelled: "idle",
};

/**
 * The state as a word with a coloured dot. The colour adds no information.
 * @param {string} state
 */
export function pill(state) {
  const look = /** @type {Record<string, string>} */ (LOOKS)[state] ?? "idle";
  return h("span", { class: `pill ${look}` }, state.replace("_", "-"));
}

/**
 * The status of a task. One that is attempted now is pending for the API, and in progress for people.
 * @param {{status: string, running?: boolean, progress?: unknown}} task
 */
export function taskPill(task) {
  return (task.running || task.progress !== undefined) && task.status === "pending"
    ? h("span", { class: "pill busy" }, "in progress")
    : pill(task.status);
}

// From this share of failed tasks on, a completed job looks bad.
const MANY = 0.1;

/**
 * The state of a job or a run in the words of its user: what it waits for, and whether all tasks succeeded.
 * @param {{state: string, total: number, counts: Ended, waiting?: Job["waiting"]}} job
 */
export function jobPill({ state, total, counts, waiting }) {
  if (state === "completed" && counts.failed > 0) {
    const look = counts.failed >= MANY * total ? "bad" : "held";
    return h("span", { class: `pill ${look}` }, "completed with failures");
  }
  if (waiting?.code === "open") return h("span", { class: "pill idle" }, "open · waiting for tasks");
  // A paused job and an ingest say so by their state.
  const waits = waiting && state === "running";
  return waits ? h("span", { class: "pill held" }, "waiting") : pill(state);
}

/**
 * The breaker that a job waits for, and its next probe. A target is a host, or a name of the user behind "upstream:".
 * @param {NonNullable<Job["waiting"]>} waiting
 */
export function circuitOf({ target, until }) {
  const left = until === null ? 0 : (Date.parse(until) - Date.now()) / 1000;
  const probe = left > 0 ? `next probe in ${duration(Math.ceil(left))}` : "probing now";
  return `circuit open for ${(target ?? "").replace(/^upstream:/, "")}, ${probe}`;
}

const ENDED = new Set(["completed", "failed", "cancelled"]);

/** @param {string} state */
export const hasEnded = (state) => ENDED.has(state);

/** @param {Ended} counts */
export const ended = (counts) => counts.succeeded + counts.failed + counts.cancelled;

/**
 * The tasks of a run as one bar: succeeded, failed, cancelled, running; the rest is pending.
 * @param {{total: number, counts: Counts}} run
 * @param {string} label
 */
export function bar(run, label) {
  const { total, counts } = run;
  const done = ended(counts);
  let x = 0;
  const parts = /** @type {const} */ (["succeeded", "failed", "cancelled", "running"]).map((name) => {
    const width = total ? (1000 * counts[name]) / total : 0;
    x += width;
    // Every part that is not empty is visible.
    return width && svg("rect", { class: name, x: x - width, width: Math.max(width, 2), height: 10 });
  });
  const words = `${percent(done, total)} finished, ${count(counts.failed)} failed`;
  return h(
    "div",
    {
      class: "progress",
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": total,
      "aria-valuenow": done,
      "aria-valuetext": words,
    },
    svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", "aria-hidden": "true" }, parts),
  );
}

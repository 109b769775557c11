/** The head of a job's page: name, state, reason to wait, progress. */

/** @import { Counts, Job, Run } from "../shapes.js" */

import { addressWith } from "../address.js";
import { h, renew } from "../dom.js";
import { count, duration, moment, percent, rate } from "../format.js";
import { progressParts } from "./progress.js";
import { bar, circuitOf, ended, hasEnded, jobPill } from "./state.js";

/** @param {Element} actions the buttons of the job */
export function jobSummary(actions) {
  const title = h("h1");
  const state = h("span");
  const about = h("p", { class: "muted about" });
  const notice = h("div");
  const line = h("div", { class: "big-bar" });
  const tiles = h("dl", { class: "tiles" });
  return {
    nodes: [
      h("div", { class: "title" }, h("div", { class: "title-text" }, title, state), actions),
      about,
      notice,
      line,
      tiles,
    ],
    /**
     * @param {Job} job with the counts that are shown
     * @param {Run} run that is shown, or the latest
     * @param {boolean} isAlone whether the run is shown alone
     */
    show(job, run, isAlone) {
      const created = moment(job.created_at);
      const expires = job.expires_at === null ? [] : [" · expires ", moment(job.expires_at)];
      renew(title, job.name ?? job.id);
      renew(state, jobPill(job));
      renew(about, h("code", {}, job.id), ` · ${job.kind} · created `, created, ...expires);
      renew(notice, noticeOf(job));
      renew(line, bar(job, isAlone ? `Tasks of run ${run.number}` : "All tasks"));
      renew(tiles, tilesOf(job, run, isAlone));
    },
  };
}

/** @param {Job} job */
function noticeOf(job) {
  const text = waitOf(job) ?? (job.reason && sentence(job.reason)) ?? ingestOf(job);
  return [
    text && h("p", { class: `notice ${job.state === "failed" ? "bad" : ""}` }, text),
    // A list that was rejected has no tasks: its reason says so.
    job.invalid_lines > 0 && job.total > 0 && h("p", { class: "notice" }, skippedOf(job)),
  ];
}

/** Why it waits, and until when. @param {Job} job */
function waitOf({ waiting }) {
  if (!waiting) return null;
  const because = waiting.error ? ` (${waiting.error})` : "";
  return waiting.target ? `${sentence(circuitOf(waiting))}${because}.` : waiting.detail;
}

/** A reason of the server as a sentence. @param {string} text */
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** @param {Job} job */
function skippedOf({ invalid_lines: invalid, total }) {
  const lines = invalid + total === 1 ? "line" : "lines";
  const list = h("a", { href: addressWith({ tab: null, cursor: null, page: null }) }, "Invalid lines");
  return [`${count(invalid)} of ${count(invalid + total)} ${lines} skipped: `, list, " in the overview."];
}

/** @param {Job} job */
function ingestOf({ state, ingest }) {
  if (state !== "ingesting" || !ingest) return null;
  const share = ingest.bytes_total ? `, ${percent(ingest.bytes_read, ingest.bytes_total)} of the bytes` : "";
  return `Ingesting the list: ${count(ingest.tasks)} tasks so far${share}.`;
}

/** @param {Job} job @param {Run} run @param {boolean} isAlone */
function tilesOf({ total, counts, run: latest, rate: speed, eta, task_time: time, transfers, kind }, run, isAlone) {
  const over = run.ended_at ? Date.parse(run.ended_at) : Date.now();
  const lasted = duration((over - Date.parse(run.created_at)) / 1000);
  const isOver = hasEnded(run.state);
  const ofRun = latest.number > 1 ? ` · run ${run.number}` : "";
  const moving = isOver ? null : transfers;
  if (run.id !== latest.id) {
    // Throughput and latency are kept for the latest run alone.
    const average = isOver && over > Date.parse(run.created_at)
      ? (1000 * (run.counts.succeeded + run.counts.failed)) / (over - Date.parse(run.created_at))
      : 0;
    return [...countTiles(total, counts), tile(`Throughput${ofRun}`, rate(average)), tile(`Duration${ofRun}`, lasted)];
  }
  return [
    ...countTiles(total, counts),
    !isAlone && run.number > 1 && !isOver &&
    tile("Rerun", percent(run.total - run.counts.pending - run.counts.running, run.total), `of ${count(run.total)}`),
    tile("In progress", count(run.counts.running), `${count(run.counts.pending)} pending`),
    tile(`Throughput${ofRun}`, rate(speed), time && `p50 ${duration(time.p50)}`),
    moving && downloading(moving, kind),
    isOver ? tile(`Duration${ofRun}`, lasted) : tile("Time left", duration(eta), `after ${lasted}`),
  ];
}

/** How far the downloads in progress are, together. @param {NonNullable<Job["transfers"]>} moving @param {string} kind */
function downloading(moving, kind) {
  const [amount, ...more] = progressParts(moving, kind);
  return moving.total === null
    ? tile("Downloading", amount, more.join(" · "))
    : tile("Downloading", percent(moving.done, moving.total), [amount, ...more.slice(1)].join(" · "));
}

/** @param {number} total @param {Counts} counts */
function countTiles(total, counts) {
  return [
    tile("Finished", percent(ended(counts), total), `of ${count(total)}`),
    tile("Succeeded", count(counts.succeeded), null, "succeeded"),
    (counts.unchanged ?? 0) > 0 && tile("Unchanged", count(counts.unchanged ?? 0), "of the succeeded"),
    tile("Failed", count(counts.failed), null, counts.failed ? "failed" : ""),
    counts.cancelled > 0 && tile("Cancelled", count(counts.cancelled)),
  ];
}

/**
 * A number with its name.
 * @param {string} name
 * @param {string} value
 * @param {string | null} [beside]
 * @param {string} [look]
 */
export function tile(name, value, beside, look = "") {
  const note = beside ? h("span", { class: "muted" }, beside) : null;
  return h("div", { class: `tile ${look}` }, h("dt", {}, name), h("dd", {}, h("b", {}, value), note));
}

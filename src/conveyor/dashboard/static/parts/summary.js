/** The head of a job's page: name, state, reason to wait, progress. */

/** @import { Job } from "../shapes.js" */

import { h, renew } from "../dom.js";
import { count, duration, moment, percent, rate } from "../format.js";
import { bar, ended, hasEnded, jobPill } from "./state.js";

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
    /** @param {Job} job */
    show(job) {
      const created = moment(job.created_at);
      const expires = job.expires_at === null ? [] : [" · expires ", moment(job.expires_at)];
      renew(title, job.name ?? job.id);
      renew(state, jobPill(job));
      renew(about, h("code", {}, job.id), ` · ${job.kind} · created `, created, ...expires);
      renew(notice, noticeOf(job));
      renew(line, bar(job, "All tasks"));
      renew(tiles, tilesOf(job));
    },
  };
}

/** @param {Job} job */
function noticeOf(job) {
  const text = waitOf(job) ?? job.reason ?? ingestOf(job);
  return [
    text && h("p", { class: `notice ${job.state === "failed" ? "bad" : ""}` }, text),
    // A list that was rejected has no tasks: its reason says so.
    job.invalid_lines > 0 && job.total > 0 && h("p", { class: "notice" }, skippedOf(job)),
  ];
}

/** Why it waits, and until when. @param {Job} job */
function waitOf({ waiting }) {
  if (!waiting) return null;
  const left = waiting.until === null ? 0 : (Date.parse(waiting.until) - Date.now()) / 1000;
  return left > 0 && waiting.target ? `${waiting.detail} Next probe in ${duration(left)}.` : waiting.detail;
}

/** @param {Job} job */
function skippedOf({ invalid_lines: invalid, total }) {
  const lines = invalid + total === 1 ? "line" : "lines";
  return [`${count(invalid)} of ${count(invalid + total)} ${lines} skipped: `, h("b", {}, "Invalid lines"), " below."];
}

/** @param {Job} job */
function ingestOf({ state, ingest }) {
  if (state !== "ingesting" || !ingest) return null;
  const share = ingest.bytes_total ? `, ${percent(ingest.bytes_read, ingest.bytes_total)} of the bytes` : "";
  return `Ingesting the list: ${count(ingest.tasks)} tasks so far${share}.`;
}

/** @param {Job} job */
function tilesOf({ total, counts, run, state, rate: speed, eta, task_time: time }) {
  const over = hasEnded(state) && run.ended_at ? Date.parse(run.ended_at) : Date.now();
  const lasted = duration((over - Date.parse(run.created_at)) / 1000);
  return [
    tile("Finished", percent(ended(counts), total), `of ${count(total)}`),
    tile("Succeeded", count(counts.succeeded), null, "succeeded"),
    tile("Failed", count(counts.failed), null, counts.failed ? "failed" : ""),
    counts.cancelled > 0 && tile("Cancelled", count(counts.cancelled)),
    run.number > 1 && !hasEnded(state) &&
    tile("Rerun", percent(run.total - run.counts.pending - run.counts.running, run.total), `of ${count(run.total)}`),
    tile("Running", count(run.counts.running), `${count(run.counts.pending)} pending`),
    tile("Throughput", rate(speed), time && `p50 ${duration(time.p50)}`),
    hasEnded(state) ? tile("Duration", lasted) : tile("Time left", duration(eta), `after ${lasted}`),
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

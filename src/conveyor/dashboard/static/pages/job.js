/** One job: summary, charts, errors, tasks, runs, exports, events and actions. */

/** @import { Job, Progress, Statistics } from "../shapes.js" */

import { get } from "../api.js";
import { h, oncePerFrame } from "../dom.js";
import { follow, single } from "../live.js";
import { jobActions } from "../parts/actions.js";
import { addSample, latencyChart, progressChart } from "../parts/charts.js";
import { deliveriesTable } from "../parts/deliveries.js";
import { errorsList } from "../parts/errors.js";
import { exportsCard } from "../parts/exports.js";
import { invalidCard } from "../parts/invalid.js";
import { runsTable } from "../parts/runs.js";
import { ended, hasEnded } from "../parts/state.js";
import { jobSummary } from "../parts/summary.js";
import { tasksCard } from "../parts/tasks.js";
import { trail } from "../parts/trail.js";

// Interval for data that the stream does not carry, in milliseconds.
const SLOW = 4_000;

/** @type {import("../main.js").Page} */
export async function jobPage(root, signal, jobId) {
  const path = `/v1/jobs/${jobId}`;
  /** @type {Job} */
  let job = await get(path, {}, signal);
  /** @type {Statistics | null} */
  let statistics = null;
  let asked = 0;

  const refresh = async () => {
    job = await get(path, {}, signal);
    if (Date.now() - asked >= SLOW || hasEnded(job.state)) await refreshParts();
    draw();
  };
  const refreshParts = async () => {
    asked = Date.now();
    const [latest, page] = await Promise.all([
      get(`${path}/statistics`, {}, signal),
      get(`${path}/deliveries`, { limit: 50 }, signal),
      exports.refresh(job),
      invalid.refresh(job),
      events.refresh(),
      tasks.refresh(),
    ]);
    statistics = latest;
    deliveries.show(page.items);
    sent.hidden = page.items.length === 0;
  };
  const refreshAll = async () => {
    asked = 0;
    await refresh();
  };
  // One request at a time: a slow server gets no further one.
  const catchUp = single(refreshAll);

  const actions = jobActions(jobId, {
    changed: refreshAll,
    exported: () => exports.refresh(job),
    gone: () => (location.hash = "#/jobs"),
  });
  const summary = jobSummary(actions.node);
  const progress = progressChart();
  const latency = latencyChart();
  const tasks = tasksCard(jobId, signal);
  const errors = errorsList((code) => tasks.ofError(code));
  const runs = runsTable((number) => tasks.ofRun(number));
  const exports = exportsCard(jobId, signal);
  const invalid = invalidCard(jobId, signal);
  const events = trail(`${path}/events`, signal);
  const deliveries = deliveriesTable(signal);
  const sent = section("Webhook deliveries", deliveries.node);
  sent.hidden = true;

  const draw = () => {
    document.title = `${job.name ?? job.id} · Conveyor`;
    summary.show(job);
    actions.show(job);
    runs.show(job.runs);
    if (!statistics) return;
    progress.show(statistics.samples, job.run.total);
    latency.show(statistics.durations, job.task_time);
    errors.show(statistics.errors);
  };
  const drawSoon = oncePerFrame(draw);
  const moved = (/** @type {Progress} */ now) => {
    const another = now.run_id !== job.run.id;
    job = advanced(job, now);
    if (statistics) addSample(statistics.samples, now.counts);
    drawSoon();
    // The stream does not carry throughput and time left.
    if (another || hasEnded(now.state) || Date.now() - asked >= SLOW) void catchUp();
  };

  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs")),
    ...summary.nodes,
    h("div", { class: "pair" }, section("Throughput", progress.node), section("Latency", latency.node)),
    section("Errors", errors.node),
    tasks.node,
    section("Runs", runs.node),
    exports.node,
    invalid.node,
    sent,
    section("Events", events.node),
  );
  draw();
  // Show what is known; the rest follows.
  void catchUp();
  void follow(`${path}/stream`, { progress: moved }, refresh, signal, () => !hasEnded(job.state));
}

/**
 * A job with the progress from the stream. The stream has no running count, so the last known one is limited to the
 * unfinished tasks.
 * @param {Job} job
 * @param {Progress} now
 * @returns {Job}
 */
function advanced(job, now) {
  const left = Math.max(0, now.total - ended(now.counts));
  const running = Math.min(job.run.counts.running, left);
  const counts = { ...now.counts, running, pending: left - running };
  return {
    ...job,
    state: now.state,
    reason: now.reason,
    waiting: now.waiting,
    run: { ...job.run, total: now.total, counts },
  };
}

/** @param {string} title @param {Node} content */
function section(title, content) {
  return h("section", { class: "card" }, h("h2", {}, title), content);
}

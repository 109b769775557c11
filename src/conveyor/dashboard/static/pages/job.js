/**
 * One job: summary, and in tabs charts, errors and tasks; hosts; runs; exports; events. All of it is about the latest
 * outcome of each task over all runs, or about the one run that the address names.
 */

/** @import { ErrorGroups, Job, Progress, Run, Statistics } from "../shapes.js" */

import { addressWith, stateOf } from "../address.js";
import { get } from "../api.js";
import { h, oncePerFrame, renew } from "../dom.js";
import { follow, single } from "../live.js";
import { jobActions } from "../parts/actions.js";
import { addSample, latencyChart, progressChart } from "../parts/charts.js";
import { comparisonCard } from "../parts/comparison.js";
import { deliveriesTable } from "../parts/deliveries.js";
import { errorGroups } from "../parts/error-groups.js";
import { errorsList } from "../parts/errors.js";
import { exportsCard } from "../parts/exports.js";
import { hostsCard } from "../parts/hosts.js";
import { invalidCard } from "../parts/invalid.js";
import { optionsCard } from "../parts/options-card.js";
import { runsTable } from "../parts/runs.js";
import { attempt } from "../parts/says.js";
import { ended, hasEnded } from "../parts/state.js";
import { jobSummary } from "../parts/summary.js";
import { tabs } from "../parts/tabs.js";
import { tasksCard } from "../parts/tasks.js";
import { trail } from "../parts/trail.js";

// Interval for data that the stream does not carry, in milliseconds.
const SLOW = 4_000;
// When to look again after the end of a run: its workers write the last of what they collected.
const LATE = [1_500, 6_500];

/** @type {import("../main.js").Page} */
export async function jobPage(root, signal, jobId) {
  const path = `/v1/jobs/${jobId}`;
  const chosen = () => stateOf("run");
  /** @type {Job} */
  let job = await get(path, { run: chosen() }, signal);
  /** @type {Statistics | null} */
  let statistics = null;
  /** @type {ErrorGroups | null} */
  let grouped = null;
  let asked = 0;

  const refresh = async () => {
    job = await get(path, { run: chosen() }, signal);
    if (Date.now() - asked >= SLOW || hasEnded(job.state)) await refreshParts();
    draw();
  };
  const refreshParts = async () => {
    asked = Date.now();
    const [latest, groups, page] = await Promise.all([
      get(`${path}/statistics`, { run: chosen() }, signal),
      get(`${path}/errors`, { run: chosen() || "latest" }, signal),
      get(`${path}/deliveries`, { limit: 50 }, signal),
      exports.refresh(job),
      invalid.refresh(job),
      events.refresh(),
      tasks.refresh(),
      showHosts(),
    ]);
    statistics = latest;
    grouped = groups;
    deliveries.show(page.items);
    sent.hidden = page.items.length === 0;
  };
  const ofRun = () => (job.runs.length > 1 ? ` · run ${shownRun(job, chosen()).number}` : "");
  // Only where it is looked at.
  const showHosts = async () => {
    if (parts.current() === "hosts") await hosts.refresh(chosen(), hasEnded(job.state), ofRun());
  };
  const refreshAll = async () => {
    asked = 0;
    await refresh();
  };
  // One request at a time: a slow server gets no further one.
  const catchUp = single(refreshAll);

  const actions = jobActions(jobId, {
    changed: refreshAll,
    exported: async () => {
      location.hash = addressWith({ tab: "exports" });
      await exports.refresh(job);
    },
    gone: () => (location.hash = "#/jobs"),
  });
  const summary = jobSummary(actions.node);
  const switcher = h("div", { class: "runs-switch" });
  const progress = progressChart();
  const latency = latencyChart();
  const tasks = tasksCard(jobId, job.kind, signal, refreshAll);
  const errors = errorsList((code) => tasks.ofError(code));
  const groups = errorGroups(jobId, refreshAll);
  const hosts = hostsCard(jobId, signal, refreshAll);
  const runs = runsTable();
  const comparison = comparisonCard(jobId, signal);
  const exports = exportsCard(jobId, signal);
  const invalid = invalidCard(jobId, signal);
  const options = optionsCard(jobId, refreshAll);
  const events = trail(`${path}/events`, signal);
  const deliveries = deliveriesTable(signal);
  const [speedTitle, latencyTitle, errorsTitle] = [h("h2"), h("h2"), h("h2")];
  const card = (/** @type {Element} */ title, /** @type {Element} */ content) =>
    h("section", { class: "card" }, title, content);
  const sent = card(h("h2", {}, "Webhook deliveries"), deliveries.node);
  sent.hidden = true;
  const parts = tabs("Parts of the job", [
    {
      id: "overview",
      label: "Overview",
      nodes: [
        h("div", { class: "pair" }, card(speedTitle, progress.node), card(latencyTitle, latency.node)),
        h("section", { class: "card" }, errorsTitle, errors.node, groups.node),
        tasks.node,
        invalid.node,
      ],
    },
    { id: "hosts", label: "Hosts", nodes: [hosts.node] },
    { id: "runs", label: "Runs", nodes: [card(h("h2", {}, "Runs"), runs.node), comparison.node] },
    { id: "exports", label: "Exports", nodes: [exports.node] },
    { id: "options", label: "Options", nodes: [options.node] },
    { id: "events", label: "Events", nodes: [card(h("h2", {}, "Events"), events.node), sent] },
  ]);

  const draw = () => {
    lookLater();
    document.title = `${job.name ?? job.id} · Conveyor`;
    const run = shownRun(job, chosen());
    summary.show(job, run, chosen() !== "");
    actions.show(job, statistics?.errors);
    renew(switcher, runSwitch(job, chosen()));
    renew(speedTitle, `Throughput${ofRun()}`);
    renew(latencyTitle, `Latency${ofRun()}`);
    renew(errorsTitle, chosen() ? `Errors${ofRun()}` : "Errors");
    runs.show(job.runs);
    comparison.show(job.runs);
    options.show(job);
    tasks.allow(hasEnded(job.state));
    parts.show();
    if (parts.current() === "runs") void comparison.open();
    if (grouped) groups.show(grouped, hasEnded(job.state), ofRun());
    if (!statistics) return;
    progress.show(statistics.samples, statistics.series, run.total);
    latency.show(statistics.durations, run.number === job.run.number ? job.task_time : null);
    errors.show(statistics.errors, job.counts.failed);
  };
  const drawSoon = oncePerFrame(draw);
  const moved = (/** @type {Progress} */ now) => {
    const another = now.run_id !== job.run.id;
    job = advanced(job, now, chosen());
    // The samples are those of the run that is shown.
    if (statistics && statistics.run_id === now.run_id) addSample(statistics.samples, now.counts);
    drawSoon();
    // The stream does not carry throughput and time left.
    if (another || hasEnded(now.state) || Date.now() - asked >= SLOW) void catchUp();
  };
  // Tasks of a run that was cancelled a moment ago are still to be cancelled.
  let isLate = hasEnded(job.state) && job.run.counts.pending === 0;
  /** A run that is watched to its end, or whose tasks are not at theirs, is looked at again. */
  const lookLater = () => {
    if (isLate || !hasEnded(job.state)) return;
    isLate = true;
    for (const after of LATE) setTimeout(() => !signal.aborted && void catchUp(), after);
  };
  let run = chosen();
  /** The state of the address has changed: another run is another view of everything. */
  const restore = () => {
    const other = run !== chosen();
    run = chosen();
    tasks.restore();
    parts.show();
    if (parts.current() === "runs") void comparison.open();
    void attempt(showHosts);
    if (other) {
      statistics = null;
      grouped = null;
      asked = 0;
      void catchUp();
    }
    void tasks.load();
  };

  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs")),
    ...summary.nodes,
    switcher,
    ...parts.nodes,
  );
  tasks.restore();
  draw();
  // Show what is known; the rest follows.
  void catchUp();
  void follow(`${path}/stream`, { progress: moved }, refresh, signal, () => !hasEnded(job.state));
  return restore;
}

/** @param {Job} job @param {string} chosen @returns {Run} */
function shownRun(job, chosen) {
  return job.runs.find((run) => String(run.number) === chosen || run.id === chosen) ?? job.run;
}

/** Links to the latest outcome of each task over all runs, and to each run alone. @param {Job} job @param {string} chosen */
function runSwitch(job, chosen) {
  if (job.runs.length < 2) return null;
  const link = (/** @type {string | null} */ run, /** @type {string} */ text, /** @type {boolean} */ here) =>
    h(
      "a",
      { class: "switch", href: addressWith({ run, cursor: null, page: null }), "aria-current": here ? "true" : null },
      text,
    );
  return h(
    "nav",
    { class: "switches", "aria-label": "Runs" },
    link(null, "All runs, latest result of each task", chosen === ""),
    job.runs.slice(0, 8).map((run) =>
      link(String(run.number), `Run ${run.number}`, chosen === String(run.number) || chosen === run.id)
    ),
  );
}

/**
 * A job with the progress from the stream. The stream has no running count, so the last known one is limited to the
 * unfinished tasks.
 * @param {Job} job
 * @param {Progress} now
 * @param {string} chosen the run that is shown; empty for the latest outcome of each task
 * @returns {Job}
 */
function advanced(job, now, chosen) {
  const left = Math.max(0, now.total - ended(now.counts));
  const running = Math.min(job.run.counts.running, left);
  const run = { ...job.run, total: now.total, counts: { ...now.counts, running, pending: left - running } };
  const { total, counts } = now.job;
  const open = Math.max(0, total - ended(counts));
  const busy = job.run.number > 1 ? 0 : Math.min(running, open);
  const whole = { total, counts: { ...counts, running: busy, pending: open - busy } };
  const isOther = chosen !== "" && shownRun(job, chosen).id !== now.run_id;
  const view = chosen === "" ? whole : isOther ? {} : { total: run.total, counts: run.counts };
  return {
    ...job,
    state: now.state,
    reason: now.reason,
    waiting: now.waiting,
    ...view,
    run,
    runs: job.runs.map((each) => (each.id === run.id ? run : each)),
  };
}

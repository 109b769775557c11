/** All jobs, newest first, each with a live progress bar. */

/** @import { Job } from "../shapes.js" */

import { get } from "../api.js";
import { h, keyed, oncePerFrame, renew } from "../dom.js";
import { count, duration, moment, percent, rate } from "../format.js";
import { follow } from "../live.js";
import { pager } from "../parts/table.js";
import { empty } from "../parts/says.js";
import { bar, ended, hasEnded, jobPill } from "../parts/state.js";

const PAGE = 50;

/** @type {import("../main.js").Page} */
export async function jobsPage(root, signal) {
  /** @type {Map<string, Job>} */
  let jobs = new Map();
  const list = h("ul", { class: "jobs" });
  const none = h("div");
  const filter = h("input", { type: "search", id: "filter", placeholder: "Name or id", on: { input: () => draw() } });
  const state = h(
    "select",
    { id: "state", on: { change: () => draw() } },
    ["", "active", "completed", "failed", "cancelled"].map((value) => h("option", { value }, value || "any state")),
  );
  const summary = h("p", { class: "muted", role: "status" });
  const pages = pager(() => load());
  const rows = keyed(list, (job) => job.id, row);

  const load = async () => {
    const page = await get("/v1/jobs", { limit: PAGE, cursor: pages.cursor }, signal);
    jobs = new Map(page.items.map((/** @type {Job} */ job) => [job.id, job]));
    pages.show(page.next_cursor);
    draw();
  };
  const draw = () => {
    const all = [...jobs.values()].sort((a, b) => (a.id < b.id ? 1 : -1)).slice(0, PAGE);
    jobs = new Map(all.map((job) => [job.id, job]));
    const shown = all.filter((job) => matches(job, filter.value, state.value));
    rows(shown);
    renew(none, shown.length ? null : all.length ? empty("No job on this page matches.") : welcome());
    renew(summary, summarize(all));
  };
  const drawSoon = oncePerFrame(draw);
  // The stream carries only the newest jobs, which are on the first page.
  const take = (/** @type {Job} */ job) => {
    if (!pages.first) return;
    jobs.set(job.id, job);
    drawSoon();
  };
  const drop = (/** @type {{id: string}} */ gone) => {
    if (jobs.delete(gone.id)) drawSoon();
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Jobs"), h("a", { class: "button primary", href: "#/new" }, "New job")),
    h(
      "form",
      {
        class: "filters",
        role: "search",
        on: { submit: (/** @type {Event} */ event) => event.preventDefault() },
      },
      h("label", { for: "filter", class: "hidden" }, "Filter jobs by name or id"),
      filter,
      h("label", { for: "state", class: "hidden" }, "State"),
      state,
      summary,
    ),
    list,
    none,
    pages.node,
  );
  await load();
  void follow("/v1/stream", { job: take, gone: drop }, load, signal);
}

/** @param {Job} job @param {string} text @param {string} state */
function matches(job, text, state) {
  const wanted = text.trim().toLowerCase();
  const named = !wanted || job.id.includes(wanted) || (job.name ?? "").toLowerCase().includes(wanted);
  return named && (!state || (state === "active" ? !hasEnded(job.state) : job.state === state));
}

/** @param {Job[]} jobs */
function summarize(jobs) {
  const active = jobs.filter((job) => !hasEnded(job.state));
  if (!active.length) return "No active jobs.";
  const speed = active.reduce((sum, job) => sum + job.rate, 0);
  return `${count(active.length)} active, ${rate(speed)}`;
}

function welcome() {
  return empty(
    "No jobs yet",
    "Submit a list with ",
    h("a", { href: "#/new" }, "New job"),
    " or ",
    h("code", {}, "conveyor submit urls.txt"),
    ".",
  );
}

/** @param {Job} first */
function row(first) {
  const head = h("div", { class: "job-head" });
  const body = h("div", { class: "job-body" });
  const link = h("a", { class: "job", href: `#/jobs/${first.id}` }, head, body);
  return {
    node: h("li", {}, link),
    update(/** @type {Job} */ job) {
      renew(
        head,
        h("span", { class: "job-name" }, job.name ?? job.id),
        jobPill(job),
        h("span", { class: "muted job-when" }, job.kind, " · ", moment(job.created_at)),
      );
      renew(
        body,
        bar(job, job.name ?? job.id),
        h("span", { class: "job-counts" }, counts(job)),
        h("span", { class: "muted job-speed" }, speed(job)),
      );
    },
  };
}

/** @param {Job} job */
function counts(job) {
  if (job.reason_code === "tasks_elsewhere") return h("span", { class: "muted" }, "tasks elsewhere");
  if (job.total === 0) return h("span", { class: "muted" }, "no tasks");
  return [
    h("b", {}, percent(ended(job.counts), job.total)),
    ` of ${count(job.total)}`,
    job.counts.failed > 0 && h("span", { class: "failed-count" }, ` · ${count(job.counts.failed)} failed`),
    job.counts.cancelled > 0 && ` · ${count(job.counts.cancelled)} cancelled`,
    job.invalid_lines > 0 && ` · ${count(job.invalid_lines)} skipped`,
  ];
}

/** @param {Job} job */
function speed(job) {
  if (job.waiting) return job.waiting.target ? `circuit open for ${job.waiting.target}` : job.waiting.detail;
  if (hasEnded(job.state)) {
    return `took ${
      duration((Date.parse(job.run.ended_at ?? job.run.created_at) - Date.parse(job.run.created_at)) / 1000)
    }`;
  }
  return job.eta === null ? rate(job.rate) : `${rate(job.rate)} · ${duration(job.eta)} left`;
}

/** All jobs, newest first, each with a live progress bar; searched on the server; many can be chosen at once. */

/** @import { Job, Schedule } from "../shapes.js" */

import { remember, stateOf } from "../address.js";
import { get } from "../api.js";
import { h, keyed, oncePerFrame, renew } from "../dom.js";
import { count, duration, moment, percent, rate } from "../format.js";
import { follow } from "../live.js";
import { bulkBar } from "../parts/bulk.js";
import { jobFilters } from "../parts/job-filters.js";
import { pager } from "../parts/table.js";
import { attempt, empty } from "../parts/says.js";
import { bar, circuitOf, ended, hasEnded, jobPill } from "../parts/state.js";

const PAGE = 50;
// A search reads further pages until one has a match, at most this many.
const MAX_READS = 20;

/** Orders of the jobs of a page. @type {Record<string, (a: Job, b: Job) => number>} */
const ORDERS = {
  "": (a, b) => (a.id < b.id ? 1 : -1),
  name: (a, b) => (a.name ?? a.id).localeCompare(b.name ?? b.id),
  failed: (a, b) => b.counts.failed - a.counts.failed,
  progress: (a, b) => done(a) - done(b),
  throughput: (a, b) => b.rate - a.rate,
  tasks: (a, b) => b.total - a.total,
};
/** @type {[string, string][]} */
const ORDER_NAMES = [
  ["", "newest first"],
  ["name", "page by name"],
  ["failed", "page by failed tasks"],
  ["progress", "page by progress"],
  ["throughput", "page by throughput"],
  ["tasks", "page by size"],
];

/** @type {import("../main.js").Page} */
export async function jobsPage(root, signal) {
  /** @type {Map<string, Job>} */
  let jobs = new Map();
  const list = h("ul", { class: "jobs" });
  const none = h("div");
  const summary = h("p", { class: "muted" });
  const read = h("p", { class: "muted", role: "status" });
  const pages = pager(() => load(), "jobs");
  const filters = jobFilters(signal, (kind) => {
    pages.reset();
    remember({ ...filters.values(), cursor: null, page: null }, kind);
    void attempt(load);
  });
  const order = h(
    "select",
    { id: "order", on: { change: () => (remember({ sort: order.value }), draw()) } },
    ORDER_NAMES.map(([value, text]) => h("option", { value }, text)),
  );
  const bulk = bulkBar(() => load());
  const rows = keyed(list, (/** @type {Job} */ job) => job.id, (job) => row(job, bulk));

  let asked = 0;
  const load = async () => {
    const mine = (asked += 1);
    const page = await look(() => mine === asked);
    if (mine !== asked) return;
    jobs = new Map(page.items.map((/** @type {Job} */ job) => [job.id, job]));
    pages.show(page.next_cursor);
    renew(read, searched(page));
    draw();
  };
  /** A page may be empty without being the last: one request reads a limited number of jobs. */
  const look = async (/** @type {() => boolean} */ isWanted) => {
    const query = filters.query();
    let cursor = pages.cursor;
    let total = 0;
    for (let turn = 0;; turn += 1) {
      const page = await get("/v1/jobs", { ...query, limit: PAGE, cursor }, signal);
      total += page.read;
      const isEnough = page.items.length || page.next_cursor === null || turn === MAX_READS;
      if (isEnough || !isWanted()) return { ...page, read: total };
      cursor = page.next_cursor;
      renew(read, `Searching… ${count(total)} jobs searched`);
    }
  };
  const searched = (/** @type {{read: number, next_cursor: string | null}} */ page) =>
    filters.isSet() ? `${count(page.read)} jobs searched${page.next_cursor ? ", not all" : ""}` : "";
  const draw = () => {
    const all = [...jobs.values()].sort(ORDERS[""]).slice(0, PAGE);
    jobs = new Map(all.map((job) => [job.id, job]));
    const sorted = [...all].sort(ORDERS[order.value] ?? ORDERS[""]);
    sorted.forEach(bulk.update);
    rows(sorted);
    renew(none, all.length ? null : nothing(filters.isSet(), pages.next !== null));
    renew(summary, summarize(all));
  };
  const drawSoon = oncePerFrame(draw);
  // The stream carries only the newest jobs, which are on the first page, and knows of no filter.
  const take = (/** @type {Job} */ job) => {
    if (!jobs.has(job.id) && (!pages.first || filters.isSet())) return;
    jobs.set(job.id, job);
    drawSoon();
  };
  const drop = (/** @type {{id: string}} */ gone) => {
    if (jobs.delete(gone.id)) drawSoon();
  };
  const restore = () => {
    filters.restore();
    order.value = stateOf("sort") in ORDERS ? stateOf("sort") : "";
    pages.restore();
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Jobs"), h("a", { class: "button primary", href: "#/new" }, "New job")),
    h(
      "form",
      { class: "filters", role: "search", on: { submit: (/** @type {Event} */ event) => event.preventDefault() } },
      ...filters.nodes,
      h("label", { for: "order", class: "hidden" }, "Order"),
      order,
      summary,
    ),
    bulk.node,
    read,
    list,
    none,
    pages.node,
  );
  restore();
  await load();
  void follow("/v1/stream", { job: take, gone: drop }, load, signal);
  return () => {
    restore();
    void attempt(load);
  };
}

/** @param {boolean} isFiltered @param {boolean} hasMore */
function nothing(isFiltered, hasMore) {
  if (!isFiltered) return welcome();
  return hasMore ? empty("No match so far", "Continue with Next.") : empty("No job matches");
}

/** @param {Job} job */
const done = (job) => (job.total ? ended(job.counts) / job.total : 1);

/** @param {Job[]} jobs */
function summarize(jobs) {
  const active = jobs.filter((job) => !hasEnded(job.state));
  if (!active.length) return "No active jobs here.";
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

/** @param {Job} first @param {ReturnType<typeof bulkBar>} bulk */
function row(first, bulk) {
  const head = h("div", { class: "job-head" });
  const body = h("div", { class: "job-body" });
  const link = h("a", { class: "job", href: `#/jobs/${first.id}` }, head, body);
  let current = first;
  const check = h("input", {
    type: "checkbox",
    class: "job-check",
    "aria-label": `Select ${first.name ?? first.id}`,
    on: { change: () => bulk.choose(current, check.checked) },
  });
  check.checked = bulk.has(first.id);
  return {
    node: h("li", { class: "job-item" }, check, link),
    update(/** @type {Job} */ job) {
      current = job;
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
    (job.counts.unchanged ?? 0) > 0 && ` · ${count(job.counts.unchanged ?? 0)} unchanged`,
    job.counts.cancelled > 0 && ` · ${count(job.counts.cancelled)} cancelled`,
    job.invalid_lines > 0 && ` · ${count(job.invalid_lines)} skipped`,
  ];
}

/** @param {Job} job */
function speed(job) {
  if (job.waiting) return job.waiting.target ? circuitOf(job.waiting) : job.waiting.detail;
  if (hasEnded(job.state)) {
    return `took ${
      duration((Date.parse(job.run.ended_at ?? job.run.created_at) - Date.parse(job.run.created_at)) / 1000)
    }`;
  }
  return job.eta === null ? rate(job.rate) : `${rate(job.rate)} · ${duration(job.eta)} left`;
}

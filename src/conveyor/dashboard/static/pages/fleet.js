/** The fleet: workers, breakers and lanes. */

/** @import { Breaker, BusyWorker, Depth, FleetWorker, Lane } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { poll } from "../live.js";
import { resetBreakers } from "../parts/breakers.js";
import { loadChart } from "../parts/load-chart.js";
import { attempt, empty } from "../parts/says.js";
import { circuitOf, jobPill, pill } from "../parts/state.js";
import { tile } from "../parts/summary.js";
import { pager, table } from "../parts/table.js";

// Handlers of a worker that its row names.
const HANDLERS = 4;
// Lanes are of runs that have not finished: their state does not depend on counts.
const NONE = { succeeded: 0, failed: 0, cancelled: 0 };

/** @type {import("../main.js").Page} */
export async function fleetPage(root, signal) {
  const tiles = h("dl", { class: "tiles" });
  const calm = h("div");
  const idle = h("div");
  const long = h("section", { class: "card", hidden: true });
  const pages = pager(() => load(), "lanes");
  const breakers = table(
    "Breakers",
    /** @type {import("../parts/table.js").Column<Breaker>[]} */ ([
      {
        title: "Target",
        look: "wide",
        sort: (each) => each.target,
        cell: (each) => each.target.replace(/^upstream:/, ""),
      },
      { title: "State", cell: (each) => pill(each.state) },
      { title: "Open since", look: "number", sort: (each) => each.since ?? "", cell: (each) => moment(each.since) },
      {
        title: "Next probe",
        look: "number",
        cell: (each) => (each.state === "open" ? moment(each.until) : `${count(each.at_once)} probes at once`),
      },
      { title: "Times opened", look: "number", sort: (each) => each.times, cell: (each) => count(each.times) },
      { title: "Error", cell: (each) => each.error && h("code", {}, each.error) },
      {
        title: "Reset",
        cell: (each) =>
          h(
            "button",
            {
              type: "button",
              "aria-label": `Reset ${each.target}`,
              on: { click: () => attempt(() => reset([each.target])) },
            },
            "Reset",
          ),
      },
    ]),
    (each) => each.target,
    "breakers",
  );
  const reset = async (/** @type {string[]} */ targets) => {
    if (await resetBreakers(targets)) await load();
  };
  /** @type {Breaker[]} */
  let opened = [];
  const all = h(
    "button",
    { type: "button", on: { click: () => attempt(() => reset(opened.map((each) => each.target))) } },
    "Reset all",
  );
  const lanes = table(
    "Lanes",
    /** @type {import("../parts/table.js").Column<Lane>[]} */ ([
      {
        title: "Job",
        look: "wide",
        sort: (each) => each.name ?? each.job_id,
        cell: (
          each,
        ) => [
          h("a", { class: "clip", href: `#/jobs/${each.job_id}` }, each.name ?? each.job_id),
          each.waiting &&
          h("span", { class: "muted" }, each.waiting.target ? circuitOf(each.waiting) : each.waiting.detail),
        ],
      },
      { title: "State", cell: (each) => jobPill({ ...each, total: 0, counts: NONE }) },
      {
        title: "In progress",
        look: "number",
        sort: (each) => each.running,
        cell: (each) => `${count(each.running)} of ${count(each.concurrency)}`,
      },
      { title: "Queue", look: "number", sort: (each) => waiting(each.queue), cell: (each) => depth(each.queue) },
      {
        title: "Retries",
        look: "number",
        sort: (each) => waiting(each.recovery),
        cell: (each) => depth(each.recovery),
      },
      { title: "Priority", look: "number", sort: (each) => each.priority, cell: (each) => each.priority },
    ]),
    (each) => each.run_id,
    "lanes",
  );
  const fleet = table(
    "Workers",
    /** @type {import("../parts/table.js").Column<FleetWorker>[]} */ ([
      { title: "Worker", cell: (each) => h("code", { class: "id", title: each.name }, each.name) },
      {
        title: "Host",
        sort: (each) => each.host,
        cell: (each) => h("span", {}, each.host, h("span", { class: "muted" }, ` process ${each.process}`)),
      },
      { title: "Version", look: "number", sort: (each) => each.version, cell: (each) => each.version },
      { title: "Slots", look: "number", sort: (each) => each.slots, cell: (each) => count(each.slots) },
      { title: "Handlers", look: "wide", cell: (each) => handlers(each.handlers) },
      { title: "Started", look: "number", sort: (each) => each.started_at, cell: (each) => moment(each.started_at) },
      { title: "Heartbeat", look: "number", sort: (each) => each.at, cell: (each) => moment(each.at) },
    ]),
    (each) => each.name,
    "workers",
  );
  const alone = h("div");
  const chart = loadChart();
  const load = async () => {
    const [workers, broken, active, history] = await Promise.all([
      get("/v1/workers", {}, signal),
      get("/v1/breakers", {}, signal),
      get("/v1/lanes", { limit: 50, cursor: pages.cursor }, signal),
      get("/v1/load", {}, signal),
    ]);
    // Once the page is shown: the chart is as wide as its card.
    requestAnimationFrame(() => chart.show(history));
    const running = active.items.reduce((/** @type {number} */ sum, /** @type {Lane} */ lane) => sum + lane.running, 0);
    // A page of lanes may not be all of them.
    const part = active.next_cursor !== null || !pages.first ? "on this page" : null;
    renew(
      tiles,
      tile("Workers", count(workers.alive)),
      tile("Tasks in progress", count(running), part),
      tile("Lanes", count(active.items.length), part),
      tile("Open breakers", count(broken.items.length)),
    );
    fleet.rows(workers.workers);
    fleet.node.hidden = workers.workers.length === 0;
    renew(
      alone,
      workers.workers.length
        ? null
        : empty("No worker is alive", "Start one with ", h("code", {}, "conveyor work"), "."),
    );
    opened = broken.items;
    breakers.rows(broken.items);
    all.hidden = broken.items.length < 2;
    breakers.node.hidden = broken.items.length === 0;
    renew(calm, broken.items.length ? null : empty("All breakers are closed"));
    lanes.rows(active.items);
    lanes.node.hidden = active.items.length === 0;
    renew(idle, active.items.length ? null : empty("No run is in progress"));
    pages.show(active.next_cursor);
    long.hidden = workers.long_tasks.length === 0;
    renew(long, h("h2", {}, "Long tasks"), h("ul", { class: "trail" }, workers.long_tasks.map(worker)));
  };
  root.append(
    h("div", { class: "title" }, h("h1", {}, "Fleet")),
    tiles,
    h(
      "section",
      { class: "card" },
      h("h2", {}, "Load"),
      chart.node,
      h("p", { class: "muted fine" }, "All jobs together, sampled every few seconds."),
    ),
    h("section", { class: "card" }, h("h2", {}, "Workers"), fleet.node, alone),
    h("section", { class: "card" }, h("h2", {}, "Breakers"), breakers.node, calm, h("p", { class: "actions" }, all)),
    h("section", { class: "card" }, h("h2", {}, "Lanes"), lanes.node, idle, pages.node),
    long,
  );
  await load();
  void poll(load, signal);
}

/** @param {Depth} queue */
const waiting = ({ ready, held, delayed }) => ready + held + delayed;

/**
 * Messages that are ready, in flight or delayed.
 * @param {Depth} queue
 */
function depth({ ready, held, delayed }) {
  const more = [held && `${count(held)} in flight`, delayed && `${count(delayed)} delayed`].filter(Boolean).join(", ");
  return h("span", {}, more && h("span", { class: "muted" }, `${more}, `), `${count(ready)} ready`);
}

/** @param {string[] | null} names */
function handlers(names) {
  if (!names?.length) return "–";
  const more = names.length - HANDLERS;
  const shown = names.slice(0, HANDLERS).join(", ");
  return h("span", { title: names.join(", ") }, shown, more > 0 && ` and ${count(more)} more`);
}

/** @param {BusyWorker} each */
function worker({ name, at, tasks }) {
  const links = tasks.flatMap((task) => [h("a", { href: `#/jobs/${task.job_id}` }, `task ${count(task.index)}`), " "]);
  return h(
    "li",
    {},
    h("code", { class: "trail-name" }, name),
    h("span", { class: "trail-what" }, links),
    h("span", { class: "muted" }, moment(at)),
  );
}

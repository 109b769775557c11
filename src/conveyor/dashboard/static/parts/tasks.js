/** The tasks of a job, filtered by status, error, run and text, one page at a time. */

/** @import { Task } from "../shapes.js" */

import { get, Unreachable } from "../api.js";
import { h, renew } from "../dom.js";
import { count, duration, input, moment } from "../format.js";
import { empty, words } from "./says.js";
import { pill } from "./state.js";
import { pager, table } from "./table.js";

const PAGE = 25;
// A search reads further pages until one has a match, at most this many.
const MAX_READS = 20;
const TYPING_MS = 300;

/**
 * @param {string} jobId
 * @param {AbortSignal} signal
 */
export function tasksCard(jobId, signal) {
  const choose = (/** @type {string} */ id, /** @type {[string, string][]} */ options) =>
    h("select", { id, on: { change: () => again() } }, options.map(([value, text]) => h("option", { value }, text)));
  const text = h("input", {
    type: "search",
    id: "search",
    placeholder: "Search inputs",
    maxlength: 200,
    on: { input: () => typed() },
  });
  const status = choose("task-status", [["", "any status"], ["pending", "pending"], ["succeeded", "succeeded"], [
    "failed",
    "failed",
  ], ["cancelled", "cancelled"]]);
  const chips = h("div", { class: "chips" });
  const said = h("p", { class: "muted", role: "status" });
  const none = h("div");
  const heading = h("h2", { id: "tasks", tabindex: "-1" }, "Tasks");
  const pages = pager(() => load());
  const { node: list, rows } = table("Tasks", columns(jobId), (/** @type {Task} */ task) => task.task_id);
  let error = "";
  let run = "";
  let typing = 0;
  /** Aborts the previous request. */
  let asking = new AbortController();

  const again = () => {
    pages.reset();
    void load();
  };
  const typed = () => {
    clearTimeout(typing);
    typing = setTimeout(again, TYPING_MS);
  };
  const query = () => ({ status: status.value, error_code: error, run, limit: PAGE, cursor: pages.cursor });

  const load = async () => {
    asking.abort();
    asking = new AbortController();
    const mine = AbortSignal.any([signal, asking.signal]);
    drawChips();
    try {
      const wanted = text.value.trim();
      const page = await look(wanted ? "search" : "results", wanted ? { text: wanted } : {}, mine);
      rows(page.items);
      list.hidden = page.items.length === 0;
      renew(
        none,
        page.items.length
          ? null
          : page.next_cursor
          ? empty("No match so far", "Continue with Next.")
          : empty(wanted || error || status.value ? "No task matches" : "No tasks yet"),
      );
      renew(
        said,
        page.read === undefined ? "" : `${count(page.read)} tasks searched${page.next_cursor ? ", not all" : ""}`,
      );
      pages.show(page.next_cursor);
    } catch (problem) {
      // The banner at the top reports an unreachable server.
      if (!mine.aborted && !(problem instanceof Unreachable)) renew(said, words(problem));
    }
  };
  /** A page may be empty without being the last: a page reads a limited number of tasks. */
  const look = async (
    /** @type {string} */ where,
    /** @type {{text?: string}} */ given,
    /** @type {AbortSignal} */ mine,
  ) => {
    let cursor = pages.cursor;
    let read = 0;
    for (let turn = 0;; turn += 1) {
      const page = await get(`/v1/jobs/${jobId}/${where}`, { ...query(), ...given, cursor }, mine);
      read += page.read ?? 0;
      if (page.items.length || page.next_cursor === null || turn === MAX_READS) {
        return page.read === undefined ? page : { ...page, read };
      }
      cursor = page.next_cursor;
      renew(said, page.read === undefined ? "Searching…" : `Searching… ${count(read)} tasks searched`);
    }
  };
  const drawChips = () =>
    renew(
      chips,
      error && chip(`error ${error}`, () => show({ error: "" })),
      run && chip(`run ${run}`, () => show({ run: "" })),
    );
  const show = (/** @type {{error?: string, run?: string}} */ change) => {
    error = change.error ?? error;
    run = change.run ?? run;
    again();
    heading.scrollIntoView({ block: "start" });
    heading.focus({ preventScroll: true });
  };

  return {
    node: h(
      "section",
      { class: "card", "aria-labelledby": "tasks" },
      heading,
      h(
        "form",
        {
          class: "filters",
          role: "search",
          on: { submit: (/** @type {Event} */ event) => event.preventDefault() },
        },
        h("label", { for: "search", class: "hidden" }, "Search the inputs of tasks, or an index"),
        text,
        h("label", { for: "task-status", class: "hidden" }, "Status"),
        status,
        chips,
        said,
      ),
      list,
      none,
      pages.node,
    ),
    /** Show only tasks with this error code. @param {string} code */
    ofError: (code) => show({ error: code }),
    /** Show only tasks of this run. @param {number} number */
    ofRun: (number) => show({ run: String(number) }),
    /** Reload the page; a search is not repeated, because it reads many rows. */
    refresh: () => (text.value.trim() ? Promise.resolve() : load()),
  };
}

/** @param {string} text @param {() => void} remove */
function chip(text, remove) {
  return h(
    "button",
    { type: "button", class: "chip", "aria-label": `Remove the filter: ${text}`, on: { click: remove } },
    text,
    h("span", { "aria-hidden": "true" }, " ×"),
  );
}

/** @param {string} jobId @returns {import("./table.js").Column<Task>[]} */
function columns(jobId) {
  return [
    { title: "#", look: "number", cell: (task) => count(task.index) },
    {
      title: "Input",
      look: "wide",
      cell: (task) => h("a", { class: "clip", href: `#/jobs/${jobId}/tasks/${task.task_id}` }, input(task.input)),
    },
    { title: "Status", cell: (task) => pill(task.status) },
    {
      title: "Error",
      cell: (
        task,
      ) => (task.error ? h("code", { class: "error-code", title: task.error.message }, task.error.code) : "–"),
    },
    { title: "HTTP", look: "number minor", cell: (task) => task.http_status ?? "–" },
    { title: "Attempts", look: "number minor", cell: (task) => count(task.attempts) },
    { title: "Duration", look: "number minor", cell: (task) => duration(task.elapsed) },
    { title: "Finished", look: "number minor", cell: (task) => moment(task.finished_at) },
  ];
}

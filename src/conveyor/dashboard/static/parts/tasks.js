/** The tasks of a job, filtered by status, error, run and text, one page at a time. */

/** @import { Task } from "../shapes.js" */

import { remember, stateOf } from "../address.js";
import { get, Unreachable } from "../api.js";
import { h, renew } from "../dom.js";
import { count, duration, input, labels, moment } from "../format.js";
import { progressText } from "./progress.js";
import { rerunTasks } from "./rerun.js";
import { attempt, empty, words } from "./says.js";
import { taskPill } from "./state.js";
import { pager, table } from "./table.js";

const PAGE = 25;
// A search reads further pages until one has a match, at most this many.
const MAX_READS = 20;
const TYPING_MS = 300;
// The server reruns this many single tasks at once.
const MAX_SELECTED = 1000;

/**
 * The filters, the run and the page are in the address.
 * @param {string} jobId
 * @param {string} kind of the job
 * @param {AbortSignal} signal
 * @param {() => Promise<void>} rerun called when tasks are rerun
 */
export function tasksCard(jobId, kind, signal, rerun) {
  const choose = (/** @type {string} */ id, /** @type {[string, string][]} */ options) =>
    h("select", { id, on: { change: () => again() } }, options.map(([value, text]) => h("option", { value }, text)));
  const text = h("input", {
    type: "search",
    id: "search",
    placeholder: "Search inputs",
    "data-shortcut": "/",
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
  const pages = pager(() => load(), "tasks");
  const order = h("p", { class: "muted order" });
  /** Indexes of the selected tasks. @type {Set<number>} */
  const selected = new Set();
  const selection = h("div", { class: "bulk", role: "group", "aria-label": "Selected tasks", hidden: true });
  const select = (/** @type {Task} */ task, /** @type {boolean} */ isSelected) => {
    if (isSelected) selected.add(task.index);
    else selected.delete(task.index);
    drawSelection();
  };
  const { node: list, rows } = table(
    "Tasks",
    columns(jobId, kind, selected, select),
    (/** @type {Task} */ task) => task.task_id,
    "sort",
  );
  let error = "";
  let canRerun = false;
  let typing = 0;
  /** Aborts the previous request. */
  let asking = new AbortController();

  const again = (/** @type {"step" | "typing"} */ kind = "step") => {
    pages.reset();
    const values = { status: status.value, error, q: text.value.trim(), cursor: null, page: null };
    remember(values, kind);
    void load();
  };
  const typed = () => {
    clearTimeout(typing);
    typing = setTimeout(() => again("typing"), TYPING_MS);
  };
  const query = () => ({
    status: status.value,
    error_code: error,
    run: stateOf("run"),
    limit: PAGE,
    cursor: pages.cursor,
  });
  const drawSelection = () => {
    selection.hidden = selected.size === 0;
    renew(
      selection,
      h("b", {}, `${count(selected.size)} selected`),
      h(
        "button",
        {
          type: "button",
          class: "small",
          disabled: !canRerun || selected.size > MAX_SELECTED,
          on: { click: () => attempt(rerunSelected) },
        },
        "Rerun selected",
      ),
      !canRerun && h("span", { class: "muted" }, "The latest run has not finished."),
      h("button", { type: "button", class: "small quiet", on: { click: () => clear() } }, "Clear selection"),
    );
  };
  const clear = () => {
    selected.clear();
    list.querySelectorAll("input[type=checkbox]").forEach((/** @type {any} */ box) => (box.checked = false));
    drawSelection();
  };
  const rerunSelected = async () => {
    const what = selected.size === 1 ? `task ${count([...selected][0])}` : `${count(selected.size)} tasks`;
    if (!(await rerunTasks(jobId, what, { indexes: [...selected] }))) return;
    clear();
    await rerun();
  };

  const load = async () => {
    asking.abort();
    asking = new AbortController();
    const mine = AbortSignal.any([signal, asking.signal]);
    drawChips();
    try {
      const wanted = text.value.trim();
      const page = await look(wanted ? "search" : "results", wanted ? { text: wanted } : {}, mine);
      rows(page.items);
      const isById = page.order === "task_id";
      renew(
        order,
        isById && page.items.length > 1 ? "By task id: this engine does not keep the order of the list." : "",
      );
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
    );
  const show = (/** @type {{error?: string, text?: string, status?: string}} */ change) => {
    error = change.error ?? error;
    text.value = change.text ?? text.value;
    status.value = change.status ?? status.value;
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
      selection,
      list,
      none,
      order,
      pages.node,
    ),
    /** Show only tasks with this error code. @param {string} code */
    ofError: (code) => show({ error: code }),
    /** Show only tasks with this text in their input. @param {string} wanted */
    ofText: (wanted) => show({ text: wanted, error: "" }),
    /** Whether tasks can be rerun now. @param {boolean} can */
    allow(can) {
      if (can === canRerun) return;
      canRerun = can;
      drawSelection();
    },
    /** Take over the state of the address. */
    restore() {
      clearTimeout(typing);
      error = stateOf("error");
      status.value = stateOf("status");
      if (text.value.trim() !== stateOf("q")) text.value = stateOf("q");
      pages.restore();
    },
    load,
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

/** A failed task leads to the failed ones before and after it. @param {string} jobId @param {Task} task */
function taskAddress(jobId, task) {
  const run = stateOf("run");
  return `#/jobs/${jobId}/tasks/${task.task_id}${run ? `?run=${run}` : ""}`;
}

/**
 * @param {string} jobId
 * @param {string} kind
 * @param {Set<number>} selected
 * @param {(task: Task, isSelected: boolean) => void} select
 * @returns {import("./table.js").Column<Task>[]}
 */
function columns(jobId, kind, selected, select) {
  return [
    {
      title: "",
      look: "check",
      cell: (task) => {
        const box = h("input", {
          type: "checkbox",
          "aria-label": `Select task ${task.index}`,
          checked: selected.has(task.index),
          on: { change: () => select(task, box.checked) },
        });
        return box;
      },
    },
    { title: "#", look: "number", cell: (task) => count(task.index), sort: (task) => task.index },
    {
      title: "Input",
      look: "wide",
      cell: (task) => [
        h("a", { class: "clip", href: taskAddress(jobId, task) }, input(task.input)),
        labels(task.input) && h("span", { class: "muted" }, labels(task.input)),
      ],
      sort: (task) => input(task.input),
    },
    {
      title: "Status",
      cell: (task) => [
        taskPill(task),
        task.unchanged && h("span", { class: "muted" }, " unchanged"),
        task.progress && h("span", { class: "muted far" }, progressText(task.progress, kind)),
      ],
      sort: (task) => task.status,
    },
    {
      title: "Error",
      cell: (
        task,
      ) => (task.error ? h("code", { class: "error-code", title: task.error.message }, task.error.code) : "–"),
      sort: (task) => task.error?.code ?? "",
    },
    {
      title: "HTTP",
      look: "number minor",
      cell: (task) => task.http_status ?? "–",
      sort: (task) => task.http_status ?? 0,
    },
    {
      title: "Attempts",
      look: "number minor",
      // The row of an unfinished task does not count them.
      cell: (task) => (task.status === "pending" ? "–" : count(task.attempts)),
      sort: (task) => task.attempts,
    },
    {
      title: "Duration",
      look: "number minor",
      cell: (task) => task.attempts ? duration(task.elapsed) : "–",
      sort: (task) => task.elapsed ?? -1,
    },
    {
      title: "Finished",
      look: "number minor",
      cell: (task) => moment(task.finished_at),
      sort: (task) => task.finished_at ?? "",
    },
  ];
}

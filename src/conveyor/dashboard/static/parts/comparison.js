/** Two runs of a job side by side: tasks that were fixed, failed newly, or failed still. */

/** @import { Run, Task } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { count, input } from "../format.js";
import { attempt, empty } from "./says.js";
import { taskPill } from "./state.js";
import { table } from "./table.js";

const PAGE = 50;
// A comparison reads further pages until one has a match, at most this many.
const MAX_READS = 20;
/** @type {[string, string][]} */
const CHANGES = [["fixed", "Fixed"], ["newly_failed", "Newly failed"], ["still_failed", "Still failed"]];

/** @param {string} jobId @param {AbortSignal} signal */
export function comparisonCard(jobId, signal) {
  const choose = (/** @type {string} */ id, /** @type {string} */ label) =>
    h("select", { id, "aria-label": label, on: { change: () => attempt(() => load(null)) } });
  const [earlier, later, change] = [
    choose("earlier", "Earlier run"),
    choose("later", "Later run"),
    choose("change", "Change"),
  ];
  renew(change, CHANGES.map(([value, text]) => h("option", { value }, text)));
  const said = h("p", { class: "muted", role: "status" });
  const none = h("div");
  const more = h("button", { type: "button", class: "small", hidden: true }, "More");
  const { node: list, rows } = table(
    "Comparison",
    /** @type {import("./table.js").Column<Task>[]} */ ([
      { title: "#", look: "number", cell: (task) => count(task.index) },
      {
        title: "Input",
        look: "wide",
        cell: (task) => h("a", { class: "clip", href: `#/jobs/${jobId}/tasks/${task.task_id}` }, input(task.input)),
      },
      { title: "Now", cell: (task) => taskPill(task) },
      { title: "Error", cell: (task) => (task.error ? h("code", { class: "error-code" }, task.error.code) : "–") },
    ]),
    (task) => task.task_id,
  );
  /** @type {Task[]} */
  let shown = [];
  /** @type {string | null} */
  let following = null;
  more.addEventListener("click", () => attempt(() => load(following)));

  let asked = 0;
  const load = async (/** @type {string | null} */ cursor) => {
    const mine = (asked += 1);
    if (earlier.value === later.value) return renew(said, "Choose two runs.");
    renew(said, "Comparing…");
    const query = { with: earlier.value, run: later.value, change: change.value, limit: PAGE };
    let page;
    let at = cursor;
    for (let turn = 0; turn < MAX_READS; turn += 1) {
      page = await get(`/v1/jobs/${jobId}/comparison`, { ...query, cursor: at }, signal);
      at = page.next_cursor;
      if (page.items.length || at === null) break;
    }
    if (mine !== asked) return;
    shown = cursor === null ? page.items : [...shown, ...page.items];
    following = at;
    rows(shown);
    list.hidden = shown.length === 0;
    more.hidden = following === null;
    renew(none, shown.length || following ? null : empty("No task matches"));
    renew(said, `${count(shown.length)} ${shown.length === 1 ? "task" : "tasks"}${following ? " so far" : ""}`);
  };
  let known = "";
  const node = h(
    "section",
    { class: "card" },
    h("h2", {}, "Compare two runs"),
    h("div", { class: "filters" }, earlier, h("span", { class: "muted" }, "and"), later, change, said),
    list,
    none,
    more,
  );
  list.hidden = true;
  return {
    node,
    /** @param {Run[]} runs newest first */
    show(runs) {
      node.hidden = runs.length < 2;
      const now = runs.map((run) => run.number).join();
      if (now === known) return;
      known = now;
      asked += 1;
      shown = [];
      rows(shown);
      renew(said);
      for (const field of [earlier, later]) {
        renew(field, runs.map((run) => h("option", { value: run.number }, `Run ${run.number}`)));
      }
      if (runs.length > 1) {
        later.value = String(runs[0].number);
        earlier.value = String(runs[1].number);
      }
    },
    /** The first comparison, once it is looked at. */
    async open() {
      if (!node.hidden && !shown.length && said.textContent === "") await attempt(() => load(null));
    },
  };
}

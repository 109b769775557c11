/** The runs of a job, newest first. */

/** @import { Lineage, Run } from "../shapes.js" */

import { h } from "../dom.js";
import { count, moment } from "../format.js";
import { bar, jobPill } from "./state.js";
import { table } from "./table.js";

/** @param {(number: number) => void} pick called with the number of a clicked run */
export function runsTable(pick) {
  const { node, rows } = table(
    "Runs",
    /** @type {import("./table.js").Column<Run>[]} */ ([
      {
        title: "Run",
        cell: (run) =>
          h("button", { type: "button", class: "link", on: { click: () => pick(run.number) } }, `Run ${run.number}`),
      },
      { title: "State", cell: (run) => jobPill(run) },
      {
        title: "Tasks",
        look: "wide",
        cell: (
          run,
        ) => [
          bar(run, `Run ${run.number}`),
          h("span", { class: "muted" }, `${count(run.total)} tasks, ${count(run.counts.failed)} failed`),
        ],
      },
      { title: "Tasks from", cell: (run) => lineage(run.lineage) },
      { title: "Started", look: "number", cell: (run) => moment(run.created_at) },
      { title: "Finished", look: "number", cell: (run) => moment(run.ended_at) },
    ]),
    (run) => run.id,
  );
  return { node, show: rows };
}

/** @param {Lineage | null} from */
function lineage(from) {
  if (from === null) return "the list";
  const chosen = [
    from.status.join(" or "),
    from.error_code,
    from.http_status && `status ${from.http_status}`,
    from.tag && `tag ${from.tag}`,
  ].filter(Boolean).join(", ");
  const changed = Object.keys(from.options);
  return [
    chosen || "all",
    " of the previous run",
    changed.length > 0 && h("span", { class: "muted" }, `; changed: ${changed.join(", ")}`),
  ];
}

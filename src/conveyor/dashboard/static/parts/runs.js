/** The runs of a job, newest first. */

/** @import { Lineage, Run } from "../shapes.js" */

import { addressWith } from "../address.js";
import { h } from "../dom.js";
import { count, moment } from "../format.js";
import { bar, jobPill } from "./state.js";
import { table } from "./table.js";

/** A click on a run shows the whole page for this run alone. */
export function runsTable() {
  const { node, rows } = table(
    "Runs",
    /** @type {import("./table.js").Column<Run>[]} */ ([
      {
        title: "Run",
        look: "nowrap",
        cell: (run) =>
          h("a", { href: addressWith({ run: run.number, tab: null, cursor: null, page: null }) }, `Run ${run.number}`),
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
          (run.counts.unchanged ?? 0) > 0 &&
          h("span", { class: "muted" }, `, ${count(run.counts.unchanged ?? 0)} unchanged`),
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
    from.host && `host ${from.host}`,
    from.indexes?.length && `${count(from.indexes.length)} chosen`,
  ].filter(Boolean).join(", ");
  const changed = Object.keys(from.options);
  return [
    chosen || "all",
    " of the previous run",
    from.changed_only && ", compared with it",
    changed.length > 0 && h("span", { class: "muted" }, `; changed: ${changed.join(", ")}`),
  ];
}

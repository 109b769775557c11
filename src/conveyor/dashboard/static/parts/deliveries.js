/** What was sent by webhook, try by try, and sending it again. */

/** @import { Attempt, Delivery } from "../shapes.js" */

import { send } from "../api.js";
import { h } from "../dom.js";
import { count, duration, moment } from "../format.js";
import { attempt, toast } from "./says.js";
import { pill } from "./state.js";
import { table } from "./table.js";

/** @param {AbortSignal} signal @param {() => Promise<void>} [changed] */
export function deliveriesTable(signal, changed = async () => {}) {
  const again = async (/** @type {string} */ id) => {
    await send("POST", `/v1/webhooks/deliveries/${encodeURIComponent(id)}/redeliver`, undefined, { signal });
    toast("It is sent again.");
    await changed();
  };
  const { node, rows } = table(
    "Deliveries",
    /** @type {import("./table.js").Column<Delivery>[]} */ ([
      { title: "Event", look: "nowrap", cell: (each) => h("code", {}, each.event) },
      {
        title: "Job",
        cell: (each) => h("a", { class: "id", href: `#/jobs/${each.job_id}`, title: each.job_id }, each.job_id),
      },
      { title: "State", cell: (each) => pill(each.status) },
      { title: "Tries", look: "number", cell: (each) => count(each.attempts) },
      { title: "Last try", look: "wide", cell: (each) => lastTry(each.log[each.log.length - 1]) },
      { title: "Next", look: "number", cell: (each) => moment(each.next_attempt_at) },
      {
        title: "",
        look: "end",
        cell: (each) =>
          h("button", {
            type: "button",
            class: "small",
            "aria-label": `Redeliver ${each.event}`,
            on: { click: () => attempt(() => again(each.id)) },
          }, "Redeliver"),
      },
    ]),
    (each) => each.id,
  );
  return { node, show: rows };
}

/** @param {Attempt | undefined} attempt */
function lastTry(attempt) {
  if (!attempt) return "–";
  return [
    attempt.status ?? attempt.error,
    h("span", { class: "muted" }, ` in ${duration(attempt.seconds)}, `),
    moment(attempt.at),
  ];
}

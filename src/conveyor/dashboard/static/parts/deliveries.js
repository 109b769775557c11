/** Webhook deliveries with their attempts, and redelivery. */

/** @import { Attempt, Delivery } from "../shapes.js" */

import { get, send } from "../api.js";
import { h } from "../dom.js";
import { count, duration, moment } from "../format.js";
import { show } from "./dialog.js";
import { attempt, toast } from "./says.js";
import { pill } from "./state.js";
import { table } from "./table.js";

/** @param {AbortSignal} signal @param {() => Promise<void>} [changed] */
export function deliveriesTable(signal, changed = async () => {}) {
  const redeliver = async (/** @type {string} */ id) => {
    await send("POST", `/v1/webhooks/deliveries/${encodeURIComponent(id)}/redeliver`, undefined, { signal });
    toast("The event is redelivered.");
    await changed();
  };
  const { node, rows } = table(
    "Deliveries",
    /** @type {import("./table.js").Column<Delivery>[]} */ ([
      { title: "Event", look: "nowrap", cell: (each) => h("code", {}, each.event) },
      {
        title: "Job",
        cell: (each) =>
          each.job_id === null
            ? "–"
            : h("a", { class: "id", href: `#/jobs/${each.job_id}`, title: each.job_id }, each.job_id),
      },
      { title: "State", cell: (each) => pill(each.status) },
      { title: "Attempts", look: "number", cell: (each) => count(each.attempts) },
      { title: "Last attempt", look: "wide", cell: (each) => lastAttempt(each.log[each.log.length - 1]) },
      { title: "Next attempt", look: "number", cell: (each) => moment(each.next_attempt_at) },
      {
        title: "",
        look: "end",
        cell: (each) => [
          h("button", {
            type: "button",
            class: "small",
            "aria-label": `Show the payload and response of ${each.event}`,
            on: { click: () => attempt(() => inspect(each.id, signal)) },
          }, "Show"),
          h("button", {
            type: "button",
            class: "small",
            "aria-label": `Redeliver ${each.event}`,
            on: { click: () => attempt(() => redeliver(each.id)) },
          }, "Redeliver"),
        ],
      },
    ]),
    (each) => each.id,
  );
  return { node, show: rows };
}

/**
 * Show what was sent, and what each attempt was answered.
 * @param {string} id
 * @param {AbortSignal} signal
 */
async function inspect(id, signal) {
  const delivery = await get(`/v1/webhooks/deliveries/${encodeURIComponent(id)}`, {}, signal);
  const attempts = /** @type {Attempt[]} */ (delivery.log);
  const last = attempts[attempts.length - 1];
  await show(
    delivery.event,
    h("h3", {}, "Payload"),
    h("pre", { class: "body" }, JSON.stringify(delivery.payload, null, 2)),
    h("h3", {}, "Attempts"),
    attempts.length
      ? h("ul", { class: "trail" }, attempts.map((each) => h("li", {}, h("span", {}, lastAttempt(each)))))
      : h("p", { class: "muted" }, "None yet."),
    last?.answer && [h("h3", {}, "Response"), h("pre", { class: "body" }, last.answer)],
  );
}

/** @param {Attempt | undefined} attempt */
function lastAttempt(attempt) {
  if (!attempt) return "–";
  return [
    attempt.status ?? attempt.error,
    h("span", { class: "muted" }, ` in ${duration(attempt.seconds)}, `),
    moment(attempt.at),
  ];
}

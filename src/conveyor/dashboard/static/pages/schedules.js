/** Schedules: list, pause, resume and delete. */

/** @import { Schedule } from "../shapes.js" */

import { get, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { poll } from "../live.js";
import { ask } from "../parts/dialog.js";
import { attempt, empty, toast } from "../parts/says.js";
import { pill } from "../parts/state.js";
import { pager, table } from "../parts/table.js";

/** @type {import("../main.js").Page} */
export async function schedulesPage(root, signal) {
  const none = h("div");
  const pages = pager(() => load());
  const { node: list, rows } = table(
    "Schedules",
    /** @type {import("../parts/table.js").Column<Schedule>[]} */ ([
      { title: "Name", cell: (each) => h("span", { class: "clip", title: each.id }, each.name ?? each.id) },
      { title: "Cron", cell: (each) => [h("code", {}, each.cron), h("span", { class: "muted" }, ` ${each.timezone}`)] },
      { title: "State", cell: (each) => pill(each.paused ? "paused" : "active") },
      { title: "Next fire", look: "number", cell: (each) => (each.paused ? "–" : moment(each.next_fires[0] ?? null)) },
      { title: "Last fire", look: "wide", cell: (each) => lastFire(each) },
      {
        title: "",
        look: "end",
        cell: (each) => [
          h("button", {
            type: "button",
            class: "small",
            "aria-label": `${each.paused ? "Resume" : "Pause"} ${each.name ?? each.id}`,
            on: { click: () => attempt(() => pause(each.id, !each.paused)) },
          }, each.paused ? "Resume" : "Pause"),
          h("button", {
            type: "button",
            class: "small quiet-danger",
            "aria-label": `Delete ${each.name ?? each.id}`,
            on: { click: () => attempt(() => remove(each)) },
          }, "Delete"),
        ],
      },
    ]),
    (each) => each.id,
  );

  const load = async () => {
    const page = await get("/v1/schedules", { limit: 50, cursor: pages.cursor }, signal);
    rows(page.items);
    list.hidden = page.items.length === 0;
    renew(
      none,
      page.items.length
        ? null
        : empty("No schedules", "Create one with ", h("code", {}, "conveyor schedules create"), "."),
    );
    pages.show(page.next_cursor);
  };
  const pause = async (/** @type {string} */ id, /** @type {boolean} */ paused) => {
    await send("PATCH", `/v1/schedules/${id}`, { paused });
    toast(paused ? "The schedule is paused." : "The schedule is resumed.");
    await load();
  };
  const remove = async (/** @type {Schedule} */ schedule) => {
    const done = await ask({
      title: "Delete this schedule?",
      text: [h("b", {}, schedule.name ?? schedule.id), " creates no more jobs. Its existing jobs stay."],
      action: "Delete",
      danger: true,
      act: () => send("DELETE", `/v1/schedules/${schedule.id}`).then(() => true),
    });
    if (done) await load();
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Schedules")),
    h("section", { class: "card" }, list, none, pages.node),
  );
  await load();
  void poll(load, signal);
}

/** @param {Schedule} schedule */
function lastFire(schedule) {
  const last = schedule.fires[schedule.fires.length - 1];
  if (!last) return "never fired";
  const what = last.job_id
    ? h("a", { href: `#/jobs/${last.job_id}` }, "job")
    : h("span", { class: "error-code" }, last.error ?? "none");
  return [what, " ", moment(last.at), h("span", { class: "muted" }, ` · ${count(schedule.fired)} fires`)];
}

/** Dead letters: list, filter by error and job, see what a redrive will do, redrive, and see what came of it. */

/** @import { Letter } from "../shapes.js" */

import { remember, stateOf } from "../address.js";
import { get, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { poll } from "../live.js";
import { ask } from "../parts/dialog.js";
import { plannedRedrive, redriveOutcome } from "../parts/redrive.js";
import { attempt, empty, toast } from "../parts/says.js";
import { pager, table } from "../parts/table.js";

const PAGE = 100;

/** @type {import("../main.js").Page} */
export async function lettersPage(root, signal) {
  /** @type {Letter[]} */
  let letters = [];
  /** @type {Set<string>} */
  const picked = new Set();
  const none = h("div");
  const pages = pager(() => (picked.clear(), load()), "dead letters");
  const filter = (/** @type {string} */ id, /** @type {string} */ name, /** @type {string} */ placeholder) =>
    h("input", {
      id,
      type: "search",
      placeholder,
      on: {
        change: (/** @type {any} */ event) => {
          picked.clear();
          pages.reset();
          remember({ [name]: event.target.value.trim(), cursor: null, page: null });
          void attempt(load);
        },
      },
    });
  const error = filter("error-code", "error", "http_503");
  const job = filter("of-job", "job", "job_…");
  const all = h("button", {
    type: "button",
    on: { click: () => pick(letters.map((each) => each.id), picked.size < letters.length) },
  });
  const redriveAll = h("button", { type: "button", on: { click: () => attempt(actOnAll) } });
  const redrive = h("button", { type: "button", class: "primary", on: { click: () => attempt(act) } });
  const outcome = redriveOutcome(signal);
  const { node: list, rows } = table(
    "Dead letters",
    /** @type {import("../parts/table.js").Column<Letter>[]} */ ([
      {
        title: "Select",
        cell: (each) =>
          h("input", {
            type: "checkbox",
            "aria-label": `Select the dead letter of ${each.job_id}`,
            value: each.id,
            on: { change: (/** @type {any} */ event) => pick([each.id], event.target.checked) },
          }),
      },
      {
        title: "Job",
        sort: (each) => each.job_id,
        cell: (each) => h("a", { class: "id", href: `#/jobs/${each.job_id}`, title: each.job_id }, each.job_id),
      },
      {
        title: "Type",
        look: "short",
        sort: (each) => each.index ?? -1,
        cell: (each) =>
          each.task_id === null
            ? each.queue === "control" ? "ingest" : "tasks"
            : h("a", { href: `#/jobs/${each.job_id}/tasks/${each.task_id}` }, `task ${each.index}`),
      },
      { title: "Error", look: "short", sort: (each) => each.error_code ?? "", cell: (each) => each.error_code ?? "–" },
      { title: "Reason", look: "wide", sort: (each) => each.reason, cell: (each) => each.reason },
      { title: "Redrive", look: "nowrap", cell: (each) => h("span", { class: "muted" }, each.redrive_effect) },
      { title: "Dead-lettered", look: "number", sort: (each) => each.at, cell: (each) => moment(each.at) },
    ]),
    (each) => each.id,
    "sort",
  );
  const where = () => ({
    ...(stateOf("error") ? { error_code: stateOf("error") } : {}),
    ...(stateOf("job") ? { job_id: stateOf("job") } : {}),
  });

  const load = async () => {
    const page = await get("/v1/dead-letters", { limit: PAGE, cursor: pages.cursor, ...where() }, signal);
    letters = page.items;
    for (const id of picked) if (!letters.some((each) => each.id === id)) picked.delete(id);
    rows(letters);
    list.hidden = letters.length === 0;
    renew(
      none,
      letters.length
        ? null
        : Object.keys(where()).length
        ? empty("No dead letter matches")
        : empty("No dead letters", "Tasks and ingests that fail repeatedly appear here."),
    );
    pages.show(page.next_cursor);
    draw();
    await outcome.refresh();
  };
  const pick = (/** @type {string[]} */ ids, /** @type {boolean} */ on) => {
    for (const id of ids) on ? picked.add(id) : picked.delete(id);
    draw();
  };
  const draw = () => {
    list.querySelectorAll("input").forEach((
      /** @type {HTMLInputElement} */ box,
    ) => (box.checked = picked.has(box.value)));
    all.textContent = picked.size < letters.length ? "Select all" : "Select none";
    all.hidden = redrive.hidden = redriveAll.hidden = letters.length === 0;
    redrive.disabled = picked.size === 0;
    redrive.textContent = picked.size ? `Redrive ${count(picked.size)}` : "Redrive";
    redriveAll.textContent = Object.keys(where()).length ? "Redrive all that match" : "Redrive all";
  };
  const act = () => carryOut({ ids: [...picked] });
  const actOnAll = () => carryOut(Object.keys(where()).length ? where() : { all: true });
  const carryOut = async (/** @type {object} */ body) => {
    const plan = await send("POST", "/v1/dead-letters/redrive", { ...body, dry_run: true });
    const done = await ask({
      title: plan.redriven ? "Redrive dead letters?" : "Nothing to redrive",
      text: plannedRedrive(plan),
      action: plan.redriven ? "Redrive" : "Try anyway",
      act: () => send("POST", "/v1/dead-letters/redrive", body),
    });
    if (!done) return;
    outcome.show(done);
    toast(`${count(done.redriven)} redriven${done.skipped ? `, ${count(done.skipped)} skipped` : ""}.`);
    picked.clear();
    await load();
  };
  const restore = () => {
    error.value = stateOf("error");
    job.value = stateOf("job");
    pages.restore();
    picked.clear();
    void attempt(load);
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Dead letters"), h("div", { class: "actions" }, all, redriveAll, redrive)),
    outcome.node,
    h(
      "section",
      { class: "card" },
      h(
        "div",
        { class: "filters" },
        h("span", { class: "pair" }, h("label", { for: "error-code" }, "Error code"), error),
        h("span", { class: "pair" }, h("label", { for: "of-job" }, "Job"), job),
      ),
      list,
      none,
      pages.node,
    ),
  );
  error.value = stateOf("error");
  job.value = stateOf("job");
  await load();
  void poll(load, signal);
  return restore;
}

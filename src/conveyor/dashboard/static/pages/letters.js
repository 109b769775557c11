/** Dead letters: list, filter by error, and redrive. */

/** @import { Letter } from "../shapes.js" */

import { get, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { poll } from "../live.js";
import { ask } from "../parts/dialog.js";
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
  const pages = pager(() => (picked.clear(), load()));
  const error = h("input", {
    id: "error-code",
    type: "search",
    placeholder: "http_503",
    on: { change: () => (picked.clear(), pages.reset(), attempt(load)) },
  });
  const all = h("button", {
    type: "button",
    on: { click: () => pick(letters.map((each) => each.id), picked.size < letters.length) },
  });
  const redriveAll = h("button", { type: "button", on: { click: () => attempt(actOnAll) } });
  const redrive = h("button", { type: "button", class: "primary", on: { click: () => attempt(act) } });
  const { node: list, rows } = table(
    "Dead letters",
    /** @type {import("../parts/table.js").Column<Letter>[]} */ ([
      {
        title: "Select",
        cell: (each) =>
          h("input", {
            type: "checkbox",
            "aria-label": `Select the dead letter of ${each.job_id}`,
            on: { change: (/** @type {any} */ event) => pick([each.id], event.target.checked) },
          }),
      },
      {
        title: "Job",
        cell: (each) => h("a", { class: "id", href: `#/jobs/${each.job_id}`, title: each.job_id }, each.job_id),
      },
      {
        title: "Type",
        cell: (each) =>
          each.task_id === null
            ? each.queue === "control" ? "ingest" : "tasks"
            : h("a", { href: `#/jobs/${each.job_id}/tasks/${each.task_id}` }, `task ${each.index}`),
      },
      { title: "Error", cell: (each) => each.error_code ?? "–" },
      { title: "Reason", look: "wide", cell: (each) => each.reason },
      { title: "Dead-lettered", look: "number", cell: (each) => moment(each.at) },
    ]),
    (each) => each.id,
  );

  const load = async () => {
    const filter = error.value.trim() ? { error_code: error.value.trim() } : {};
    const page = await get("/v1/dead-letters", { limit: PAGE, cursor: pages.cursor, ...filter }, signal);
    letters = page.items;
    for (const id of picked) if (!letters.some((each) => each.id === id)) picked.delete(id);
    rows(letters);
    list.hidden = letters.length === 0;
    renew(
      none,
      letters.length ? null : empty("No dead letters", "Tasks and ingests that fail repeatedly appear here."),
    );
    pages.show(page.next_cursor);
    draw();
  };
  const pick = (/** @type {string[]} */ ids, /** @type {boolean} */ on) => {
    for (const id of ids) on ? picked.add(id) : picked.delete(id);
    draw();
  };
  const draw = () => {
    list.querySelectorAll("input").forEach((
      /** @type {HTMLInputElement} */ box,
      /** @type {number} */ at,
    ) => (box.checked = picked.has(letters[at].id)));
    all.textContent = picked.size < letters.length ? "Select all" : "Select none";
    all.hidden = redrive.hidden = redriveAll.hidden = letters.length === 0;
    redrive.disabled = picked.size === 0;
    redrive.textContent = picked.size ? `Redrive ${count(picked.size)}` : "Redrive";
    redriveAll.textContent = error.value.trim() ? `Redrive all ${error.value.trim()}` : "Redrive all";
  };
  const act = () =>
    carryOut({ ids: [...picked] }, `${count(picked.size)} dead letters are requeued, or their tasks rerun.`);
  const actOnAll = () => {
    const code = error.value.trim();
    const which = code ? `All dead letters with the error ${code}` : "All dead letters";
    return carryOut(code ? { error_code: code } : { all: true }, `${which} are requeued, or their tasks rerun.`);
  };
  const carryOut = async (/** @type {object} */ body, /** @type {string} */ text) => {
    const done = await ask({
      title: "Redrive dead letters?",
      text,
      action: "Redrive",
      act: () => send("POST", "/v1/dead-letters/redrive", body),
    });
    if (!done) return;
    toast(`${count(done.redriven)} redriven${done.skipped ? `, ${count(done.skipped)} skipped` : ""}.`);
    picked.clear();
    await load();
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Dead letters"), h("div", { class: "actions" }, all, redriveAll, redrive)),
    h(
      "section",
      { class: "card" },
      h("div", { class: "filters" }, h("label", { for: "error-code" }, "Error code"), error),
      list,
      none,
      pages.node,
    ),
  );
  await load();
  void poll(load, signal);
}

/** Dead letters: list and redrive. */

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
  const all = h("button", {
    type: "button",
    on: { click: () => pick(letters.map((each) => each.id), picked.size < letters.length) },
  });
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
      { title: "Type", cell: (each) => (each.queue === "control" ? "ingest" : "tasks") },
      { title: "Reason", look: "wide", cell: (each) => each.reason },
      { title: "Dead-lettered", look: "number", cell: (each) => moment(each.at) },
    ]),
    (each) => each.id,
  );

  const load = async () => {
    const page = await get("/v1/dead-letters", { limit: PAGE, cursor: pages.cursor }, signal);
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
    all.hidden = redrive.hidden = letters.length === 0;
    redrive.disabled = picked.size === 0;
    redrive.textContent = picked.size ? `Redrive ${count(picked.size)}` : "Redrive";
  };
  const act = async () => {
    const ids = [...picked];
    const done = await ask({
      title: "Redrive dead letters?",
      text: `${count(ids.length)} dead letters go back to their queues and run again.`,
      action: "Redrive",
      act: () => send("POST", "/v1/dead-letters/redrive", { ids }),
    });
    if (!done) return;
    toast(`${count(done.redriven)} redriven${done.skipped ? `, ${count(done.skipped)} already finished` : ""}.`);
    picked.clear();
    await load();
  };

  root.append(
    h("div", { class: "title" }, h("h1", {}, "Dead letters"), h("div", { class: "actions" }, all, redrive)),
    h("section", { class: "card" }, list, none, pages.node),
  );
  await load();
  void poll(load, signal);
}

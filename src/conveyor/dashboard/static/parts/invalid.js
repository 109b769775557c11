/** The invalid lines of a job's list. */

/** @import { InvalidLine, Job } from "../shapes.js" */

import { get } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { pager, table } from "./table.js";

const PAGE = 25;

/** @param {string} jobId @param {AbortSignal} signal */
export function invalidCard(jobId, signal) {
  const pages = pager(() => load(), "invalid lines", false);
  const { node: list, rows } = table(
    "Invalid lines",
    /** @type {import("./table.js").Column<InvalidLine>[]} */ ([
      { title: "Line", look: "number", cell: (each) => count(each.line) },
      { title: "Reason", cell: (each) => each.reason },
      { title: "Text", look: "wide", cell: (each) => h("code", { class: "clip" }, each.text) },
    ]),
    (each) => String(each.line),
  );
  const node = h("section", { class: "card", hidden: true }, h("h2", {}, "Invalid lines"), list, pages.node);
  let known = 0;
  const load = async () => {
    const page = await get(`/v1/jobs/${jobId}/invalid`, { limit: PAGE, cursor: pages.cursor }, signal);
    rows(page.items);
    pages.show(page.next_cursor);
  };
  return {
    node,
    /** Loads again only if their number has changed. @param {Job} job */
    async refresh(job) {
      if (job.invalid_lines === known) return;
      node.hidden = false;
      await load();
      known = job.invalid_lines;
    },
  };
}

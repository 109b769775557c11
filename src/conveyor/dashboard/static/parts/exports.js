/** The exports of a job, with progress and files. */

/** @import { Export, Job } from "../shapes.js" */

import { get, send } from "../api.js";
import { h } from "../dom.js";
import { bytes, count, moment, percent } from "../format.js";
import { attempt } from "./says.js";
import { hasEnded, pill } from "./state.js";
import { table } from "./table.js";

// Refresh interval while an export is in progress, in milliseconds.
const REFRESH = 1_500;

/** @param {string} jobId @param {AbortSignal} signal */
export function exportsCard(jobId, signal) {
  let later = 0;
  const remove = async (/** @type {string} */ id) => {
    await send("DELETE", `/v1/exports/${id}`);
    await load();
  };
  const { node: list, rows } = table(
    "Exports",
    /** @type {import("./table.js").Column<Export>[]} */ ([
      { title: "Created", cell: (each) => moment(each.created_at) },
      {
        title: "Format",
        cell: (each) => `${each.format}${each.compression === "none" ? "" : `, ${each.compression}`}`,
      },
      {
        title: "State",
        cell: (each) => [pill(each.state), each.error && h("span", { class: "muted" }, each.error.message)],
      },
      {
        title: "Tasks",
        look: "number",
        cell: (
          each,
        ) => (each.state === "ready" ? count(each.counts.tasks) : percent(each.progress.tasks, each.progress.total)),
      },
      { title: "Files", look: "wide", cell: files },
      {
        title: "",
        look: "end",
        cell: (each) =>
          h("button", {
            type: "button",
            class: "quiet small",
            "aria-label": `Delete the ${each.format} export`,
            on: { click: () => attempt(() => remove(each.id)) },
          }, "Delete"),
      },
    ]),
    (each) => each.id,
  );
  const whole = h(
    "a",
    { class: "button quiet small", href: `/v1/jobs/${jobId}/export`, download: true },
    "Download all as zip",
  );
  const node = h(
    "section",
    { class: "card", hidden: true },
    h("div", { class: "title" }, h("h2", {}, "Exports"), whole),
    list,
  );
  const load = async () => {
    clearTimeout(later);
    const { items } = await get(`/v1/jobs/${jobId}/exports`, {}, signal);
    rows([...items].reverse());
    list.hidden = items.length === 0;
    if (items.some((/** @type {Export} */ each) => each.state === "queued" || each.state === "running")) {
      later = setTimeout(() => void load().catch(() => {}), REFRESH);
    }
    return items.length;
  };
  signal.addEventListener("abort", () => clearTimeout(later));
  return {
    node,
    /** @param {Job} job */
    async refresh(job) {
      const some = await load();
      whole.hidden = !hasEnded(job.state);
      node.hidden = !some && whole.hidden;
    },
  };
}

/** @param {Export} each */
function files(each) {
  if (!each.parts.length) return "–";
  return h(
    "ul",
    { class: "files" },
    each.parts.slice(0, 20).map((part) =>
      h(
        "li",
        {},
        h("a", { href: part.url, download: part.name }, part.name),
        h("span", { class: "muted" }, ` ${bytes(part.size)}`),
      )
    ),
  );
}

/** The errors of a run by code and host, retried attempts too, with sample messages; each group can be rerun. */

/** @import { ErrorGroup, ErrorGroups } from "../shapes.js" */

import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { rerunTasks } from "./rerun.js";
import { attempt } from "./says.js";
import { table } from "./table.js";

/**
 * @param {string} jobId
 * @param {() => Promise<void>} changed called after a rerun has started
 */
export function errorGroups(jobId, changed) {
  let canRerun = false;
  let alone = new Set();
  const title = h("h3");
  const note = h("p", { class: "muted" });
  const { node, rows } = table(
    "Errors by host",
    /** @type {import("./table.js").Column<ErrorGroup>[]} */ ([
      {
        title: "Error",
        sort: ({ code }) => code ?? "",
        cell: ({ code }) => (code === null ? "other errors" : h("code", { class: "error-code" }, code)),
      },
      { title: "Host", look: "host", sort: ({ host }) => host ?? "", cell: hostText },
      { title: "Failed", look: "number", sort: ({ failed }) => failed, cell: ({ failed }) => count(failed) },
      { title: "Retried", look: "number", sort: ({ retried }) => retried, cell: ({ retried }) => count(retried) },
      { title: "Messages", look: "messages", cell: (group) => samples(jobId, group) },
      { title: "", look: "action", cell: (group) => rerunButton(group) },
    ]),
    ({ code, host, is_other: isOther }) => JSON.stringify([code, host, isOther]),
    "groups",
  );
  const rerunButton = (/** @type {ErrorGroup} */ group) => {
    const { code, host, failed, is_other: isOther } = group;
    // The tasks of several hosts cannot be chosen by their host.
    if (failed === 0 || code === null || (isOther && !alone.has(code))) return null;
    const where = host === null ? "" : ` on ${host}`;
    const what = `${count(failed)} tasks with ${code}${where}`;
    const select = { error_code: code, ...(host === null ? {} : { host }) };
    return h("button", {
      type: "button",
      class: "small",
      disabled: !canRerun,
      title: canRerun ? `Rerun ${what}` : "The run has not finished.",
      on: {
        click: () =>
          attempt(async () => {
            if (await rerunTasks(jobId, what, select)) await changed();
          }),
      },
    }, "Rerun");
  };
  const card = h("div", { class: "groups", hidden: true }, title, node, note);
  return {
    node: card,
    /**
     * @param {ErrorGroups} found
     * @param {boolean} ended whether the latest run has finished
     * @param {string} ofRun names the run, if there are several
     */
    show(found, ended, ofRun) {
      canRerun = ended;
      alone = new Set(
        found.items.map(({ code }) => code).filter((code, _, all) => all.indexOf(code) === all.lastIndexOf(code)),
      );
      card.hidden = found.items.length === 0;
      renew(title, `By host${ofRun}`);
      rows(found.items);
      renew(note, precision(found, ended));
    },
  };
}

/** @param {ErrorGroup} group */
function hostText({ host, is_other: isOther }) {
  return isOther
    ? h("span", { class: "muted" }, "other, or not yet collected")
    : host ?? h("span", { class: "muted" }, "–");
}

/** @param {string} jobId @param {ErrorGroup} group */
function samples(jobId, { samples: found }) {
  if (!found.length) return h("span", { class: "muted" }, "–");
  return h(
    "ul",
    { class: "samples" },
    found.map((each) =>
      h(
        "li",
        {},
        h("a", { href: `#/jobs/${jobId}/tasks/${each.task_id}` }, `Task ${count(each.index)}`),
        " ",
        each.message || "no message",
        " ",
        h("span", { class: "muted" }, moment(each.at)),
      )
    ),
  );
}

/** What is exact, and what is not. @param {ErrorGroups} found @param {boolean} ended */
function precision({ is_exact: isExact, at }, ended) {
  if (isExact) return "All counts are exact.";
  const when = at === null ? [] : [" Last collected ", moment(at), "."];
  return [
    `Failed tasks of each error are ${ended ? "exact" : "as they were counted some seconds ago"}. ` +
    "Hosts and retried attempts are collected by workers every few seconds; " +
    "what a worker that died had not written is missing.",
    ...when,
  ];
}

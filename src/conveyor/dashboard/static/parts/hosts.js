/** The hosts of a run: throughput, latency, errors, breaker and pace. */

/** @import { HostAttempts, RunHost, RunHosts } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { count, duration, moment, percent, rate } from "../format.js";
import { resetBreakers } from "./breakers.js";
import { rerunTasks } from "./rerun.js";
import { attempt, empty } from "./says.js";
import { pill } from "./state.js";
import { table } from "./table.js";

/** @typedef {RunHost | (HostAttempts & {host: null, isOther: true})} Row */

/**
 * @param {string} jobId
 * @param {AbortSignal} signal
 * @param {() => Promise<void>} changed called after a rerun or a reset
 */
export function hostsCard(jobId, signal, changed) {
  let canRerun = false;
  const title = h("h2", {}, "Hosts");
  const none = h("div");
  const note = h("p", { class: "muted" });
  const { node, rows } = table(
    "Hosts",
    /** @type {import("./table.js").Column<Row>[]} */ ([
      { title: "Host", look: "host", sort: (row) => row.host ?? "", cell: hostText },
      { title: "Attempts", look: "number", sort: (row) => row.attempts, cell: (row) => count(row.attempts) },
      { title: "Throughput", look: "number", sort: (row) => row.rate, cell: throughput },
      { title: "p50", look: "number", sort: (row) => row.p50 ?? 0, cell: (row) => duration(row.p50) },
      { title: "p95", look: "number", sort: (row) => row.p95 ?? 0, cell: (row) => duration(row.p95) },
      { title: "Failed", look: "number", sort: (row) => row.failed, cell: (row) => share(row.failed, row.attempts) },
      { title: "Retried", look: "number", sort: (row) => row.retried, cell: (row) => share(row.retried, row.attempts) },
      { title: "Errors", cell: (row) => ("errors" in row ? codes(row) : null) },
      { title: "Breaker", cell: (row) => ("breaker" in row ? breakerText(row) : null) },
      { title: "", look: "action", cell: (row) => actions(row) },
    ]),
    (row) => ("isOther" in row ? "*" : row.host ?? ""),
    "hosts",
  );
  const button = (
    /** @type {string} */ label,
    /** @type {string} */ name,
    /** @type {() => Promise<boolean>} */ work,
  ) =>
    h("button", {
      type: "button",
      class: "small",
      "aria-label": name,
      on: {
        click: () =>
          attempt(async () => {
            if (await work()) await changed();
          }),
      },
    }, label);
  const actions = (/** @type {Row} */ row) => {
    const { host } = row;
    if (!("breaker" in row) || host === null) return null;
    const target = row.breaker?.target;
    const select = { status: ["failed"], host };
    return [
      target && button("Reset", `Reset the breaker of ${host}`, () => resetBreakers([target])),
      row.failed > 0 && canRerun &&
      button(
        "Rerun",
        `Rerun failed tasks of ${host}`,
        () => rerunTasks(jobId, `failed tasks of ${host}`, select),
      ),
    ];
  };
  return {
    node: h("section", { class: "card" }, title, node, none, note),
    /**
     * @param {string} run of the address; empty for the latest
     * @param {boolean} ended whether the latest run has finished
     * @param {string} ofRun names the run, if there are several
     */
    async refresh(run, ended, ofRun) {
      /** @type {RunHosts} */
      const found = await get(`/v1/jobs/${jobId}/hosts`, { run: run || "latest" }, signal);
      canRerun = ended;
      renew(title, `Hosts${ofRun}`);
      /** @type {Row[]} */
      const all = [
        ...found.items,
        ...(found.other ? [{ ...found.other, host: null, isOther: /** @type {const} */ (true) }] : []),
      ];
      node.hidden = all.length === 0;
      renew(none, all.length ? null : empty(found.missing ? "No figures by host yet" : "No attempt has finished yet"));
      rows(all);
      renew(note, all.length || found.missing ? precision(found) : null);
    },
  };
}

/** @param {Row} row */
function hostText(row) {
  if ("isOther" in row) return h("span", { class: "muted" }, "all other hosts");
  return row.host ?? h("span", { class: "muted" }, "no host");
}

/** @param {number} part @param {number} whole */
function share(part, whole) {
  return part ? h("span", {}, count(part), h("span", { class: "muted" }, ` ${percent(part, whole)}`)) : "0";
}

/** The most frequent codes, and how many attempts had others. @param {RunHost} row */
function codes({ errors, failed, retried }) {
  if (!errors.length) return h("span", { class: "muted" }, "–");
  const others = errors.reduce((left, each) => left - each.count, failed + retried);
  return h(
    "ul",
    { class: "samples" },
    errors.map((each) => h("li", {}, h("code", { class: "error-code" }, each.code), ` ${count(each.count)}`)),
    others > 0 && h("li", { class: "muted" }, `others ${count(others)}`),
  );
}

/** @param {RunHost} row */
function breakerText({ breaker }) {
  if (breaker === null) return pill("closed");
  const next = breaker.state === "open" ? ["next probe ", moment(breaker.until)] : [];
  return h("span", { title: breaker.error }, pill(breaker.state), h("span", { class: "muted pace" }, ...next));
}

/** Attempts a second, and the pace that `pace: auto` has found. @param {Row} row */
function throughput(row) {
  const pace = "pace" in row ? row.pace : null;
  if (pace === null) return rate(row.rate);
  const paused = pace.paused_until === null ? [] : [", paused until ", moment(pace.paused_until)];
  const now = `${count(pace.in_flight)} of ${count(pace.limit)} at once`;
  return h("span", {}, rate(row.rate), h("span", { class: "muted pace", title: "Pace" }, now, ...paused));
}

/** What is exact, and what is not. @param {RunHosts} found */
function precision({ is_exact: isExact, at, other, missing }) {
  return [
    missing
      ? `${count(missing)} finished tasks are not counted here: workers add theirs every few seconds, ` +
        "and one that is killed loses those of its last seconds."
      : isExact
      ? "Counts are exact."
      : "Workers add their attempts every few seconds.",
    other === null ? null : " Hosts with few attempts and errors are shown together.",
    " Throughput and latency are those of attempts, retried ones too; latency within a tenth.",
    ...(isExact || at === null ? [] : [" Last collected ", moment(at), "."]),
  ];
}

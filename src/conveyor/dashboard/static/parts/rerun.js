/** Rerun: choose tasks of a job by their latest outcome, and start a new run of them. */

/** @import { ErrorCount, Job } from "../shapes.js" */

import { newKey, send } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { ask } from "./dialog.js";
import { toast } from "./says.js";

/** @typedef {"failed" | "all" | Record<string, unknown>} Select */

/**
 * Ask, and rerun the tasks of a selection. Resolves to whether it was done.
 * @param {string} jobId
 * @param {string} what the tasks, for the question
 * @param {Select} select
 */
export async function rerunTasks(jobId, what, select) {
  const key = newKey();
  const done = await ask({
    title: `Rerun ${what}?`,
    text: "A new run repeats them. Earlier results stay.",
    action: "Rerun",
    act: () => send("POST", `/v1/jobs/${jobId}/rerun`, { select }, { key }).then(() => true),
  });
  if (done) toast("The rerun has started.");
  return Boolean(done);
}

/**
 * Ask which tasks to rerun. Resolves to whether it was done.
 * @param {Job} job
 * @param {ErrorCount[]} errors
 */
export async function chooseRerun(job, errors) {
  const key = newKey();
  const done = await ask({
    title: "Rerun tasks",
    text: form(job, errors),
    action: "Rerun",
    act: (data) => send("POST", `/v1/jobs/${job.id}/rerun`, requestOf(data, job), { key }).then(() => true),
  });
  if (done) toast("The rerun has started.");
  return Boolean(done);
}

/** @param {Job} job @param {ErrorCount[]} errors */
function form(job, errors) {
  const { counts, total } = job;
  const choice = (/** @type {string} */ value, /** @type {string} */ text, /** @type {boolean} */ checked) =>
    h("label", { class: "choice" }, h("input", { type: "radio", name: "which", value, checked }), text);
  const field = (/** @type {string} */ text, /** @type {Element} */ input) =>
    h("label", { class: "field" }, h("span", {}, text), input);
  return [
    h(
      "fieldset",
      { class: "choices" },
      h("legend", {}, "Tasks, by their latest result"),
      choice("failed", `Failed (${count(counts.failed)})`, counts.failed > 0),
      counts.cancelled > 0 && choice("cancelled", `Cancelled (${count(counts.cancelled)})`, counts.failed === 0),
      choice("all", `All (${count(total)})`, counts.failed === 0 && counts.cancelled === 0),
      choice("matching", "Those that match:", false),
    ),
    h(
      "div",
      { class: "matching", on: { input: chooseMatching } },
      field(
        "Error",
        h(
          "select",
          { name: "error_code" },
          h("option", { value: "" }, "any"),
          errors.map(({ code, count: number }) => h("option", { value: code }, `${code} (${count(number)})`)),
        ),
      ),
      field("HTTP status", h("input", { name: "http_status", type: "number", min: 100, max: 599 })),
      field("Host", h("input", { name: "host", maxlength: 255 })),
      field("Tag", h("input", { name: "tag", maxlength: 1024 })),
    ),
    job.kind === "fetch" && h(
      "label",
      { class: "choice" },
      h("input", { type: "checkbox", name: "changed_only" }),
      "Only what changed: unchanged pages are not sent again, and keep their bodies",
    ),
    job.options.extract && [
      h(
        "label",
        { class: "choice" },
        h("input", { type: "checkbox", name: "extract_only" }),
        "Extract again from the stored bodies, without a request",
      ),
      field("Function", h("input", { name: "extract", value: job.options.extract, maxlength: 200 })),
    ],
    h("p", { class: "muted" }, "A new run repeats the chosen tasks. Earlier results stay."),
  ];
}

/** A condition that is entered counts. @param {Event} event */
function chooseMatching(event) {
  const form = /** @type {HTMLElement} */ (event.currentTarget).closest("form");
  const choice = /** @type {HTMLInputElement | null | undefined} */ (form?.querySelector("input[value=matching]"));
  if (choice) choice.checked = true;
}

/** @param {FormData} data @param {Job} job */
function requestOf(data, job) {
  const extract = String(data.get("extract") ?? "").trim();
  return {
    select: selectOf(data),
    ...(data.get("changed_only") ? { changed_only: true } : {}),
    ...(data.get("extract_only") ? { extract_only: true } : {}),
    ...(extract && extract !== job.options.extract ? { options: { extract } } : {}),
  };
}

/** @param {FormData} data @returns {Select} */
function selectOf(data) {
  const which = String(data.get("which"));
  const value = (/** @type {string} */ name) => String(data.get(name) ?? "").trim();
  if (which === "failed" || which === "all") return which;
  if (which === "cancelled") return { status: ["cancelled"] };
  return {
    ...(value("error_code") ? { error_code: value("error_code") } : {}),
    ...(value("http_status") ? { http_status: Number(value("http_status")) } : {}),
    ...(value("host") ? { host: value("host") } : {}),
    ...(value("tag") ? { tag: value("tag") } : {}),
  };
}

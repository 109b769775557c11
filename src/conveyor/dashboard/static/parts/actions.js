/** The actions that a job allows in its current state. Destructive actions ask for confirmation. */

/** @import { ErrorCount, Job } from "../shapes.js" */

import { newKey, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count } from "../format.js";
import { resetBreakers } from "./breakers.js";
import { ask } from "./dialog.js";
import { duplicateJob } from "./duplicate.js";
import { chooseRerun } from "./rerun.js";
import { attempt, toast } from "./says.js";
import { hasEnded } from "./state.js";

/**
 * @param {string} jobId
 * @param {{changed: () => Promise<void>, exported: () => Promise<void>, gone: () => void}} after
 */
export function jobActions(jobId, after) {
  const path = `/v1/jobs/${jobId}`;
  const node = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
  /** @type {Job} */
  let job;
  /** @type {ErrorCount[]} */
  let errors = [];

  const control = (/** @type {string} */ action, /** @type {string} */ message) => async () => {
    await send("POST", `${path}/${action}`);
    toast(message);
    await after.changed();
  };
  const cancel = async () => {
    const done = await ask({
      title: "Cancel this job?",
      text: "No further task starts, and running attempts are aborted. Existing results stay.",
      action: "Cancel job",
      danger: true,
      act: () => send("POST", `${path}/cancel`).then(() => true),
    });
    if (done) await after.changed();
  };
  const close = async () => {
    const done = await ask({
      title: "Close this job?",
      text: "No more tasks can be added. The job completes when those that it has are finished.",
      action: "Close job",
      act: () => send("POST", `${path}/close`).then(() => true),
    });
    if (done) await after.changed();
  };
  const rerun = async () => {
    const key = newKey();
    const resumed = job.total === 0;
    const done = await ask({
      title: resumed ? "Resume the ingest?" : "Rerun failed tasks?",
      text: resumed
        ? "The ingest continues where it stopped."
        : `${count(job.counts.failed)} tasks have failed. A new run repeats them; earlier results stay.`,
      action: resumed ? "Resume" : "Rerun failed",
      act: () => send("POST", `${path}/rerun`, { select: "failed" }, { key }).then(() => true),
    });
    if (done) await after.changed();
  };
  const rerunSome = async () => {
    if (await chooseRerun(job, errors)) await after.changed();
  };
  const exported = async () => {
    const key = newKey();
    const done = await ask({
      title: "Export results",
      text: exportForm(job),
      action: "Export",
      act: (form) => send("POST", `${path}/exports`, exportSpec(form, job), { key }).then(() => true),
    });
    if (done) {
      toast("The export has started.");
      await after.exported();
    }
  };
  const duplicate = async () => {
    const made = await duplicateJob(job);
    if (made) location.hash = `#/jobs/${made.id}`;
  };
  const reset = async () => {
    const target = job.waiting?.target;
    if (target && (await resetBreakers([target]))) await after.changed();
  };
  const remove = async () => {
    const done = await ask({
      title: "Delete this job?",
      text: `The job, its ${count(job.total)} tasks, and all results and exports are deleted permanently.${
        hasEnded(job.state) ? "" : " Running tasks stop."
      }`,
      action: "Delete",
      danger: true,
      act: () => send("DELETE", path).then(() => true),
    });
    if (done) {
      toast("The job was deleted.");
      after.gone();
    }
  };
  const button = (/** @type {string} */ text, /** @type {() => Promise<void>} */ act, look = "") =>
    h("button", { type: "button", class: look, on: { click: () => attempt(act) } }, text);

  return {
    node,
    /** @param {Job} now @param {ErrorCount[]} [known] errors to choose from */
    show(now, known = errors) {
      job = now;
      errors = known;
      const over = hasEnded(job.state);
      const unread = job.state === "failed" && job.ingest && !job.total;
      renew(
        node,
        !over && job.waiting?.target && button("Reset breaker", reset, "primary"),
        !over && job.state !== "paused" && button("Pause", control("pause", "The job is paused.")),
        job.state === "paused" && button("Resume", control("resume", "The job is resumed."), "primary"),
        canClose(job) && button("Close", close),
        !over && button("Cancel", cancel),
        over && (job.counts.failed > 0 || unread) &&
          button(unread ? "Resume ingest" : "Rerun failed", rerun, "primary"),
        over && job.total > 0 && button("Rerun…", rerunSome),
        button("Duplicate…", duplicate),
        button("Export", exported),
        button("Delete", remove, "quiet-danger"),
      );
    },
  };
}

/** Whether tasks may still be added. @param {Job} job */
function canClose({ mode, state, run }) {
  return mode === "open" && run.number === 1 && ["ingesting", "paused"].includes(state);
}

/** @param {Job} job */
function exportForm(job) {
  const choice = (/** @type {string} */ name, /** @type {[string, string][]} */ options) =>
    h("select", { id: name, name }, options.map(([value, text]) => h("option", { value }, text)));
  return [
    h("label", { for: "format" }, "Format"),
    choice("format", [["zip", "zip, a file for each body"], ["jsonl", "jsonl, a line for each task"], [
      "csv",
      "csv, a row for each task",
    ], ["parquet", "Parquet"]]),
    h("label", { for: "status" }, "Tasks"),
    choice("status", [["", "all"], ["succeeded", "succeeded"], ["failed", "failed"]]),
    !hasEnded(job.state) &&
    h("p", { class: "muted" }, "The run is unfinished: the export contains the results so far."),
  ];
}

/** @param {FormData} form @param {Job} job */
function exportSpec(form, job) {
  const status = form.get("status");
  return { format: form.get("format"), partial: !hasEnded(job.state), ...(status ? { select: { status } } : {}) };
}

/** One action on many jobs: one request for each, a few at a time, with progress and a summary of what failed. */

/** @import { Job } from "../shapes.js" */

import { newKey, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count } from "../format.js";
import { ask } from "./dialog.js";
import { toast, words } from "./says.js";
import { hasEnded } from "./state.js";

const AT_ONCE = 4;

/**
 * @typedef {Object} Action
 * @property {string} name label of the button
 * @property {string} done past participle, for the summary
 * @property {string} text what it does, for the question
 * @property {boolean} danger
 * @property {(job: Job) => boolean} fits whether it makes sense for the job
 * @property {(job: Job) => Promise<unknown>} act
 */

/** @type {Action[]} */
const ACTIONS = [
  {
    name: "Cancel",
    done: "cancelled",
    text: "No further task starts, and running attempts are aborted. Existing results stay.",
    danger: true,
    fits: (job) => !hasEnded(job.state),
    act: (job) => send("POST", `/v1/jobs/${job.id}/cancel`),
  },
  {
    name: "Rerun failed",
    done: "rerun",
    text: "A new run of each job repeats its failed tasks. Earlier results stay.",
    danger: false,
    fits: (job) => hasEnded(job.state) && job.counts.failed > 0,
    act: (job) => send("POST", `/v1/jobs/${job.id}/rerun`, { select: "failed" }, { key: newKey() }),
  },
  {
    name: "Delete",
    done: "deleted",
    text: "The jobs, their tasks, and all results and exports are deleted permanently. Running tasks stop.",
    danger: true,
    fits: () => true,
    act: (job) => send("DELETE", `/v1/jobs/${job.id}`),
  },
];

/** @param {() => Promise<void>} changed called after an action, with the selection cleared */
export function bulkBar(changed) {
  /** @type {Map<string, Job>} */
  const chosen = new Map();
  const node = h("div", { class: "bulk", role: "group", "aria-label": "Selected jobs", hidden: true });
  const draw = () => {
    const jobs = [...chosen.values()];
    node.hidden = jobs.length === 0;
    renew(
      node,
      h("b", {}, `${count(jobs.length)} selected`),
      ACTIONS.map((action) => {
        const fitting = jobs.filter(action.fits);
        const look = action.danger ? "small quiet-danger" : "small";
        // By the selection of then: an equal button keeps its node, and with it this listener.
        const click = () => run(action, [...chosen.values()].filter(action.fits));
        return h(
          "button",
          { type: "button", class: look, disabled: fitting.length === 0, on: { click } },
          fitting.length === jobs.length ? action.name : `${action.name} (${count(fitting.length)})`,
        );
      }),
      h("button", { type: "button", class: "small quiet", on: { click: clear } }, "Clear selection"),
    );
  };
  const clear = () => {
    chosen.clear();
    document.querySelectorAll(".job-check").forEach((box) => (/** @type {HTMLInputElement} */ (box).checked = false));
    draw();
  };
  const run = async (/** @type {Action} */ action, /** @type {Job[]} */ jobs) => {
    const progress = h("div", { role: "status" });
    const finished = await ask({
      title: `${action.name}: ${count(jobs.length)} ${jobs.length === 1 ? "job" : "jobs"}?`,
      text: [h("p", {}, action.text), progress],
      action: action.name,
      danger: action.danger,
      act: () => each(action, jobs, progress),
    });
    if (!finished) return;
    const { done, failed } = finished;
    if (failed.length) showFailures(action, done, failed);
    else toast(`${count(done)} ${done === 1 ? "job" : "jobs"} ${action.done}.`);
    clear();
    await changed();
  };
  return {
    node,
    /** @param {Job} job @param {boolean} isChosen */
    choose(job, isChosen) {
      if (isChosen) chosen.set(job.id, job);
      else chosen.delete(job.id);
      draw();
    },
    /** @param {string} id */
    has: (id) => chosen.has(id),
    /** The latest state of a job. @param {Job} job */
    update(job) {
      if (!chosen.has(job.id)) return;
      chosen.set(job.id, job);
      draw();
    },
  };
}

/**
 * @param {Action} action
 * @param {Job[]} jobs
 * @param {Element} progress
 */
async function each(action, jobs, progress) {
  const waiting = [...jobs];
  /** @type {[Job, string][]} */
  const failed = [];
  let done = 0;
  const work = async () => {
    for (let job = waiting.shift(); job; job = waiting.shift()) {
      try {
        await action.act(job);
        done += 1;
      } catch (error) {
        failed.push([job, words(error)]);
      }
      renew(progress, `${count(done + failed.length)} of ${count(jobs.length)}`);
    }
  };
  await Promise.all(Array.from({ length: Math.min(AT_ONCE, jobs.length) }, work));
  return { done, failed };
}

/** @param {Action} action @param {number} done @param {[Job, string][]} failed */
function showFailures(action, done, failed) {
  void ask({
    title: `${count(failed.length)} ${failed.length === 1 ? "job" : "jobs"} not ${action.done}`,
    text: [
      done > 0 && h("p", {}, `${count(done)} ${action.done}.`),
      h(
        "ul",
        { class: "failures" },
        failed.map(([job, why]) => h("li", {}, h("b", {}, job.name ?? job.id), h("span", { class: "muted" }, why))),
      ),
    ],
    action: "Close",
    act: () => Promise.resolve(true),
  });
}

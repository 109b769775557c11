/** A redrive of dead letters: what it will do, and what came of it. */

/** @import { Redriven } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { count } from "../format.js";
import { bar, hasEnded, jobPill } from "./state.js";

// Reruns that are shown one by one.
const SHOWN = 10;

/**
 * What a redrive will do, in words.
 * @param {Redriven} plan
 */
export function plannedRedrive(plan) {
  const rerun = plan.redriven - plan.requeued;
  const jobs = plan.runs.length;
  const lines = [
    rerun > 0 &&
    `${letters(rerun)} of ${
      jobs === 1 ? "1 job" : `${count(jobs)} jobs`
    }: their failed tasks are rerun, in one new run of each job.`,
    plan.requeued > 0 && `${letters(plan.requeued)}: the message goes back to its queue; a failed ingest resumes.`,
    ...skipped(plan, "is skipped", "are skipped"),
  ].filter(Boolean);
  return h("ul", { class: "points" }, lines.map((line) => h("li", {}, line)));
}

/** @param {Redriven} done @param {string} one @param {string} many */
function skipped({ skipped: all, blocked }, one, many) {
  const rest = all - blocked;
  return [
    blocked > 0 &&
    `${letters(blocked)} ${blocked === 1 ? one : many}: a run of the job is in progress. Redrive when it has finished.`,
    rest > 0 && `${letters(rest)} ${rest === 1 ? one : many}: nothing is left to do.`,
  ];
}

/** @param {number} number */
const letters = (number) => (number === 1 ? "1 dead letter" : `${count(number)} dead letters`);

/**
 * What came of the last redrive on this page: its reruns, as they go on.
 * @param {AbortSignal} signal
 */
export function redriveOutcome(signal) {
  const node = h("section", { class: "card", hidden: true });
  /** @type {Redriven | null} */
  let done = null;
  /** @type {any[]} */
  let jobs = [];
  const draw = () => {
    if (!done) return;
    const more = done.runs.length - SHOWN;
    renew(
      node,
      h(
        "div",
        { class: "title" },
        h("h2", {}, `Last redrive: ${letters(done.redriven)}`),
        h("button", { type: "button", class: "quiet small", on: { click: close } }, "Dismiss"),
      ),
      h(
        "ul",
        { class: "points" },
        done.requeued > 0 && h("li", {}, `${letters(done.requeued)} went back to the queue.`),
        skipped(done, "was skipped", "were skipped").filter(Boolean).map((line) => h("li", {}, line)),
      ),
      jobs.map(outcomeOf),
      more > 0 && h("p", { class: "muted" }, `And reruns of ${count(more)} more jobs.`),
    );
  };
  const close = () => {
    done = null;
    node.hidden = true;
  };
  return {
    node,
    /** @param {Redriven} now */
    show(now) {
      done = now;
      jobs = [];
      node.hidden = false;
      draw();
    },
    /** Read the reruns that have not finished. */
    async refresh() {
      if (!done || (jobs.length && jobs.every(({ job }) => hasEnded(job.state)))) return;
      jobs = await Promise.all(
        done.runs.slice(0, SHOWN).map(async ({ job_id: id, run_id: run }) => ({
          id,
          job: await get(`/v1/jobs/${id}`, { run }, signal).catch(() => null),
        })),
      );
      jobs = jobs.filter(({ job }) => job !== null);
      draw();
    },
  };
}

/** One rerun. @param {{id: string, job: any}} rerun */
function outcomeOf({ id, job }) {
  const { succeeded, failed } = job.counts;
  return h(
    "div",
    { class: "outcome" },
    h("a", { href: `#/jobs/${id}` }, job.name ?? id),
    jobPill(job),
    h("span", { class: "muted" }, `${count(succeeded)} succeeded, ${count(failed)} failed of ${count(job.total)}`),
    bar(job, `Rerun of ${job.name ?? id}`),
  );
}

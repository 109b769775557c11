/** Duplicate: a new job with the list and the options of a job. The server makes it, so that secrets go along unseen. */

/** @import { Job } from "../shapes.js" */

import { newKey, send } from "../api.js";
import { h } from "../dom.js";
import { count } from "../format.js";
import { ask } from "./dialog.js";
import { field, text, textOf } from "./form.js";
import { offeredChanges, offeredFields } from "./offered-options.js";
import { toast } from "./says.js";

/**
 * Ask, and duplicate the job. Resolves to the new one.
 * @param {Job} job
 * @returns {Promise<Job | null>}
 */
export async function duplicateJob(job) {
  const key = newKey();
  const options = job.options ?? {};
  const tasks = job.mode === "open" ? `the ${count(job.total)} tasks that it has so far` : "its whole list";
  const made = await ask({
    title: "Duplicate this job?",
    text: [
      h(
        "p",
        {},
        `A new job runs ${tasks} with the same options. Headers and other secrets go along without being shown.`,
      ),
      field("duplicate-name", "Name", text("duplicate-name", { name: "name", maxlength: 200, value: job.name ?? "" })),
      h("div", { class: "fields" }, offeredFields("duplicate-", options)),
    ],
    action: "Duplicate",
    act: (form) => send("POST", `/v1/jobs/${job.id}/duplicate`, bodyOf(form, options), { key }),
  });
  if (made) toast("The new job was submitted.");
  return made;
}

/** @param {FormData} form @param {Record<string, any>} options */
function bodyOf(form, options) {
  return { name: textOf(form, "name") || null, options: offeredChanges(form, options) };
}

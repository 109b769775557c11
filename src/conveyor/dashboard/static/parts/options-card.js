/** The options of a job: shown, and changed while it runs. The server checks them; its errors are shown at their fields. */

/** @import { Job } from "../shapes.js" */
/** @import { OptionField } from "./option-fields.js" */

import { send } from "../api.js";
import { h, renew } from "../dom.js";
import { clearProblems, showProblem } from "./form.js";
import { applies, changesOf, GROUPS, optionField, shownValue } from "./option-fields.js";
import { attempt, toast } from "./says.js";
import { hasEnded } from "./state.js";

// What has its effect when the job is accepted.
const FIXED = /** @type {const} */ ([
  ["handler", "Function"],
  ["extract", "Extract"],
  ["keep_bodies", "Bodies are kept"],
  ["changed_from", "Compared with the job"],
  ["chunk_size", "References in a message"],
  ["on_invalid", "Invalid lines"],
  ["export", "Export API"],
]);
// Of a finished job, only this one has an effect.
const AT_THE_END = "retention_days";

/**
 * @param {string} jobId
 * @param {() => Promise<void>} changed called after a change
 */
export function optionsCard(jobId, changed) {
  const path = `/v1/jobs/${jobId}`;
  const about = h("p", { class: "muted" });
  const fixed = h("dl", { class: "facts" });
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const save = h("button", { type: "submit", class: "primary" }, "Save changes");
  const undo = h("button", { type: "button", class: "quiet", on: { click: () => fill() } }, "Undo");
  const groups = h("div", { class: "option-groups" });
  /** @type {Job | null} */
  let job = null;
  /** The fields of this kind of job, with their controls. @type {Map<OptionField, HTMLInputElement>} */
  let controls = new Map();
  let drawn = "";

  const options = () => /** @type {Record<string, any>} */ (job?.options ?? {});
  const dirty = () =>
    new Map(
      [...controls].filter(([option, control]) => !control.disabled && control.value !== shownValue(option, options()))
        .map(([option, control]) => [option, control.value]),
    );
  const mark = () => {
    const some = dirty();
    for (const [option, control] of controls) control.closest(".field")?.classList.toggle("changed", some.has(option));
    save.disabled = undo.disabled = some.size === 0;
  };
  const fill = () => {
    clearProblems(form);
    problem.hidden = true;
    for (const [option, control] of controls) control.value = shownValue(option, options());
    mark();
  };
  const build = (/** @type {Job} */ now) => {
    const over = hasEnded(now.state);
    controls = new Map();
    renew(groups);
    for (const { title, fields } of GROUPS) {
      const own = fields.filter((each) => applies(each, now.kind, now.mode));
      const nodes = own.map((option) => {
        const disabled = over && option.name !== AT_THE_END;
        const node = optionField(option, { prefix: "option-", disabled });
        controls.set(option, node.querySelector("input, select, textarea"));
        return node;
      });
      if (nodes.length) groups.append(h("fieldset", {}, h("legend", {}, title), h("div", { class: "fields" }, nodes)));
    }
  };
  const submit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    clearProblems(form);
    problem.hidden = true;
    save.disabled = true;
    try {
      job = await send("PATCH", path, changesOf(options(), dirty()));
      fill();
      toast("The options are changed. Workers follow within a second.");
      await changed();
    } catch (error) {
      if (!showProblem(form, error)) {
        problem.textContent = /** @type {Error} */ (error).message;
        problem.hidden = false;
      }
      save.disabled = false;
    }
  };
  const form = h(
    "form",
    { class: "options", on: { submit: (/** @type {Event} */ event) => attempt(() => submit(event)), input: mark } },
    groups,
    problem,
    h("div", { class: "actions" }, save, undo),
  );
  return {
    node: h("section", { class: "card" }, h("h2", {}, "Options"), about, form, fixed),
    /** What was typed and not yet saved stays. @param {Job} now */
    show(now) {
      const before = JSON.stringify(job?.options);
      const isTouched = dirty().size > 0;
      const shape = `${now.kind} ${now.mode} ${hasEnded(now.state)}`;
      job = now;
      renew(
        about,
        hasEnded(now.state)
          ? "The job has finished: only its retention can change. A rerun or a duplicate may have other options."
          : "Changes take effect within a second. A running attempt keeps the options that it began with.",
      );
      if (shape !== drawn) {
        drawn = shape;
        build(now);
        fill();
      } else if (!isTouched && before !== JSON.stringify(now.options)) fill();
      renew(fixed, fixedOf(options()));
    },
  };
}

/** @param {Record<string, any>} options */
function fixedOf(options) {
  return FIXED.filter(([name]) => options[name] !== undefined).map(([name, label]) => {
    const value = options[name];
    const shown = typeof value === "object" ? JSON.stringify(value) : value === false ? "no" : String(value);
    return h("div", {}, h("dt", {}, label), h("dd", {}, shown));
  });
}

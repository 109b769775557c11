/** The options that people change most, as fields of a dialog: where a job is duplicated, or a schedule edited. */

import { textOf } from "./form.js";
import { changesOf, FIELDS, optionField, shownValue } from "./option-fields.js";

const OFFERED = ["concurrency", "rate_per_host", "attempts"].map((name) =>
  FIELDS.filter((each) => each.name === name)[0]
);

/** The fields, filled. @param {string} prefix of their ids @param {Record<string, any>} options */
export function offeredFields(prefix, options) {
  return OFFERED.map((option) => {
    const node = optionField(option, { prefix });
    node.querySelector("input").value = shownValue(option, options);
    return node;
  });
}

/** The options of which a field changed. @param {FormData} form @param {Record<string, any>} options */
export function offeredChanges(form, options) {
  const typed = OFFERED.map((option) => /** @type {const} */ ([option, textOf(form, option.name)]));
  return changesOf(options, new Map(typed.filter(([option, value]) => value !== shownValue(option, options))));
}

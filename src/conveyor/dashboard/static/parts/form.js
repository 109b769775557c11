/** Fields of forms: a label, a control, and a hint. */

import { h } from "../dom.js";

/**
 * @param {string} id
 * @param {string} label
 * @param {Element} control its id is `id`
 * @param {import("../dom.js").Child} [hint]
 */
export function field(id, label, control, hint) {
  const described = hint && `${id}-hint`;
  if (described) control.setAttribute("aria-describedby", described);
  return h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    control,
    hint && h("span", { class: "muted", id: described }, hint),
  );
}

/** @param {string} id @param {import("../dom.js").Props} [props] */
export function text(id, props = {}) {
  return h("input", { id, name: id, autocomplete: "off", spellcheck: "false", ...props });
}

/** @param {string} id @param {[string, string][]} options value and label @param {string} [chosen] */
export function choice(id, options, chosen) {
  return h(
    "select",
    { id, name: id },
    options.map(([value, label]) => h("option", { value, selected: value === chosen }, label)),
  );
}

/** The trimmed text of a field. @param {FormData} form @param {string} name */
export const textOf = (form, name) => String(form.get(name) ?? "").trim();

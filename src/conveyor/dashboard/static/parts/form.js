/** Fields of forms: a label, a control, and a hint. */

import { Problem } from "../api.js";
import { h } from "../dom.js";

/**
 * @param {string} id
 * @param {import("../dom.js").Children} label
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

/**
 * Show an error of the server at the field that it names, which gets the focus. Returns whether there is one.
 * @param {HTMLFormElement} form
 * @param {unknown} error
 */
export function showProblem(form, error) {
  const name = error instanceof Problem ? String(error.body.field ?? "") : "";
  if (!name || !(error instanceof Error)) return false;
  const controls = /** @type {HTMLInputElement[]} */ ([...form.elements]);
  const control = controls.find((each) => each.name === name) ??
    controls.find((each) => each.name?.startsWith(`${name}.`) || name.startsWith(`${each.name || "-"}.`));
  if (!control) return false;
  const id = `${control.id}-problem`;
  const note = h("span", { class: "field-problem", id, role: "alert" }, error.message);
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-errormessage", id);
  control.insertAdjacentElement("afterend", note);
  // It may be in a part of the form that is folded.
  const folded = control.closest("details");
  if (folded) folded.open = true;
  control.focus();
  return true;
}

/** @param {HTMLFormElement} form */
export function clearProblems(form) {
  form.querySelectorAll(".field-problem").forEach((each) => each.remove());
  form.querySelectorAll("[aria-invalid]").forEach((each) => {
    each.removeAttribute("aria-invalid");
    each.removeAttribute("aria-errormessage");
  });
}

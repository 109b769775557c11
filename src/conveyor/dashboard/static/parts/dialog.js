/** Modal dialogs. The browser keeps the focus inside, and restores it on close. */

import { h } from "../dom.js";
import { words } from "./says.js";

/**
 * @template T
 * @typedef {Object} Question
 * @property {string} title
 * @property {import("../dom.js").Children} text
 * @property {string} action label of the confirm button
 * @property {boolean} [danger] whether the action cannot be undone
 * @property {(form: FormData) => Promise<T>} act
 */

/**
 * Show something until the user closes it.
 * @param {string} title
 * @param {...import("../dom.js").Children} content
 * @returns {Promise<void>}
 */
export function show(title, ...content) {
  return new Promise((resolve) => {
    const close = h("button", { type: "button", on: { click: () => dialog.close() } }, "Close");
    const dialog = h(
      "dialog",
      { "aria-labelledby": "dialog-title", class: "large", on: { close: () => (dialog.remove(), resolve()) } },
      h("h2", { id: "dialog-title" }, title),
      h("div", { class: "dialog-text" }, ...content),
      h("div", { class: "actions end" }, close),
    );
    open(dialog, close);
  });
}

/**
 * Ask for confirmation, run `act`, and show its error in the dialog. Resolves to the result of `act`, or to null if the
 * user cancels.
 * @template T
 * @param {Question<T>} question
 * @returns {Promise<T | null>}
 */
export function ask({ title, text, action, danger = false, act }) {
  return new Promise((resolve) => {
    /** @type {T | null} */
    let result = null;
    const problem = h("p", { class: "problem", role: "alert", hidden: true });
    const confirm = h("button", { type: "submit", class: danger ? "danger" : "primary" }, action);
    const cancel = h("button", { type: "button", class: "quiet", on: { click: () => dialog.close() } }, "Cancel");
    const submit = async (/** @type {SubmitEvent} */ event) => {
      event.preventDefault();
      const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
      confirm.disabled = true;
      try {
        result = await act(form);
        dialog.close();
      } catch (error) {
        problem.textContent = words(error);
        problem.hidden = false;
        confirm.disabled = false;
      }
    };
    const dialog = h(
      "dialog",
      { "aria-labelledby": "dialog-title", on: { close: () => (dialog.remove(), resolve(result)) } },
      h(
        "form",
        { on: { submit } },
        h("h2", { id: "dialog-title" }, title),
        h("div", { class: "dialog-text" }, text),
        problem,
        h("div", { class: "actions end" }, cancel, confirm),
      ),
    );
    // Enter must not trigger an action that cannot be undone.
    open(dialog, danger ? cancel : dialog.querySelector("input, select, textarea") ?? confirm);
  });
}

/**
 * Open a dialog. Another page closes it: what it asks about is not shown any more.
 * @param {HTMLDialogElement} dialog
 * @param {HTMLElement} first gets the focus
 */
function open(dialog, first) {
  document.body.append(dialog);
  dialog.showModal();
  first.focus();
  const closed = new AbortController();
  dialog.addEventListener("close", () => closed.abort());
  addEventListener("hashchange", () => dialog.close(), { signal: closed.signal });
}

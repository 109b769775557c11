/** Questions that stand in the way until they are answered. The browser keeps the focus inside and gives it back. */

import { h } from "../dom.js";
import { words } from "./says.js";

/**
 * @template T
 * @typedef {Object} Question
 * @property {string} title
 * @property {import("../dom.js").Children} text
 * @property {string} action what the button says that does it
 * @property {boolean} [danger] whether it can not be undone
 * @property {(form: FormData) => Promise<T>} act
 */

/**
 * Ask before something is done, do it, and say in the same place what went wrong. Resolves to what `act` gave, or null
 * if the user thought better of it.
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
      const given = new FormData(/** @type {HTMLFormElement} */ (event.target));
      confirm.disabled = true;
      try {
        result = await act(given);
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
    document.body.append(dialog);
    dialog.showModal();
    // What can be undone may be one key away; what can not, is not.
    (danger ? cancel : confirm).focus();
  });
}

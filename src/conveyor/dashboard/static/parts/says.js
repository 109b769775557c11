/** What a page says when there is nothing to show: not yet, not any more, or because something went wrong. */

import { Problem } from "../api.js";
import { h } from "../dom.js";

/** @param {string} title @param {...import("../dom.js").Child} more */
export function empty(title, ...more) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), more.length ? h("p", {}, more) : null);
}

export function loading() {
  return h("p", { class: "loading", role: "status" }, "Loading…");
}

/**
 * @param {unknown} error
 * @param {() => void} retry
 */
export function failure(error, retry) {
  const missing = error instanceof Problem && error.status === 404;
  return h(
    "div",
    { class: "card failure", role: "alert" },
    h("h1", {}, missing ? "There is nothing here" : "That did not work"),
    h("p", {}, missing ? "It was deleted, it expired, or it never was." : words(error)),
    h(
      "p",
      { class: "actions" },
      h("button", { type: "button", on: { click: retry } }, "Try again"),
      h("a", { class: "button quiet", href: "#/jobs" }, "All jobs"),
    ),
  );
}

/** @param {unknown} error */
export function words(error) {
  return error instanceof Error ? error.message : String(error);
}

/**
 * A short word at the edge of the page, read out too.
 * @param {string} text
 * @param {"good" | "bad"} [look]
 */
export function toast(text, look = "good") {
  const place = /** @type {HTMLElement} */ (document.getElementById("toasts"));
  const close = () => note.remove();
  const note = h(
    "div",
    { class: `toast ${look}` },
    h("span", {}, text),
    h("button", { type: "button", class: "quiet icon", "aria-label": "Dismiss", on: { click: close } }, "×"),
  );
  place.append(note);
  while (place.childElementCount > 4) place.firstElementChild?.remove();
  setTimeout(close, look === "bad" ? 12_000 : 5_000);
}

/**
 * Do what a button stands for, and say what went wrong; nothing, if that is only that another page is shown by now.
 * @param {() => Promise<unknown>} work
 */
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof DOMException && error.name === "AbortError")) toast(words(error), "bad");
  }
}

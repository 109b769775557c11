/** Messages: empty states, errors and toasts. */

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
    h("h1", {}, missing ? "Not found" : "Something went wrong"),
    h("p", {}, missing ? "It was deleted, has expired, or never existed." : words(error)),
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
 * A short message at the edge of the page, also for screen readers.
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
 * Run the action of a button, and show its error; except if it was aborted because another page is shown.
 * @param {() => Promise<unknown>} work
 */
export async function attempt(work) {
  try {
    await work();
  } catch (error) {
    if (!(error instanceof DOMException && error.name === "AbortError")) toast(words(error), "bad");
  }
}

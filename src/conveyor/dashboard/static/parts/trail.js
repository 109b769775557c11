/** A list of events, oldest first. */

/** @import { ErrorCount, Event } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { empty } from "./says.js";

const PAGE = 100;
// Pages to read, at most, to reach the latest events.
const MAX_PAGES = 5;

/**
 * @param {string} path
 * @param {AbortSignal} signal
 * @param {Record<string, string>} [query]
 */
export function trail(path, signal, query = {}) {
  const node = h("div");
  /** @type {Event[]} */
  let seen = [];
  return {
    node,
    /** The latest events, as last read. */
    get events() {
      return seen;
    },
    async refresh() {
      /** @type {Event[]} */
      let events = [];
      let cursor = null;
      for (let page = 0; page < MAX_PAGES && (page === 0 || cursor); page += 1) {
        const found = /** @type {any} */ (await get(path, { ...query, limit: PAGE, cursor }, signal));
        events = [...events, ...found.items].slice(-PAGE);
        cursor = found.next_cursor;
      }
      seen = events;
      renew(node, events.length ? h("ol", { class: "trail" }, events.map(entry)) : empty("No events yet"));
    },
  };
}

/** @param {Event} event */
function entry(event) {
  const look = /failed|dead|overdue/.test(event.event)
    ? "bad"
    : /succeeded|completed|ready/.test(event.event)
    ? "good"
    : "";
  return h(
    "li",
    { class: look },
    h("span", { class: "trail-name" }, event.event),
    h("span", { class: "trail-what" }, details(event.data)),
    h("span", { class: "muted" }, moment(event.at)),
  );
}

/** The data of an event, as text for people. @param {Record<string, any>} data */
function details({ counts, error, top_errors: errors = [], ...rest }) {
  const plain = Object.entries(rest).filter(([, value]) =>
    value !== "" && (typeof value === "string" || typeof value === "number")
  );
  return [
    error && `${error.code}: ${error.message}`,
    ...plain.map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? count(value) : value}`),
    ...Object.entries(counts ?? {}).filter(([, value]) => value > 0).map(([name, value]) => `${count(value)} ${name}`),
    ...errors.map((/** @type {ErrorCount} */ each) => `${each.code} × ${count(each.count)}`),
  ].filter(Boolean).join(" · ");
}

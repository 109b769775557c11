/** Tables. On a narrow page each row becomes a card, with the column title in front of each value. */

import { h, keyed, renew } from "../dom.js";
import { attempt } from "./says.js";

/**
 * @template T
 * @typedef {{title: string, cell: (item: T) => import("../dom.js").Children, look?: string}} Column
 */

/**
 * Rows keep their nodes, by `keyOf`, while their cells change. The roles are explicit, because the card styles would
 * remove the implicit ones.
 * @template T
 * @param {string} caption
 * @param {Column<T>[]} columns
 * @param {(item: T) => string} keyOf
 */
export function table(caption, columns, keyOf) {
  const body = h("tbody", { role: "rowgroup" });
  const heads = columns.map(({ title, look }) => h("th", { role: "columnheader", scope: "col", class: look }, title));
  const node = h(
    "table",
    { role: "table" },
    h("caption", { class: "hidden" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)),
    body,
  );
  const rows = keyed(body, keyOf, () => {
    const cells = columns.map(({ title, look }) => h("td", { role: "cell", class: look, "data-title": title }));
    return {
      node: h("tr", { role: "row" }, cells),
      update: (/** @type {T} */ item) => columns.forEach(({ cell }, at) => renew(cells[at], cell(item))),
    };
  });
  return { node, rows };
}

/**
 * A pager for cursors: it remembers the cursors of earlier pages.
 * @param {() => Promise<void>} turn called to load another page
 */
export function pager(turn) {
  /** @type {(string | null)[]} */
  let cursors = [null];
  /** @type {string | null} */
  let next = null;
  const go = (/** @type {() => void} */ change) => () => {
    change();
    void attempt(turn);
  };
  const back = h("button", { type: "button", class: "quiet", on: { click: go(() => cursors.pop()) } }, "Previous");
  const on = h("button", { type: "button", class: "quiet", on: { click: go(() => cursors.push(next)) } }, "Next");
  const where = h("span", { class: "muted" });
  return {
    node: h("nav", { class: "pager", "aria-label": "Pages" }, back, where, on),
    get cursor() {
      return cursors[cursors.length - 1];
    },
    get first() {
      return cursors.length === 1;
    },
    reset() {
      cursors = [null];
    },
    /** @param {string | null} after the cursor of the next page */
    show(after) {
      next = after;
      back.disabled = cursors.length === 1;
      on.disabled = after === null;
      where.textContent = `Page ${cursors.length}`;
      this.node.hidden = cursors.length === 1 && after === null;
    },
  };
}

/** Tables. On a narrow page each row becomes a card, with the column title in front of each value. */

import { remember, stateOf } from "../address.js";
import { h, keyed, renew } from "../dom.js";
import { attempt } from "./says.js";

/**
 * @template T
 * @typedef {Object} Column
 * @property {string} title
 * @property {(item: T) => import("../dom.js").Children} cell
 * @property {string} [look]
 * @property {(item: T) => string | number} [sort] what the rows are sorted by, when the title is clicked
 */

/**
 * Rows keep their nodes, by `keyOf`, while their cells change. The roles are explicit, because the card styles would
 * remove the implicit ones.
 * @template T
 * @param {string} caption
 * @param {Column<T>[]} columns
 * @param {(item: T) => string} keyOf
 * @param {string} [sortName] the name in the address of the column that the loaded rows are sorted by
 */
export function table(caption, columns, keyOf, sortName = "") {
  const body = h("tbody", { role: "rowgroup" });
  /** @type {T[]} */
  let items = [];
  const sortBy = (/** @type {string} */ title) => {
    const now = stateOf(sortName);
    remember({ [sortName]: now === title ? `-${title}` : now === `-${title}` ? null : title });
    show(items);
  };
  const heads = columns.map(({ title, look, sort }) =>
    h(
      "th",
      { role: "columnheader", scope: "col", class: look },
      sort && sortName
        ? h("button", {
          type: "button",
          class: "sorter",
          title: "Sort the rows of this page",
          on: { click: () => sortBy(title) },
        }, title)
        : title || h("span", { class: "hidden" }, look === "check" ? "Select" : "Actions"),
    )
  );
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
  const show = (/** @type {T[]} */ shown) => {
    items = shown;
    const sorted = sortName ? stateOf(sortName) : "";
    const column = columns.find(({ title, sort }) => sort && (sorted === title || sorted === `-${title}`));
    columns.forEach((each, at) => {
      if (each !== column) heads[at].removeAttribute("aria-sort");
      else heads[at].setAttribute("aria-sort", sorted.startsWith("-") ? "descending" : "ascending");
    });
    rows(column?.sort ? inOrder(shown, column.sort, sorted.startsWith("-") ? -1 : 1) : shown);
  };
  return { node, rows: show };
}

/**
 * @template T
 * @param {T[]} items
 * @param {(item: T) => string | number} by
 * @param {1 | -1} direction
 */
function inOrder(items, by, direction) {
  return [...items].sort((a, b) => {
    const [first, second] = [by(a), by(b)];
    return direction * (first < second ? -1 : first > second ? 1 : 0);
  });
}

/**
 * A pager for cursors: it remembers the cursors of earlier pages. The cursor and the number of the page are in the
 * address; if a link led to this page, the cursor before it is unknown, and Previous leads to the first one.
 * @param {() => Promise<void>} turn called to load another page
 * @param {string} of what is on the pages: a screen may have several pagers
 * @param {boolean} [inAddress] only one pager of a screen can be
 */
export function pager(turn, of, inAddress = true) {
  /** @type {(string | null | undefined)[]} */
  let cursors = inAddress ? fromAddress() : [null];
  /** @type {string | null} */
  let next = null;
  const go = (/** @type {() => void} */ change) => () => {
    change();
    const page = cursors.length > 1 ? cursors.length : null;
    if (inAddress) remember({ cursor: cursors[cursors.length - 1] ?? null, page });
    void attempt(turn);
  };
  const previous = () => {
    cursors.pop();
    if (cursors[cursors.length - 1] === undefined) cursors = [null];
  };
  const back = h("button", { type: "button", class: "quiet", on: { click: go(previous) } }, "Previous");
  const on = h("button", { type: "button", class: "quiet", on: { click: go(() => cursors.push(next)) } }, "Next");
  const where = h("span", { class: "muted" });
  return {
    node: h("nav", { class: "pager", "aria-label": `Pages of ${of}`, hidden: true }, back, where, on),
    get cursor() {
      return cursors[cursors.length - 1] ?? null;
    },
    get next() {
      return next;
    },
    get first() {
      return cursors.length === 1;
    },
    /** To the first page; the caller remembers it with what it changes. */
    reset() {
      cursors = [null];
    },
    /** To the page of the address. */
    restore() {
      const wanted = fromAddress();
      const known = cursors[wanted.length - 1] === wanted[wanted.length - 1];
      cursors = known ? cursors.slice(0, wanted.length) : wanted;
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

/** The cursors up to the page of the address; those before it are unknown. @returns {(string | null | undefined)[]} */
function fromAddress() {
  const cursor = stateOf("cursor");
  if (!cursor) return [null];
  const number = Math.min(Math.max(Math.trunc(Number(stateOf("page"))) || 2, 2), 10_000);
  return [null, ...Array(number - 2).fill(undefined), cursor];
}

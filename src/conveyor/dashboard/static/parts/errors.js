/** Errors of a run, most frequent first; a click shows the failed tasks. */

/** @import { ErrorCount } from "../shapes.js" */

import { h, keyed, renew, svg } from "../dom.js";
import { count } from "../format.js";

/** @param {(code: string) => void} pick called with the code of a clicked error */
export function errorsList(pick) {
  const none = h("p", { class: "muted" }, "No task has failed.");
  const list = h("ul", { class: "errors" });
  let most = 1;
  const rows = keyed(
    list,
    (/** @type {ErrorCount} */ error) => error.code,
    ({ code }) => {
      const button = h("button", {
        type: "button",
        class: "error",
        title: "Show these tasks",
        on: { click: () => pick(code) },
      });
      return {
        node: h("li", {}, button),
        update: (error) =>
          renew(
            button,
            h("code", {}, code),
            share(error.count / most),
            h("b", {}, count(error.count)),
          ),
      };
    },
  );
  return {
    node: h("div", {}, none, list),
    /** @param {ErrorCount[]} errors */
    show(errors) {
      most = errors[0]?.count ?? 1;
      none.hidden = errors.length > 0;
      rows(errors);
    },
  };
}

/** @param {number} part of 1 */
function share(part) {
  return h(
    "span",
    { class: "progress" },
    svg(
      "svg",
      { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("rect", { class: "failed", width: 100 * part, height: 10 }),
    ),
  );
}

/** Errors of a run, most frequent first; a click shows the failed tasks. */

/** @import { ErrorCount } from "../shapes.js" */

import { h, keyed, renew, svg } from "../dom.js";
import { count, number } from "../format.js";

/** @param {(code: string) => void} pick called with the code of a clicked error */
export function errorsList(pick) {
  const none = h("p", { class: "muted" }, "No task has failed.");
  const list = h("ul", { class: "errors" });
  const rest = h("p", { class: "muted" });
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
    node: h("div", {}, none, list, rest),
    /**
     * @param {ErrorCount[]} errors as they were counted last
     * @param {number} failed tasks by now
     */
    show(errors, failed) {
      most = errors[0]?.count ?? 1;
      const others = errors.reduce((left, each) => left - each.count, failed);
      none.hidden = failed > 0 || errors.length > 0;
      rows(errors);
      rest.hidden = others <= 0;
      renew(rest, `${number(others, "failed task")} with other errors, or not counted by error yet.`);
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

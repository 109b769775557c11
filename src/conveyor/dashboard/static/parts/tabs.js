/** Parts of a page, of which one is shown. They are links, so that each part has an address. */

import { addressWith, stateOf } from "../address.js";
import { h, renew } from "../dom.js";

/** @typedef {{id: string, label: string, nodes: Element[], isEmpty?: () => boolean}} Tab */

/**
 * @param {string} label of all of them
 * @param {Tab[]} entries the first one is shown by default
 */
export function tabs(label, entries) {
  const links = h("nav", { class: "tabs", "aria-label": label });
  const panels = new Map(entries.map((each) => [each.id, h("div", { class: "panel" }, each.nodes)]));
  const current = () => (panels.has(stateOf("tab")) ? stateOf("tab") : entries[0].id);
  return {
    nodes: [links, ...panels.values()],
    current,
    /** Show the tab of the address. */
    show() {
      const here = current();
      for (const [id, panel] of panels) panel.hidden = id !== here;
      renew(
        links,
        entries.filter((each) => each.id === here || !each.isEmpty?.()).map((each) =>
          h(
            "a",
            {
              // Filters and pages belong to the list of tasks.
              href: addressWith({ tab: each === entries[0] ? null : each.id, cursor: null, page: null }),
              "aria-current": each.id === here ? "page" : null,
            },
            each.label,
          )
        ),
      );
    },
  };
}

/** The first lines of a list, as the server will read them. */

import { send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, input, number } from "../format.js";
import { words } from "./says.js";

const BEGINNING = 48 * 1024;
const PAUSE = 400;
const SHOWN = 5;

/** @typedef {{index: number, input: unknown}} PreviewedTask */

/** @param {AbortSignal} signal */
export function listPreview(signal) {
  const node = h("div", { class: "preview", role: "status" });
  let asked = 0;
  const load = async (/** @type {Blob} */ list, /** @type {Record<string, unknown>} */ form) => {
    const mine = (asked += 1);
    await new Promise((resolve) => setTimeout(resolve, PAUSE));
    if (mine !== asked || signal.aborted) return;
    if (!list.size) return renew(node);
    if (form.compression) return renew(node, h("p", { class: "muted" }, "A compressed list has no preview."));
    const { compression: _, ...rest } = form;
    const text = await list.slice(0, BEGINNING).text();
    try {
      const read = await send("POST", "/v1/lists/preview", { ...rest, text, is_cut: list.size > BEGINNING }, {
        signal,
      });
      if (mine === asked) renew(node, drawn(read, list.size > BEGINNING));
    } catch (error) {
      if (mine === asked && !signal.aborted) renew(node, h("p", { class: "problem" }, words(error)));
    }
  };
  return { node, load };
}

/**
 * @param {{format: string, tasks: PreviewedTask[], invalid: {line: number, reason: string}[], task_count: number,
 *   invalid_count: number}} read
 * @param {boolean} more
 */
function drawn({ format, tasks, invalid, task_count, invalid_count }, more) {
  const scope = more ? "in the first lines" : "in the list";
  return [
    h(
      "p",
      { class: "muted" },
      `Read as ${format}: ${number(task_count, "task")}`,
      invalid_count > 0 && `, ${number(invalid_count, "invalid line")}`,
      ` ${scope}.`,
    ),
    h(
      "ol",
      { class: "preview-tasks" },
      tasks.slice(0, SHOWN).map((task) => h("li", {}, h("code", {}, input(task.input)))),
    ),
    invalid.slice(0, SHOWN).map(({ line, reason }) =>
      h("p", { class: "problem-line" }, h("b", {}, `Line ${count(line)}: `), reason)
    ),
  ];
}

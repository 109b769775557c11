/** The filters of the list of jobs: name or id, state, kind, schedule, and when the job was created. */

/** @import { Schedule } from "../shapes.js" */

import { stateOf } from "../address.js";
import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { attempt } from "./says.js";

const TYPING_MS = 300;
const MAX_SCHEDULES = 100;
const NAMES = ["text", "state", "kind", "schedule", "from", "to"];

/**
 * @param {AbortSignal} signal
 * @param {(kind: "step" | "typing") => void} changed called when a filter has changed
 */
export function jobFilters(signal, changed) {
  let typing = 0;
  const choose = (/** @type {string} */ id, /** @type {[string, string][]} */ options) =>
    h("select", { id, on: { change: () => changed("step") } }, choices(options));
  const day = (/** @type {string} */ id) => h("input", { type: "date", id, on: { change: () => changed("step") } });
  const typed = () => {
    clearTimeout(typing);
    typing = setTimeout(() => changed("typing"), TYPING_MS);
  };
  const text = h("input", {
    type: "search",
    id: "filter",
    placeholder: "Name or id, of all jobs",
    maxlength: 200,
    "data-shortcut": "/",
    on: { input: typed },
  });
  const state = choose("state", [
    ["", "any state"],
    ["active", "active"],
    ["ingesting", "ingesting"],
    ["running", "running"],
    ["paused", "paused"],
    ["completed", "completed"],
    ["failed", "failed"],
    ["cancelled", "cancelled"],
  ]);
  const kind = choose("kind", [
    ["", "any kind"],
    ["fetch", "fetch"],
    ["download", "download"],
    ["export_download", "export_download"],
    ["python", "python"],
  ]);
  const schedule = choose("schedule", [["", "any schedule"]]);
  const [from, to] = [day("from"), day("to")];
  /** @type {Record<string, HTMLInputElement | HTMLSelectElement>} */
  const fields = { text, state, kind, schedule, from, to };
  const more = h(
    "details",
    { class: "more-filters" },
    h("summary", {}, "More filters"),
    h(
      "div",
      { class: "filters" },
      labelled("Kind", kind),
      labelled("Schedule", schedule),
      labelled("Created from", from),
      labelled("to", to),
    ),
  );
  const loadSchedules = async () => {
    const page = await get("/v1/schedules", { limit: MAX_SCHEDULES }, signal);
    const wanted = stateOf("schedule");
    const known = page.items.map((/** @type {Schedule} */ each) => [each.id, each.name ?? each.cron]);
    const missing = wanted && !known.some((/** @type {string[]} */ [id]) => id === wanted) ? [[wanted, wanted]] : [];
    renew(schedule, choices([["", "any schedule"], ...known, ...missing]));
    schedule.value = wanted;
  };
  void attempt(loadSchedules);

  return {
    nodes: [
      h("label", { for: "filter", class: "hidden" }, "Search all jobs by name or id"),
      text,
      h("label", { for: "state", class: "hidden" }, "State"),
      state,
      more,
    ],
    isSet: () => NAMES.some((name) => fields[name].value.trim() !== ""),
    /** As the address has them. @returns {Record<string, string>} */
    values: () => Object.fromEntries(NAMES.map((name) => [name, fields[name].value.trim()])),
    /** As the server takes them. */
    query: () => ({
      text: text.value.trim(),
      state: state.value,
      kind: kind.value,
      schedule_id: schedule.value,
      created_after: from.value && new Date(`${from.value}T00:00`).toISOString(),
      created_before: to.value && dayAfter(to.value).toISOString(),
    }),
    /** Take over the state of the address. */
    restore() {
      clearTimeout(typing);
      for (const name of NAMES) {
        const value = stateOf(name);
        if (name === "schedule" && value && ![...schedule.options].some((each) => each.value === value)) {
          schedule.append(...choices([[value, value]]));
        }
        if (document.activeElement !== fields[name] || fields[name].value.trim() !== value) fields[name].value = value;
      }
      if (["kind", "schedule", "from", "to"].some((name) => stateOf(name))) more.open = true;
    },
  };
}

/** @param {[string, string][]} options */
function choices(options) {
  return options.map(([value, text]) => h("option", { value }, text));
}

/** @param {string} text @param {Element} field */
function labelled(text, field) {
  return h("label", { class: "inline" }, h("span", { class: "muted" }, text), field);
}

/** @param {string} day */
function dayAfter(day) {
  const at = new Date(`${day}T00:00`);
  at.setDate(at.getDate() + 1);
  return at;
}

/**
 * The options of a job as fields of forms: labels, help, defaults and limits, in groups. A name with a dot is a part of an
 * option. A test compares defaults and limits with those of the server.
 */

import { choice, field, text } from "./form.js";
import { h } from "../dom.js";

/**
 * @typedef {Object} OptionField
 * @property {string} name
 * @property {string} label
 * @property {string} hint
 * @property {"whole" | "number" | "choice" | "numbers" | "words" | "text" | "headers" | "gateway"} type
 * @property {any} [standard] the default; null for none
 * @property {number} [inside] the default of a part, where the option that it is a part of is given
 * @property {number} [min]
 * @property {number} [max]
 * @property {[string, string][]} [choices] values and labels
 * @property {string[]} [kinds] the kinds of jobs that have it; all without it
 * @property {string} [mode] the mode of jobs that have it; all without it
 */

const YEAR = 31_536_000;
const DAY = 86_400;
const GIB = 1_073_741_824;
const REQUESTS = ["fetch", "download", "export_download"];

/** @type {{title: string, fields: OptionField[]}[]} */
export const GROUPS = [
  {
    title: "Speed",
    fields: [
      whole("concurrency", "Concurrency", "Tasks in progress at once, over all workers.", 64, 1, 10_000),
      number("rate_per_host", "Rate per host", "Requests a second to one host. No limit if empty.", null, 0, 1_000_000),
      whole("concurrency_per_host", "Concurrency per host", "Requests at once to one host.", null, 1, 10_000),
      {
        name: "pace",
        label: "Pace",
        hint: "As many requests at once as each host can take: usual without a limit per host and a gateway.",
        type: "choice",
        standard: null,
        choices: [["", "as usual"], ["auto", "automatic"], ["fixed", "fixed"]],
        kinds: ["fetch", "download"],
      },
      {
        name: "robots",
        label: "robots.txt",
        hint: "Whether URLs that a site's robots.txt disallows fail without a request.",
        type: "choice",
        standard: null,
        choices: [["", "ignored"], ["obey", "obeyed"]],
        kinds: ["fetch", "download"],
      },
      whole("priority", "Priority", "Among the jobs of a tenant, the highest goes first.", 0, -1000, 1000),
    ],
  },
  {
    title: "Retries",
    fields: [
      whole("attempts", "Attempts", "Of each task, including the first.", 4, 1, 100),
      number("backoff.base", "Backoff", "Seconds before the first retry, at most: the wait is random.", 1, 0, 3600),
      number("backoff.rate", "Backoff rate", "Each further wait is this many times longer.", 2, 1, 100),
      number("backoff.cap", "Longest backoff", "In seconds.", 300, 0, DAY),
      {
        name: "backoff.jitter",
        label: "Backoff jitter",
        hint: "Whether waits are random, up to their bound, or exactly that bound.",
        type: "choice",
        standard: true,
        choices: [["true", "on"], ["false", "off"]],
      },
      {
        name: "retry_statuses",
        label: "Retried HTTP statuses",
        hint: "Separated by commas.",
        type: "numbers",
        standard: [408, 425, 429, 500, 502, 503, 504],
        kinds: REQUESTS,
      },
      {
        name: "retry_errors",
        label: "Retried error codes",
        hint: "Separated by commas. Those of transient failures if empty.",
        type: "words",
        standard: null,
      },
      {
        ...whole("outage.quick_tries", "Attempts before an outage", "Then tasks wait for the delay.", null, 1, 100),
        inside: 2,
      },
      {
        ...number("outage.delay", "Delay in an outage", "Seconds to wait while a target is unavailable.", null, 0, DAY),
        inside: 900,
      },
      {
        name: "on_exhausted",
        label: "Without retries left",
        hint: "A dead letter can be redriven later.",
        type: "choice",
        standard: "fail",
        choices: [["fail", "the task fails"], ["dead_letter", "dead letter"]],
      },
      {
        name: "breaker.enabled",
        label: "Breaker",
        hint: "Whether tasks wait while their target is down.",
        type: "choice",
        standard: true,
        choices: [["true", "on"], ["false", "off"]],
      },
      number("breaker.patience", "Patience", "Seconds that tasks wait for a target that is down.", 3600, 0, 30 * DAY),
      {
        name: "upstream",
        label: "Upstream",
        hint: "Your name for the system behind all tasks: one breaker for all of them.",
        type: "text",
        standard: null,
      },
    ],
  },
  {
    title: "Time limits",
    fields: [
      number(
        "timeout",
        "Timeout",
        "Seconds for an attempt; of a download, until it starts and between reads.",
        30,
        0.1,
        DAY,
      ),
      number("connect_timeout", "Connect timeout", "In seconds.", 10, 0.1, DAY, REQUESTS),
      number(
        "task_deadline",
        "Task deadline",
        "Seconds after its first attempt in which a task may start another.",
        null,
        1,
        YEAR,
      ),
      number("deadline", "Run deadline", "Seconds after which a run is overdue and fails in the end.", null, 1, YEAR),
      number(
        "max_lifetime",
        "Maximum lifetime",
        "Seconds after which an unfinished run fails, paused or not.",
        null,
        1,
        10 * YEAR,
      ),
      number(
        "stuck_after",
        "Stuck after",
        "Seconds without progress after which a long task is taken over.",
        null,
        1,
        DAY,
      ),
      {
        ...number(
          "idle_timeout",
          "Idle timeout",
          "Seconds without a batch after which the job is closed.",
          3600,
          1,
          30 * DAY,
        ),
        mode: "open",
      },
    ],
  },
  {
    title: "Requests",
    fields: [
      {
        name: "headers",
        label: "Headers",
        hint: "Name: value, one a line. Stored values are not shown: to change any, type all of them.",
        type: "headers",
        standard: {},
        kinds: REQUESTS,
      },
      {
        name: "gateway",
        label: "Gateway",
        hint: "The URL of a proxy, or a template with {url}. It is not shown.",
        type: "gateway",
        standard: null,
        kinds: REQUESTS,
      },
      {
        name: "insecure",
        label: "Certificates",
        hint: "Not verified: anyone on the way can read and change requests and responses. The server must allow it.",
        type: "choice",
        standard: false,
        choices: [["false", "verified"], ["true", "not verified"]],
        kinds: REQUESTS,
      },
      {
        name: "http2",
        label: "HTTP/2",
        hint: "Whether sites may choose it. If off, all requests are HTTP/1.1.",
        type: "choice",
        standard: false,
        choices: [["false", "off"], ["true", "on"]],
        kinds: REQUESTS,
      },
      {
        name: "success_statuses",
        label: "Successful HTTP statuses",
        hint: "Separated by commas. 200 to 299 if empty.",
        type: "numbers",
        standard: [],
        kinds: REQUESTS,
      },
      whole("max_redirects", "Redirects", "Followed at most.", 5, 0, 20, REQUESTS),
      whole("max_body_bytes", "Maximum body", "In bytes.", 33_554_432, 0, GIB, ["fetch"]),
      whole("download.max_bytes", "Maximum download", "In bytes.", 53_687_091_200, 0, 5120 * GIB, REQUESTS.slice(1)),
      number(
        "download.min_rate",
        "Minimum rate",
        "Bytes a second, over the time below.",
        1024,
        0,
        GIB,
        REQUESTS.slice(1),
      ),
      number("download.min_rate_seconds", "Time for the minimum rate", "In seconds.", 60, 1, DAY, REQUESTS.slice(1)),
    ],
  },
  {
    title: "Results",
    fields: [
      number("retention_days", "Retention", "Days for which results are kept after the end.", 14, 0, 365),
      whole(
        "failure_threshold.failed",
        "Stop at failed tasks",
        "The run fails when this many tasks have failed.",
        null,
        1,
        2 ** 40,
      ),
      number(
        "failure_threshold.ratio",
        "Stop at a share",
        "The run fails when more than this share failed: 0.1 is a tenth.",
        null,
        0,
        1,
      ),
      {
        ...whole("failure_threshold.after", "Share counts after", "Finished tasks; 100 if empty.", null, 0, 2 ** 40),
        inside: 100,
      },
    ],
  },
];

export const FIELDS = GROUPS.flatMap((group) => group.fields);

/**
 * @param {string} name
 * @param {string} label
 * @param {string} hint
 * @param {number | null} standard
 * @param {number} min
 * @param {number} max
 * @param {string[]} [kinds]
 * @returns {OptionField}
 */
function number(name, label, hint, standard, min, max, kinds) {
  return { name, label, hint, type: "number", standard, min, max, kinds };
}

/** As number, for whole numbers. @type {typeof number} */
function whole(name, label, hint, standard, min, max, kinds) {
  return { ...number(name, label, hint, standard, min, max, kinds), type: "whole" };
}

/** Whether jobs of a kind and mode have the option. @param {OptionField} option @param {string} kind @param {string} mode */
export function applies({ kinds, mode: only }, kind, mode) {
  return (!kinds || kinds.includes(kind)) && (!only || only === mode);
}

/** Whether it can be empty: then the option is none. @param {OptionField} option */
export const isOptional = ({ standard }) => standard === null;

/**
 * A field for the option. Its id is `prefix` and the name of the option.
 * @param {OptionField} option
 * @param {{prefix?: string, disabled?: boolean, isFilled?: boolean}} [look] `isFilled`: an empty field is not the default
 */
export function optionField(option, { prefix = "", disabled = false, isFilled = true } = {}) {
  const id = `${prefix}${option.name}`;
  return field(id, option.label, control(option, id, { name: option.name, disabled, required: isFilled }), option.hint);
}

/** @param {OptionField} option @param {string} id @param {{name: string, disabled: boolean, required: boolean}} props */
function control(option, id, { name, disabled, required }) {
  const must = required && !isOptional(option);
  switch (option.type) {
    case "whole":
    case "number":
      return text(id, {
        name,
        disabled,
        type: "number",
        min: option.min,
        max: option.max,
        step: option.type === "whole" ? 1 : "any",
        required: must,
      });
    case "choice": {
      const node = choice(id, option.choices ?? []);
      node.name = name;
      node.disabled = disabled;
      return node;
    }
    case "headers":
      return h("textarea", { id, name, disabled, rows: 3, spellcheck: "false", autocomplete: "off" });
    default:
      return text(id, { name, disabled });
  }
}

/** The value of an option, as its field shows it. @param {OptionField} option @param {Record<string, any>} options */
export function shownValue(option, options) {
  const value = storedValue(option, options);
  if (value === null || value === undefined) return "";
  if (option.type === "headers") return Object.entries(value).map(([name, each]) => `${name}: ${each}`).join("\n");
  if (option.type === "gateway") return value.proxy ?? value.url ?? "";
  return Array.isArray(value) ? value.join(", ") : String(value);
}

/** The value, or the default: the server leaves defaults out. @param {OptionField} option @param {Record<string, any>} options */
function storedValue({ name, standard, inside }, options) {
  const [outer, inner] = name.split(".");
  if (!inner) return options[outer] === undefined ? standard : options[outer];
  const whole = options[outer];
  const value = whole?.[inner];
  return value !== undefined ? value : whole && inside !== undefined ? inside : standard;
}

/** What a field means: the value of the option, or null for none. @param {OptionField} option @param {string} typed */
export function valueOf(option, typed) {
  const shown = typed.trim();
  const parts = shown.split(",").map((each) => each.trim()).filter(Boolean);
  switch (option.type) {
    case "whole":
    case "number":
      return shown === "" ? null : Number(shown);
    case "numbers":
      return parts.map((each) => (/^\d+$/.test(each) ? Number(each) : each));
    case "words":
      return parts.length ? parts : null;
    case "headers":
      return Object.fromEntries(shown.split("\n").filter((line) => line.trim()).map(header));
    case "gateway":
      return shown === "" ? null : shown.includes("{url}") ? { url: shown } : { proxy: shown };
    case "choice":
      return shown === "true" || shown === "false" ? shown === "true" : shown || null;
    default:
      return shown || null;
  }
}

/** @param {string} line @returns {[string, string]} */
function header(line) {
  const at = line.indexOf(":");
  return at < 0 ? [line.trim(), ""] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
}

/**
 * The body of a change: the options of which a field changed, each whole.
 * @param {Record<string, any>} options those of the job
 * @param {Map<OptionField, string>} changed what was typed
 */
export function changesOf(options, changed) {
  /** @type {Record<string, any>} */
  const body = {};
  for (const [option, typed] of changed) {
    const [outer, inner] = option.name.split(".");
    const value = valueOf(option, typed);
    if (!inner) body[outer] = value;
    else body[outer] = { ...(body[outer] ?? options[outer] ?? {}), [inner]: value };
  }
  if (body.outage) body.outage = given(body.outage, ["quick_tries", "delay"]);
  if (body.failure_threshold) body.failure_threshold = given(body.failure_threshold, ["failed", "ratio"]);
  return body;
}

/**
 * An option with parts: null if none of those that it needs is given, otherwise without empty parts.
 * @param {Record<string, any>} value
 * @param {string[]} needed
 */
function given(value, needed) {
  if (!needed.some((name) => typeof value[name] === "number")) return null;
  return Object.fromEntries(Object.entries(value).filter(([, each]) => each !== null));
}

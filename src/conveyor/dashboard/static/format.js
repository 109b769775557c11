/** Numbers, times and sizes for people. */

import { h } from "./dom.js";

// The words of the dashboard are English, and so are its numbers and times: in the user's own kind of English, if any.
export const LOCALE = navigator.languages.find((each) => /^en\b/i.test(each)) ?? "en-GB";
const WHOLE = new Intl.NumberFormat(LOCALE);
const SHORT = new Intl.NumberFormat(LOCALE, { notation: "compact", maximumFractionDigits: 1 });
const MOMENT = new Intl.DateTimeFormat(LOCALE, { dateStyle: "medium", timeStyle: "medium" });
const CLOCK = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const AGO = new Intl.RelativeTimeFormat(LOCALE, { numeric: "always", style: "short" });
const UNITS = /** @type {const} */ ([["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]]);
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (/** @type {number} */ value) => WHOLE.format(value);
/** A tick of an axis: 20, 1.5k, 0.002. @param {number} value */
export const short = (value) => value > 0 && value < 0.1 ? String(Number(value.toPrecision(1))) : SHORT.format(value);

/** As text: 1 task, 2 tasks. @param {number} value @param {string} noun */
export const number = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** @param {number} part @param {number} whole */
export function percent(part, whole) {
  if (whole === 0) return "0%";
  const share = (100 * part) / whole;
  // 100% only if everything is finished, 0% only if nothing is.
  if (part < whole && share > 99.9) return "99.9%";
  if (part > 0 && share < 0.1) return "0.1%";
  return `${share.toFixed(share < 10 && share !== Math.round(share) ? 1 : 0)}%`;
}

/** @param {number} value tasks a second */
export function rate(value) {
  if (value >= 100) return `${WHOLE.format(Math.round(value))}/s`;
  // A decimal of a second would say nothing of a file every minute.
  const [amount, unit] = value >= 0.1 || value === 0
    ? [value, "s"]
    : value >= 0.1 / 60
    ? [60 * value, "min"]
    : [3600 * value, "h"];
  return `${amount.toFixed(1)}/${unit}`;
}

/** @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return "< 1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [
    Math.floor(whole / 86400),
    Math.floor(whole / 3600) % 24,
    Math.floor(whole / 60) % 60,
  ];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < SIZES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${SIZES[unit]}`;
}

/** @param {string | number} time */
export const clock = (time) => CLOCK.format(new Date(time));

/**
 * A time relative to now; the title has the absolute time.
 * @param {string | null} iso
 */
export function moment(iso) {
  if (iso === null) return "–";
  const at = new Date(iso);
  return h("time", { datetime: iso, title: MOMENT.format(at) }, relative((at.getTime() - Date.now()) / 1000));
}

/** A time to come: the date there, and how far it is. @param {string} iso @param {string} zone */
export function coming(iso, zone) {
  const there = new Intl.DateTimeFormat(LOCALE, { dateStyle: "medium", timeStyle: "short", timeZone: zone });
  return h("span", {}, there.format(new Date(iso)), " · ", moment(iso));
}

/** @param {number} seconds from now, below 0 for the past */
function relative(seconds) {
  if (Math.abs(seconds) < 10) return seconds < 0 ? "just now" : "now";
  const [unit, length] = UNITS.find(([, size]) => Math.abs(seconds) >= size) ?? UNITS[UNITS.length - 1];
  return AGO.format(Math.round(seconds / length), unit);
}

/**
 * The input of a task, in one line.
 * @param {unknown} input
 */
export function input(input) {
  if (typeof input === "string") return input;
  const url = input !== null && typeof input === "object" ? /** @type {any} */ (input).url : undefined;
  return typeof url === "string" ? url : JSON.stringify(input);
}

/** The user's own id and tag of a task of URLs, in one line. @param {unknown} input */
export function labels(input) {
  const { url, id, tag } = /** @type {any} */ (input ?? {});
  return typeof url === "string" ? [id, tag].filter((each) => typeof each === "string").join(" · ") : "";
}

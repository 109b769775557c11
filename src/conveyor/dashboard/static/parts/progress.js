/** How far long tasks are: how much of it, how fast, and the time left. */

/** @import { Progressed } from "../shapes.js" */

import { bytes, count, duration, percent, rate as perSecond } from "../format.js";

/**
 * @param {Progressed} progress
 * @param {string} kind of the job: functions report units of their own, all others bytes
 */
export function progressParts({ done, total, rate }, kind) {
  const amount = kind === "python" ? count : bytes;
  const left = total !== null && rate ? (total - done) / rate : 0;
  return [
    total === null ? amount(done) : `${amount(done)} of ${amount(total)}`,
    total !== null && percent(done, total),
    rate ? (kind === "python" ? perSecond(rate) : `${bytes(rate)}/s`) : null,
    left > 0 && `${duration(left)} left`,
  ].filter((each) => typeof each === "string");
}

/** One task in a line. @param {Progressed & {note: string | null}} progress @param {string} kind */
export const progressText = (progress, kind) =>
  [...progressParts(progress, kind), progress.note].filter(Boolean).join(" · ");

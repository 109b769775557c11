/** Charts of a run, in plain SVG, each with a text alternative. */

import { remember, stateOf } from "../address.js";
import { h, renew, svg } from "../dom.js";
import { clock, count, duration, rate, short } from "../format.js";
import { area, axis, drawing, grid, GROUND, LEFT, legend, scale, ticks, timeTicks, tippedFigure, TOP } from "./axes.js";

/** @import { Duration, Ended, Sample, Series } from "../shapes.js" */

// Of two stacked charts, the baseline of the upper and the top of the lower one.
const UPPER = 132;
const LOWER = 150;
// Number of intervals; minimum and maximum number of bars of a histogram.
const INTERVALS = 60;
const [MIN_BARS, MAX_BARS] = [12, 40];
// Ratio of two neighbouring buckets of the server's histogram.
const STEP = 1.1;
const SAMPLE_MS = 1_000;
const MAX_SAMPLES = 600;
// What a time range can be, in minutes.
const RANGES =
  /** @type {const} */ ([[5, "5 minutes"], [15, "15 minutes"], [60, "hour"], [360, "6 hours"], [1440, "day"]]);

/**
 * Add a sample, at most one a second. Above the maximum, every other sample is dropped.
 * @param {Sample[]} samples
 * @param {Ended} counts
 */
export function addSample(samples, counts) {
  const now = new Date();
  if (now.getTime() - Date.parse(samples[samples.length - 1].at) < SAMPLE_MS) return;
  samples.push({ at: now.toISOString(), ...counts });
  if (samples.length <= MAX_SAMPLES) return;
  const kept = samples.filter((_, at) => at % 2 === 0 || at === samples.length - 1);
  samples.splice(0, samples.length, ...kept);
}

/**
 * The last minutes that a chart shows; in the address.
 * @param {() => void} changed
 */
export function timeRange(changed) {
  const node = h("select", { class: "small", "aria-label": "Time range" });
  node.addEventListener("change", () => {
    remember({ range: node.value });
    changed();
  });
  return {
    node,
    /** The start of what is shown, with ranges to choose that are shorter than all. @param {number} from @param {number} to */
    start(from, to) {
      const wanted = stateOf("range");
      const known = RANGES.filter(([minutes]) => minutes * 60_000 < to - from || String(minutes) === wanted);
      renew(
        node,
        h("option", { value: "", selected: wanted === "" }, "all time"),
        known.map(([minutes, name]) =>
          h("option", { value: minutes, selected: String(minutes) === wanted }, `last ${name}`)
        ),
      );
      node.hidden = known.length === 0;
      node.value = known.some(([minutes]) => String(minutes) === wanted) ? wanted : "";
      return node.value ? Math.max(from, to - 60_000 * Number(node.value)) : from;
    },
  };
}

/** `worked` leaves out cancelled tasks: they took no work. */
/** @typedef {{t: number, done: number, worked: number, failed: number}} Point */
/** @typedef {{from: number, to: number, point: Point, rate: number, retries: number}} Interval */

/** Finished tasks over time, and below it the throughput with retries. */
export function progressChart() {
  const figure = tippedFigure("Throughput over time");
  /** @type {[Sample[], Series, number]} */
  let last = [[], { seconds: 1, items: [] }, 0];
  const range = timeRange(() => show(...last));
  figure.node.prepend(range.node);
  const show = (/** @type {Sample[]} */ samples, /** @type {Series} */ series, /** @type {number} */ total) => {
    last = [samples, series, total];
    const all = samples.map((each) => ({
      t: Date.parse(each.at),
      failed: each.failed,
      worked: each.succeeded + each.failed,
      done: each.succeeded + each.failed + each.cancelled,
    }));
    const end = all[all.length - 1];
    const start = range.start(all[0].t, end.t);
    const retried = series.items.reduce((sum, each) => sum + each.retried, 0);
    if (end.done === 0 && retried === 0) return figure.say("No task has finished yet.");
    const points = since(all, start);
    const width = figure.width();
    const x = scale(points[0].t, end.t, LEFT, width);
    const counts = ticks(Math.max(total, end.done), 2);
    const y = scale(0, counts[counts.length - 1], UPPER, TOP);
    const intervals = withRetries(throughput(points), series);
    const rates = ticks(Math.max(...intervals.map((each) => each.rate + each.retries)), 1);
    const speed = scale(0, rates[rates.length - 1], GROUND, LOWER);
    const fastest = Math.max(...intervals.map((each) => each.rate));
    const words = `${count(end.done)} of ${count(total)} tasks finished between ${clock(samples[0].at)} and ${
      clock(samples[samples.length - 1].at)
    }, ${count(end.failed)} of them failed, ${count(retried)} attempts retried; at most ${rate(fastest)}`;
    figure.draw(
      [
        legend("succeeded", "finished"),
        legend("failed", "failed"),
        legend("speed", "throughput"),
        legend("retried", "retries"),
      ],
      drawing(
        width,
        words,
        axis(width, x, timeTicks(points[0].t, end.t, width - LEFT)),
        grid(width, y, counts, short),
        svg("path", { class: "area succeeded", d: area(points.map((each) => [x(each.t), y(each.done)]), UPPER) }),
        svg("path", { class: "area failed", d: area(points.map((each) => [x(each.t), y(each.failed)]), UPPER) }),
        grid(width, speed, [0, rates[rates.length - 1]], short),
        intervals.map((each) => [
          bar("speed", x(each.from), x(each.to), speed(each.rate), GROUND),
          each.retries > 0 &&
          bar("retried", x(each.from), x(each.to), speed(each.rate + each.retries), speed(each.rate)),
        ]),
      ),
      intervals.map((each) => ({
        x: (x(each.from) + x(each.to)) / 2,
        lines: [
          `${clock(each.from)} – ${clock(each.to)}`,
          `${count(each.point.done)} of ${count(total)} finished`,
          `${count(each.point.failed)} failed`,
          `throughput ${rate(each.rate)}`,
          `retries ${rate(each.retries)}`,
        ],
      })),
    );
  };
  return { node: figure.node, show };
}

/** Histogram of task latency, on a logarithmic scale. */
export function latencyChart() {
  const figure = tippedFigure("Latency");
  return {
    node: figure.node,
    /** @param {Duration[]} durations @param {{p50: number, p95: number} | null} known exactly; a server that was restarted has forgotten it */
    show(durations, known) {
      if (!durations.length) return figure.say("No latency data for this run.");
      const time = known ?? { p50: quantile(durations, 0.5), p95: quantile(durations, 0.95) };
      const width = figure.width();
      const { bars, low, high } = histogram(durations);
      const counts = ticks(Math.max(...bars), 2);
      const y = scale(0, counts[counts.length - 1], GROUND, TOP);
      const x = scale(Math.log(low), Math.log(high), LEFT, width);
      const step = (width - LEFT) / bars.length;
      const border = (/** @type {number} */ at) => low * (high / low) ** (at / bars.length);
      const words = `p50 ${duration(time.p50)}, p95 ${duration(time.p95)}`;
      figure.draw(
        legend("running", words),
        drawing(
          width,
          `Latency: ${words}`,
          axis(width, (seconds) => x(Math.log(seconds)), durationTicks(low, high, width)),
          grid(width, y, counts, short),
          bars.map((value, at) =>
            value > 0 &&
            svg("rect", {
              class: "running",
              x: LEFT + at * step + 1,
              width: step - 2,
              y: Math.min(y(value), GROUND - 2),
              height: Math.max(GROUND - y(value), 2),
              rx: 1,
            })
          ),
          [time.p50, time.p95].map((seconds) =>
            svg("line", { class: "mark", x1: x(Math.log(seconds)), x2: x(Math.log(seconds)), y1: TOP, y2: GROUND })
          ),
        ),
        bars.map((value, at) => ({
          x: LEFT + (at + 0.5) * step,
          lines: [`${duration(border(at))} – ${duration(border(at + 1))}`, `${count(value)} tasks`],
        })),
      );
    },
  };
}

/** @param {string} look @param {number} from @param {number} to @param {number} top @param {number} bottom */
export function bar(look, from, to, top, bottom) {
  return svg("rect", {
    class: look,
    x: from,
    width: Math.max(1, to - from - 1),
    y: top,
    height: Math.max(0, bottom - top),
  });
}

/** Round durations on a logarithmic axis. @param {number} low @param {number} high @param {number} width */
function durationTicks(low, high, width) {
  const powers = Array.from({ length: 12 }, (_, at) => 10 ** (at - 4));
  const candidates = [[1, 2, 5], [1, 3], [1]].map((parts) =>
    powers.flatMap((power) => parts.map((part) => part * power)).filter((each) => each >= low && each <= high)
  );
  const fitting = candidates.find((each) => each.length <= width / 80) ?? candidates[2];
  return (fitting.length ? fitting : [low, high]).map((at) => ({ at, text: duration(at) }));
}

/** The points from a time on, with one at that time. @param {Point[]} points @param {number} start */
function since(points, start) {
  const kept = points.filter((each) => each.t >= start);
  const before = points.filter((each) => each.t < start).pop();
  return before ? [{ ...before, t: start }, ...kept] : kept;
}

/**
 * Retried attempts a second in each interval.
 * @param {Omit<Interval, "retries">[]} intervals
 * @param {Series} series
 * @returns {Interval[]}
 */
function withRetries(intervals, { seconds, items }) {
  const length = 1000 * seconds;
  const starts = items.map((each) => Date.parse(each.at));
  return intervals.map((each) => {
    const share = (/** @type {number} */ from) =>
      Math.max(0, Math.min(each.to, from + length) - Math.max(each.from, from)) / length;
    const retried = items.reduce((sum, item, at) => sum + item.retried * share(starts[at]), 0);
    return { ...each, retries: (1000 * retried) / Math.max(each.to - each.from, 1) };
  });
}

/** The duration that a share of the tasks is within, of the buckets that there are. @param {Duration[]} durations shortest first @param {number} share */
function quantile(durations, share) {
  let left = share * durations.reduce((sum, each) => sum + each.count, 0);
  return (durations.find((each) => (left -= each.count) <= 0) ?? durations[durations.length - 1]).seconds;
}

/** @param {Duration[]} durations shortest first */
function histogram(durations) {
  const few = Math.sqrt(STEP ** MIN_BARS);
  const middle = Math.sqrt(durations[0].seconds * durations[durations.length - 1].seconds);
  const low = Math.min(durations[0].seconds, middle / few);
  const high = Math.max(durations[durations.length - 1].seconds * STEP, middle * few);
  const steps = Math.round(Math.log(high / low) / Math.log(STEP));
  const bars = Array(Math.min(MAX_BARS, steps)).fill(0);
  for (const each of durations) {
    bars[Math.min(bars.length - 1, Math.floor((Math.log(each.seconds / low) / Math.log(high / low)) * bars.length))] +=
      each.count;
  }
  return { bars, low, high };
}

/**
 * Tasks that succeeded or failed a second, over intervals that are long enough to be meaningful.
 * @param {Point[]} points
 * @returns {Omit<Interval, "retries">[]}
 */
export function throughput(points) {
  const last = points[points.length - 1];
  const least = Math.max((last.t - points[0].t) / INTERVALS, 500);
  const bounds = [points[0]];
  for (const point of points.slice(1)) {
    if (point.t - bounds[bounds.length - 1].t >= least) bounds.push(point);
  }
  // What is left at the end is no interval of its own, unless it is all there is.
  if (bounds.length > 1) bounds.pop();
  bounds.push(last);
  return bounds.slice(1).map((point, at) => {
    const from = bounds[at];
    const rate = ((point.worked - from.worked) * 1000) / Math.max(point.t - from.t, 1);
    return { from: from.t, to: point.t, point, rate };
  });
}

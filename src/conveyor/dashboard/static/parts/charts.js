/** Charts, in plain SVG, each with a text alternative. */

import { h, renew, svg } from "../dom.js";
import { clock, count, duration, rate, short } from "../format.js";

/** @import { Duration, Ended, Sample } from "../shapes.js" */

const HEIGHT = 220;
const LEFT = 50;
const TOP = 8;
// The baseline of the chart, above the axis.
const GROUND = HEIGHT - 20;
// Of two stacked charts, the baseline of the upper and the top of the lower one.
const UPPER = 140;
const LOWER = 158;
// Number of intervals; minimum and maximum number of bars of a histogram.
const INTERVALS = 60;
const [MIN_BARS, MAX_BARS] = [12, 40];
// Ratio of two neighbouring buckets of the server's histogram.
const STEP = 1.1;
const SAMPLE_MS = 1_000;
const MAX_SAMPLES = 600;

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

/** Finished tasks over time, and below it the throughput. */
export function progressChart() {
  const node = h("figure", { class: "chart" }, h("p", { class: "muted" }, "Loading…"));
  return {
    node,
    /** @param {Sample[]} samples @param {number} total */
    show(samples, total) {
      const points = samples.map((each) => ({
        ...each,
        t: Date.parse(each.at),
        done: each.succeeded + each.failed + each.cancelled,
      }));
      const [first, last] = [points[0], points[points.length - 1]];
      if (last.done === 0) return renew(node, h("p", { class: "muted" }, "No task has finished yet."));
      const width = widthOf(node);
      const x = scale(first.t, last.t, LEFT, width);
      const most = Math.max(total, last.done);
      const y = scale(0, most, UPPER, TOP);
      const rates = throughput(points);
      const fastest = Math.max(...rates.map((each) => each.rate));
      const speed = scale(0, fastest, GROUND, LOWER);
      const words = `${count(last.done)} of ${count(total)} tasks finished between ${clock(first.at)} and ${
        clock(last.at)
      }, ${count(last.failed)} of them failed; at most ${rate(fastest)}`;
      renew(
        node,
        h(
          "figcaption",
          { class: "legend" },
          legend("succeeded", "finished"),
          legend("failed", "failed"),
          legend("speed", "throughput"),
        ),
        drawing(
          width,
          words,
          grid(width, y, [0, most / 2, most], short),
          svg("path", { class: "area succeeded", d: area(points.map((each) => [x(each.t), y(each.done)]), UPPER) }),
          svg("path", { class: "area failed", d: area(points.map((each) => [x(each.t), y(each.failed)]), UPPER) }),
          grid(width, speed, [0, fastest], short),
          rates.map((each) =>
            svg("rect", {
              class: "speed",
              x: x(each.from),
              width: Math.max(1, x(each.to) - x(each.from) - 1),
              y: speed(each.rate),
              height: GROUND - speed(each.rate),
            })
          ),
          axis(width, clock(first.at), clock(last.at)),
        ),
      );
    },
  };
}

/** Histogram of task latency, on a logarithmic scale. */
export function latencyChart() {
  const node = h("figure", { class: "chart" }, h("p", { class: "muted" }, "Loading…"));
  return {
    node,
    /** @param {Duration[]} durations @param {{p50: number, p95: number} | null} time */
    show(durations, time) {
      if (!durations.length) return renew(node, h("p", { class: "muted" }, "No latency data for this run."));
      const width = widthOf(node);
      const { bars, low, high } = histogram(durations);
      const most = Math.max(...bars);
      const y = scale(0, most, GROUND, TOP);
      const x = scale(Math.log(low), Math.log(high), LEFT, width);
      const step = (width - LEFT) / bars.length;
      const words = time ? `p50 ${duration(time.p50)}, p95 ${duration(time.p95)}` : "tasks by duration";
      renew(
        node,
        h("figcaption", { class: "legend" }, legend("running", words)),
        drawing(
          width,
          `Latency: ${words}`,
          grid(width, y, [0, most], short),
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
          time &&
            [time.p50, time.p95].map((seconds) =>
              svg("line", { class: "mark", x1: x(Math.log(seconds)), x2: x(Math.log(seconds)), y1: TOP, y2: GROUND })
            ),
          axis(width, duration(low), duration(high)),
        ),
      );
    },
  };
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
 * Finished tasks a second, over intervals that are long enough to be meaningful.
 * @param {{t: number, done: number}[]} points
 */
function throughput(points) {
  const least = Math.max((points[points.length - 1].t - points[0].t) / INTERVALS, 500);
  /** @type {{from: number, to: number, rate: number}[]} */
  const found = [];
  let from = points[0];
  points.slice(1).forEach((point, at) => {
    const lasted = Math.max(point.t - from.t, 1);
    if (lasted < least && at < points.length - 2) return;
    found.push({ from: from.t, to: point.t, rate: ((point.done - from.done) * 1000) / lasted });
    from = point;
  });
  return found;
}

/** @param {string} look @param {string} text */
function legend(look, text) {
  return h(
    "span",
    {},
    svg(
      "svg",
      { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" },
      svg("rect", { class: look, width: 10, height: 10, rx: 2 }),
    ),
    text,
  );
}

/** @param {number} width @param {string} words @param {...any} parts */
function drawing(width, words, ...parts) {
  return svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": words }, parts);
}

/** One unit is a pixel, so that text has the same size on every screen. @param {Element} node */
const widthOf = (node) => Math.max(node.clientWidth, 240);

/** @param {number} low @param {number} high @param {number} from @param {number} to */
function scale(low, high, from, to) {
  return (/** @type {number} */ value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

/**
 * @param {number} width
 * @param {(value: number) => number} y
 * @param {number[]} values
 * @param {(value: number) => string} text
 */
function grid(width, y, values, text) {
  return values.map((value) =>
    svg(
      "g",
      { class: "grid" },
      svg("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text(value)),
    )
  );
}

/** @param {number} width @param {string} start @param {string} end */
function axis(width, start, end) {
  return svg(
    "g",
    { class: "axis" },
    svg("text", { x: LEFT, y: HEIGHT - 4 }, start),
    svg("text", { x: width, y: HEIGHT - 4, "text-anchor": "end" }, end),
  );
}

/** @param {number[][]} points @param {number} ground */
function area(points, ground) {
  const line = points.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return `M${points[0][0].toFixed(1)} ${ground}${line}L${points[points.length - 1][0].toFixed(1)} ${ground}Z`;
}

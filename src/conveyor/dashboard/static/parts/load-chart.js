/** The load over all jobs: tasks that wait, and below it the throughput with retries. Kept by the server. */

/** @import { Load, LoadPoint } from "../shapes.js" */

import { remember, stateOf } from "../address.js";
import { h, svg } from "../dom.js";
import { clock, count, LOCALE, rate, short } from "../format.js";
import { area, axis, drawing, grid, GROUND, LEFT, legend, scale, ticks, timeTicks, tippedFigure, TOP } from "./axes.js";
import { bar } from "./charts.js";

const UPPER = 112;
const LOWER = 130;
// Minutes that are shown, in intervals of a minute or of an hour.
const RANGES =
  /** @type {const} */ ([["60", "last hour"], ["240", "last 4 hours"], ["1440", "last day"], ["10080", "last week"]]);
const DAY = new Intl.DateTimeFormat(LOCALE, { weekday: "short", hour: "2-digit", minute: "2-digit" });

export function loadChart() {
  const figure = tippedFigure("Load over time");
  /** @type {Load | null} */
  let last = null;
  const range = h(
    "select",
    { class: "small", "aria-label": "Time range" },
    RANGES.map(([value, name]) => h("option", { value }, name)),
  );
  range.addEventListener("change", () => {
    remember({ range: range.value });
    if (last) show(last);
  });
  figure.node.prepend(range);
  const show = (/** @type {Load} */ load) => {
    last = load;
    const wanted = stateOf("range");
    range.value = RANGES.some(([value]) => value === wanted) ? wanted : "60";
    const minutes = Number(range.value);
    const { seconds, items } = minutes > 240 ? load.hours : load.minutes;
    const length = 1000 * seconds;
    const to = Math.ceil(Date.now() / length) * length;
    const points = filled(items, to - 60_000 * minutes, to, length);
    const width = figure.width();
    const x = scale(points[0].t, to, LEFT, width);
    const waits = ticks(Math.max(...points.map((each) => each.waiting), 1), 2);
    const y = scale(0, waits[waits.length - 1], UPPER, TOP);
    const rateOf = (/** @type {number} */ tasks) => tasks / seconds;
    const rates = ticks(Math.max(...points.map((each) => rateOf(each.done + each.retried)), 0.1), 1);
    const speed = scale(0, rates[rates.length - 1], GROUND, LOWER);
    const done = points.reduce((sum, each) => sum + each.done, 0);
    const most = Math.max(...points.map((each) => each.waiting));
    figure.draw(
      [legend("waited", "tasks that wait"), legend("speed", "throughput"), legend("retried", "retries")],
      drawing(
        width,
        `${count(done)} tasks finished, at most ${count(most)} waited`,
        axis(width, x, timeTicks(points[0].t, to, width - LEFT)),
        grid(width, y, waits, short),
        svg("path", {
          class: "area waited",
          d: area(steps(points, length).map(([t, value]) => [x(t), y(value)]), UPPER),
        }),
        grid(width, speed, [0, rates[rates.length - 1]], short),
        points.map((each) => [
          each.done > 0 && bar("speed", x(each.t), x(each.t + length), speed(rateOf(each.done)), GROUND),
          each.retried > 0 &&
          bar(
            "retried",
            x(each.t),
            x(each.t + length),
            speed(rateOf(each.done + each.retried)),
            speed(rateOf(each.done)),
          ),
        ]),
      ),
      points.map((each) => ({
        x: x(each.t + length / 2),
        lines: [
          `${minutes > 240 ? DAY.format(each.t) : clock(each.t)} – ${clock(each.t + length)}`,
          `${count(each.waiting)} waited, ${count(each.running)} ran at most`,
          `${count(each.done)} finished, ${count(each.failed)} failed`,
          `throughput ${rate(rateOf(each.done))}`,
          `retries ${rate(rateOf(each.retried))}`,
        ],
      })),
    );
  };
  return { node: figure.node, show };
}

/**
 * All intervals, also those in which nothing was seen.
 * @param {LoadPoint[]} items
 * @param {number} from
 * @param {number} to
 * @param {number} length
 */
function filled(items, from, to, length) {
  const known = new Map(items.map((each) => [Date.parse(each.at), each]));
  return Array.from({ length: Math.round((to - from) / length) }, (_, at) => {
    const t = from + at * length;
    const found = known.get(t);
    const { succeeded = 0, failed = 0, retried = 0, waiting = 0, running = 0 } = found ?? {};
    return { t, done: succeeded + failed, failed, retried, waiting, running };
  });
}

/** @param {{t: number, waiting: number}[]} points @param {number} length */
const steps = (points, length) => points.flatMap((each) => [[each.t, each.waiting], [each.t + length, each.waiting]]);

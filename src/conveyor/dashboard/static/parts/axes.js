/** What charts share: scales, ticks at round values, and a tip that follows the pointer or the arrow keys. */

import { h, renew, svg } from "../dom.js";
import { LOCALE } from "../format.js";

export const HEIGHT = 220;
export const LEFT = 50;
export const TOP = 8;
/** The baseline of the chart, above the axis. */
export const GROUND = HEIGHT - 20;

// Steps of a time axis, in seconds, and pixels between two of its labels.
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800];
const LABEL_WIDTH = 90;

const SECOND = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MINUTE = new Intl.DateTimeFormat(LOCALE, { hour: "2-digit", minute: "2-digit" });
const DAY = new Intl.DateTimeFormat(LOCALE, { month: "short", day: "numeric" });

/** One unit is a pixel, so that text has the same size on every screen. @param {Element} node */
export const widthOf = (node) => Math.max(node.clientWidth, 240);

/** @param {number} low @param {number} high @param {number} from @param {number} to */
export function scale(low, high, from, to) {
  return (/** @type {number} */ value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

/**
 * Round values from 0 to at least `most`: 1, 2 or 5 times a power of ten apart.
 * @param {number} most
 * @param {number} parts about how many steps
 */
export function ticks(most, parts) {
  const rough = most / parts || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((each) => each * power >= rough) ?? 10);
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, at) => at * step);
}

/**
 * Round times between two, in milliseconds, as many as there is room for; and how to write them.
 * @param {number} from
 * @param {number} to
 * @param {number} width
 */
export function timeTicks(from, to, width) {
  const wanted = (to - from) / 1000 / Math.max(width / LABEL_WIDTH, 1);
  const step = 1000 * (STEPS.find((each) => each >= wanted) ?? 86400 * Math.ceil(wanted / 86400));
  // In the time of the reader: midnight is a round time.
  const offset = 60_000 * new Date(from).getTimezoneOffset();
  const first = Math.ceil((from - offset) / step) * step + offset;
  const times = [];
  for (let at = first; at <= to; at += step) times.push(at);
  const format = step < 60_000 ? SECOND : step < 86_400_000 ? MINUTE : DAY;
  return times.map((at) => ({ at, text: format.format(at) }));
}

/**
 * @param {number} width
 * @param {(value: number) => number} y
 * @param {number[]} values
 * @param {(value: number) => string} text
 */
export function grid(width, y, values, text) {
  return values.map((value) =>
    svg(
      "g",
      { class: "grid" },
      svg("line", { x1: LEFT, x2: width, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, text(value)),
    )
  );
}

/**
 * @param {number} width
 * @param {(value: number) => number} x
 * @param {{at: number, text: string}[]} marks
 * @param {number} [top]
 */
export function axis(width, x, marks, top = TOP) {
  return marks.map(({ at, text }) => {
    const place = x(at);
    const anchor = place > width - 30 ? "end" : place < LEFT + 20 ? "start" : "middle";
    return svg(
      "g",
      { class: "axis" },
      svg("line", { x1: place, x2: place, y1: top, y2: GROUND }),
      svg("text", { x: place, y: HEIGHT - 4, "text-anchor": anchor }, text),
    );
  });
}

/** @param {string} look @param {string} text */
export function legend(look, text) {
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
export function drawing(width, words, ...parts) {
  return svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": words }, parts);
}

/** @param {number[][]} points @param {number} ground */
export function area(points, ground) {
  const line = points.map(([x, y]) => `L${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  return `M${points[0][0].toFixed(1)} ${ground}${line}L${points[points.length - 1][0].toFixed(1)} ${ground}Z`;
}

/**
 * A chart with a tip: what is drawn changes, the tip stays where the pointer is. It can be reached by Tab, and the arrow
 * keys move the tip.
 * @param {string} label
 */
export function tippedFigure(label) {
  /** @type {{x: number, lines: string[]}[]} */
  let stops = [];
  let shown = -1;
  const caption = h("figcaption", { class: "legend" });
  const drawn = h("div", { class: "drawn" });
  const line = h("div", { class: "tip-line", hidden: true });
  const tip = h("div", { class: "tip", hidden: true });
  const place = h("div", { class: "tipped", tabindex: "0", role: "group", "aria-label": label }, drawn, line, tip);
  const node = h("figure", { class: "chart" }, caption, place);
  const hide = () => {
    shown = -1;
    tip.hidden = line.hidden = true;
  };
  const show = (/** @type {number} */ at) => {
    const stop = stops[at];
    if (!stop) return hide();
    shown = at;
    tip.hidden = line.hidden = false;
    renew(tip, stop.lines.map((each) => h("span", {}, each)));
    line.style.left = `${stop.x}px`;
    const right = stop.x > place.clientWidth / 2;
    tip.style.left = right ? "auto" : `${stop.x + 10}px`;
    tip.style.right = right ? `${place.clientWidth - stop.x + 10}px` : "auto";
  };
  const nearest = (/** @type {number} */ x) =>
    stops.reduce((best, each, at) => (Math.abs(each.x - x) < Math.abs(stops[best].x - x) ? at : best), 0);
  place.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => {
    tip.setAttribute("aria-live", "off");
    if (stops.length) show(nearest(event.clientX - place.getBoundingClientRect().left));
  });
  place.addEventListener("pointerleave", hide);
  place.addEventListener("blur", hide);
  place.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step || !stops.length) return;
    event.preventDefault();
    // What the keys choose is read out, what the pointer passes is not.
    tip.setAttribute("aria-live", "polite");
    show(shown < 0 ? (step > 0 ? 0 : stops.length - 1) : Math.min(Math.max(shown + step, 0), stops.length - 1));
  });
  return {
    node,
    width: () => widthOf(drawn),
    /**
     * @param {any} legends
     * @param {any} picture
     * @param {{x: number, lines: string[]}[]} where what the tip says at each place
     */
    draw(legends, picture, where) {
      renew(caption, legends);
      renew(drawn, picture);
      stops = where;
      if (shown >= 0) show(Math.min(shown, stops.length - 1));
    },
    /** @param {string} text */
    say(text) {
      renew(caption, null);
      renew(drawn, h("p", { class: "muted" }, text));
      stops = [];
      hide();
    },
  };
}

/**
 * Creates elements from plain values. Text stays text: the dashboard never parses HTML, so that untrusted names, URLs
 * and bodies cannot inject markup.
 */

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Child | Child[]} Children */
/** @typedef {Record<string, unknown>} Props */

const SVG = "http://www.w3.org/2000/svg";
// A page, a path of the API, or a signed link of an object store.
const SAFE_LINK = /^(#|\/(?!\/)|https?:)/;

/**
 * An HTML element. `on` has listeners by event; false and null are omitted; everything else is an attribute.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...Children} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/**
 * An SVG element.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...Children} children
 * @returns {any}
 */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/**
 * @param {Element} element
 * @param {Props} props
 * @param {Children[]} children
 */
function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(/** @type {any} */ (value))) {
        element.addEventListener(event, listener);
      }
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      if (name === "href" && !SAFE_LINK.test(String(value))) throw new Error("unsafe link");
      element.setAttribute(name, String(value));
    }
  }
  element.append(...nodes(children));
  return element;
}

/**
 * @param {Children[]} children
 * @returns {Node[]}
 */
function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

/**
 * Replace the children of an element. Equal children keep their nodes, and with them focus and selection.
 * @param {Element} parent
 * @param {...Children} children
 */
export function renew(parent, ...children) {
  const fresh = nodes(children);
  const old = [...parent.childNodes];
  fresh.forEach((node, at) => {
    if (at >= old.length) parent.append(node);
    else if (!old[at].isEqualNode(node)) old[at].replaceWith(node);
  });
  old.slice(fresh.length).forEach((node) => node.remove());
}

/**
 * A list whose entries keep their nodes, by a key, while their content changes.
 * @template T
 * @param {Element} parent
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => {node: Element, update: (item: T) => void}} make
 * @returns {(items: T[]) => void}
 */
export function keyed(parent, keyOf, make) {
  /** @type {Map<string, {node: Element, update: (item: T) => void}>} */
  let entries = new Map();
  return (items) => {
    const next = new Map();
    for (const item of items) {
      const key = keyOf(item);
      const entry = entries.get(key) ?? make(item);
      entry.update(item);
      next.set(key, entry);
    }
    for (const [key, entry] of entries) if (!next.has(key)) entry.node.remove();
    let at = parent.firstElementChild;
    for (const { node } of next.values()) {
      if (node === at) at = node.nextElementSibling;
      else parent.insertBefore(node, at);
    }
    entries = next;
  };
}

/**
 * Draw at most once per animation frame.
 * @param {() => void} draw
 */
export function oncePerFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

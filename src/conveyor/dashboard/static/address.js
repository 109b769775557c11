/**
 * The address of a page: its path, and its state (filters, page, tab, run), both after the #. A link shows the same page
 * in the same state, and Back restores the state before.
 */

export function address() {
  const [path, query = ""] = location.hash.split(/\?(.*)/s);
  return { path, state: new URLSearchParams(query) };
}

/** One value of the state; empty if it is not set. @param {string} name */
export const stateOf = (name) => address().state.get(name) ?? "";

/**
 * The address of the page with some values changed; empty ones are removed.
 * @param {Record<string, string | number | null>} changes
 */
export function addressWith(changes) {
  const { path, state } = address();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") state.delete(name);
    else state.set(name, String(value));
  }
  const query = state.toString();
  return query ? `${path}?${query}` : path;
}

/**
 * Change the state in the address without a new page. A step is an entry of the history, for Back; what is typed is not.
 * @param {Record<string, string | number | null>} changes
 * @param {"step" | "typing"} [kind]
 */
export function remember(changes, kind = "step") {
  const next = addressWith(changes);
  if (next === location.hash) return;
  if (kind === "step") history.pushState(null, "", next);
  else history.replaceState(null, "", next);
}

/** Drafts: what was typed into a form stays in this tab until the form was sent; a chosen file, while the page is open. */

/** Chosen files, by the name of their draft: no storage takes one. @type {Map<string, File>} */
const files = new Map();

/** @param {string} name of the draft */
export const keptFile = (name) => files.get(name) ?? null;

/** @param {string} name @param {File | null} file */
export function keepFile(name, file) {
  if (file) files.set(name, file);
  else files.delete(name);
}

/** A draft belongs to the person who typed it. */
export function forgetDrafts() {
  sessionStorage.clear();
  files.clear();
}

/**
 * Fill a form from its draft, and keep the draft up to date. Passwords, other secrets and files are not stored.
 * @param {HTMLFormElement} form
 * @param {string} name
 * @returns {() => void} forgets the draft
 */
export function keepDraft(form, name) {
  const key = `draft:${name}`;
  const fields = () =>
    /** @type {HTMLInputElement[]} */ ([...form.elements]).filter((each) =>
      each.name && each.type !== "file" && each.type !== "password" && !("secret" in each.dataset)
    );
  const stored = JSON.parse(sessionStorage.getItem(key) ?? "{}");
  for (const each of fields()) {
    if (each.name in stored) {
      if (each.type === "checkbox") each.checked = stored[each.name];
      else each.value = stored[each.name];
    }
  }
  const save = () => {
    const values = fields().map((each) => [each.name, each.type === "checkbox" ? each.checked : each.value]);
    try {
      sessionStorage.setItem(key, JSON.stringify(Object.fromEntries(values)));
    } catch {
      // A long list does not fit: the form works without a draft.
      sessionStorage.removeItem(key);
    }
  };
  form.addEventListener("input", save);
  return () => {
    sessionStorage.removeItem(key);
    files.delete(name);
  };
}

/** A new job, from a list that is dropped, chosen or typed. */

import { h, renew } from "../dom.js";
import { bytes, percent } from "../format.js";
import { words } from "../parts/says.js";
import { formOf, submitList } from "../upload.js";

/** @type {import("../main.js").Page} */
export function newJobPage(root, signal) {
  /** @type {File | null} */
  let chosen = null;
  const file = h("input", {
    type: "file",
    id: "file",
    class: "hidden-input",
    on: { change: () => choose(file.files?.[0] ?? null) },
  });
  const label = h("label", { for: "file", class: "drop-text" });
  const zone = h("div", { class: "drop" }, file, label);
  const typed = h("textarea", {
    id: "typed",
    name: "typed",
    rows: 6,
    spellcheck: "false",
    placeholder: "https://example.com/\nhttps://example.org/",
    on: { input: () => choose(null) },
  });
  const kind = h(
    "select",
    { id: "kind", name: "kind", on: { change: () => show() } },
    [["fetch", "Fetch URLs"], ["download", "Download files"], ["python", "Call a Python function"]].map((
      [value, text],
    ) => h("option", { value }, text)),
  );
  const handler = h("input", { id: "handler", name: "handler", autocomplete: "off", spellcheck: "false" });
  const handlerField = field("handler", "Function", handler, "The name given to @conveyor.task.");
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const status = h("p", { class: "muted", role: "status" });
  const button = h("button", { type: "submit", class: "primary" }, "Submit");

  const choose = (/** @type {File | null} */ selected) => {
    chosen = selected;
    if (selected) typed.value = "";
    else file.value = "";
    show();
  };
  const show = () => {
    zone.classList.toggle("full", chosen !== null);
    renew(
      label,
      chosen
        ? [h("b", {}, chosen.name), ` ${bytes(chosen.size)}`]
        : [h("b", {}, "Drop a list here"), " or choose a file: text, jsonl or csv; plain, gzip or zstd"],
    );
    handlerField.hidden = kind.value !== "python";
    handler.required = kind.value === "python";
  };
  const over = (/** @type {DragEvent} */ event, /** @type {boolean} */ inside) => {
    event.preventDefault();
    zone.classList.toggle("over", inside);
  };
  // On the whole page: otherwise the browser would open a file that misses the drop zone.
  document.addEventListener("dragover", (event) => over(event, true), { signal });
  document.addEventListener("dragleave", (event) => over(event, false), { signal });
  document.addEventListener("drop", (event) => {
    over(event, false);
    const dropped = event.dataTransfer?.files[0];
    if (dropped) choose(dropped);
  }, { signal });

  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const list = chosen ?? new Blob([typed.value]);
    problem.hidden = true;
    button.disabled = true;
    try {
      if (!list.size) throw new Error("The list is empty. Drop a file, choose one, or type some lines.");
      const form = chosen ? formOf(chosen.name) : {};
      const options = optionsOf(new FormData(/** @type {HTMLFormElement} */ (event.target)), chosen);
      const job = await submitList(
        list,
        options,
        form,
        (what, done, total) => renew(status, `${what} ${percent(done, total)}`),
        signal,
      );
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      if (signal.aborted) return;
      problem.textContent = words(error);
      problem.hidden = false;
      renew(status, "");
    } finally {
      button.disabled = false;
    }
  };

  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "title" }, h("h1", {}, "New job")),
    h(
      "form",
      { class: "card new-job", on: { submit } },
      zone,
      field("typed", "Or type it, one URL per line", typed),
      h(
        "div",
        { class: "fields" },
        field("name", "Name", h("input", { id: "name", name: "name", maxlength: 200, autocomplete: "off" })),
        field("kind", "Kind", kind),
        handlerField,
        field("concurrency", "Concurrency", number("concurrency", 64, 1, 10_000)),
        field("attempts", "Attempts", number("attempts", 4, 1, 100)),
      ),
      problem,
      h("div", { class: "actions" }, button, h("a", { class: "button quiet", href: "#/jobs" }, "Cancel"), status),
    ),
  );
  show();
  return Promise.resolve();
}

/** @param {string} id @param {string} label @param {Element} control @param {string} [hint] */
function field(id, label, control, hint) {
  return h(
    "div",
    { class: "field" },
    h("label", { for: id }, label),
    control,
    hint && h("span", { class: "muted" }, hint),
  );
}

/** @param {string} id @param {number} value @param {number} min @param {number} max */
function number(id, value, min, max) {
  return h("input", { id, name: id, type: "number", value, min, max, required: true });
}

/** @param {FormData} form @param {File | null} chosen */
function optionsOf(form, chosen) {
  const kind = String(form.get("kind"));
  const name = String(form.get("name")).trim() || chosen?.name.slice(0, 200);
  return {
    kind,
    ...(name ? { name } : {}),
    ...(kind === "python" ? { handler: form.get("handler") } : {}),
    concurrency: Number(form.get("concurrency")),
    attempts: Number(form.get("attempts")),
  };
}

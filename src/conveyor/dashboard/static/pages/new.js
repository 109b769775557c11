/** A new job, from a list that is dropped, chosen or typed. */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { bytes, percent } from "../format.js";
import { keepDraft, keepFile, keptFile } from "../parts/draft.js";
import { choice, clearProblems, field, showProblem, text, textOf } from "../parts/form.js";
import { applies, changesOf, FIELDS, optionField } from "../parts/option-fields.js";
import { listPreview } from "../parts/preview.js";
import { words } from "../parts/says.js";
import { formOf, submitList } from "../upload.js";

const DRAFT = "new job";
const named = (/** @type {string[]} */ names) => names.flatMap((name) => FIELDS.filter((each) => each.name === name));
const FIRST = named(["concurrency", "attempts"]);
const MORE = named([
  "timeout",
  "rate_per_host",
  "concurrency_per_host",
  "pace",
  "robots",
  "gateway",
  "priority",
  "retention_days",
  "on_exhausted",
  "failure_threshold.failed",
  "headers",
]);

/** @type {import("../main.js").Page} */
export async function newJobPage(root, signal) {
  /** @type {File | null} */
  let chosen = keptFile(DRAFT);
  const workers = await get("/v1/workers", {}, signal).catch(() => ({ workers: [] }));
  const handlers = handlersOf(workers.workers);
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
  const typedLabel = h("span");
  const kind = choice("kind", [["fetch", "Fetch URLs"], ["download", "Download files"], [
    "python",
    "Call a Python function",
  ]]);
  kind.addEventListener("change", () => show());
  const column = text("url_column", { placeholder: "url", on: { input: () => show() } });
  const columnField = field("url_column", "URL column", column, "Of a csv, if it is not called url.");
  const handler = text("handler", { list: "handlers" });
  const handlerField = field(
    "handler",
    "Function",
    handler,
    handlers.length ? `Live workers have ${handlers.join(", ")}.` : "The name given to @conveyor.task.",
  );
  const extract = field(
    "extract",
    "Extract",
    text("extract", { list: "handlers" }),
    "A function that gets each page, and whose result is kept beside it.",
  );
  const invalid = choice("on_invalid", [["skip", "skip them"], ["reject", "reject the list"]]);
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const status = h("p", { class: "muted", role: "status" });
  const button = h("button", { type: "submit", class: "primary" }, "Submit");
  const preview = listPreview(signal);

  const choose = (/** @type {File | null} */ selected) => {
    chosen = selected;
    keepFile(DRAFT, selected);
    if (selected) typed.value = "";
    else file.value = "";
    show();
  };
  const listForm = () => ({
    ...(chosen ? formOf(chosen.name) : {}),
    ...(column.value.trim() ? { url_column: column.value.trim() } : {}),
  });
  const show = () => {
    zone.classList.toggle("full", chosen !== null);
    renew(
      label,
      chosen
        ? [h("b", {}, chosen.name), ` ${bytes(chosen.size)}`]
        : [h("b", {}, "Drop a list here"), " or choose a file: text, jsonl or csv; plain, gzip, zstd or bzip2"],
    );
    handlerField.hidden = kind.value !== "python";
    extract.hidden = columnField.hidden = kind.value === "python";
    renew(typedLabel, `Or type it, one ${kind.value === "python" ? "input" : "URL"} per line`);
    for (const option of MORE) {
      const place = form.elements.namedItem(option.name)?.closest(".field");
      if (place) place.hidden = !applies(option, kind.value, "closed");
    }
    handler.required = kind.value === "python";
    void preview.load(chosen ?? new Blob([typed.value]), { kind: kind.value, ...listForm() });
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
    clearProblems(form);
    button.disabled = true;
    try {
      if (!list.size) throw new Error("The list is empty. Drop a file, choose one, or type some lines.");
      const options = optionsOf(new FormData(form), chosen);
      const job = await submitList(
        list,
        options,
        listForm(),
        (what, done, total) => renew(status, `${what} ${percent(done, total)}`),
        signal,
      );
      forget();
      location.hash = `#/jobs/${job.id}`;
    } catch (error) {
      if (signal.aborted) return;
      if (!showProblem(form, error)) {
        problem.textContent = words(error);
        problem.hidden = false;
      }
      renew(status, "");
    } finally {
      button.disabled = false;
    }
  };

  const form = h(
    "form",
    { class: "card new-job", on: { submit } },
    zone,
    field("typed", typedLabel, typed),
    preview.node,
    h(
      "div",
      { class: "fields" },
      field("name", "Name", text("name", { maxlength: 200 })),
      field("kind", "Kind", kind),
      handlerField,
      columnField,
      FIRST.map(optional),
    ),
    h("datalist", { id: "handlers" }, handlers.map((value) => h("option", { value }))),
    h(
      "details",
      {},
      h("summary", {}, "More options"),
      h("div", { class: "fields" }, extract, field("on_invalid", "Invalid lines", invalid), MORE.map(optional)),
    ),
    problem,
    h("div", { class: "actions" }, button, h("a", { class: "button quiet", href: "#/jobs" }, "Cancel"), status),
  );
  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/jobs" }, "Jobs")),
    h("div", { class: "title" }, h("h1", {}, "New job")),
    form,
  );
  const forget = keepDraft(form, DRAFT);
  show();
}

/** A field that may stay empty: the default is its placeholder. @param {import("../parts/option-fields.js").OptionField} option */
function optional(option) {
  const node = optionField(option, { isFilled: false });
  const control = node.querySelector("input, textarea");
  if (control && typeof option.standard === "number") control.placeholder = String(option.standard);
  // What may hold secrets is not stored with the draft.
  if (control && ["headers", "gateway"].includes(option.type)) control.dataset.secret = "";
  return node;
}

/** @param {import("../shapes.js").FleetWorker[]} workers */
function handlersOf(workers) {
  return [...new Set(workers.flatMap((each) => each.handlers ?? []))].sort();
}

/** @param {FormData} form @param {File | null} chosen */
function optionsOf(form, chosen) {
  const kind = textOf(form, "kind");
  const name = textOf(form, "name") || chosen?.name.slice(0, 200);
  const extract = kind === "python" ? "" : textOf(form, "extract");
  const typed = [...FIRST, ...MORE].filter((option) => applies(option, kind, "closed"))
    .map((option) => /** @type {const} */ ([option, textOf(form, option.name)]))
    .filter(([option, value]) => value !== "" && value !== option.standard);
  return {
    kind,
    ...(name ? { name } : {}),
    ...(kind === "python" ? { handler: textOf(form, "handler") } : {}),
    ...(extract ? { extract } : {}),
    ...(textOf(form, "on_invalid") === "reject" ? { on_invalid: "reject" } : {}),
    ...changesOf({}, new Map(typed)),
  };
}

/** Shortcuts, and a palette of commands: pages, and jobs by name or id. */

/** @import { Job } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { jobPill } from "./state.js";

const TYPING_MS = 200;
const MAX_JOBS = 8;
/** @type {[string, string][]} */
const HELP = [["Ctrl K", "this palette"], ["/", "search on the page"], ["n", "new job"], ["Esc", "close"]];

/** @param {[string, string][]} pages address and name */
export function palette(pages) {
  const commands = [...pages, ["#/new", "New job"]];
  addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      return open(commands);
    }
    if (event.ctrlKey || event.metaKey || event.altKey || isTyping() || document.querySelector("dialog")) return;
    const field = /** @type {HTMLElement | null} */ (document.querySelector("main [data-shortcut='/']"));
    if (event.key === "/" && field) {
      event.preventDefault();
      field.focus();
    } else if (event.key === "?") {
      event.preventDefault();
      open(commands);
    } else if (event.key === "n") {
      location.hash = "#/new";
    }
  });
}

function isTyping() {
  const here = document.activeElement;
  return here instanceof HTMLInputElement ? here.type !== "checkbox" : /^(TEXTAREA|SELECT)$/.test(here?.tagName ?? "");
}

/** @param {string[][]} commands */
function open(commands) {
  if (document.querySelector("dialog") || document.getElementById("bar")?.hidden) return;
  let [typing, at, asked] = [0, 0, 0];
  /** @type {{href: string, label: string, job?: Job}[]} */
  let entries = [];
  const list = h("ul", { class: "palette-list", id: "palette-list", role: "listbox", "aria-label": "Commands" });
  const go = (/** @type {string} */ href) => {
    dialog.close();
    location.hash = href;
  };
  const draw = () => {
    at = Math.max(0, Math.min(at, entries.length - 1));
    renew(
      list,
      entries.map(({ href, label, job }, place) =>
        h(
          "li",
          {
            role: "option",
            id: `command-${place}`,
            "aria-selected": String(place === at),
            "data-href": href,
          },
          h("span", {}, label),
          job ? jobPill(job) : h("span", { class: "muted" }, "page"),
        )
      ),
    );
    if (entries.length) field.setAttribute("aria-activedescendant", `command-${at}`);
    else field.removeAttribute("aria-activedescendant");
  };
  const matching = (/** @type {string} */ text) =>
    commands.filter(([, name]) => name.toLowerCase().includes(text.toLowerCase())).map(([href, label]) => ({
      href,
      label,
    }));
  const search = async () => {
    const text = field.value.trim();
    const mine = asked += 1;
    entries = matching(text);
    draw();
    const page = await get("/v1/jobs", { text, limit: MAX_JOBS }).catch(() => ({ items: [] }));
    if (mine !== asked) return;
    const jobs = page.items.map((/** @type {Job} */ job) => ({
      href: `#/jobs/${job.id}`,
      label: job.name ?? job.id,
      job,
    }));
    entries = [...matching(text), ...jobs];
    draw();
  };
  const pressed = (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      at += step;
      draw();
    } else if (event.key === "Enter" && entries[at]) {
      event.preventDefault();
      go(entries[at].href);
    }
  };
  const field = h("input", {
    type: "search",
    role: "combobox",
    "aria-label": "Go to a page or a job",
    "aria-controls": "palette-list",
    "aria-expanded": "true",
    placeholder: "Go to a page or a job",
    on: {
      keydown: pressed,
      input: () => {
        clearTimeout(typing);
        typing = setTimeout(search, TYPING_MS);
      },
    },
  });
  list.addEventListener("click", (/** @type {MouseEvent} */ event) => {
    const entry = /** @type {HTMLElement} */ (event.target).closest("li");
    if (entry?.dataset.href) go(entry.dataset.href);
  });
  const dialog = h(
    "dialog",
    { class: "palette", "aria-label": "Commands", on: { close: () => dialog.remove() } },
    field,
    list,
    h("p", { class: "muted" }, HELP.flatMap(([key, what]) => [h("kbd", {}, key), ` ${what}  `])),
  );
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
  void search();
}

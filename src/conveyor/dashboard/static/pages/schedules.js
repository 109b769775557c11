/** Schedules: create, edit, fire now, pause, resume and delete; and one schedule with its fires. */

/** @import { Fire, Schedule } from "../shapes.js" */

import { get, newKey, send } from "../api.js";
import { h, renew } from "../dom.js";
import { coming, count, input, moment, number } from "../format.js";
import { poll } from "../live.js";
import { ask } from "../parts/dialog.js";
import { choice, field, text, textOf } from "../parts/form.js";
import { offeredChanges, offeredFields } from "../parts/offered-options.js";
import { attempt, empty, toast } from "../parts/says.js";
import { bar, jobPill, pill } from "../parts/state.js";
import { pager, table } from "../parts/table.js";

const MISSED = /** @type {[string, string][]} */ ([
  ["coalesce", "one job for all of them"],
  ["skip", "none"],
  ["all", "a job for each"],
]);
// What the server shows in place of a secret.
const HIDDEN = "[hidden]";

/** @type {import("../main.js").Page} */
export async function schedulesPage(root, signal, scheduleId) {
  if (scheduleId) return schedulePage(root, signal, scheduleId);
  const none = h("div");
  const pages = pager(() => load(), "schedules");
  const { node: list, rows } = table(
    "Schedules",
    /** @type {import("../parts/table.js").Column<Schedule>[]} */ ([
      {
        title: "Name",
        sort: nameOf,
        cell: (each) => h("a", { class: "clip", href: `#/schedules/${each.id}`, title: each.id }, nameOf(each)),
      },
      { title: "Times", look: "wide", cell: times },
      { title: "State", sort: (each) => Number(each.paused), cell: (each) => pill(each.paused ? "paused" : "active") },
      {
        title: "Next fire",
        look: "number",
        sort: (each) => each.next_fires[0] ?? "",
        cell: (each) => (each.paused ? "–" : moment(each.next_fires[0] ?? null)),
      },
      { title: "Last fire", cell: lastFire },
      { title: "", look: "end", cell: (each) => scheduleButtons(each, load) },
    ]),
    (each) => each.id,
    "sort",
  );

  const load = async () => {
    const page = await get("/v1/schedules", { limit: 50, cursor: pages.cursor }, signal);
    rows(page.items);
    list.hidden = page.items.length === 0;
    renew(
      none,
      page.items.length ? null : empty(
        "No schedules",
        "Create one here, or with ",
        h("code", {}, "conveyor schedules create"),
        ".",
      ),
    );
    pages.show(page.next_cursor);
  };
  const create = async () => {
    const key = newKey();
    const made = await ask({
      title: "New schedule",
      text: createForm(),
      action: "Create",
      act: (form) => send("POST", "/v1/schedules", newSchedule(form), { key }),
    });
    if (made) await load();
  };

  root.append(
    h(
      "div",
      { class: "title" },
      h("h1", {}, "Schedules"),
      h("button", { type: "button", class: "primary", on: { click: () => attempt(create) } }, "New schedule"),
    ),
    h("section", { class: "card" }, list, none, pages.node),
  );
  await load();
  void poll(load, signal);
}

/** One schedule. @type {(root: HTMLElement, signal: AbortSignal, scheduleId: string) => Promise<void>} */
async function schedulePage(root, signal, scheduleId) {
  const title = h("h1", {});
  const buttons = h("div", { class: "actions", role: "group", "aria-label": "Actions" });
  const facts = h("dl", { class: "facts" });
  const none = h("div");
  const { node: fires, rows } = table(
    "Fires",
    /** @type {import("../parts/table.js").Column<Fire>[]} */ ([
      { title: "Time", look: "number", cell: (each) => moment(each.at) },
      { title: "Job", look: "wide", cell: fireJob },
      { title: "State", cell: ({ outcome }) => outcome ? jobPill(outcome) : "–" },
      { title: "Progress", cell: fireProgress },
      { title: "Tasks", look: "number", cell: ({ outcome }) => outcome ? count(outcome.total) : "–" },
      { title: "Failed", look: "number", cell: ({ outcome }) => outcome ? count(outcome.counts.failed) : "–" },
      { title: "Skipped", look: "number", cell: ({ outcome }) => outcome ? count(outcome.invalid_lines) : "–" },
      { title: "Missed fires included", look: "number", cell: (each) => count(each.coalesced) },
    ]),
    (each) => each.at,
  );
  const load = async () => {
    /** @type {Schedule} */
    const schedule = await get(`/v1/schedules/${scheduleId}`, {}, signal);
    document.title = `${nameOf(schedule)} · Conveyor`;
    renew(title, nameOf(schedule));
    renew(buttons, scheduleButtons(schedule, load, () => (location.hash = "#/schedules")));
    renew(
      facts,
      fact("State", pill(schedule.paused ? "paused" : "active")),
      fact("Times", times(schedule)),
      fact(
        `Next fires, ${schedule.timezone}`,
        schedule.next_fires.map((at) => h("span", { class: "line" }, coming(at, schedule.timezone))),
      ),
      fact("Missed fires", MISSED.find(([name]) => name === schedule.missed)?.[1] ?? schedule.missed),
      schedule.invalid_lines > 0 && fact("Invalid lines", `${count(schedule.invalid_lines)}, skipped by each fire`),
      schedule.changed_only && fact("Only what changed", "Each job compares its pages with those of the one before."),
      fact("Job", h("pre", { class: "body" }, JSON.stringify(schedule.job, null, 2))),
    );
    rows([...schedule.fires].reverse());
    fires.hidden = schedule.fires.length === 0;
    renew(none, schedule.fires.length ? null : empty("No fires yet"));
  };
  root.append(
    h("p", { class: "crumbs" }, h("a", { href: "#/schedules" }, "Schedules")),
    h("div", { class: "title" }, title, buttons),
    h("section", { class: "card" }, facts),
    h("section", { class: "card" }, h("h2", {}, "Last fires"), fires, none),
  );
  await load();
  void poll(load, signal);
}

/**
 * @param {Schedule} schedule
 * @param {() => Promise<void>} changed
 * @param {() => void} [gone]
 */
function scheduleButtons(schedule, changed, gone = () => void changed()) {
  const path = `/v1/schedules/${schedule.id}`;
  const name = nameOf(schedule);
  const button = (/** @type {string} */ label, /** @type {() => Promise<void>} */ act, look = "small") =>
    h("button", {
      type: "button",
      class: look,
      "aria-label": `${label} ${name}`,
      on: { click: () => attempt(act) },
    }, label);
  const runNow = async () => {
    const fire = await send("POST", `${path}/run`);
    toast(`The schedule fires now, as job ${fire.job_id}.`);
    await changed();
  };
  const pause = async () => {
    await send("PATCH", path, { paused: !schedule.paused });
    toast(schedule.paused ? "The schedule is resumed." : "The schedule is paused.");
    await changed();
  };
  const edit = async () => {
    // An equal button keeps its node and its listener: the schedule that it knows may be an old one.
    const now = await get(path);
    const done = await ask({
      title: "Edit the schedule",
      text: [...timeFields(now), ...jobFields(now.job)],
      action: "Save",
      act: (form) => send("PATCH", path, { ...timesOf(form), ...jobChanges(form, now.job) }),
    });
    if (done) await changed();
  };
  const remove = async () => {
    const done = await ask({
      title: "Delete this schedule?",
      text: [h("b", {}, name), " creates no more jobs. Its existing jobs stay."],
      action: "Delete",
      danger: true,
      act: () => send("DELETE", path).then(() => true),
    });
    if (done) gone();
  };
  return [
    button("Run now", runNow),
    button("Edit", edit),
    button(schedule.paused ? "Resume" : "Pause", pause),
    button("Delete", remove, "small quiet-danger"),
  ];
}

/** @param {Partial<Schedule>} [schedule] */
function timeFields(schedule = {}) {
  const zone = schedule.timezone ?? Intl.DateTimeFormat().resolvedOptions().timeZone ?? "UTC";
  return [
    field("name", "Name", text("name", { maxlength: 200, value: schedule.name ?? "" })),
    field(
      "cron",
      "Cron",
      text("cron", { required: true, placeholder: "0 6 * * MON-FRI", value: schedule.cron ?? "" }),
      "Minute, hour, day of the month, month, day of the week.",
    ),
    field("timezone", "Time zone", text("timezone", { required: true, value: zone })),
    field(
      "missed",
      "Missed fires",
      choice("missed", MISSED, schedule.missed),
    ),
    h(
      "label",
      { class: "choice" },
      h("input", { type: "checkbox", name: "changed_only", checked: schedule.changed_only === true }),
      "Only what changed: compare the pages of each job with those of the last one that has finished",
    ),
  ];
}

/** Of a schedule that exists, the fields of its job. What they leave out stays as it is: secrets are not shown. @param {Schedule["job"]} job */
function jobFields(job) {
  return [
    // A source with a secret is replaced as a whole, over the API.
    job.source?.url && !JSON.stringify(job.source).includes(HIDDEN) &&
    listField({ value: job.source.url, required: true }),
    h("div", { class: "fields" }, offeredFields("schedule-", job)),
    h("p", { class: "muted" }, "The next jobs have these options. Headers and other secrets stay, unseen."),
  ];
}

/** @param {FormData} form @param {Schedule["job"]} job */
function jobChanges(form, job) {
  const changes = offeredChanges(form, job);
  const url = textOf(form, "url");
  if (url && url !== job.source.url) changes.source = { ...job.source, url };
  return Object.keys(changes).length ? { job_changes: changes } : {};
}

/** @param {import("../dom.js").Props} [props] */
function listField(props) {
  const control = text("url", { type: "url", placeholder: "https://example.com/urls.txt", ...props });
  return field("url", "List", control, "URL of a list that each fire reads.");
}

function createForm() {
  return [
    ...timeFields(),
    listField(),
    field(
      "lines",
      "Or type it, one URL per line",
      h("textarea", { id: "lines", name: "lines", rows: 4, spellcheck: "false" }),
    ),
    h("div", { class: "fields" }, offeredFields("schedule-", {})),
  ];
}

/** @param {FormData} form */
function timesOf(form) {
  const [name, cron, timezone, missed] = ["name", "cron", "timezone", "missed"].map((each) => textOf(form, each));
  return { name: name || null, cron, timezone, missed, changed_only: form.get("changed_only") !== null };
}

/** @param {FormData} form */
function newSchedule(form) {
  const tasks = textOf(form, "lines").split(/\s*\n\s*/).filter(Boolean);
  const url = textOf(form, "url");
  if (Boolean(url) === tasks.length > 0) throw new Error("Give the URL of a list, or type its lines.");
  return { ...timesOf(form), job: { ...offeredChanges(form, {}), ...(url ? { source: { url } } : { tasks }) } };
}

/** @param {Schedule} schedule */
const nameOf = (schedule) => schedule.name ?? schedule.id;

/** @param {Schedule} schedule */
function times(schedule) {
  return [
    h("span", { class: "line" }, schedule.cron_text),
    h("span", { class: "line muted" }, h("code", {}, schedule.cron), ` ${schedule.timezone}`),
  ];
}

/** @param {string} name @param {import("../dom.js").Children} value */
function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

/** @param {Fire} fire */
function fireJob(fire) {
  if (!fire.job_id) return h("span", { class: "error-code" }, input(fire.error ?? "none"));
  // A schedule that is fired now has no job for a moment, and one that fired long ago none any more.
  return h("a", { class: "id", href: `#/jobs/${fire.job_id}` }, fire.job_id);
}

/** @param {Fire} fire */
function fireProgress({ outcome, job_id }) {
  return outcome ? bar(outcome, `Progress of ${job_id}`) : "–";
}

/** @param {Schedule} schedule */
function lastFire(schedule) {
  const last = schedule.fires[schedule.fires.length - 1];
  if (!last) return "never fired";
  const what = last.job_id
    ? h("a", { href: `#/jobs/${last.job_id}` }, "job")
    : h("span", { class: "error-code" }, last.error ?? "none");
  return [
    h("span", { class: "line" }, what),
    h("span", { class: "line muted" }, moment(last.at), ` · ${number(schedule.fired, "fire")}`),
  ];
}

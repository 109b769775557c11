/** Webhook endpoints: create, test, rotate, enable, disable, delete; and the deliveries of one of them. */

/** @import { Webhook, WebhookDetail } from "../shapes.js" */

import { get, newKey, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment, percent } from "../format.js";
import { poll } from "../live.js";
import { deliveriesTable } from "../parts/deliveries.js";
import { ask, show } from "../parts/dialog.js";
import { field, text, textOf } from "../parts/form.js";
import { attempt, empty, toast } from "../parts/says.js";
import { pill } from "../parts/state.js";
import { tile } from "../parts/summary.js";
import { pager, table } from "../parts/table.js";

/** @type {import("../main.js").Page} */
export async function webhooksPage(root, signal, webhookId) {
  const none = h("div");
  const { node: list, rows } = table(
    "Endpoints",
    /** @type {import("../parts/table.js").Column<Webhook>[]} */ ([
      {
        title: "Endpoint",
        sort: (each) => each.url,
        look: "wide",
        cell: (each) => [
          h(
            "a",
            { class: "clip", href: `#/webhooks/${each.id}`, "aria-current": each.id === webhookId && "true" },
            each.url,
          ),
          each.description && h("span", { class: "muted" }, each.description),
        ],
      },
      { title: "Events", cell: (each) => eventsOf(each) },
      { title: "State", cell: state },
      { title: "Created", look: "number", sort: (each) => each.created_at, cell: (each) => moment(each.created_at) },
      { title: "", look: "end", cell: (each) => endpointButtons(each, refresh) },
    ]),
    (each) => each.id,
    "sort",
  );
  const load = async () => {
    const { items } = await get("/v1/webhooks", {}, signal);
    rows(items);
    list.hidden = items.length === 0;
    renew(
      none,
      items.length ? null : empty(
        "No endpoints",
        "Create one here, or with ",
        h("code", {}, "conveyor webhooks create"),
        ".",
      ),
    );
  };
  const sent = webhookId ? deliveriesCard(webhookId, signal) : null;
  const refresh = async () => {
    await Promise.all([load(), sent?.load()]);
  };
  const create = async () => {
    const key = newKey();
    const made = await ask({
      title: "New endpoint",
      text: endpointForm(),
      action: "Create",
      act: (form) => send("POST", "/v1/webhooks", specOf(form), { key }),
    });
    if (!made) return;
    await showSecret("The endpoint is created", made.secret);
    await refresh();
  };
  root.append(
    h(
      "div",
      { class: "title" },
      h("h1", {}, "Webhooks"),
      h("button", { type: "button", class: "primary", on: { click: () => attempt(create) } }, "New endpoint"),
    ),
    h("section", { class: "card" }, list, none),
  );
  if (sent) root.append(sent.node);
  else root.append(h("p", { class: "muted" }, "Select an endpoint to see its deliveries."));
  await refresh();
  void poll(refresh, signal);
}

/** @param {string} webhookId @param {AbortSignal} signal */
function deliveriesCard(webhookId, signal) {
  const none = h("div");
  const tiles = h("dl", { class: "tiles" });
  const pages = pager(() => load(), "deliveries");
  const deliveries = deliveriesTable(signal, () => load());
  const load = async () => {
    const path = `/v1/webhooks/${webhookId}`;
    const [detail, page] = await Promise.all([
      get(path, {}, signal),
      get(`${path}/deliveries`, { limit: 50, cursor: pages.cursor }, signal),
    ]);
    const { delivered, failed, pending } = /** @type {WebhookDetail} */ (detail).deliveries;
    // While an endpoint fails, what is pending was attempted in vain, or waits behind such deliveries.
    const undelivered = failed + (detail.failing_since ? pending : 0);
    renew(
      tiles,
      tile("Success rate", delivered + undelivered ? percent(delivered, delivered + undelivered) : "–"),
      tile("Delivered", count(delivered)),
      tile("Failed", count(failed)),
      tile("Pending", count(pending)),
    );
    deliveries.show(page.items);
    deliveries.node.hidden = page.items.length === 0;
    renew(none, page.items.length ? null : empty("No deliveries yet"));
    pages.show(page.next_cursor);
  };
  const node = h("section", { class: "card" }, h("h2", {}, "Deliveries"), tiles, deliveries.node, none, pages.node);
  return { node, load };
}

/** @param {Webhook} webhook @param {() => Promise<void>} changed */
function endpointButtons(webhook, changed) {
  const path = `/v1/webhooks/${webhook.id}`;
  const button = (/** @type {string} */ label, /** @type {() => Promise<void>} */ act, look = "small") =>
    h("button", {
      type: "button",
      class: look,
      "aria-label": `${label} ${webhook.url}`,
      on: { click: () => attempt(act) },
    }, label);
  const test = async () => {
    await send("POST", `${path}/test`);
    toast("A test event is on its way. Its delivery shows the outcome.");
    location.hash = `#/webhooks/${webhook.id}`;
    await changed();
  };
  const rotate = async () => {
    const done = await ask({
      title: "Rotate the secret?",
      text: "The endpoint gets a new secret. For a day, both the old and the new one sign each request.",
      action: "Rotate",
      act: () => send("POST", `${path}/rotate`),
    });
    if (done) await showSecret("The secret is rotated", done.secret);
  };
  const enable = async () => {
    await send("PATCH", path, { disabled: !webhook.disabled });
    toast(webhook.disabled ? "The endpoint is enabled." : "The endpoint is disabled.");
    await changed();
  };
  const remove = async () => {
    const done = await ask({
      title: "Delete this endpoint?",
      text: [h("b", {}, webhook.url), " gets no more events. Its pending deliveries are dropped."],
      action: "Delete",
      danger: true,
      act: () => send("DELETE", path).then(() => true),
    });
    if (!done) return;
    if (location.hash !== "#/webhooks") location.hash = "#/webhooks";
    else await changed();
  };
  return [
    !webhook.disabled && button("Test", test),
    button("Rotate", rotate),
    button(webhook.disabled ? "Enable" : "Disable", enable),
    button("Delete", remove, "small quiet-danger"),
  ];
}

/** @param {string} title @param {string} secret */
function showSecret(title, secret) {
  return show(
    title,
    h("p", {}, "Its secret signs each request. Store it now: it cannot be shown again."),
    h("pre", { class: "body" }, secret),
  );
}

function endpointForm() {
  return [
    field("url", "URL", text("url", { type: "url", required: true, placeholder: "https://example.com/hook" })),
    field(
      "events",
      "Events",
      text("events", { placeholder: "run.completed, run.failed" }),
      "Separated by commas; all events without any.",
    ),
    field("description", "Description", text("description", { maxlength: 500 })),
  ];
}

/** @param {FormData} form */
function specOf(form) {
  const events = textOf(form, "events").split(/[\s,]+/).filter(Boolean);
  return {
    url: textOf(form, "url"),
    events: events.length ? events : null,
    description: textOf(form, "description") || null,
  };
}

/** @param {Webhook} webhook */
function eventsOf(webhook) {
  if (webhook.events === null) return "all";
  return webhook.events.join(", ") || "those that jobs name";
}

/** @param {Webhook} webhook */
function state(webhook) {
  if (webhook.disabled) return [pill("disabled"), webhook.reason && h("span", { class: "muted" }, webhook.reason)];
  if (!webhook.failing_since) return pill("ready");
  return [
    pill("failing"),
    h("span", { class: "muted" }, h("code", {}, webhook.error ?? ""), " since ", moment(webhook.failing_since)),
  ];
}

/** Keys and tenants, for administrators: the page asks for an administrator's key, and shows them for 15 minutes. */

/** @import { Key, Tenant } from "../shapes.js" */

import { get, newKey, Problem, send } from "../api.js";
import { h, renew } from "../dom.js";
import { count, moment } from "../format.js";
import { ask, show } from "../parts/dialog.js";
import { field, text, textOf } from "../parts/form.js";
import { attempt, empty, toast, words } from "../parts/says.js";
import { pill } from "../parts/state.js";
import { pager, table } from "../parts/table.js";

/** @type {import("../main.js").Page} */
export async function keysPage(root, signal) {
  const body = h("div", { class: "page" });
  const draw = async () => {
    const session = await get("/v1/session", {}, signal);
    if (session.admin_until) await drawKeys(body, signal, session.admin_until, draw);
    else drawSignIn(body, draw);
  };
  root.append(body);
  await draw();
}

/** @param {HTMLElement} root @param {() => Promise<void>} done */
function drawSignIn(root, done) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.target));
    try {
      await send("POST", "/v1/session/admin", { key: textOf(form, "key") });
      await done();
    } catch (error) {
      problem.textContent = words(error);
      problem.hidden = false;
    }
  };
  renew(
    root,
    h("div", { class: "title" }, h("h1", {}, "Keys")),
    h(
      "form",
      { class: "card new-job", on: { submit } },
      h("p", {}, "Keys of all tenants are for administrators. An administrator's key opens this page for 15 minutes."),
      field("key", "Administrator's key", text("key", { type: "password", required: true })),
      problem,
      h("div", { class: "actions" }, h("button", { type: "submit", class: "primary" }, "Continue")),
    ),
  );
}

/**
 * @param {HTMLElement} root
 * @param {AbortSignal} signal
 * @param {string} until
 * @param {() => Promise<void>} redraw
 */
async function drawKeys(root, signal, until, redraw) {
  const none = h("div");
  const summary = h("p", { class: "muted" }, "This page closes ", moment(until));
  const tenant = text("tenant", { type: "search", placeholder: "all tenants", on: { change: () => attempt(reload) } });
  const pages = pager(() => load(), "keys");
  const { node: list, rows } = table(
    "Keys",
    /** @type {import("../parts/table.js").Column<Key>[]} */ ([
      { title: "Tenant", sort: (each) => each.tenant, cell: (each) => each.tenant },
      {
        title: "Name",
        look: "wide",
        sort: (each) => each.name ?? "",
        cell: (each) => [each.name ?? "–", each.admin && " (administrator)"],
      },
      { title: "Key id", cell: (each) => h("code", { class: "id", title: each.key_id }, each.key_id) },
      { title: "State", sort: stateOf, cell: (each) => pill(stateOf(each)) },
      { title: "Created", look: "number", sort: (each) => each.created_at, cell: (each) => moment(each.created_at) },
      {
        title: "",
        look: "end",
        cell: (each) =>
          stateOf(each) === "active" && h("button", {
            type: "button",
            class: "small quiet-danger",
            "aria-label": `Revoke ${each.name ?? each.key_id}`,
            on: { click: () => attempt(() => revoke(each)) },
          }, "Revoke"),
      },
    ]),
    (each) => each.key_id,
    "keys",
  );
  const tenantPages = pager(() => load(), "tenants", false);
  const { node: tenants, rows: tenantRows } = table(
    "Tenants",
    /** @type {import("../parts/table.js").Column<Tenant>[]} */ ([
      { title: "Tenant", look: "wide", sort: (each) => each.tenant, cell: (each) => each.tenant },
      {
        title: "Active keys",
        look: "number",
        sort: (each) => each.active_keys,
        cell: (each) => count(each.active_keys),
      },
      { title: "All keys", look: "number", sort: (each) => each.keys, cell: (each) => count(each.keys) },
      { title: "First key", look: "number", cell: (each) => moment(each.created_at) },
      {
        title: "",
        look: "end",
        cell: (each) =>
          h("button", {
            type: "button",
            class: "small",
            "aria-label": `Show keys of ${each.tenant}`,
            on: { click: () => ((tenant.value = each.tenant), attempt(reload)) },
          }, "Show keys"),
      },
    ]),
    (each) => each.tenant,
    "tenants",
  );
  const load = async () => {
    try {
      const page = await get("/v1/keys", { limit: 100, cursor: pages.cursor, tenant: tenant.value.trim() }, signal);
      rows(page.items);
      list.hidden = page.items.length === 0;
      renew(none, page.items.length ? null : empty("No keys"));
      pages.show(page.next_cursor);
      const { items, next_cursor } = await get("/v1/tenants", { limit: 100, cursor: tenantPages.cursor }, signal);
      tenantRows(items);
      tenantPages.show(next_cursor);
    } catch (error) {
      if (error instanceof Problem && error.status === 403) return redraw();
      throw error;
    }
  };
  const reload = () => (pages.reset(), load());
  const create = async () => {
    const key = newKey();
    const made = await ask({
      title: "New key",
      text: [
        field("new-tenant", "Tenant", text("new-tenant", { required: true }), "A new name makes a new tenant."),
        field("new-name", "Name", text("new-name", { maxlength: 200 })),
      ],
      action: "Create",
      act: (form) =>
        send("POST", "/v1/keys", { tenant: textOf(form, "new-tenant"), name: textOf(form, "new-name") || null }, {
          key,
        }),
    });
    if (!made) return;
    await show(
      "The key is created",
      h("p", {}, "Store it now: it cannot be shown again."),
      h("pre", { class: "body" }, made.key),
    );
    await load();
  };
  const revoke = async (/** @type {Key} */ each) => {
    const done = await ask({
      title: "Revoke this key?",
      text: [
        "The server refuses ",
        h("b", {}, each.name ?? each.key_id),
        ` of ${each.tenant} within two seconds, for good.`,
      ],
      action: "Revoke",
      danger: true,
      act: () => send("DELETE", `/v1/keys/${each.key_id}`).then(() => true),
    });
    if (!done) return;
    toast("The key is revoked.");
    await load();
  };
  const leave = async () => {
    await send("DELETE", "/v1/session/admin");
    await redraw();
  };
  renew(
    root,
    h(
      "div",
      { class: "title" },
      h("h1", {}, "Keys and tenants"),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", class: "quiet", on: { click: () => attempt(leave) } }, "Leave"),
        h("button", { type: "button", class: "primary", on: { click: () => attempt(create) } }, "New key"),
      ),
    ),
    h(
      "section",
      { class: "card" },
      h("div", { class: "filters" }, h("label", { for: "tenant" }, "Tenant"), tenant, summary),
      list,
      none,
      pages.node,
    ),
    h("section", { class: "card" }, h("h2", {}, "Tenants"), tenants, tenantPages.node),
  );
  await load();
}

/** @param {Key} key */
function stateOf(key) {
  if (key.revoked_at) return "revoked";
  return key.expires_at && Date.parse(key.expires_at) <= Date.now() ? "expired" : "active";
}

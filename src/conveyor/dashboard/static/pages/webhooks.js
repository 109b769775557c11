/** Webhook endpoints, and the deliveries of one of them. */

/** @import { Webhook } from "../shapes.js" */

import { get } from "../api.js";
import { h, renew } from "../dom.js";
import { moment } from "../format.js";
import { poll } from "../live.js";
import { deliveriesTable } from "../parts/deliveries.js";
import { empty } from "../parts/says.js";
import { pill } from "../parts/state.js";
import { pager, table } from "../parts/table.js";

/** @type {import("../main.js").Page} */
export async function webhooksPage(root, signal, webhookId) {
  const none = h("div");
  const { node: list, rows } = table(
    "Endpoints",
    /** @type {import("../parts/table.js").Column<Webhook>[]} */ ([
      {
        title: "Endpoint",
        look: "wide",
        cell: (
          each,
        ) => [
          h(
            "a",
            { class: "clip", href: `#/webhooks/${each.id}`, "aria-current": each.id === webhookId && "true" },
            each.url,
          ),
          each.description && h("span", { class: "muted" }, each.description),
        ],
      },
      { title: "Events", cell: (each) => each.events?.join(", ") ?? "all" },
      {
        title: "State",
        cell: (
          each,
        ) => [pill(each.disabled ? "disabled" : "ready"), each.reason && h("span", { class: "muted" }, each.reason)],
      },
      { title: "Created", look: "number", cell: (each) => moment(each.created_at) },
    ]),
    (each) => each.id,
  );
  const load = async () => {
    const { items } = await get("/v1/webhooks", {}, signal);
    rows(items);
    list.hidden = items.length === 0;
    renew(
      none,
      items.length ? null : empty("No endpoints", "Create one with ", h("code", {}, "conveyor webhooks create"), "."),
    );
  };
  const sent = webhookId ? deliveriesCard(webhookId, signal) : null;
  const refresh = () => Promise.all([load(), sent?.load()]);
  root.append(h("div", { class: "title" }, h("h1", {}, "Webhooks")), h("section", { class: "card" }, list, none));
  if (sent) root.append(sent.node);
  else root.append(h("p", { class: "muted" }, "Select an endpoint to see its deliveries."));
  await refresh();
  void poll(refresh, signal);
}

/** @param {string} webhookId @param {AbortSignal} signal */
function deliveriesCard(webhookId, signal) {
  const none = h("div");
  const pages = pager(() => load());
  const deliveries = deliveriesTable(signal, () => load());
  const load = async () => {
    const page = await get(`/v1/webhooks/${webhookId}/deliveries`, { limit: 50, cursor: pages.cursor }, signal);
    deliveries.show(page.items);
    deliveries.node.hidden = page.items.length === 0;
    renew(none, page.items.length ? null : empty("No deliveries yet"));
    pages.show(page.next_cursor);
  };
  return { node: h("section", { class: "card" }, h("h2", {}, "Deliveries"), deliveries.node, none, pages.node), load };
}

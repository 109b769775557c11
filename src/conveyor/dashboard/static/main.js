/** The frame around all pages: routing, session, and connection status. */

import { address } from "./address.js";
import { get, news, send } from "./api.js";
import { h, renew } from "./dom.js";
import { attempt, failure, loading } from "./parts/says.js";
import { forgetDrafts } from "./parts/draft.js";
import { palette } from "./parts/palette.js";
import { fleetPage } from "./pages/fleet.js";
import { keysPage } from "./pages/keys.js";
import { jobPage } from "./pages/job.js";
import { jobsPage } from "./pages/jobs.js";
import { lettersPage } from "./pages/letters.js";
import { newJobPage } from "./pages/new.js";
import { schedulesPage } from "./pages/schedules.js";
import { signInPage } from "./pages/sign-in.js";
import { taskPage } from "./pages/task.js";
import { webhooksPage } from "./pages/webhooks.js";

/**
 * A page is a function: it fills its root, resolves once there is something to show, and runs until the signal aborts it
 * for another page. It may resolve to a function that takes over the state of the address after it has changed.
 * @typedef {(root: HTMLElement, signal: AbortSignal, ...parameters: string[]) => Promise<void | (() => void)>} Page
 */

/** @type {[RegExp, string, Page][]} */
const PAGES = [
  [/^#\/jobs$/, "Jobs", jobsPage],
  [/^#\/new$/, "New job", newJobPage],
  [/^#\/jobs\/(job_\w+)$/, "Job", jobPage],
  [/^#\/jobs\/(job_\w+)\/tasks\/(\w+)$/, "Task", taskPage],
  [/^#\/dead-letters$/, "Dead letters", lettersPage],
  [/^#\/schedules$/, "Schedules", schedulesPage],
  [/^#\/schedules\/(schedule_\w+)$/, "Schedule", schedulesPage],
  [/^#\/webhooks$/, "Webhooks", webhooksPage],
  [/^#\/webhooks\/(webhook_\w+)$/, "Deliveries", webhooksPage],
  [/^#\/fleet$/, "Fleet", fleetPage],
  [/^#\/keys$/, "Keys", keysPage],
];
const LINKS = [
  ["#/jobs", "Jobs"],
  ["#/dead-letters", "Dead letters"],
  ["#/schedules", "Schedules"],
  ["#/webhooks", "Webhooks"],
  ["#/fleet", "Fleet"],
  ["#/keys", "Keys"],
];
const STANDINGS = { live: "Live", polling: "Polling", offline: "Offline" };
const SIGN_IN = /^#\/sign-in(?:\/([\w-]+))?$/;

const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const header = /** @type {HTMLElement} */ (document.getElementById("bar"));
const offline = /** @type {HTMLElement} */ (document.getElementById("offline"));
const standing = h("span", { class: "standing polling" }, STANDINGS.polling);

/** Aborts the current page. */
let over = new AbortController();
/** The page that is shown, if it can take over another state. @type {{path: string, restore: () => void} | null} */
let shown = null;
/** Where to go once signed in. */
let wanted = "#/jobs";

/** After a change of the address: another page, or the same one in another state. */
function move() {
  if (shown && shown.path === address().path) shown.restore();
  else void show();
}

async function show() {
  over.abort();
  over = new AbortController();
  shown = null;
  const { signal } = over;
  const link = SIGN_IN.exec(location.hash);
  if (link) return showSignIn(link[1]);
  const { path } = address();
  const found = PAGES.map(([pattern, title, page]) => ({ title, page, match: pattern.exec(path) })).find((
    { match },
  ) => match);
  if (!found?.match) return location.replace("#/jobs");
  document.title = `${found.title} · Conveyor`;
  markHere();
  renew(main, loading());
  const root = h("div", { class: "page" });
  try {
    const restore = await found.page(root, signal, ...found.match.slice(1));
    if (signal.aborted) return;
    if (restore) shown = { path, restore };
    main.replaceChildren(root);
    focusTitle();
  } catch (error) {
    if (!signal.aborted && location.hash !== "#/sign-in") main.replaceChildren(failure(error, show));
  }
}

/** @param {string | undefined} link */
async function showSignIn(link) {
  header.hidden = true;
  document.title = "Sign in · Conveyor";
  const root = h("div", { class: "page" });
  const enter = async () => {
    history.replaceState(null, "", wanted);
    await start();
  };
  main.replaceChildren(root);
  // A link works once, so it must not stay in the address bar or the history.
  if (link) history.replaceState(null, "", "#/sign-in");
  await signInPage(root, link, enter);
}

/** Moves the focus to the title after a page change, for screen readers. */
function focusTitle() {
  const title = main.querySelector("h1");
  title?.setAttribute("tabindex", "-1");
  title?.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function markHere() {
  for (const link of header.querySelectorAll("nav a")) {
    if (location.hash.startsWith(link.getAttribute("href") ?? "")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function signOut() {
  await send("DELETE", "/v1/session");
  forgetDrafts();
  wanted = "#/jobs";
  location.hash = "#/sign-in";
}

/** @param {{tenant: string, key_name: string | null}} session */
function drawHeader(session) {
  renew(
    header,
    h(
      "a",
      { class: "brand", href: "#/jobs" },
      h("img", { src: "/dashboard/icon.svg", alt: "", width: 26, height: 26 }),
      "Conveyor",
    ),
    h("nav", { "aria-label": "Main" }, LINKS.map(([href, text]) => h("a", { href }, text))),
    h(
      "div",
      { class: "bar-end" },
      standing,
      h("span", { class: "muted tenant", title: session.key_name ?? "" }, session.tenant),
      h("button", { type: "button", class: "quiet small", on: { click: () => attempt(signOut) } }, "Sign out"),
    ),
  );
  header.hidden = false;
}

async function start() {
  if (SIGN_IN.test(location.hash)) return show();
  renew(main, loading());
  try {
    drawHeader(await get("/v1/session"));
    await show();
  } catch (error) {
    if (location.hash !== "#/sign-in") main.replaceChildren(failure(error, start));
  }
}

news.addEventListener("signed-out", () => {
  if (SIGN_IN.test(location.hash)) return;
  wanted = location.hash || "#/jobs";
  location.replace("#/sign-in");
});
news.addEventListener("standing", (event) => {
  const now = /** @type {CustomEvent<keyof typeof STANDINGS>} */ (event).detail;
  standing.className = `standing ${now}`;
  standing.textContent = STANDINGS[now];
  offline.hidden = now !== "offline";
});
addEventListener("hashchange", move);
palette(/** @type {[string, string][]} */ (LINKS));
document.querySelector(".skip")?.addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
await start();

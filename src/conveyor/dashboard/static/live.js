/**
 * Keeping a page up to date. By server-sent events where they come through; by asking again every few seconds where
 * they do not; not at all while nobody looks.
 */

import { news } from "./api.js";

const POLL = 2_000;
// Of what has ended, little is new; unless somebody here makes it go on.
const IDLE = 15_000;
const LOOK = 500;
// Even a stream that is open is not trusted for ever: a line may be dead without anybody saying so.
const CHECK = 20_000;
const OPENING = 5_000;
// Streams that never opened in a row, before the next is only tried after a while.
const MOST_FAILED = 3;
const REST = 60_000;

/** @typedef {"live" | "polling" | "offline"} Standing */

let standing = /** @type {Standing} */ ("polling");

/** @param {Standing} now */
function say(now) {
  if (now === standing) return;
  standing = now;
  news.dispatchEvent(new CustomEvent("standing", { detail: now }));
}
news.addEventListener("unreachable", () => say("offline"));
news.addEventListener("answered", () => standing === "offline" && say("polling"));

/**
 * Call `refresh` now and again, one call at a time, for as long as the page is looked at.
 * @param {() => Promise<unknown>} refresh
 * @param {AbortSignal} signal ends it
 * @param {number} [every] milliseconds
 */
export async function poll(refresh, signal, every = POLL) {
  while (!signal.aborted) {
    await pause(every, signal);
    await visible(signal);
    if (!signal.aborted) await quietly(refresh);
  }
}

/**
 * Follow a stream of the server, and fall back to `refresh`.
 * @param {string} path
 * @param {Record<string, (data: any) => void>} on handlers, by event
 * @param {() => Promise<unknown>} refresh
 * @param {AbortSignal} signal ends it
 * @param {() => boolean} [wanted] whether there is anything to follow now
 */
export async function follow(path, on, refresh, signal, wanted = () => true) {
  let failed = 0;
  let restUntil = 0;
  while (!signal.aborted) {
    // While nobody answers at all, a stream would not either.
    if (wanted() && standing !== "offline" && Date.now() >= restUntil) {
      failed = (await stream(path, on, refresh, signal)) ? 0 : failed + 1;
      if (failed === MOST_FAILED) [failed, restUntil] = [0, Date.now() + REST];
    }
    // A stream that broke off is most often one whose server is gone: who looks should know soon.
    const broke = standing === "live";
    if (broke) say("polling");
    await pause(broke ? LOOK : wanted() ? POLL : 0, signal);
    for (let rested = 0; rested < IDLE && !wanted() && !signal.aborted; rested += LOOK) await pause(LOOK, signal);
    await visible(signal);
    if (!signal.aborted) await quietly(refresh);
  }
}

/**
 * Wait until a stream breaks, ends or is not looked at any more. Whether it was open at all.
 * @param {string} path
 * @param {Record<string, (data: any) => void>} on
 * @param {() => Promise<unknown>} refresh
 * @param {AbortSignal} signal
 * @returns {Promise<boolean>}
 */
function stream(path, on, refresh, signal) {
  return new Promise((resolve) => {
    const source = new EventSource(path);
    const over = new AbortController();
    let opened = false;
    const end = () => {
      source.close();
      over.abort();
      clearInterval(check);
      clearTimeout(opening);
      resolve(opened);
    };
    const check = setInterval(() => quietly(refresh), CHECK);
    const opening = setTimeout(() => opened || end(), OPENING);
    source.addEventListener("open", () => {
      opened = true;
      say("live");
    });
    source.addEventListener("error", end);
    for (const [event, handle] of Object.entries(on)) {
      source.addEventListener(event, (message) => handle(JSON.parse(message.data)));
    }
    signal.addEventListener("abort", end, { signal: over.signal });
    document.addEventListener("visibilitychange", () => document.hidden && end(), { signal: over.signal });
  });
}

/**
 * One at a time: who asks while it is under way waits for that.
 * @param {() => Promise<void>} work
 */
export function single(work) {
  /** @type {Promise<void> | null} */
  let current = null;
  return () => (current ??= quietly(work).finally(() => (current = null)));
}

/** @param {() => Promise<unknown>} refresh */
async function quietly(refresh) {
  try {
    await refresh();
  } catch {
    // What went wrong is told at the top of the page; the next turn tries again.
  }
}

/**
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve(undefined);
    };
    const timer = setTimeout(done, milliseconds);
    signal.addEventListener("abort", done);
  });
}

/** @param {AbortSignal} signal */
function visible(signal) {
  return new Promise((resolve) => {
    if (!document.hidden || signal.aborted) return resolve(undefined);
    const over = new AbortController();
    const done = () => (over.abort(), resolve(undefined));
    document.addEventListener("visibilitychange", () => document.hidden || done(), { signal: over.signal });
    signal.addEventListener("abort", done, { signal: over.signal });
  });
}

/**
 * Keeps a page up to date: by server-sent events, by polling where they are not available, and not at all while the page
 * is hidden.
 */

import { news } from "./api.js";

const POLL = 2_000;
// A finished job rarely changes, unless the user starts a rerun.
const IDLE = 15_000;
const LOOK = 500;
// A refresh in addition to an open stream, because a connection may be dead without an error.
const CHECK = 20_000;
const OPENING = 5_000;
// After this many failed streams in a row, wait before the next one.
const MAX_FAILED = 3;
const REST = 60_000;
// Streams of all tabs of a browser.
const MAX_STREAMS = 3;

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
 * Call `refresh` at an interval, one call at a time, while the page is visible.
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
    // While the server is unreachable, a stream would fail too.
    if (wanted() && standing !== "offline" && Date.now() >= restUntil) {
      failed = (await stream(path, on, refresh, signal)) ? 0 : failed + 1;
      if (failed === MAX_FAILED) [failed, restUntil] = [0, Date.now() + REST];
    }
    // A broken stream usually means that the server is gone, so check soon.
    const broke = standing === "live";
    if (broke) say("polling");
    await pause(broke ? LOOK : wanted() ? POLL : 0, signal);
    for (let rested = 0; rested < IDLE && !wanted() && !signal.aborted; rested += LOOK) await pause(LOOK, signal);
    await visible(signal);
    if (!signal.aborted) await quietly(refresh);
  }
}

/**
 * Wait until a stream breaks, ends or the page is hidden. Resolves to whether it was open at all.
 * @param {string} path
 * @param {Record<string, (data: any) => void>} on
 * @param {() => Promise<unknown>} refresh
 * @param {AbortSignal} signal
 * @returns {Promise<boolean>}
 */
async function stream(path, on, refresh, signal) {
  const free = await freeStream();
  if (!free) return true;
  try {
    return await openStream(path, on, refresh, signal);
  } finally {
    free();
  }
}

/**
 * A browser has six connections to a server, for all its tabs: so many of them may be streams, and other tabs poll.
 * Resolves to what ends the use of one; null if all are in use.
 * @returns {Promise<(() => void) | null>}
 */
function freeStream() {
  // Only a secure page has locks. Without them every tab has a stream, as long as it is visible.
  const { locks } = navigator;
  if (!locks) return Promise.resolve(() => {});
  const take = (/** @type {number} */ number) =>
    new Promise((resolve) => {
      void locks.request(`stream-${number}`, { ifAvailable: true }, (lock) => {
        if (!lock) return resolve(null);
        return new Promise((release) => resolve(() => release(undefined)));
      });
    });
  return Array.from({ length: MAX_STREAMS }).reduce(
    async (/** @type {Promise<any>} */ before, _, number) => (await before) ?? take(number),
    Promise.resolve(null),
  );
}

/**
 * @param {string} path
 * @param {Record<string, (data: any) => void>} on
 * @param {() => Promise<unknown>} refresh
 * @param {AbortSignal} signal
 * @returns {Promise<boolean>}
 */
function openStream(path, on, refresh, signal) {
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
 * Run one call at a time: a call during another one waits for that one.
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
    // The banner at the top reports the error; the next call retries.
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

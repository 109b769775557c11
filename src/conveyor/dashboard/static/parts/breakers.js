/** Breakers: reset those of targets that are back. */

import { send } from "../api.js";
import { ask } from "./dialog.js";
import { toast } from "./says.js";

/**
 * Ask, and reset breakers. Resolves to whether it was done.
 * @param {string[]} targets
 */
export async function resetBreakers(targets) {
  const what = targets.length === 1 ? targets[0] : "all targets";
  const done = await ask({
    title: targets.length === 1 ? "Reset the breaker?" : "Reset all breakers?",
    text: `Tasks that wait for ${what} start at once. Where it is still down, they use up attempts.`,
    action: "Reset",
    act: () => send("POST", "/v1/breakers/reset", { targets }),
  });
  if (!done) return false;
  toast(done.reset.length ? "Tasks that waited start now." : "The breaker was closed already.");
  return true;
}

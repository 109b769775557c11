/** Sign-in, by a link or by an API key. */

import { Problem, send } from "../api.js";
import { h } from "../dom.js";
import { words } from "../parts/says.js";

/**
 * @param {HTMLElement} root
 * @param {string | undefined} link
 * @param {() => Promise<void>} enter
 */
export async function signInPage(root, link, enter) {
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const key = h("input", {
    id: "key",
    name: "key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    placeholder: "cv_…",
  });
  const button = h("button", { type: "submit", class: "primary" }, "Sign in");

  /** @param {{link: string} | {key: string}} credential */
  const signIn = async (credential) => {
    button.disabled = true;
    try {
      await send("POST", "/v1/sign-in", credential);
      await enter();
    } catch (error) {
      problem.textContent = error instanceof Problem && error.code === "invalid_key"
        ? "This key is unknown, expired or revoked."
        : words(error);
      problem.hidden = false;
      key.focus();
    } finally {
      button.disabled = false;
    }
  };
  const submit = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    void signIn({ key: key.value.trim() });
  };
  root.append(
    h(
      "section",
      { class: "card sign-in" },
      h("img", { src: "/dashboard/icon.svg", alt: "", width: 44, height: 44 }),
      h("h1", {}, "Sign in to Conveyor"),
      h(
        "p",
        { class: "muted" },
        "Run ",
        h("code", {}, "conveyor dashboard"),
        " on the server: it prints a link that signs you in. Or paste an API key.",
      ),
      problem,
      h("form", { on: { submit } }, h("label", { for: "key" }, "API key"), key, button),
    ),
  );
  if (link) await signIn({ link });
  else key.focus();
}

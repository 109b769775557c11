"""Pages in a browser: opened as a user opens them, used by their buttons and dialogs, and checked."""

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize, expect

from tests.dashboard.world import World

WIDE = ViewportSize(width=1280, height=860)
WATCH = "window.reported = []; addEventListener('securitypolicyviolation', (e) => reported.push(e.violatedDirective))"

Open = Callable[..., Page]
USUAL: dict[str, Any] = {"viewport": WIDE, "locale": "en-GB", "timezone_id": "UTC", "reduced_motion": "reduce"}


class Visits:
    """Pages that are looked at. Most tests share one, as a user would go from place to place."""

    def __init__(self, here: World, browser: Browser, cookies: Any) -> None:
        self._here = here
        self._browser = browser
        self._cookies = cookies
        self._shared: Page | None = None
        self._own: list[Page] = []
        self.wrong: list[str] = []

    def open(self, path: str, errors: bool = False, signed_in: bool = True, **options: Any) -> Page:
        """A page, signed in. With `errors` its console may have some; with options it has a context of its own."""
        if errors or not signed_in or options:
            page = self._page(signed_in, options)
            self._own.append(page)
        else:
            page = self._shared = self._shared or self._page(True, {})
            # Whatever it showed before, what is asked for is made anew.
            page.goto(f"{self._here.url}/#/new")
        if not errors:
            page.on("console", self._heard)
        page.goto(f"{self._here.url}/{path}")
        return page

    def check(self) -> None:
        """Nothing ran that should not, the policy had nothing to report, and nothing else went wrong."""
        pages = [*self._own, *([self._shared] if self._shared else [])]
        found = [page.evaluate("[window.reported, window.hacked]") for page in pages]
        self.leave(self._own)
        assert all(each == [[], None] for each in found)
        assert self.wrong == []
        if self._shared:
            self._shared.remove_listener("console", self._heard)

    def leave(self, pages: list[Page]) -> None:
        for page in pages:
            page.context.close()
        pages.clear()

    def start_over(self) -> None:
        """What a test that failed leaves behind is not for the next one."""
        self.wrong.clear()
        self.leave([*self._own, *([self._shared] if self._shared else [])])
        self._own, self._shared = [], None

    def _page(self, signed_in: bool, options: dict[str, Any]) -> Page:
        context = self._browser.new_context(**{**USUAL, **options})
        if signed_in:
            context.add_cookies(self._cookies)
        context.add_init_script(WATCH)
        page = context.new_page()
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        return page

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.wrong.append(message.text)


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def heading(page: Page, name: str) -> Any:
    return page.get_by_role("heading", name=name, exact=True)


def confirm(page: Page, action: str) -> None:
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name=action, exact=True).click()
    expect(dialog).to_have_count(0)


def usable(page: Page) -> None:
    """Nothing stands out of the page, it has one title, and all that can be used has a name."""
    script = (
        "() => [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > innerWidth)"
    )
    wide = page.evaluate(f"({script})().map((e) => e.tagName + '.' + e.getAttribute('class'))")
    assert (wide, page.evaluate("document.documentElement.scrollWidth <= innerWidth")) == ([], True)
    # Nor is a column so narrow that its words break.
    script = """[...document.querySelectorAll('td')].filter((e) => {
        const range = document.createRange();
        range.selectNodeContents(e);
        const { width, height } = range.getBoundingClientRect();
        return e.checkVisibility() && e.innerText.length > 8 && width < 80 && height > 90;
    }).map((e) => e.innerText)"""
    assert page.evaluate(script) == []
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    nameless = """[...document.querySelectorAll('a, button, input, select, textarea')].filter((e) => e.checkVisibility()
        && !(e.ariaLabel || e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []

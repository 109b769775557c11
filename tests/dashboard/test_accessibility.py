"""axe finds nothing wrong on any page in any state, on a wide screen and on a phone, in light and dark mode. The
pictures of the documentation are those of the same pages. By default, the test checks colours in both modes on the wide
screen, and all other rules on both screens in one mode; `CONVEYOR_AXE=all` checks all rules everywhere, on a narrow
screen too."""

import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, ViewportSize

from tests.dashboard import screenshots
from tests.dashboard.browsing import Open, usable
from tests.dashboard.gallery import views
from tests.dashboard.world import World

_COLOURS = "{runOnly: ['color-contrast']}"
_ALL_ELSE = "{rules: {'color-contrast': {enabled: false}}}"
LOOKS = [(1440, "light", "{}"), (1440, "dark", _COLOURS), (390, "light", _ALL_ELSE)]
if os.environ.get("CONVEYOR_AXE") == "all":
    LOOKS = [(width, scheme, "{}") for width in (1440, 1024, 390) for scheme in ("light", "dark")]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.timeout(600)
def test_axe_finds_nothing_on_any_page(here: World, visit: Open) -> None:
    found: dict[str, Any] = {}
    # Only the script: the module around it drives one page at a time.
    axe = (files("axe_playwright_python") / "axe.min.js").read_text()
    pages = {True: visit("#/jobs", viewport=_size(1440)), False: visit("", errors=True, signed_in=False)}
    gallery = views(here)
    for view in gallery:
        page = pages[view.signed_in]
        # Dialogs and other pages are closed.
        page.goto("about:blank")
        view.open(page, here.url)
        page.evaluate(axe)
        # axe does not see those that are hidden, until there is a second page.
        pagers = page.locator("nav.pager").evaluate_all("all => all.map((each) => each.getAttribute('aria-label'))")
        if len(set(pagers)) < len(pagers):
            found[f"{view.name}: pagers with the same name"] = pagers
        for width, scheme, options in LOOKS:
            page.set_viewport_size(_size(width))
            page.emulate_media(color_scheme=scheme)
            for rule, target, message in _violations(page, options):
                found.setdefault(f"{view.name}: {rule} {target}: {message}", []).append((width, scheme))
            if page.get_by_role("dialog").count() == 0:
                usable(page)
    assert found == {}
    names = {view.name for view in gallery} | set(screenshots.IN_THE_DARK) | set(screenshots.ON_A_PHONE)
    assert {path.name for path in screenshots.FOLDER.iterdir()} == {f"{name}.webp" for name in names}


def test_the_documentation_has_its_pictures() -> None:
    named = {name for page in DOCS.rglob("*.md") for name in re.findall(r"screenshots/([\w.-]+)", page.read_text())}
    assert named == {path.name for path in screenshots.FOLDER.iterdir()}
    assert all(path.stat().st_size < screenshots.MAX_BYTES for path in screenshots.FOLDER.iterdir())


def _size(width: int) -> ViewportSize:
    return ViewportSize(width=width, height=900)


def _violations(page: Page, options: str) -> list[tuple[str, str, str]]:
    script = f"""axe.run(document, {{resultTypes: ['violations'], ...{options}}}).then(({{violations}}) =>
        violations.flatMap(({{id, nodes}}) => nodes.map((node) =>
            [id, node.target.join(' '), [...node.any, ...node.all, ...node.none][0]?.message ?? ''])))"""
    return [tuple(each) for each in page.evaluate(script)]

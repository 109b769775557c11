"""`python -m tests.dashboard.screenshots [FOLDER]` takes the pictures of the documentation: every view of the gallery,
from a real server, as small WebP files. Some are taken in dark mode and on a phone, too."""

import base64
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from playwright.sync_api import Browser, Page, ViewportSize

from tests.dashboard.gallery import View, views
from tests.dashboard.world import World, world
from tests.servers.chromium import chromium

FOLDER = Path(__file__).parents[2] / "docs" / "screenshots"
MAX_BYTES = 100_000
# Views that are taken once more, by the name of the picture.
IN_THE_DARK = {"dark": "job-running"}
ON_A_PHONE = {"phone": "job-failures"}

_WIDTH, _PHONE = 1200, 390
_QUALITY = 72
# Milliseconds until charts and lists have their first content.
_SETTLE = 1200


def take_all(here: World, browser: Browser, folder: Path) -> None:
    """Fill the server, and take a picture of every view."""
    gallery = views(here)
    by_name = {view.name: view for view in gallery}
    signed_in, stranger = _page(here, browser), _page(here, browser, signed_in=False)
    for view in gallery:
        _take(here, signed_in if view.signed_in else stranger, view, folder / f"{view.name}.webp")
    for name, original in IN_THE_DARK.items():
        _take(here, _page(here, browser, color_scheme="dark"), by_name[original], folder / f"{name}.webp")
    for name, original in ON_A_PHONE.items():
        phone = by_name[original]._replace(height=844)
        _take(here, _page(here, browser), phone, folder / f"{name}.webp", _PHONE)


def _page(here: World, browser: Browser, *, signed_in: bool = True, **options: Any) -> Page:
    usual = {"locale": "en-GB", "timezone_id": "UTC", "reduced_motion": "reduce"}
    page = browser.new_context(**{**usual, **options}).new_page()
    if signed_in:
        page.goto(here.url + here.ask("POST", "/v1/sign-in/links", {})["path"])
        page.get_by_role("heading", name="Jobs").wait_for()
    return page


def _take(here: World, page: Page, view: View, path: Path, width: int = _WIDTH) -> None:
    page.set_viewport_size(ViewportSize(width=width, height=view.height))
    # Another page in between: what was open on the one before is closed.
    page.goto("about:blank")
    view.open(page, here.url)
    page.wait_for_timeout(_SETTLE)
    shown = min(view.height, page.evaluate("document.documentElement.getBoundingClientRect().height") + 1)
    clip = {"x": 0, "y": 0, "width": width, "height": max(shown, 400), "scale": 1}
    wanted = {"format": "webp", "quality": _QUALITY, "clip": clip}
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", wanted)
    path.write_bytes(base64.b64decode(taken["data"]))
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size < MAX_BYTES, f"{path.name} has {size} bytes, where {MAX_BYTES} are allowed"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place, world(Path(place)) as filled, chromium() as opened:
        take_all(filled, opened, target)

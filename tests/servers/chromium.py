"""Chromium as Debian packages it, driven by Playwright. It ends with the driver, and that with the test process,
however that comes about: its pipe closes."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, sync_playwright

_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. While it is open no event loop can be run in this thread: it has one of its own."""
    path = shutil.which("chromium")
    assert path is not None, "The dashboard is tested in Chromium: `make packages` installs it."
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=_FLAGS, headless=True)
        try:
            yield browser
        finally:
            browser.close()

"""The dashboard in a real browser, for all tests of its pages. Whatever a page does, its console has no error and its
policy nothing to report."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.dashboard.browsing import Open, Visits
from tests.dashboard.world import World, world
from tests.servers.chromium import chromium
from tests.support.up_process import environment

expect.set_options(timeout=10_000)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def here(place: Path) -> Iterator[World]:
    with world(place) as found:
        yield found


@pytest.fixture(scope="module")
def browser(here: World) -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def cookies(here: World, browser: Browser) -> Any:
    """Those of the session that the link starts which `conveyor dashboard` prints; the link is spent then."""
    command = [Path(sys.executable).with_name("conveyor"), "dashboard", "--data", str(here.up.data)]
    printed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    link = re.fullmatch(r"http://[^/]+(/#/sign-in/\S+)\n", printed)
    assert link is not None
    # Standard output was no terminal, and a log signs nobody in.
    assert "sign-in/" not in here.up.output.read_text()
    assert "open    " in here.up.output.read_text()
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(here.url + link[1])
        expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
        assert "sign-in" not in page.url
        kept = context.cookies()
    assert [(each["httpOnly"], each["sameSite"]) for each in kept] == [(True, "Strict")]
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(here.url + link[1])
        expect(page.get_by_role("alert")).to_contain_text("already used")
    return kept


@pytest.fixture(scope="module")
def visits(here: World, browser: Browser, cookies: Any) -> Visits:
    return Visits(here, browser, cookies)


@pytest.fixture
def visit(visits: Visits, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a page. Nothing may have gone wrong in it by the end of the test, but what the test expects."""
    failed = request.session.testsfailed
    yield visits.open
    try:
        if request.session.testsfailed == failed:
            visits.check()
    finally:
        if visits.wrong or request.session.testsfailed != failed:
            visits.start_over()

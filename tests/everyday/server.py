"""A real `conveyor up` on one of the stacks."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from conveyor.clock import SystemClock
from conveyor.settings import Settings
from conveyor.system import migrate
from tests.stacks.conftest import urls
from tests.support.up_process import Up

STACKS = ("embedded", "postgres", "aws")


@asynccontextmanager
async def server(stack: str, place: Path) -> AsyncIterator[Up]:
    """Started; stopped at the end, as an operator stops it."""
    given = urls(stack, place / "data")
    if given:
        await migrate(Settings.load({}, data=place / "data", **given), SystemClock())
    named = {f"CONVEYOR_{name.upper()}": str(url) for name, url in given.items()}
    named |= {"CONVEYOR_SIGNING_KEY": "s" * 32} if given else {}
    up = Up(place, "--app", "tests.everyday.app", **named, CONVEYOR_LOG_LEVEL="warning", CONVEYOR_LOG_FORMAT="json")
    up.log = place / "log"
    up.start()
    try:
        yield up
    finally:
        up.close()


def complaints(log: Path) -> tuple[list[str], Counter[str]]:
    """Errors that the server wrote, and whatever is no line of its log; and how often it warned of what."""
    found: list[str] = []
    warnings: Counter[str] = Counter()
    for line in log.read_text().splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            # It says how it stops.
            found += [] if line.startswith("conveyor: Stopp") else [line]
            continue
        if said.get("level") == "warning":
            warnings[said["event"]] += 1
        else:
            found.append(line)
    return found, warnings

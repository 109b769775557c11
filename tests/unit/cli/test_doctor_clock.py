"""`conveyor doctor` compares the clock with the last time that retention stored."""

import asyncio
from pathlib import Path

import pytest

from conveyor.cli import doctor_checks
from conveyor.clock import SystemClock
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.clocks import ManualClock


async def _store(settings: Settings, ahead: float, jump: float) -> None:
    clock = ManualClock(SystemClock().now() + ahead)
    async with open_system(settings, clock) as system:
        trusted = TrustedTime(system.records.documents, clock)
        await trusted.now()
        clock.step(jump)
        await trusted.now()


@pytest.mark.parametrize(
    ("ahead", "jump", "verdict", "found"),
    [
        (0.0, 0.0, "ok", ""),
        (7200.0, 0.0, "warn", " s behind the last stored time"),
        (-86_400.0, 86_400.0, "warn", "jumped forward from "),
    ],
)
def test_a_clock_that_was_set_is_named(tmp_path: Path, ahead: float, jump: float, verdict: str, found: str) -> None:
    settings = Settings.load({}, data=tmp_path)
    asyncio.run(_store(settings, ahead, jump))
    check = doctor_checks._clock(settings)
    assert (check.name, check.verdict) == ("clock", verdict)
    assert found in check.found

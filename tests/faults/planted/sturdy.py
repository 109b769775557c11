"""Bugs that hostile clients, damaged disks and wrong clocks found: limits that were missing, checks that were not
made."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from conveyor.api.connection_limit import ConnectionLimit
from conveyor.auth import keys
from conveyor.errors import LastAdminKey
from conveyor.lists import reader
from conveyor.model import BlockSums, BodyRef
from conveyor.read import results
from conveyor.recover.overdue_runs import Deadlines
from conveyor.telemetry import logs
from tests.faults.planted import Planted
from tests.flow import test_api_keys, test_clock_jump, test_damaged_bodies
from tests.security import test_connections
from tests.unit.lists import test_reader
from tests.unit.telemetry import test_redact


def connections_without_end(patch: pytest.MonkeyPatch) -> None:
    for name in ("is_reached", "is_exceeded"):
        patch.setattr(ConnectionLimit, name, False)


def each_administrator_looks_for_itself(patch: pytest.MonkeyPatch) -> None:
    """Two who revoke each other's keys at the same time see each other."""

    async def claim(access: Any, documents: Any, clock: Any, key_id: str) -> None:
        others = [other for other in await access.keys(None) if other.admin and other.key_id != key_id]
        if not any(keys.is_usable(other, clock.now()) for other in others):
            raise LastAdminKey

    patch.setattr(keys, "_claim_revocation", claim)


def deadlines_of_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    async def now(self: Deadlines) -> float:
        return self._clock.now()

    patch.setattr(Deadlines, "_now", now)


def blocks_are_sent_as_they_are(patch: pytest.MonkeyPatch) -> None:
    async def check(blobs: Any, ref: BodyRef, sums: BlockSums, number: int) -> tuple[int, int]:
        return number * sums.size, min(ref.length, (number + 1) * sums.size)

    patch.setattr(results, "_check_block", check)


def setting(module: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, value)


PLANTED = [
    Planted(
        "connections have no limit", connections_without_end, test_connections.connections_have_a_limit, (Exception,)
    ),
    Planted(
        "two administrators revoke each other",
        each_administrator_looks_for_itself,
        test_api_keys.two_administrators_cannot_revoke_each_other,
    ),
    Planted(
        "a run fails by one look at a wrong clock", deadlines_of_the_wall_clock, test_clock_jump.no_run_fails_by_a_jump
    ),
    Planted(
        "a range of a long body is sent unchecked",
        blocks_are_sent_as_they_are,
        partial(test_damaged_bodies.test_a_range_of_a_long_body_is_checked_by_block, "object"),
        (AssertionError, pytest.fail.Exception),
    ),
    Planted(
        "blank lines are parsed one by one",
        setting(reader, "_after_blank", lambda text, start: start),
        test_reader.blank_lines_are_skipped_together,
    ),
    Planted(
        "a full disk fills the log with tracebacks",
        setting(logs, "_explain_disk", lambda logger, method, event: event),
        test_redact.test_a_full_disk_is_explained_without_a_traceback,
        (KeyError, AssertionError),
    ),
]

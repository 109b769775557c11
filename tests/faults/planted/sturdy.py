"""Bugs that hostile clients, damaged disks and wrong clocks found: limits that were missing, checks that were not
made."""

from collections.abc import Callable
from functools import partial
from subprocess import TimeoutExpired
from typing import Any

import pytest

from conveyor.api import addressing
from conveyor.api.connection_limit import ConnectionLimit
from conveyor.auth import keys
from conveyor.cli import dashboard_command
from conveyor.coordination.breaker import Breakers
from conveyor.errors import LastAdminKey
from conveyor.jobs import secrets
from conveyor.lists import reader
from conveyor.model import BlockSums, BodyRef
from conveyor.read import results
from conveyor.recover.overdue_runs import Deadlines
from conveyor.settings import Settings
from conveyor.system import open_system
from conveyor.telemetry import logs
from tests.dashboard import test_sessions
from tests.faults.planted import Planted
from tests.flow import test_api_keys, test_clock_jump, test_damaged_bodies
from tests.security import test_connections, test_shown_secrets, test_wire
from tests.support.api import new_server
from tests.support.clocks import ManualClock
from tests.support.places import quick_place
from tests.unit import test_locks
from tests.unit.cli import test_stop_limit
from tests.unit.coordination import test_breaker
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


def every_log_has_a_link(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dashboard_command, "dashboard_link", dashboard_command.sign_in_path)


def a_stop_has_no_limit(patch: pytest.MonkeyPatch) -> None:
    """In the process that hangs."""
    without = "from conveyor.cli.loop import _StopLimit\n_StopLimit.begin = lambda *given: None\n"
    patch.setattr(test_stop_limit, "HANGS", without + test_stop_limit.HANGS)
    patch.setattr(test_stop_limit, "PATIENCE", 2.0)


def servers_need_build_tools(patch: pytest.MonkeyPatch) -> None:
    packages = test_locks.packages

    def with_build_tools(name: str) -> dict[str, str]:
        return packages(name) | (packages("build.txt") if name == "run.txt" else {})

    patch.setattr(test_locks, "packages", with_build_tools)


async def _never_beyond(self: Breakers, seconds: float) -> list[str]:
    return []


async def _a_breaker_from_before() -> None:
    clock = ManualClock()
    with quick_place() as place:
        async with open_system(Settings.load({}, data=place), clock) as system:
            await test_breaker.TestClockSetBack().test_a_breaker_from_before_is_half_open(system, clock)


def any_framing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(addressing, "_check_coding", lambda version, headers: None)


def the_first_host_counts(patch: pytest.MonkeyPatch) -> None:
    def first(version: str, headers: Any) -> str:
        return next((value.decode("latin-1") for name, value in headers if name == b"host"), "localhost")

    patch.setattr(addressing, "_host_of", first)


async def _malformed_heads() -> None:
    async with new_server() as api:
        await test_wire.test_malformed_heads_are_refused(api)


def urls_as_they_are(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(secrets, "shown_url", lambda url: url)


def setting(module: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, value)


PLANTED = [
    Planted("a log signs its readers in", every_log_has_a_link, test_sessions.a_log_signs_nobody_in),
    Planted(
        "blank lines have no bound",
        setting(reader, "MAX_WITHOUT_TASK", 1 << 60),
        test_reader.a_list_of_blank_lines_has_a_bound,
        (pytest.fail.Exception,),
    ),
    Planted(
        "a stop waits for a disk that does not answer",
        a_stop_has_no_limit,
        test_stop_limit.test_a_command_that_does_not_stop_exits,
        (TimeoutExpired,),
    ),
    Planted("a server needs build tools", servers_need_build_tools, test_locks.test_the_run_lock_holds_no_build_tool),
    Planted(
        "a breaker stays open after its clock was set back",
        lambda patch: patch.setattr(Breakers, "_half_open_beyond", _never_beyond),
        _a_breaker_from_before,
    ),
    Planted("any transfer coding is taken", any_framing, _malformed_heads),
    Planted("the first of two hosts counts", the_first_host_counts, _malformed_heads, (AssertionError, ValueError)),
    Planted(
        "queries of URLs are shown",
        urls_as_they_are,
        test_shown_secrets.test_what_of_an_export_api_and_a_schedule_is_hidden,
    ),
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

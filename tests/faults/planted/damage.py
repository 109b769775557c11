"""Checks that were not made: of bodies, exports and rows that a disk changed, and of the disk itself."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from conveyor.engines.sqlite import soundness
from conveyor.engines.sqlite.database import SqliteDatabase
from conveyor.errors import EngineFailed
from conveyor.export import writer
from conveyor.ingest import rerun_walk
from conveyor.process import worker
from conveyor.read import body_reader, results
from conveyor.verify import run_check
from tests.faults.planted import Planted
from tests.flow import test_damaged_bodies, test_export, test_exports, test_full_disk, test_rerun, test_verify
from tests.support.api import Api, new_server
from tests.support.places import quick_place
from tests.unit.engines import test_sqlite_soundness

Guard = Callable[[], Awaitable[None]]
# What a check says that is not made: the test sees no refusal, or the wrong bytes go on.
_UNSEEN = (AssertionError, ValueError, pytest.fail.Exception)


def _serving(test: Callable[..., Awaitable[None]], *given: Any) -> Guard:
    """A test of a server, or of its system."""

    async def guard() -> None:
        async with new_server() as api:
            await test(api, *given)

    return guard


def _on_its_system(test: Callable[..., Awaitable[None]], *given: Any) -> Guard:
    async def on_it(api: Api) -> None:
        await test(api.system, *given)

    return _serving(on_it)


def _in_a_place(test: Callable[..., Awaitable[None]], *given: Any) -> Guard:
    async def guard() -> None:
        with quick_place() as place:
            await test(place, *given)

    return guard


async def _exported() -> None:
    with quick_place() as place:
        await _on_its_system(test_export.test_an_export_goes_on_past_a_damaged_body, place, "segment", "flipped")()


def any_body_is_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(results, "check_body", lambda ref, length, digest: None)


def exports_check_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(body_reader, "_check_all", lambda tasks, bodies, deflated: {})


def exports_count_no_damage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writer, "is_damaged", lambda task: False)


def nothing_is_damaged(patch: pytest.MonkeyPatch) -> None:
    async def none(blobs: Any, tasks: Any) -> Any:
        yield []

    patch.setattr(rerun_walk, "damaged_tasks", none)


def verify_trusts_short_bodies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_check, "is_damaged", lambda task: False)


def verify_trusts_long_bodies(patch: pytest.MonkeyPatch) -> None:
    async def right(*_: Any) -> None:
        return None

    patch.setattr(run_check.RunCheck, "_stream", right)


def verify_trusts_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_check, "count_drift", lambda *_: 0)


def any_database_is_ours(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(soundness, "_OWN_TABLES", frozenset())


def a_full_disk_has_no_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SqliteDatabase, "_failed", lambda self, error: EngineFailed(f"The database failed: {error}"))


def nobody_says_that_the_disk_is_full(patch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: Any) -> None:
        pass

    patch.setattr(worker, "publish_disk_wait", nothing)


PLANTED = [
    Planted(
        "a damaged small body is sent",
        any_body_is_right,
        _serving(test_damaged_bodies.test_a_small_body_is_checked_before_it_is_sent, "segment", "flipped"),
        _UNSEEN,
    ),
    Planted(
        "a damaged long body ends cleanly",
        any_body_is_right,
        _serving(test_damaged_bodies.test_a_long_body_never_ends_cleanly, "object", "flipped"),
        _UNSEEN,
    ),
    Planted("a damaged body is exported", exports_check_nothing, _exported, (Exception,)),
    Planted(
        "an export is silent about damaged bodies",
        exports_count_no_damage,
        _on_its_system(test_exports.test_a_damaged_body_is_a_warning, "segment"),
    ),
    Planted(
        "a rerun finds no damaged body", nothing_is_damaged, _serving(test_rerun.test_what_is_damaged_is_run_again)
    ),
    Planted(
        "verify trusts the bodies that it has read",
        verify_trusts_short_bodies,
        _on_its_system(test_verify.test_a_damaged_segment_is_found, "flipped"),
    ),
    Planted(
        "verify trusts long bodies",
        verify_trusts_long_bodies,
        _on_its_system(test_verify.test_other_damaged_bodies_are_found, "long"),
    ),
    Planted(
        "verify trusts counts",
        verify_trusts_counts,
        _on_its_system(test_verify.test_wrong_counts_are_found_and_repaired),
        (KeyError,),
    ),
    Planted(
        "the database of another program is used",
        any_database_is_ours,
        _in_a_place(test_sqlite_soundness.test_the_database_of_another_program, 1),
        (Exception,),
    ),
    Planted(
        "an error of a full disk does not name it",
        a_full_disk_has_no_name,
        _serving(test_full_disk.test_a_submit_is_told_at_once),
    ),
    Planted(
        "a job does not say that it waits for the disk",
        nobody_says_that_the_disk_is_full,
        test_full_disk.test_a_job_says_that_it_waits_for_the_disk,
    ),
]

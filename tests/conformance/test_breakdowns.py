"""Breakdowns and load over every engine: workers add their parts at the same time, and each part counts once."""

import asyncio

import pytest

from conveyor import faults
from conveyor.coordination.load_counters import add_load, read_load
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.records import Records
from conveyor.jobs.breakdowns import Breakdown, FailedAttempt, add_part, stored_breakdown
from conveyor.jobs.load_history import LoadPoint, add_to_load, load_history
from conveyor.model import TaskError
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, OTHER, make_run

HOST = "a.example"


class Died(BaseException):
    """The process ends here."""


def part_of(at: float, succeeded: int = 3, failed: int = 1) -> Breakdown:
    part = Breakdown()
    part.add_successes([HOST] * succeeded, [0.1] * succeeded, at)
    errors = [FailedAttempt(7, 1, HOST, TaskError("http_503", "busy"), 503, 0.2, False) for _ in range(failed)]
    part.add_failures(errors, at)
    return part


async def test_parts_of_many_workers_add_up(records: Records, clock: ManualClock) -> None:
    run, now = make_run(clock), clock.now()

    async def work(worker: str) -> None:
        for number in (1, 2, 3):
            while not await add_part(records.documents, run, part_of(now), worker, number, now):
                pass

    await asyncio.gather(*(work(f"worker_{number}") for number in range(6)))
    # An answer that was lost: the part is sent again.
    assert await add_part(records.documents, run, part_of(now), "worker_0", 3, now)
    found = await stored_breakdown(records.documents, run)
    tally = found.hosts[HOST]
    assert (tally.succeeded, tally.failed, max(tally.steps.values())) == (54, 18, 54)
    assert (found.groups["http_503"][HOST].failed, len(found.groups["http_503"][HOST].samples)) == (18, 1)
    assert [counts for _, counts in found.buckets.items()] == [[54, 18, 0]]


@pytest.mark.parametrize(("point", "counted"), [("breakdown.write.before", 2), ("breakdown.write.after", 3)])
async def test_a_worker_that_dies_counts_no_part_twice(
    records: Records, clock: ManualClock, point: str, counted: int
) -> None:
    run, now = make_run(clock), clock.now()
    assert await add_part(records.documents, run, part_of(now, 1), "first", 1, now)
    assert await add_part(records.documents, run, part_of(now, 1), "first", 2, now)

    def die(passed: str) -> None:
        if passed == point:
            raise Died

    faults.arm(die)
    try:
        with pytest.raises(Died):
            await add_part(records.documents, run, part_of(now, 1), "first", 3, now)
    finally:
        faults.arm(None)
    assert (await stored_breakdown(records.documents, run)).hosts[HOST].succeeded == counted
    # The same worker, if it was only the answer that was lost; and the one after it.
    assert await add_part(records.documents, run, part_of(now, 1), "first", 3, now)
    assert await add_part(records.documents, run, part_of(now, 1), "second", 1, now)
    assert (await stored_breakdown(records.documents, run)).hosts[HOST].succeeded == 4


async def test_load_is_counted_once_by_tenant_and_minute(coordinator: Coordinator) -> None:
    for worker in ("one", "two", "two"):
        await add_load(coordinator, 7, {("succeeded", ACME): 3, ("retried", OTHER): 1}, f"{worker}:1")
    await add_load(coordinator, 8, {("failed", ACME): 2}, "one:2")
    assert await read_load(coordinator, 7) == {ACME: {"succeeded": 6}, OTHER: {"retried": 2}}
    assert await read_load(coordinator, 8) == {ACME: {"failed": 2}}
    assert await read_load(coordinator, 9) == {}


async def test_load_is_kept_by_tenant(records: Records, clock: ManualClock) -> None:
    now = clock.now()
    assert await add_to_load(records.documents, ACME, {61: LoadPoint(3, 1, 0, 9, 2)}, now)
    assert await add_to_load(records.documents, ACME, {61: LoadPoint(5, 1, 1, 4, 3), 62: LoadPoint(1)}, now)
    assert not await add_to_load(records.documents, ACME, {61: LoadPoint(5)}, now)
    found = await load_history(records.documents, ACME)
    assert found.minutes == {61: LoadPoint(5, 1, 1, 9, 3), 62: LoadPoint(1)}
    assert found.hours == {1: LoadPoint(6, 1, 1, 9, 3)}
    assert (await load_history(records.documents, OTHER)).minutes == {}

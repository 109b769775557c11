"""Tenants take turns: no list, however long, makes the lists of other tenants wait."""

import gzip

import pytest

from conveyor.engines.queue import CONTROL
from conveyor.ingest import turns
from conveyor.lists import reader
from conveyor.lists.reader import BATCH
from conveyor.model import Job, OnInvalid, TenantId
from conveyor.states import ReasonCode, RunState
from tests.support.small_fleet import Fleet, open_fleet

OTHER = TenantId("other")
SHORT = b"1\n2\n3\n4\n5\n"


async def is_latched(fleet: Fleet, job: Job) -> bool:
    return (await fleet.job(job.job_id, job.tenant)).run.last_batch


async def a_short_list_does_not_wait_for_a_long_one() -> None:
    """A compressed list is one range, and one ingester has it until it is done."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(turns, "TURN_STEPS", 4)
        await _ingest_a_long_list_and_a_short_one()


async def _ingest_a_long_list_and_a_short_one() -> None:
    async with open_fleet() as fleet:
        ingester = fleet.ingester()
        long = await fleet.stage_bytes(gzip.compress(b"1\n" * (7 * BATCH)))
        await ingester.tick()
        short = await fleet.stage_bytes(SHORT, tenant=OTHER)
        await ingester.tick()
        assert await is_latched(fleet, short)
        assert await is_latched(fleet, long)


async def test_a_short_list_does_not_wait_for_a_long_one() -> None:
    await a_short_list_does_not_wait_for_a_long_one()


async def test_a_list_that_is_looked_over_does_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_STEPS", 4)
    async with open_fleet() as fleet:
        long = await fleet.stage_bytes(b"1\n" * (20 * BATCH), on_invalid=OnInvalid.REJECT)
        short = await fleet.stage_bytes(SHORT, tenant=OTHER)
        await fleet.ingester().tick()
        assert await is_latched(fleet, short)
        assert not await is_latched(fleet, long)


async def test_a_message_is_found_behind_many_of_another_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that are short by themselves are one turn together, and a look that ends before it goes on behind."""
    monkeypatch.setattr(turns, "TURN_STEPS", 4)
    async with open_fleet(ingest_range_bytes=200) as fleet:
        ingester = fleet.ingester()
        await fleet.stage_bytes(b"1\n" * 20_000)
        await ingester.tick()
        assert (await fleet.system.queue.depth(CONTROL)).ready > 150
        short = await fleet.stage_bytes(SHORT, tenant=OTHER)
        for _ in range(40):
            fleet.clock.advance(0.01)
            await ingester.tick()
        assert await is_latched(fleet, short)


async def test_two_long_lists_share_an_ingester(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each makes progress in every turn, and none of them loses a line."""
    monkeypatch.setattr(turns, "TURN_STEPS", 2)
    async with open_fleet() as fleet:
        ingester = fleet.ingester()
        jobs = [await fleet.stage_bytes(gzip.compress(b"1\n" * (9 * BATCH)))]
        await ingester.tick()
        jobs.append(await fleet.stage_bytes(gzip.compress(b"1\n" * (20 * BATCH)), tenant=OTHER))
        await ingester.tick()
        first, second = [await fleet.system.records.ingests.ingested(job.run.run_id) for job in jobs]
        assert (first.tasks, first.done) == (9 * BATCH, True)
        assert 4 * BATCH <= second.tasks < 20 * BATCH
        while not await is_latched(fleet, jobs[1]):
            await ingester.tick()
        totals = [(await fleet.job(job.job_id, job.tenant)).run.total for job in jobs]
        assert totals == [9 * BATCH, 20 * BATCH]
        assert (await fleet.system.queue.depth(CONTROL)).total == 0


async def test_trouble_with_another_list_does_not_fail_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_STEPS", 2)
    async with open_fleet() as fleet:
        ingester = fleet.ingester()
        long = await fleet.stage_bytes(gzip.compress(b"1\n" * (5 * BATCH)))
        await ingester.tick()
        await fleet.stage_bytes(b"\x1f\x8b damaged", tenant=OTHER)
        await ingester.tick()
        assert await is_latched(fleet, long)


@pytest.mark.parametrize("line", [b"\n", b" \r\n", b"# \n", b"nope\n"])
async def test_a_list_of_nothing_but_lines_without_a_task_fails_early(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_WITHOUT_TASK", 5000)
    async with open_fleet() as fleet:
        task = b"http://example.com/\n"
        fine = await fleet.stage_bytes(gzip.compress(line * 5000 + task), kind="fetch", handler=None)
        sparse = await fleet.stage_bytes(gzip.compress(task + line * 100_000), kind="fetch", handler=None)
        ingester = fleet.ingester()
        for _ in range(4):
            await ingester.tick()
        assert (await fleet.job(fine.job_id)).run.total == 1
        found = await fleet.job(sparse.job_id)
        assert (found.state, found.run.reason_code) == (RunState.FAILED, ReasonCode.LIST_TOO_SPARSE)
        assert "lines without a task" in (found.reason or "")

"""IngestRecords, over every engine behind it: ranges, their checkpoints and the seal."""

import asyncio

import pytest

from conveyor.engines.ingest_sums import sums_of
from conveyor.engines.records import IdempotencyClaim, Records
from conveyor.model import (
    Compression,
    Ingested,
    Job,
    ListFormat,
    Mode,
    Range,
    RunId,
)
from conveyor.states import ReasonCode, RunState, sources_of
from tests.conformance.record_setup import (
    CALLERS,
    LIST,
    answered,
    in_state,
    ingesting,
    make_claim,
    moved,
    part,
    stored,
)
from tests.support.clocks import ManualClock


class TestRanges:
    async def test_they_are_read_back_in_order(self, records: Records, clock: ManualClock) -> None:
        ranges = [part(0, 0, 500), part(1, 500, None, header="url,id", format=ListFormat.CSV)]
        job = await ingesting(records, clock, *ranges)
        assert await records.ingests.ranges(job.run.run_id) == ranges
        assert [await records.ingests.range(job.run.run_id, number) for number in (0, 1, 2)] == [*ranges, None]
        assert (await stored(records, job)).run.sealed

    async def test_a_list_is_split_once(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock)
        where = (job.job_id, job.run.run_id)
        split = await asyncio.gather(*(records.ingests.split(*where, [part(0, 0, None)]) for _ in range(CALLERS)))
        assert sum(split) == 1
        assert len(await records.ingests.ranges(job.run.run_id)) == 1

    async def test_an_ended_run_is_not_split(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock)
        where = (job.job_id, job.run.run_id)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, None, None)
        assert not await records.ingests.split(*where, [part(0, 0, None)])
        assert await records.ingests.ranges(job.run.run_id) == []

    async def test_progress_is_kept_and_shown_as_the_total(self, records: Records, clock: ManualClock) -> None:
        one, two = part(0, 0, 500), part(1, 500, None)
        job = await ingesting(records, clock, one, two)
        run_id = job.run.run_id
        assert await records.ingests.ingested(run_id) == Ingested(2, 0, 0, 0, 0, 1000)
        assert await records.ingests.checkpoint(run_id, moved(one, 3, 200, invalid=1), 1)
        assert await records.ingests.checkpoint(run_id, moved(two, 5, 1001, done=True), 1)
        assert await records.ingests.ranges(run_id) == [moved(one, 3, 200, invalid=1), moved(two, 5, 1001, done=True)]
        # A last line without a newline is counted with one; it is not read beyond the end all the same.
        assert await records.ingests.ingested(run_id) == Ingested(2, 1, 8, 1, 700, 1000)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (8, 1)
        assert await records.ingests.checkpoint(run_id, moved(one, 3, 200, invalid=1), 1), "again changes nothing"
        assert (await records.ingests.ingested(run_id)).tasks == 8

    async def test_a_compressed_list_has_no_known_end_before_it(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None, compression=Compression.GZIP)
        job = await ingesting(records, clock, one)
        await records.ingests.checkpoint(job.run.run_id, moved(one, 3, 5000), 1)
        assert await records.ingests.ingested(job.run.run_id) == Ingested(1, 0, 3, 0, 5000, None)
        await records.ingests.checkpoint(job.run.run_id, moved(one, 9, 20_000, done=True), 1)
        assert await records.ingests.ingested(job.run.run_id) == Ingested(1, 1, 9, 0, 20_000, 20_000)

    async def test_a_stale_fence_writes_nothing(self, records: Records, clock: ManualClock) -> None:
        one, other = part(0, 0, 500), part(1, 500, None)
        job = await ingesting(records, clock, one, other)
        run_id = job.run.run_id
        assert await records.ingests.checkpoint(run_id, moved(one, 10, 100), 3)
        for stale in (1, 2):
            assert not await records.ingests.checkpoint(run_id, moved(one, 90, 400), stale)
        assert (await records.ingests.range(run_id, 0)) == moved(one, 10, 100)
        assert await records.ingests.checkpoint(run_id, moved(one, 5, 50), 4), "a later holder may start further back"
        assert not await records.ingests.checkpoint(run_id, moved(one, 20, 200), 3)
        assert await records.ingests.checkpoint(run_id, moved(other, 1, 510), 1), "each range has a fence of its own"

    @pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
    async def test_an_ended_run_takes_none(self, records: Records, clock: ManualClock, state: RunState) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(state), state, None, None)
        assert not await records.ingests.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        assert (await stored(records, job)).run.total == 0

    async def test_a_paused_run_takes_them(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.jobs.move_run(job.job_id, job.run.run_id, {RunState.INGESTING}, RunState.PAUSED, None, None)
        assert await records.ingests.checkpoint(job.run.run_id, moved(one, 5, 50), 1)

    async def test_the_total_of_a_latched_run_stays(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.jobs.set_total(job.job_id, job.run.run_id, 7, 2)
        await records.jobs.latch(job.job_id, job.run.run_id)
        await records.ingests.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (7, 2)

    async def test_unknown_runs_and_ranges_take_none(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        assert not await records.ingests.checkpoint(RunId("run_nothing"), part(0, 0, None), 1)
        assert not await records.ingests.checkpoint(job.run.run_id, part(1, 0, None), 1)

    async def test_a_run_that_failed_before_its_latch_goes_on(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        where = (job.job_id, job.run.run_id)
        await records.ingests.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None, keep=True)
        assert await records.jobs.unswept_jobs(10) == [], "what it has is not cleared away"
        assert await records.jobs.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)
        found = await stored(records, job)
        assert (found.state, found.reason, found.run.ended_at, found.run.total) == (RunState.INGESTING, None, None, 5)
        assert await records.ingests.checkpoint(job.run.run_id, moved(one, 6, 60), 2)

    async def test_without_keep_it_is_swept(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        where = (job.job_id, job.run.run_id)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None)
        assert [each.job_id for each in await records.jobs.unswept_jobs(10)] == [job.job_id]

    async def test_one_that_went_on_and_ends_again_is_swept(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        where = (job.job_id, job.run.run_id)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None, keep=True)
        await records.jobs.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, "by hand", None)
        assert [each.job_id for each in await records.jobs.unswept_jobs(10)] == [job.job_id]

    async def test_a_latched_run_does_not(self, records: Records, clock: ManualClock) -> None:
        job = await in_state(records, clock, RunState.FAILED)
        where = (job.job_id, job.run.run_id)
        assert not await records.jobs.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)

    async def test_an_unknown_run_has_none(self, records: Records) -> None:
        assert await records.ingests.ranges(RunId("run_nothing")) == []
        assert await records.ingests.range(RunId("run_nothing"), 0) is None
        assert await records.ingests.ingested(RunId("run_nothing")) == Ingested(0, 0, 0, 0, 0, 0)


class TestOpenJobs:
    async def append(
        self, records: Records, job: Job, lines: int, answer: IdempotencyClaim | None = None, seal: bool = False
    ) -> Range | IdempotencyClaim | None:
        return await records.ingests.append_range(job.job_id, job.run.run_id, LIST, lines, answer, seal)

    async def test_indexes_are_handed_out_once(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        sizes = list(range(1, CALLERS + 1))
        added = await asyncio.gather(*(self.append(records, job, lines) for lines in sizes))
        given: list[int] = []
        for one, lines in zip(added, sizes, strict=True):
            assert isinstance(one, Range)
            given += range(one.first_index, one.first_index + lines)
        assert sorted(given) == list(range(sum(sizes)))
        assert [one.number for one in await records.ingests.ranges(job.run.run_id)] == list(range(CALLERS))

    async def test_it_says_when_something_was_last_added(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        clock.advance(50)
        await self.append(records, job, 1)
        assert (await stored(records, job)).run.touched_at == pytest.approx(clock.now())

    async def test_the_last_batch_seals(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        added = await self.append(records, job, 3, seal=True)
        assert isinstance(added, Range)
        assert (await stored(records, job)).run.sealed
        assert await self.append(records, job, 1) is None
        assert not await records.ingests.seal(job.job_id, job.run.run_id, "late")
        assert (await stored(records, job)).reason is None

    async def test_it_is_sealed_once_and_says_why(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        sealed = await asyncio.gather(*(records.ingests.seal(*where, "nobody added") for _ in range(CALLERS)))
        assert sum(sealed) == 1
        found = await stored(records, job)
        assert (found.run.sealed, found.reason, found.state) == (True, "nobody added", RunState.INGESTING)
        assert await self.append(records, job, 1) is None

    async def test_it_is_sealed_for_idleness_only_if_nothing_was_added(
        self, records: Records, clock: ManualClock
    ) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        seen = (await stored(records, job)).run.touched_at
        clock.advance(50.25)
        assert isinstance(await self.append(records, job, 1), Range)
        assert not await records.ingests.seal(*where, "nobody added", touched_at=seen)
        found = await stored(records, job)
        assert (found.run.sealed, found.reason) == (False, None)
        assert isinstance(await self.append(records, job, 1), Range)
        assert await records.ingests.seal(*where, "nobody added", touched_at=found.run.touched_at)
        assert (await stored(records, job)).reason == "nobody added"

    async def test_a_batch_and_an_idle_close_at_once(self, records: Records, clock: ManualClock) -> None:
        """One of them is first: a batch that was taken keeps the run open, or is refused."""
        for _ in range(CALLERS):
            job = await ingesting(records, clock, mode=Mode.OPEN)
            where = (job.job_id, job.run.run_id)
            seen = (await stored(records, job)).run.touched_at
            clock.advance(50)
            added, sealed = await asyncio.gather(
                self.append(records, job, 3), records.ingests.seal(*where, "nobody added", touched_at=seen)
            )
            assert sealed == (added is None)
            assert len(await records.ingests.ranges(job.run.run_id)) == (0 if sealed else 1)

    async def test_the_sums_are_those_of_all_batches(self, records: Records, clock: ManualClock) -> None:
        """However they are written: side by side, repeated, set back, and by a stale hand."""
        job = await ingesting(records, clock, mode=Mode.OPEN)
        run_id = job.run.run_id
        added = await asyncio.gather(*(self.append(records, job, lines) for lines in range(1, 9)))
        batches = [one for one in added if isinstance(one, Range)]
        assert await records.ingests.ingested(run_id) == sums_of(*batches).ingested
        await asyncio.gather(*(records.ingests.checkpoint(run_id, moved(one, 1, 40), 2) for one in batches))
        await records.ingests.checkpoint(run_id, moved(batches[0], 1, 40), 2)
        await records.ingests.checkpoint(run_id, moved(batches[1], 0, 0), 3)
        await records.ingests.checkpoint(run_id, moved(batches[2], 9, 900, done=True), 1)
        await asyncio.gather(
            self.append(records, job, 3),
            *(records.ingests.checkpoint(run_id, moved(one, 2, 1000, invalid=1, done=True), 4) for one in batches[3:]),
        )
        ranges = await records.ingests.ranges(run_id)
        assert await records.ingests.ingested(run_id) == sums_of(*ranges).ingested
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (sum(one.tasks for one in ranges), sum(one.invalid for one in ranges))

    async def test_an_ended_run_takes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        await records.jobs.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, None, None)
        assert await self.append(records, job, 1) is None
        assert not await records.ingests.seal(*where, None)

    async def test_a_batch_and_its_answer_are_one_write(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        claim = make_claim(clock, route="tasks")
        await records.access.claim(claim)
        assert isinstance(await self.append(records, job, 3, answered(claim)), Range)
        assert await self.append(records, job, 3, answered(claim, b"again")) == answered(claim)
        assert len(await records.ingests.ranges(job.run.run_id)) == 1

    async def test_the_reason_outlives_completion(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        await records.ingests.seal(*where, "nobody added", code=ReasonCode.IDLE_TIMEOUT)
        await records.jobs.latch(*where)
        assert await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.COMPLETED, None, None)
        job = await stored(records, job)
        assert (job.reason, job.run.reason_code) == ("nobody added", ReasonCode.IDLE_TIMEOUT)

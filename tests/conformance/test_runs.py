"""Later runs of a job, its options and what is told of it: the Records seam, over every engine behind it."""

import asyncio

import msgspec
import pytest

from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.model import Backoff, Job, JobId, Lineage, Options, OutboxEvent, Run, RunId
from conveyor.states import ReasonCode, RunState, TaskStatus, sources_of
from tests.clocks import ManualClock
from tests.jobs import ACME, OTHER, make_job, make_notice

CALLERS = 20

replace = msgspec.structs.replace


async def created(records: Records, clock: ManualClock, **fields: object) -> Job:
    job = make_job(clock, **fields)  # type: ignore[arg-type]
    assert await records.create_job(job, make_notice(clock, job), None) is None
    return job


async def end(records: Records, job: Job, target: RunState = RunState.COMPLETED) -> None:
    assert await records.move_run(job.job_id, job.run.run_id, sources_of(target), target, "why", None)


async def ended(records: Records, clock: ManualClock, target: RunState = RunState.COMPLETED, **fields: object) -> Job:
    job = await created(records, clock, **fields)
    await end(records, job, target)
    return job


def with_next_run(clock: ManualClock, job: Job, **fields: object) -> Job:
    """The job as it is to be, with one run more."""
    now = clock.now()
    given = {
        "run_id": RunId(clock.new_id("run")),
        "number": job.run.number + 1,
        "state": RunState.INGESTING,
        "total": 0,
        "last_batch": False,
        "created_at": now,
        "touched_at": now,
        "lineage": Lineage(job.run.run_id, statuses=[TaskStatus.FAILED]),
    }
    run = Run(**given | fields)  # type: ignore[arg-type]
    return replace(job, run=run, state=run.state, reason=None)


async def add(records: Records, clock: ManualClock, job: Job, answer: IdempotencyClaim | None = None) -> object:
    return await records.add_run(job, make_notice(clock, job, "run.added", number=job.run.number), answer)


async def test_each_run_keeps_its_code(records: Records, clock: ManualClock) -> None:
    job = await created(records, clock)
    failed, code = RunState.FAILED, ReasonCode.DEADLINE
    await records.move_run(job.job_id, job.run.run_id, sources_of(failed), failed, "why", None, code=code)
    again = with_next_run(clock, job)
    assert await add(records, clock, again) is True
    assert (await stored(records, job)).run.reason_code is None
    assert [run.reason_code for run in await records.runs(job.job_id)] == [code, None]


async def stored(records: Records, job: Job) -> Job:
    found = await records.job(job.tenant, job.job_id)
    assert found is not None
    return found


async def events(records: Records, job: Job) -> list[str]:
    return [event.event for event in (await records.notices(job.tenant, job.job_id, None, 1000)).items]


def claim_of(clock: ManualClock, job: Job, key: str = "k1") -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "rerun", key, "print", job.job_id, now + 30, now + 60)


def answered(claim: IdempotencyClaim, body: bytes = b"answer") -> IdempotencyClaim:
    return replace(claim, status=202, body=body)


class TestAddRun:
    @pytest.mark.parametrize("target", [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED])
    async def test_it_is_the_latest_then(self, records: Records, clock: ManualClock, target: RunState) -> None:
        job = await ended(records, clock, target, total=7, concurrency=3)
        clock.advance(5)
        lineage = Lineage(
            job.run.run_id,
            statuses=[TaskStatus.FAILED, TaskStatus.CANCELLED],
            error_code="http_503",
            http_status=503,
            tag="ü",
            overrides={"concurrency": 9, "backoff": {"base": 0.5}},
        )
        again = replace(
            with_next_run(clock, job, lineage=lineage), options=Options(concurrency=9, backoff=Backoff(base=0.5))
        )
        assert await add(records, clock, again) is True
        found = await stored(records, job)
        assert msgspec.to_builtins(found.run) == msgspec.to_builtins(again.run)
        assert (found.state, found.reason, found.options) == (RunState.INGESTING, None, again.options)
        assert (found.created_at, found.expires_at) == (job.created_at, job.expires_at)
        assert found.version > job.version, "its options may be others"
        assert await records.run(job.job_id, again.run.run_id) == found.run
        assert await events(records, job) == ["job.accepted", "run.added"]
        assert [each.job_id for each in await records.active_jobs()] == [job.job_id]
        assert (await records.active_jobs())[0].run == found.run
        assert (await records.jobs(ACME, None, 10)).items == [found]

    async def test_a_run_that_was_written_whole(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock, total=3)
        again = with_next_run(clock, job, state=RunState.RUNNING, total=2, last_batch=True)
        assert await add(records, clock, again) is True
        found = await stored(records, job)
        assert (found.state, found.run.total, found.run.last_batch, found.run.sealed) == (
            RunState.RUNNING,
            2,
            True,
            True,
        )
        await end(records, again)
        assert (await stored(records, job)).state is RunState.COMPLETED

    @pytest.mark.parametrize("state", [RunState.INGESTING, RunState.RUNNING, RunState.PAUSED])
    async def test_not_before_the_latest_has_ended(self, records: Records, clock: ManualClock, state: RunState) -> None:
        job = await created(records, clock, state=state, latched=state is not RunState.INGESTING)
        again, claim = with_next_run(clock, job), claim_of(clock, job)
        await records.claim(claim)
        assert await add(records, clock, again) is False
        assert await add(records, clock, again, answered(claim)) is False
        assert await stored(records, job) == job
        assert await records.runs(job.job_id) == [job.run]
        assert await records.run(job.job_id, again.run.run_id) is None
        assert await events(records, job) == ["job.accepted"]
        await end(records, job, RunState.CANCELLED)
        assert await add(records, clock, again, answered(claim)) is True, "the claim was not spent"

    async def test_not_with_another_number(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        for number in (0, 1, 3):
            assert await add(records, clock, with_next_run(clock, job, number=number)) is False
        assert len(await records.runs(job.job_id)) == 1

    async def test_one_of_many_at_once_adds_it(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        rivals = [with_next_run(clock, job) for _ in range(CALLERS)]
        added = await asyncio.gather(*(add(records, clock, each) for each in rivals))
        assert added.count(True) == 1
        assert added.count(False) == CALLERS - 1
        winner = rivals[added.index(True)]
        assert [run.run_id for run in await records.runs(job.job_id)] == [job.run.run_id, winner.run.run_id]
        assert (await stored(records, job)).run == winner.run
        assert await events(records, job) == ["job.accepted", "run.added"]

    async def test_its_answer_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        claim = claim_of(clock, job)
        await records.claim(claim)
        again = with_next_run(clock, job)
        assert await add(records, clock, again, answered(claim)) is True
        assert (await records.claim(claim)).row == answered(claim)

    async def test_a_request_that_was_carried_out_gets_its_answer(self, records: Records, clock: ManualClock) -> None:
        """The run that has not ended is the one that the request itself made: no conflict, but a replay."""
        job = await ended(records, clock)
        claim = claim_of(clock, job)
        await records.claim(claim)
        rivals = [with_next_run(clock, job) for _ in range(CALLERS)]
        added = await asyncio.gather(
            *(add(records, clock, each, answered(claim, each.run.run_id.encode())) for each in rivals)
        )
        (winner,) = [each for each, got in zip(rivals, added, strict=True) if got is True]
        assert added.count(answered(claim, winner.run.run_id.encode())) == CALLERS - 1
        await end(records, winner, RunState.CANCELLED)
        late = with_next_run(clock, winner)
        assert await add(records, clock, late, answered(claim, b"late")) == answered(claim, winner.run.run_id.encode())
        assert len(await records.runs(job.job_id)) == 2

    async def test_not_to_a_job_that_is_gone(self, records: Records, clock: ManualClock) -> None:
        expired = await ended(records, clock, expires_in=10)
        hidden = await ended(records, clock)
        unknown = replace(hidden, job_id=JobId("job_nothing"))
        foreign = replace(await ended(records, clock), tenant=OTHER)
        await records.hide_job(ACME, hidden.job_id)
        clock.advance(10)
        for job in (expired, hidden, unknown, foreign):
            assert await add(records, clock, with_next_run(clock, job)) is False
        assert await records.active_jobs() == []
        assert {notice.event for notice in await records.untold(100)} == {"job.accepted"}


class TestRuns:
    async def test_they_come_oldest_first(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, total=4)
        other = await created(records, clock)
        made = [job]
        for _ in range(11):
            await end(records, made[-1], RunState.FAILED)
            clock.advance(1)
            made.append(with_next_run(clock, made[-1]))
            assert await add(records, clock, made[-1]) is True
        runs = await records.runs(job.job_id)
        assert [run.run_id for run in runs] == [each.run.run_id for each in made]
        assert [run.number for run in runs] == list(range(1, 13))
        assert [run.state for run in runs] == [RunState.FAILED] * 11 + [RunState.INGESTING]
        assert runs[0].lineage is None
        assert [run.lineage for run in runs[1:]] == [each.run.lineage for each in made[1:]]
        assert await records.runs(other.job_id) == [other.run]
        assert await records.runs(JobId("job_nothing")) == []

    async def test_each_moves_on_its_own(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock, RunState.CANCELLED)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        where = (job.job_id, again.run.run_id)
        await records.set_total(*where, 5, 1)
        run = await records.latch(*where)
        assert run is not None
        assert (run.state, run.total, run.number) == (RunState.RUNNING, 5, 2)
        assert await records.move_run(*where, {RunState.RUNNING}, RunState.COMPLETED, None, None)
        first, second = await records.runs(job.job_id)
        assert (first.state, first.total) == (RunState.CANCELLED, 0)
        assert (second.state, second.total, second.invalid) == (RunState.COMPLETED, 5, 1)
        assert (await stored(records, job)).run == second

    async def test_what_an_older_run_left_is_still_swept(self, records: Records, clock: ManualClock) -> None:
        """It may end, and the next be added, before anyone has cleared up after it."""
        job = await ended(records, clock, RunState.CANCELLED)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        (found,) = await records.ended_unswept(10)
        assert (found.job_id, found.run.run_id, found.run.state) == (job.job_id, job.run.run_id, RunState.CANCELLED)
        assert found.key == job.key
        await records.mark_swept(job.job_id, job.run.run_id)
        assert await records.ended_unswept(10) == []
        await end(records, again, RunState.CANCELLED)
        assert [each.run.run_id for each in await records.ended_unswept(10)] == [again.run.run_id]

    async def test_all_are_hidden_and_forgotten_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        await records.create_rows([Document("export", ACME, "one", b"", job_id=job.job_id)])
        await records.hide_job(ACME, job.job_id)
        assert [run.state for run in await records.runs(job.job_id)] == [RunState.COMPLETED, RunState.CANCELLED]
        assert len(await records.hidden_jobs(clock.now(), 10)) == 1, "a job, not a run"
        await records.forget_job(job.job_id)
        assert await records.runs(job.job_id) == []
        assert await records.run(job.job_id, again.run.run_id) is None
        assert await records.run(job.job_id, job.run.run_id) is None
        assert await records.row("export", ACME, "one") is None
        assert await records.untold(10) == []
        assert (await records.notices(ACME, job.job_id, None, 10)).items == []


class TestOptions:
    async def test_they_are_replaced_on_their_version(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, concurrency=3, attempts=2)
        assert job.version == 1
        options = Options(concurrency=9, headers={"X-Ü": "é"})
        for version in range(1, 4):
            notice = make_notice(clock, job, "job.changed", version=version)
            assert await records.change_options(job.job_id, version, options, notice)
            found = await stored(records, job)
            assert msgspec.to_builtins(found) == msgspec.to_builtins(replace(job, options=options, version=version + 1))
        assert await events(records, job) == ["job.accepted", *["job.changed"] * 3]

    async def test_a_stale_version_changes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        assert await records.change_options(job.job_id, 1, Options(concurrency=2), make_notice(clock, job, "a"))
        for version in (0, 1, 3):
            notice = make_notice(clock, job, "never")
            assert not await records.change_options(job.job_id, version, Options(concurrency=5), notice)
        assert (await stored(records, job)).options.concurrency == 2
        assert await events(records, job) == ["job.accepted", "a"]

    async def test_one_of_many_at_once_changes_them(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        changed = await asyncio.gather(
            *(
                records.change_options(
                    job.job_id,
                    1,
                    Options(concurrency=caller + 1),
                    make_notice(clock, job, "job.changed", caller=caller),
                )
                for caller in range(CALLERS)
            )
        )
        assert sum(changed) == 1
        found = await stored(records, job)
        assert (found.options.concurrency, found.version) == (changed.index(True) + 1, 2)
        told = [notice.data for notice in await records.untold(100) if notice.event == "job.changed"]
        assert told == [{"caller": changed.index(True)}]

    async def test_only_of_a_job_that_is_there(self, records: Records, clock: ManualClock) -> None:
        hidden, expired = await created(records, clock), await created(records, clock, expires_in=10)
        await records.hide_job(ACME, hidden.job_id)
        clock.advance(10)
        for job_id in (hidden.job_id, expired.job_id, JobId("job_nothing")):
            notice = make_notice(clock, hidden, "never")
            assert not await records.change_options(job_id, 1, Options(), notice)


class TestUntold:
    async def test_all_that_was_not_passed_on_oldest_first(self, records: Records, clock: ManualClock) -> None:
        made: list[OutboxEvent] = []
        for number in range(12):
            job = make_job(clock, tenant=(ACME, OTHER)[number % 2])
            notice = make_notice(clock, job, "job.accepted", number=number, text="ü", deep={"a": [1, None]})
            await records.create_job(job, notice, None)
            made.append(notice)
            clock.advance(1)
        assert await records.untold(100) == made
        assert await records.untold(5) == made[:5]
        await records.mark_told([made[0], made[2], made[3]])
        assert await records.untold(3) == [made[1], made[4], made[5]]
        await records.mark_told([*made, *made])
        await records.mark_told([])
        assert await records.untold(100) == []

    async def test_told_ones_stay_in_the_trail(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        await records.mark_told(await records.untold(10))
        assert await events(records, job) == ["job.accepted"]
        clock.advance(1)
        await records.move_run(
            job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.PAUSED, None, make_notice(clock, job, "run.paused")
        )
        assert [notice.event for notice in await records.untold(10)] == ["run.paused"]
        assert await events(records, job) == ["job.accepted", "run.paused"]

    async def test_marking_what_is_not_there(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        (notice,) = await records.untold(10)
        await records.mark_told([make_notice(clock, job, "never written")])
        assert await records.untold(10) == [notice]
        await records.hide_job(ACME, job.job_id)
        await records.forget_job(job.job_id)
        await records.mark_told([notice])
        assert await records.untold(10) == []
        assert (await records.notices(ACME, job.job_id, None, 10)).items == [], "telling of it brings nothing back"

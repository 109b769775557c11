"""JobRecords, over every engine behind it: jobs, their states and their runs."""

import asyncio
import itertools

import msgspec
import pytest

from conveyor.engines.job_records import JOB_BUCKETS, bucket_of
from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.model import (
    Backoff,
    Compression,
    FailureThreshold,
    Gateway,
    Job,
    JobId,
    JobKind,
    Lineage,
    ListFormat,
    Options,
    ResultLayout,
    Run,
    RunId,
    Source,
    TenantId,
)
from conveyor.states import ENDED, MOVES, ReasonCode, RunState, TaskStatus, sources_of
from tests.conformance.record_setup import (
    CALLERS,
    answered,
    created,
    events,
    in_state,
    ingesting,
    part,
    stored,
    upload,
)
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, DAY, OTHER, make_job, make_notice

replace = msgspec.structs.replace


ALL_PAIRS = list(itertools.product(RunState, RunState))


# Of runs that are latched, or ingesting: those that failed before their latch have tests of their own.
LEGAL = [
    (source, target)
    for source, targets in MOVES.items()
    for target in sorted(targets)
    if target is not RunState.INGESTING
]


class TestCreate:
    async def test_a_job_is_read_back_as_it_was_written(self, records: Records, clock: ManualClock) -> None:
        job = make_job(
            clock,
            total=7,
            shards=4,
            layout=ResultLayout.PACKED,
            kind=JobKind.FETCH,
            source=Source("uploads/acme/one", 7, "0" * 64, ListFormat.CSV, Compression.ZSTD),
            concurrency=3,
            rate_per_host=0.5,
            backoff=Backoff(base=0.1, cap=9, jitter=False),
            headers={"X-Ü": 'é"\\ \u2028'},
            gateway=Gateway(url="http://gw/{url}", headers={"a": "b"}),
            failure_threshold=FailureThreshold(ratio=0.25, after=3),
            success_statuses=[200, 404],
            priority=-3,
        )
        job = msgspec.structs.replace(job, name="naïve 😀 'quoted'")
        await records.jobs.create_job(job, make_notice(clock, job, total=7), None)
        found = await stored(records, job)
        assert msgspec.to_builtins(found) == msgspec.to_builtins(job)
        assert found.key == job.key
        assert await records.jobs.run(job.job_id, job.run.run_id) == job.run

    async def test_unknown_ids_are_none(self, records: Records) -> None:
        assert await records.jobs.job(ACME, JobId("job_nothing")) is None
        assert await records.jobs.run(JobId("job_nothing"), RunId("run_nothing")) is None

    async def test_a_run_is_found_only_under_its_job(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock), await created(records, clock)
        assert await records.jobs.run(two.job_id, one.run.run_id) is None


class TestListing:
    async def test_jobs_come_newest_first_in_pages(self, records: Records, clock: ManualClock) -> None:
        made = []
        for number in range(25):
            made.append(await created(records, clock))
            if number % 3:
                clock.advance(0.5)
        newest_first = [job.job_id for job in reversed(made)]
        for limit in (1, 7, 24, 25, 26):
            got, cursor, pages = [], None, 0
            while True:
                page = await records.jobs.jobs(ACME, cursor, limit)
                got += [job.job_id for job in page.items]
                pages += 1
                assert len(page.items) <= limit
                cursor = page.next_cursor
                if cursor is None:
                    break
                assert len(page.items) == limit
            assert got == newest_first
            assert pages == -(-25 // limit)

    async def test_a_job_made_meanwhile_does_not_shift_the_pages(self, records: Records, clock: ManualClock) -> None:
        made = [await created(records, clock) for _ in range(4)]
        first = await records.jobs.jobs(ACME, None, 2)
        clock.advance(1)
        await created(records, clock)
        second = await records.jobs.jobs(ACME, first.next_cursor, 10)
        assert [job.job_id for job in second.items] == [made[1].job_id, made[0].job_id]

    async def test_no_jobs_is_an_empty_page(self, records: Records) -> None:
        page = await records.jobs.jobs(ACME, None, 10)
        assert page.items == []
        assert page.next_cursor is None

    async def test_active_jobs_are_those_of_all_tenants_that_have_not_ended(
        self, records: Records, clock: ManualClock
    ) -> None:
        by_state = {state: await in_state(records, clock, state) for state in RunState}
        foreign = await created(records, clock, tenant=OTHER)
        active = {job.job_id: job for job in await records.jobs.active_jobs()}
        expected = {job.job_id for state, job in by_state.items() if state not in ENDED} | {foreign.job_id}
        assert set(active) == expected
        assert active[foreign.job_id].tenant == OTHER
        for state, job in by_state.items():
            if state not in ENDED:
                assert active[job.job_id].state is state

    async def test_active_jobs_of_some_buckets_are_those_and_no_others(
        self, records: Records, clock: ManualClock
    ) -> None:
        jobs = [await created(records, clock) for _ in range(30)]
        gone = await in_state(records, clock, RunState.COMPLETED)
        by_bucket: dict[int, list[JobId]] = {}
        for job in jobs:
            by_bucket.setdefault(bucket_of(job.job_id), []).append(job.job_id)
        assert len(by_bucket) > 10, "they are spread"
        for number, job_ids in by_bucket.items():
            assert [job.job_id for job in await records.jobs.active_jobs([number])] == sorted(job_ids)
        odd = {number for number in range(JOB_BUCKETS) if number % 2}
        expected = sorted(job_id for number in odd for job_id in by_bucket.get(number, ()))
        assert [job.job_id for job in await records.jobs.active_jobs(odd)] == expected
        assert await records.jobs.active_jobs([]) == []
        assert await records.jobs.active_jobs(range(JOB_BUCKETS)) == await records.jobs.active_jobs()
        assert gone.job_id not in {job.job_id for job in await records.jobs.active_jobs()}

    async def test_an_active_job_is_read_as_it_is_after_each_change(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        where = (job.job_id, job.run.run_id)
        seen = [(await records.jobs.active_jobs())[0]]
        assert await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.PAUSED, "why", None)
        seen += await records.jobs.active_jobs()
        assert await records.jobs.change_options(job.job_id, 1, Options(attempts=7), make_notice(clock, job, "x"))
        seen += await records.jobs.active_jobs([bucket_of(job.job_id)])
        assert [(each.state, each.reason, each.options.attempts) for each in seen] == [
            (RunState.RUNNING, None, Options().attempts),
            (RunState.PAUSED, "why", Options().attempts),
            (RunState.PAUSED, "why", 7),
        ]
        assert await records.jobs.move_run(*where, {RunState.PAUSED}, RunState.CANCELLED, None, None)
        assert await records.jobs.active_jobs() == []
        rerun = replace(job, run=replace(job.run, run_id=RunId(clock.new_id("run")), number=2))
        assert await records.jobs.add_run(rerun, make_notice(clock, job, "y"), None) is True
        assert [each.run.number for each in await records.jobs.active_jobs()] == [2]

    @pytest.mark.parametrize("count", [3, 130])
    async def test_jobs_by_their_keys(self, records: Records, clock: ManualClock, count: int) -> None:
        jobs = [await created(records, clock, tenant=OTHER if n % 3 == 0 else ACME) for n in range(count)]
        keys = [(job.tenant, job.job_id) for job in jobs]
        found = await records.jobs.jobs_of([*keys, keys[0], (ACME, JobId("job_none"))])
        assert sorted(found, key=lambda job: job.job_id) == [await stored(records, job) for job in jobs]
        assert await records.jobs.jobs_of([(ACME, jobs[0].job_id)]) == [], "it is another tenant's"
        assert await records.jobs.jobs_of([]) == []
        await records.jobs.mark_deleted(jobs[1].tenant, jobs[1].job_id)
        assert jobs[1].job_id not in {job.job_id for job in await records.jobs.jobs_of(keys)}


class TestExpiry:
    async def test_an_expired_job_is_gone_from_every_read(self, records: Records, clock: ManualClock) -> None:
        brief = await ended(records, clock, retention_days=1)
        lasting = await ended(records, clock, retention_days=2)
        clock.advance(DAY - 1)
        assert await records.jobs.job(ACME, brief.job_id) is not None
        clock.advance(1)
        assert await records.jobs.job(ACME, brief.job_id) is None
        assert [job.job_id for job in (await records.jobs.jobs(ACME, None, 10)).items] == [lasting.job_id]

    async def test_a_finished_job_is_kept_for_longer(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock, retention_days=1)
        until = clock.now() + 3 * DAY
        assert not await records.jobs.keep_job(OTHER, job.job_id, until)
        assert await records.jobs.keep_job(ACME, job.job_id, until)
        assert await records.jobs.keep_job(ACME, job.job_id, until - DAY), "never for shorter"
        assert (await stored(records, job)).expires_at == until
        clock.advance(3 * DAY - 1)
        assert await records.jobs.purgeable_jobs(clock.now(), 10) == []
        clock.advance(1)
        assert not await records.jobs.keep_job(ACME, job.job_id, clock.now() + DAY), "it has expired"
        assert [each.job_id for each in await records.jobs.purgeable_jobs(clock.now(), 10)] == [job.job_id]
        running = await in_state(records, clock, RunState.RUNNING)
        assert await records.jobs.keep_job(ACME, running.job_id, until)
        assert (await stored(records, running)).expires_at is None
        await records.jobs.mark_deleted(ACME, running.job_id)
        assert not await records.jobs.keep_job(ACME, running.job_id, clock.now() + DAY)

    async def test_an_unfinished_job_does_not_expire(self, records: Records, clock: ManualClock) -> None:
        by_state = {state: await in_state(records, clock, state) for state in RunState if state not in ENDED}
        job_ids = {job.job_id for job in by_state.values()}
        clock.advance(1000 * DAY)
        for job in by_state.values():
            assert (await stored(records, job)).expires_at is None
        assert {job.job_id for job in (await records.jobs.jobs(ACME, None, 10)).items} == job_ids
        assert {job.job_id for job in await records.jobs.active_jobs()} == job_ids
        assert await records.jobs.purgeable_jobs(clock.now(), 10) == []
        for job in by_state.values():
            await records.jobs.purge_job(job.job_id)
            assert (await stored(records, job)).expires_at is None

    @pytest.mark.parametrize("target", [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED])
    async def test_its_time_counts_from_the_end_of_the_latest_run(
        self, records: Records, clock: ManualClock, target: RunState
    ) -> None:
        job = await created(records, clock, retention_days=3)
        clock.advance(20 * DAY)
        await end(records, job, target)
        assert (await stored(records, job)).expires_at == clock.now() + 3 * DAY
        clock.advance(2 * DAY)
        again = with_next_run(clock, job)
        assert await add(records, clock, again) is True
        assert (await stored(records, job)).expires_at is None
        clock.advance(20 * DAY)
        assert await records.jobs.purgeable_jobs(clock.now(), 10) == []
        await end(records, again, RunState.CANCELLED)
        until = clock.now() + 3 * DAY
        assert (await stored(records, job)).expires_at == until
        clock.advance(3 * DAY)
        assert await records.jobs.job(ACME, job.job_id) is None
        assert [found.job_id for found in await records.jobs.purgeable_jobs(until, 10)] == [job.job_id]

    async def test_a_run_that_is_resumed_does_not_expire(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING, retention_days=3)
        await end(records, job, RunState.FAILED)
        assert (await stored(records, job)).expires_at == clock.now() + 3 * DAY
        assert await records.jobs.move_run(
            job.job_id, job.run.run_id, {RunState.FAILED}, RunState.INGESTING, None, None
        )
        clock.advance(20 * DAY)
        assert (await stored(records, job)).expires_at is None
        assert await records.jobs.purgeable_jobs(clock.now(), 10) == []

    async def test_one_that_has_expired_or_was_deleted_does_not_return(
        self, records: Records, clock: ManualClock
    ) -> None:
        """Retention may have purged a part of it."""
        jobs = [
            await created(records, clock, latched=False, state=RunState.INGESTING, retention_days=days)
            for days in (1, 5)
        ]
        for job in jobs:
            await end(records, job, RunState.FAILED)
        clock.advance(DAY)
        await records.jobs.mark_deleted(ACME, jobs[1].job_id)
        for job in jobs:
            assert not await records.jobs.move_run(
                job.job_id, job.run.run_id, {RunState.FAILED}, RunState.INGESTING, None, None
            )
        found = await records.jobs.purgeable_jobs(clock.now(), 10)
        assert {job.job_id for job in found} == {job.job_id for job in jobs}

    async def test_another_retention_counts_from_the_same_end(self, records: Records, clock: ManualClock) -> None:
        active, finished = await created(records, clock), await ended(records, clock, retention_days=2)
        end_at = clock.now()
        clock.advance(DAY)
        for version, days in ((1, 9.5), (2, 14), (3, 1.5)):
            for job in (active, finished):
                options, notice = Options(retention_days=days), make_notice(clock, job, "job.changed", days=days)
                assert await records.jobs.change_options(job.job_id, version, options, notice)
            assert (await stored(records, active)).expires_at is None
            assert (await stored(records, finished)).expires_at == pytest.approx(end_at + days * DAY, abs=1e-3)
        await end(records, active)
        assert (await stored(records, active)).expires_at == clock.now() + 1.5 * DAY
        clock.advance(DAY / 2)
        found = await records.jobs.purgeable_jobs(clock.now() + 1e-3, 10)
        assert [job.job_id for job in found] == [finished.job_id]

    async def test_pages_are_full_although_expired_jobs_lie_between(self, records: Records, clock: ManualClock) -> None:
        lasting = []
        for number in range(20):
            job = await ended(records, clock, retention_days=1 if number % 2 else 3)
            if number % 2 == 0:
                lasting.append(job.job_id)
        clock.advance(2 * DAY)
        first = await records.jobs.jobs(ACME, None, 6)
        second = await records.jobs.jobs(ACME, first.next_cursor, 6)
        assert [job.job_id for job in [*first.items, *second.items]] == lasting[::-1]
        assert len(first.items) == 6
        assert second.next_cursor is None


class TestTenants:
    async def test_nothing_of_a_tenant_is_seen_by_another(self, records: Records, clock: ManualClock) -> None:
        mine = await created(records, clock)
        theirs = await created(records, clock, tenant=OTHER)
        assert await records.jobs.job(OTHER, mine.job_id) is None
        assert await records.jobs.job(ACME, theirs.job_id) is None
        assert [job.job_id for job in (await records.jobs.jobs(OTHER, None, 10)).items] == [theirs.job_id]
        assert (await records.outbox.events(OTHER, mine.job_id, None, 10)).items == []

    async def test_a_foreign_cursor_shows_nothing_foreign(self, records: Records, clock: ManualClock) -> None:
        mine = [await created(records, clock) for _ in range(3)]
        theirs = [await created(records, clock, tenant=OTHER) for _ in range(3)]
        cursor = (await records.jobs.jobs(OTHER, None, 1)).next_cursor
        page = await records.jobs.jobs(ACME, cursor, 10)
        assert {job.tenant for job in page.items} <= {ACME}
        assert {job.job_id for job in page.items} <= {job.job_id for job in mine}
        assert len(theirs) == 3

    async def test_a_name_that_begins_another_is_another(self, records: Records, clock: ManualClock) -> None:
        longer = TenantId("acme2")
        await created(records, clock, tenant=longer)
        assert (await records.jobs.jobs(ACME, None, 10)).items == []
        assert len((await records.jobs.jobs(longer, None, 10)).items) == 1


class TestMoves:
    @pytest.mark.parametrize(("source", "target"), LEGAL)
    async def test_every_legal_move(
        self, records: Records, clock: ManualClock, source: RunState, target: RunState
    ) -> None:
        job = await in_state(records, clock, source)
        clock.advance(5)
        notice = make_notice(clock, job, f"run.{target}", why="test")
        assert await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, "a reason", notice)
        found = await stored(records, job)
        assert found.state is target
        assert found.run.state is target
        assert found.reason == "a reason"
        assert found.run.ended_at == (pytest.approx(clock.now()) if target in ENDED else None)
        assert (await events(records, job)).count(f"run.{target}") == 1

    @pytest.mark.parametrize(("source", "target"), [pair for pair in ALL_PAIRS if pair not in LEGAL])
    async def test_every_other_move_changes_nothing(
        self, records: Records, clock: ManualClock, source: RunState, target: RunState
    ) -> None:
        job = await in_state(records, clock, source)
        before, told = await stored(records, job), await events(records, job)
        notice = make_notice(clock, job, "run.never")
        assert not await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, "no", notice)
        assert await stored(records, job) == before
        assert await events(records, job) == told

    @pytest.mark.parametrize(("source", "target"), LEGAL)
    async def test_one_of_many_callers_moves_it(
        self, records: Records, clock: ManualClock, source: RunState, target: RunState
    ) -> None:
        job = await in_state(records, clock, source)
        moved = await asyncio.gather(
            *(
                records.jobs.move_run(
                    job.job_id,
                    job.run.run_id,
                    {source},
                    target,
                    f"reason {caller}",
                    make_notice(clock, job, "run.moved", caller=caller),
                )
                for caller in range(CALLERS)
            )
        )
        assert sum(moved) == 1
        page = await records.outbox.events(ACME, job.job_id, None, 100)
        (told,) = [event for event in page.items if event.event == "run.moved"]
        assert told.data == {"caller": moved.index(True)}
        assert (await stored(records, job)).reason == f"reason {moved.index(True)}"

    async def test_rival_targets_have_one_winner(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        targets = [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED] * 6
        moved = await asyncio.gather(
            *(
                records.jobs.move_run(
                    job.job_id,
                    job.run.run_id,
                    sources_of(target),
                    target,
                    None,
                    make_notice(clock, job, f"run.{target}"),
                )
                for target in targets
            )
        )
        (winner,) = [target for target, won in zip(targets, moved, strict=True) if won]
        assert (await stored(records, job)).state is winner
        assert (await events(records, job))[1:] == [f"run.{winner}"]

    async def test_it_completes_only_once_latched(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False)
        where = (job.job_id, job.run.run_id)
        arguments = (sources_of(RunState.COMPLETED), RunState.COMPLETED, None)
        assert not await records.jobs.move_run(*where, *arguments, make_notice(clock, job, "run.completed"))
        assert (await stored(records, job)).state is RunState.RUNNING
        await records.jobs.latch(*where)
        assert await records.jobs.move_run(*where, *arguments, make_notice(clock, job, "run.completed"))
        assert (await events(records, job)).count("run.completed") == 1

    async def test_an_unlatched_run_can_still_fail(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        target = RunState.FAILED
        assert await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, "why", None)
        assert await events(records, job) == ["job.accepted"]

    async def test_a_move_without_a_reason_clears_the_last(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        where = (job.job_id, job.run.run_id)
        await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.PAUSED, "the target is down", None)
        assert (await stored(records, job)).reason == "the target is down"
        await records.jobs.move_run(*where, {RunState.PAUSED}, RunState.RUNNING, None, None)
        assert (await stored(records, job)).reason is None

    async def test_the_code_comes_and_goes_with_the_reason(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        where = (job.job_id, job.run.run_id)
        assert job.run.reason_code is None
        await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.PAUSED, "why", None, code=ReasonCode.PAUSED)
        assert (await stored(records, job)).run.reason_code == ReasonCode.PAUSED
        assert [active.run.reason_code for active in await records.jobs.active_jobs()] == [ReasonCode.PAUSED]
        await records.jobs.move_run(*where, {RunState.PAUSED}, RunState.RUNNING, None, None)
        assert (await stored(records, job)).run.reason_code is None
        await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.FAILED, "why", None, code="later_code")
        assert [run.reason_code for run in await records.jobs.runs(job.job_id)] == ["later_code"]
        run = await records.jobs.run(*where)
        assert run is not None
        assert run.reason_code == "later_code"

    async def test_an_unknown_run_does_not_move(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock), await created(records, clock)
        notice = make_notice(clock, one, "run.never")
        target = RunState.CANCELLED
        assert not await records.jobs.move_run(
            JobId("job_nothing"), RunId("run_nothing"), RunState, target, None, notice
        )
        assert not await records.jobs.move_run(one.job_id, two.run.run_id, RunState, target, None, notice)
        assert (await stored(records, one)).state is RunState.RUNNING
        assert (await stored(records, two)).state is RunState.RUNNING
        assert await events(records, one) == ["job.accepted"]


class TestTotalAndLatch:
    async def test_the_total_is_absolute(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        for total in (5, 5, 7, 7, 6):
            await records.jobs.set_total(*where, total, total // 2)
            run = (await stored(records, job)).run
            assert (run.total, run.invalid) == (total, total // 2)

    async def test_it_is_refused_once_latched(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        await records.jobs.set_total(*where, 5, 1)
        await records.jobs.latch(*where)
        await records.jobs.set_total(*where, 9, 2)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (5, 1)

    async def test_the_latch_makes_an_ingesting_run_running(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        await records.jobs.set_total(job.job_id, job.run.run_id, 3, 0)
        run = await records.jobs.latch(job.job_id, job.run.run_id)
        assert run is not None
        assert (run.state, run.last_batch, run.total) == (RunState.RUNNING, True, 3)
        found = await stored(records, job)
        assert found.state is RunState.RUNNING
        assert found.run == run

    @pytest.mark.parametrize("state", [RunState.PAUSED, RunState.FAILED, RunState.CANCELLED])
    async def test_any_other_state_stays(self, records: Records, clock: ManualClock, state: RunState) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        assert await records.jobs.move_run(*where, sources_of(state), state, "why", None)
        run = await records.jobs.latch(*where)
        assert run is not None
        assert run.state is state
        found = await stored(records, job)
        assert found.state is state
        assert found.reason == "why"

    async def test_latching_again_changes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        runs = await asyncio.gather(*(records.jobs.latch(job.job_id, job.run.run_id) for _ in range(CALLERS)))
        assert len({(run.state, run.last_batch, run.total) for run in runs if run is not None}) == 1
        assert None not in runs

    async def test_latching_nothing_is_none(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock, latched=False), await created(records, clock, latched=False)
        assert await records.jobs.latch(JobId("job_nothing"), RunId("run_nothing")) is None
        assert await records.jobs.latch(one.job_id, two.run.run_id) is None
        assert not (await stored(records, two)).run.last_batch
        await records.jobs.set_total(one.job_id, two.run.run_id, 99, 9)
        assert (await stored(records, two)).run.total == 0


async def end(records: Records, job: Job, target: RunState = RunState.COMPLETED) -> None:
    assert await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(target), target, "why", None)


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
    return await records.jobs.add_run(job, make_notice(clock, job, "run.added", number=job.run.number), answer)


def claim_of(clock: ManualClock, job: Job, key: str = "k1") -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "rerun", key, "print", job.job_id, now + 30, now + 60)


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
        assert (found.created_at, found.expires_at) == (job.created_at, None)
        assert found.version > job.version, "its options may be others"
        assert await records.jobs.run(job.job_id, again.run.run_id) == found.run
        assert await events(records, job) == ["job.accepted", "run.added"]
        assert [each.job_id for each in await records.jobs.active_jobs()] == [job.job_id]
        assert (await records.jobs.active_jobs())[0].run == found.run
        assert (await records.jobs.jobs(ACME, None, 10)).items == [found]

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
        await records.access.claim(claim)
        assert await add(records, clock, again) is False
        assert await add(records, clock, again, answered(claim)) is False
        assert await stored(records, job) == job
        assert await records.jobs.runs(job.job_id) == [job.run]
        assert await records.jobs.run(job.job_id, again.run.run_id) is None
        assert await events(records, job) == ["job.accepted"]
        await end(records, job, RunState.CANCELLED)
        assert await add(records, clock, again, answered(claim)) is True, "the claim was not spent"

    async def test_not_with_another_number(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        for number in (0, 1, 3):
            assert await add(records, clock, with_next_run(clock, job, number=number)) is False
        assert len(await records.jobs.runs(job.job_id)) == 1

    async def test_one_of_many_at_once_adds_it(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        rivals = [with_next_run(clock, job) for _ in range(CALLERS)]
        added = await asyncio.gather(*(add(records, clock, each) for each in rivals))
        assert added.count(True) == 1
        assert added.count(False) == CALLERS - 1
        winner = rivals[added.index(True)]
        assert [run.run_id for run in await records.jobs.runs(job.job_id)] == [job.run.run_id, winner.run.run_id]
        assert (await stored(records, job)).run == winner.run
        assert await events(records, job) == ["job.accepted", "run.added"]

    async def test_its_answer_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        claim = claim_of(clock, job)
        await records.access.claim(claim)
        again = with_next_run(clock, job)
        assert await add(records, clock, again, answered(claim)) is True
        assert (await records.access.claim(claim)).row == answered(claim)

    async def test_a_request_that_was_carried_out_gets_its_answer(self, records: Records, clock: ManualClock) -> None:
        """The run that has not ended is the one that the request itself made: no conflict, but a replay."""
        job = await ended(records, clock)
        claim = claim_of(clock, job)
        await records.access.claim(claim)
        rivals = [with_next_run(clock, job) for _ in range(CALLERS)]
        added = await asyncio.gather(
            *(add(records, clock, each, answered(claim, each.run.run_id.encode())) for each in rivals)
        )
        (winner,) = [each for each, got in zip(rivals, added, strict=True) if got is True]
        assert added.count(answered(claim, winner.run.run_id.encode())) == CALLERS - 1
        await end(records, winner, RunState.CANCELLED)
        late = with_next_run(clock, winner)
        assert await add(records, clock, late, answered(claim, b"late")) == answered(claim, winner.run.run_id.encode())
        assert len(await records.jobs.runs(job.job_id)) == 2

    async def test_not_to_a_job_that_is_gone(self, records: Records, clock: ManualClock) -> None:
        expired = await ended(records, clock, retention_days=10 / DAY)
        hidden = await ended(records, clock)
        unknown = replace(hidden, job_id=JobId("job_nothing"))
        foreign = replace(await ended(records, clock), tenant=OTHER)
        await records.jobs.mark_deleted(ACME, hidden.job_id)
        clock.advance(10)
        for job in (expired, hidden, unknown, foreign):
            assert await add(records, clock, with_next_run(clock, job)) is False
        assert await records.jobs.active_jobs() == []
        assert {notice.event for notice in await records.outbox.undispatched(100)} == {"job.accepted"}


async def test_each_run_keeps_its_code(records: Records, clock: ManualClock) -> None:
    job = await created(records, clock)
    failed, code = RunState.FAILED, ReasonCode.DEADLINE
    await records.jobs.move_run(job.job_id, job.run.run_id, sources_of(failed), failed, "why", None, code=code)
    again = with_next_run(clock, job)
    assert await add(records, clock, again) is True
    assert (await stored(records, job)).run.reason_code is None
    assert [run.reason_code for run in await records.jobs.runs(job.job_id)] == [code, None]


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
        runs = await records.jobs.runs(job.job_id)
        assert [run.run_id for run in runs] == [each.run.run_id for each in made]
        assert [run.number for run in runs] == list(range(1, 13))
        assert [run.state for run in runs] == [RunState.FAILED] * 11 + [RunState.INGESTING]
        assert runs[0].lineage is None
        assert [run.lineage for run in runs[1:]] == [each.run.lineage for each in made[1:]]
        assert await records.jobs.runs(other.job_id) == [other.run]
        assert await records.jobs.runs(JobId("job_nothing")) == []

    async def test_each_moves_on_its_own(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock, RunState.CANCELLED)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        where = (job.job_id, again.run.run_id)
        await records.jobs.set_total(*where, 5, 1)
        run = await records.jobs.latch(*where)
        assert run is not None
        assert (run.state, run.total, run.number) == (RunState.RUNNING, 5, 2)
        assert await records.jobs.move_run(*where, {RunState.RUNNING}, RunState.COMPLETED, None, None)
        first, second = await records.jobs.runs(job.job_id)
        assert (first.state, first.total) == (RunState.CANCELLED, 0)
        assert (second.state, second.total, second.invalid) == (RunState.COMPLETED, 5, 1)
        assert (await stored(records, job)).run == second

    async def test_what_an_older_run_left_is_still_swept(self, records: Records, clock: ManualClock) -> None:
        """It may end, and the next be added, before anyone has cleared up after it."""
        job = await ended(records, clock, RunState.CANCELLED)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        (found,) = await records.jobs.unswept_jobs(10)
        assert (found.job_id, found.run.run_id, found.run.state) == (job.job_id, job.run.run_id, RunState.CANCELLED)
        assert found.key == job.key
        await records.jobs.mark_swept(job.job_id, job.run.run_id)
        assert await records.jobs.unswept_jobs(10) == []
        await end(records, again, RunState.CANCELLED)
        assert [each.run.run_id for each in await records.jobs.unswept_jobs(10)] == [again.run.run_id]

    async def test_all_are_hidden_and_forgotten_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job = await ended(records, clock)
        again = with_next_run(clock, job)
        await add(records, clock, again)
        await records.documents.create_documents([Document("export", ACME, "one", b"", job_id=job.job_id)])
        await records.jobs.mark_deleted(ACME, job.job_id)
        assert [run.state for run in await records.jobs.runs(job.job_id)] == [RunState.COMPLETED, RunState.CANCELLED]
        assert len(await records.jobs.purgeable_jobs(clock.now(), 10)) == 1, "a job, not a run"
        await records.jobs.purge_job(job.job_id)
        assert await records.jobs.runs(job.job_id) == []
        assert await records.jobs.run(job.job_id, again.run.run_id) is None
        assert await records.jobs.run(job.job_id, job.run.run_id) is None
        assert await records.documents.document("export", ACME, "one") is None
        assert await records.outbox.undispatched(10) == []
        assert (await records.outbox.events(ACME, job.job_id, None, 10)).items == []


class TestOptions:
    async def test_they_are_replaced_on_their_version(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, concurrency=3, attempts=2)
        assert job.version == 1
        options = Options(concurrency=9, headers={"X-Ü": "é"})
        for version in range(1, 4):
            notice = make_notice(clock, job, "job.changed", version=version)
            assert await records.jobs.change_options(job.job_id, version, options, notice)
            found = await stored(records, job)
            assert msgspec.to_builtins(found) == msgspec.to_builtins(replace(job, options=options, version=version + 1))
        assert await events(records, job) == ["job.accepted", *["job.changed"] * 3]

    async def test_a_stale_version_changes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        assert await records.jobs.change_options(job.job_id, 1, Options(concurrency=2), make_notice(clock, job, "a"))
        for version in (0, 1, 3):
            notice = make_notice(clock, job, "never")
            assert not await records.jobs.change_options(job.job_id, version, Options(concurrency=5), notice)
        assert (await stored(records, job)).options.concurrency == 2
        assert await events(records, job) == ["job.accepted", "a"]

    async def test_one_of_many_at_once_changes_them(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        changed = await asyncio.gather(
            *(
                records.jobs.change_options(
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
        told = [notice.data for notice in await records.outbox.undispatched(100) if notice.event == "job.changed"]
        assert told == [{"caller": changed.index(True)}]

    async def test_only_of_a_job_that_is_there(self, records: Records, clock: ManualClock) -> None:
        hidden, expired = await created(records, clock), await ended(records, clock, retention_days=10 / DAY)
        await records.jobs.mark_deleted(ACME, hidden.job_id)
        clock.advance(10)
        for job_id in (hidden.job_id, expired.job_id, JobId("job_nothing")):
            notice = make_notice(clock, hidden, "never")
            assert not await records.jobs.change_options(job_id, 1, Options(), notice)


class TestDeleting:
    async def test_it_is_hidden_at_once(self, records: Records, clock: ManualClock) -> None:
        job, other = await created(records, clock), await created(records, clock)
        assert await records.jobs.mark_deleted(ACME, job.job_id)
        assert await records.jobs.job(ACME, job.job_id) is None
        assert [found.job_id for found in (await records.jobs.jobs(ACME, None, 10)).items] == [other.job_id]
        assert [found.job_id for found in await records.jobs.active_jobs()] == [other.job_id]
        run = await records.jobs.run(job.job_id, job.run.run_id)
        assert run is not None
        assert run.state is RunState.CANCELLED
        assert not await records.jobs.mark_deleted(ACME, job.job_id)

    async def test_only_by_its_tenant(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        assert not await records.jobs.mark_deleted(OTHER, job.job_id)
        assert not await records.jobs.mark_deleted(ACME, JobId("job_nothing"))
        assert await records.jobs.job(ACME, job.job_id) is not None

    async def test_hidden_ones_are_found_by_their_time(self, records: Records, clock: ManualClock) -> None:
        await created(records, clock)
        expiring = await ended(records, clock, retention_days=1)
        deleted = await created(records, clock)
        await records.jobs.mark_deleted(ACME, deleted.job_id)
        assert await records.jobs.purgeable_jobs(clock.now() - 1, 10) == []
        assert [job.job_id for job in await records.jobs.purgeable_jobs(clock.now(), 10)] == [deleted.job_id]
        clock.advance(DAY)
        found = [job.job_id for job in await records.jobs.purgeable_jobs(clock.now(), 10)]
        assert found == [deleted.job_id, expiring.job_id]
        assert len(await records.jobs.purgeable_jobs(clock.now(), 1)) == 1

    async def test_all_of_it_is_forgotten(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        await records.jobs.purge_job(job.job_id)
        assert await records.jobs.job(ACME, job.job_id) is not None, "one that is not hidden stays"
        await records.jobs.mark_deleted(ACME, job.job_id)
        await records.jobs.purge_job(job.job_id)
        assert await records.jobs.run(job.job_id, job.run.run_id) is None
        assert await records.ingests.ranges(job.run.run_id) == []
        assert (await records.outbox.events(ACME, job.job_id, None, 10)).items == []
        assert await records.jobs.purgeable_jobs(clock.now(), 10) == []

    async def test_an_upload_goes_with_the_last_job_made_of_it(self, records: Records, clock: ManualClock) -> None:
        one, unused = upload(clock), upload(clock, "upload_2")
        for each in (one, unused):
            await records.access.create_upload(each, None)
        source = Source(one.key, one.size, one.sha256)
        jobs = [await created(records, clock, source=source) for _ in range(2)]
        for job in jobs:
            assert await records.access.upload(one.upload_id) is not None
            await records.jobs.mark_deleted(ACME, job.job_id)
            await records.jobs.purge_job(job.job_id)
        assert await records.access.upload(one.upload_id) is None
        assert [each.upload_id for each in await records.access.expired_uploads(clock.now(), 10)] == [one.upload_id]
        assert await records.access.upload(unused.upload_id) is not None


class TestSweeping:
    async def test_an_ended_run_is_found_until_it_is_swept(self, records: Records, clock: ManualClock) -> None:
        await created(records, clock)
        job = await in_state(records, clock, RunState.CANCELLED)
        (found,) = await records.jobs.unswept_jobs(10)
        assert (found.job_id, found.state, found.tenant) == (job.job_id, RunState.CANCELLED, ACME)
        await records.jobs.mark_swept(job.job_id, job.run.run_id)
        assert await records.jobs.unswept_jobs(10) == []
        await records.jobs.mark_swept(job.job_id, job.run.run_id)

    async def test_runs_that_are_swept_at_once(self, records: Records, clock: ManualClock) -> None:
        running = await created(records, clock)
        ended = [await in_state(records, clock, RunState.FAILED) for _ in range(4)]
        marked = [*ended[:3], ended[0], running]
        await asyncio.gather(*(records.jobs.mark_swept(job.job_id, job.run.run_id) for job in marked))
        assert [job.job_id for job in await records.jobs.unswept_jobs(10)] == [ended[3].job_id]

    async def test_a_run_that_goes_on_can_not_be_swept(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        await records.jobs.mark_swept(job.job_id, job.run.run_id)
        await records.jobs.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        assert [found.job_id for found in await records.jobs.unswept_jobs(10)] == [job.job_id]

    async def test_it_is_bounded(self, records: Records, clock: ManualClock) -> None:
        jobs = {(await in_state(records, clock, RunState.FAILED)).job_id for _ in range(5)}
        some = await records.jobs.unswept_jobs(3)
        assert len(some) == 3
        assert {job.job_id for job in some} <= jobs

    async def test_an_expired_job_is_swept_all_the_same(self, records: Records, clock: ManualClock) -> None:
        job = await in_state(records, clock, RunState.FAILED)
        clock.advance(100 * DAY)
        assert [found.job_id for found in await records.jobs.unswept_jobs(10)] == [job.job_id]


class TestTaskStore:
    """Which task engine holds the rows of a job."""

    async def rested(self, records: Records, clock: ManualClock, store: str = "old", **fields: object) -> Job:
        """A job whose run has completed and is swept."""
        job = replace(make_job(clock, **fields), task_store=store)  # type: ignore[arg-type]
        await records.jobs.create_job(job, make_notice(clock, job), None)
        await self.end(records, job)
        return await stored(records, job)

    async def end(self, records: Records, job: Job, swept: bool = True) -> None:
        run_id = job.run.run_id
        await records.jobs.latch(job.job_id, run_id)
        target = RunState.COMPLETED
        assert await records.jobs.move_run(job.job_id, run_id, sources_of(target), target, None, None)
        if swept:
            await records.jobs.mark_swept(job.job_id, run_id)

    async def finished(self, records: Records, outside: str, limit: int = 2) -> list[JobId]:
        found: list[JobId] = []
        cursor: str | None = None
        while True:
            page = await records.jobs.finished_jobs(outside, cursor, limit)
            assert len(page.items) <= limit
            found += [job.job_id for job in page.items]
            cursor = page.next_cursor
            if cursor is None:
                assert len(found) == len(set(found))
                return sorted(found)

    def rerun(self, clock: ManualClock, job: Job) -> Job:
        run = replace(job.run, run_id=RunId(clock.new_id("run")), number=job.run.number + 1, state=RunState.INGESTING)
        return replace(job, run=replace(run, last_batch=False, ended_at=None), state=RunState.INGESTING)

    async def test_finished_jobs_are_those_at_rest_outside_an_engine(
        self, records: Records, clock: ManualClock
    ) -> None:
        old = [(await self.rested(records, clock)).job_id for _ in range(5)]
        bare = (await self.rested(records, clock, store="", tenant=OTHER)).job_id
        new = (await self.rested(records, clock, store="new")).job_id
        await created(records, clock)
        unswept = await created(records, clock)
        await self.end(records, unswept, swept=False)
        deleted = await self.rested(records, clock)
        await records.jobs.mark_deleted(ACME, deleted.job_id)
        assert await self.finished(records, "new") == sorted([*old, bare])
        assert await self.finished(records, "old", 100) == sorted([new, bare])

    async def test_a_missing_record_is_written_once(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        await records.jobs.record_task_store(job.job_id, "old")
        await records.jobs.record_task_store(job.job_id, "new")
        assert (await stored(records, job)).task_store == "old"
        await records.jobs.record_task_store(JobId("job_nothing"), "old")

    async def test_a_job_at_rest_is_switched_by_one_caller(self, records: Records, clock: ManualClock) -> None:
        job = await self.rested(records, clock)
        switch = records.jobs.switch_task_store
        assert not await switch(job.job_id, job.run.run_id, "another", "new")
        assert not await switch(job.job_id, RunId("run_another"), "old", "new")
        given = (job.job_id, job.run.run_id, "old", "new")
        assert sorted(await asyncio.gather(*(switch(*given) for _ in range(CALLERS)))) == [False] * (CALLERS - 1) + [
            True
        ]
        found = await stored(records, job)
        assert found == replace(job, task_store="new")
        assert found.key.store == "new"

    async def test_an_active_or_unswept_job_is_not_switched(self, records: Records, clock: ManualClock) -> None:
        job = replace(make_job(clock), task_store="old")
        await records.jobs.create_job(job, make_notice(clock, job), None)
        assert not await records.jobs.switch_task_store(job.job_id, job.run.run_id, "old", "new")
        await self.end(records, job, swept=False)
        assert not await records.jobs.switch_task_store(job.job_id, job.run.run_id, "old", "new")
        await records.jobs.mark_swept(job.job_id, job.run.run_id)
        assert await records.jobs.switch_task_store(job.job_id, job.run.run_id, "old", "new")

    async def test_of_a_rerun_and_a_switch_one_gives_way(self, records: Records, clock: ManualClock) -> None:
        for _ in range(5):
            job = await self.rested(records, clock)
            rerun = self.rerun(clock, job)
            added, switched = await asyncio.gather(
                records.jobs.add_run(rerun, make_notice(clock, rerun), None),
                records.jobs.switch_task_store(job.job_id, job.run.run_id, "old", "new"),
            )
            assert added is not switched
            found = await stored(records, job)
            assert (found.task_store, found.run.number) == (("new", 1) if switched else ("old", 2))

    async def test_a_run_is_added_to_a_job_without_a_record(self, records: Records, clock: ManualClock) -> None:
        job = await self.rested(records, clock, store="")
        rerun = self.rerun(clock, replace(job, task_store="old"))
        assert await records.jobs.add_run(rerun, make_notice(clock, rerun), None) is True
        assert not await self.finished(records, "new")

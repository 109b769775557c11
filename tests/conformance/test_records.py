"""The Records seam, over every engine behind it."""

import asyncio
import itertools

import msgspec
import pytest

from conveyor.engines.records import Checkpoint, IdempotencyRow, Records
from conveyor.errors import BadCursor
from conveyor.model import (
    ApiKey,
    Backoff,
    FailureThreshold,
    Gateway,
    Job,
    JobId,
    JobKind,
    ResultLayout,
    RunId,
    TenantId,
)
from conveyor.states import ENDED, MOVES, RunState, sources_of
from tests.clocks import ManualClock
from tests.jobs import ACME, DAY, OTHER, make_job, make_notice

CALLERS = 20
ALL_PAIRS = list(itertools.product(RunState, RunState))
LEGAL = [(source, target) for source, targets in MOVES.items() for target in sorted(targets)]


def row(
    clock: ManualClock, key: str = "k1", tenant: TenantId = ACME, route: str = "POST /v1/jobs", ttl: float = 60.0
) -> IdempotencyRow:
    return IdempotencyRow(tenant, route, key, f"sha of {key}", 201, f"body of {key}\0\xff".encode(), clock.now() + ttl)


async def created(records: Records, clock: ManualClock, **fields: object) -> Job:
    job = make_job(clock, **fields)  # type: ignore[arg-type]
    assert await records.create_job(job, make_notice(clock, job), None) is None
    return job


async def in_state(records: Records, clock: ManualClock, state: RunState) -> Job:
    """A latched job in this state, brought there by legal moves only."""
    paths = {
        RunState.INGESTING: [],
        RunState.RUNNING: [],
        RunState.PAUSED: [RunState.PAUSED],
        RunState.COMPLETED: [RunState.COMPLETED],
        RunState.FAILED: [RunState.FAILED],
        RunState.CANCELLED: [RunState.CANCELLED],
    }
    start = RunState.INGESTING if state is RunState.INGESTING else RunState.RUNNING
    job = await created(records, clock, state=start, latched=state is not RunState.INGESTING)
    for target in paths[state]:
        assert await records.move_run(job.job_id, job.run.run_id, sources_of(target), target, None, None)
    return job


async def stored(records: Records, job: Job) -> Job:
    found = await records.job(job.tenant, job.job_id)
    assert found is not None
    return found


async def events(records: Records, job: Job) -> list[str]:
    page = await records.notices(job.tenant, job.job_id, None, 1000)
    return [event.event for event in page.items]


class TestCreate:
    async def test_a_job_is_read_back_as_it_was_written(self, records: Records, clock: ManualClock) -> None:
        job = make_job(
            clock,
            total=7,
            shards=4,
            layout=ResultLayout.PACKED,
            kind=JobKind.FETCH,
            source="uploads/acme/one",
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
        await records.create_job(job, make_notice(clock, job, total=7), None)
        found = await stored(records, job)
        assert msgspec.to_builtins(found) == msgspec.to_builtins(job)
        assert found.key == job.key
        assert await records.run(job.job_id, job.run.run_id) == job.run

    async def test_its_notice_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        await records.create_job(job, make_notice(clock, job, total=7, note="ü"), None)
        page = await records.notices(ACME, job.job_id, None, 10)
        (event,) = page.items
        assert (event.event, event.run_id, event.index, event.data) == (
            "job.accepted",
            job.run.run_id,
            None,
            {"total": 7, "note": "ü"},
        )
        assert event.at == pytest.approx(clock.now())
        assert page.next_cursor is None

    async def test_unknown_ids_are_none(self, records: Records) -> None:
        assert await records.job(ACME, JobId("job_nothing")) is None
        assert await records.run(JobId("job_nothing"), RunId("run_nothing")) is None
        assert await records.checkpointed(RunId("run_nothing")) is None
        assert (await records.notices(ACME, JobId("job_nothing"), None, 10)).items == []

    async def test_a_run_is_found_only_under_its_job(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock), await created(records, clock)
        assert await records.run(two.job_id, one.run.run_id) is None


class TestIdempotency:
    async def test_the_first_takes_the_key(self, records: Records, clock: ManualClock) -> None:
        job, kept = make_job(clock), row(clock)
        assert await records.create_job(job, make_notice(clock, job), kept) is None
        assert await records.idempotency(ACME, kept.route, kept.key) == kept

    async def test_a_taken_key_writes_nothing_and_gives_the_row(self, records: Records, clock: ManualClock) -> None:
        first, kept = make_job(clock), row(clock)
        await records.create_job(first, make_notice(clock, first), kept)
        second = make_job(clock)
        again = msgspec.structs.replace(kept, fingerprint="another", body=b"another")
        assert await records.create_job(second, make_notice(clock, second), again) == kept
        assert await records.job(ACME, second.job_id) is None
        assert await records.run(second.job_id, second.run.run_id) is None
        assert (await records.notices(ACME, second.job_id, None, 10)).items == []
        assert await records.idempotency(ACME, kept.route, kept.key) == kept

    async def test_one_of_many_at_once_gets_it(self, records: Records, clock: ManualClock) -> None:
        jobs = [make_job(clock) for _ in range(CALLERS)]
        rows = [msgspec.structs.replace(row(clock), body=job.job_id.encode()) for job in jobs]
        answers = await asyncio.gather(
            *(records.create_job(job, make_notice(clock, job), kept) for job, kept in zip(jobs, rows, strict=True))
        )
        (winner,) = [kept for kept, answer in zip(rows, answers, strict=True) if answer is None]
        assert [answer for answer in answers if answer is not None] == [winner] * (CALLERS - 1)
        page = await records.jobs(ACME, None, 100)
        assert [job.job_id.encode() for job in page.items] == [winner.body]

    async def test_an_expired_row_is_invisible_and_the_key_is_free(self, records: Records, clock: ManualClock) -> None:
        first, kept = make_job(clock), row(clock, ttl=60)
        await records.create_job(first, make_notice(clock, first), kept)
        clock.advance(59)
        assert await records.idempotency(ACME, kept.route, kept.key) == kept
        clock.advance(1)
        assert await records.idempotency(ACME, kept.route, kept.key) is None
        second, fresh = make_job(clock), msgspec.structs.replace(row(clock), fingerprint="another")
        assert await records.create_job(second, make_notice(clock, second), fresh) is None
        assert await records.idempotency(ACME, kept.route, kept.key) == fresh
        assert await records.job(ACME, second.job_id) is not None

    async def test_a_key_is_of_one_tenant_and_one_route(self, records: Records, clock: ManualClock) -> None:
        rows = [
            row(clock),
            row(clock, tenant=OTHER),
            row(clock, route="POST /v1/uploads"),
            row(clock, key="k2"),
        ]
        for kept in rows:
            job = make_job(clock, tenant=kept.tenant)
            assert await records.create_job(job, make_notice(clock, job), kept) is None
        for kept in rows:
            assert await records.idempotency(kept.tenant, kept.route, kept.key) == kept
        assert await records.idempotency(TenantId("third"), rows[0].route, rows[0].key) is None


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
                page = await records.jobs(ACME, cursor, limit)
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
        first = await records.jobs(ACME, None, 2)
        clock.advance(1)
        await created(records, clock)
        second = await records.jobs(ACME, first.next_cursor, 10)
        assert [job.job_id for job in second.items] == [made[1].job_id, made[0].job_id]

    async def test_no_jobs_is_an_empty_page(self, records: Records) -> None:
        page = await records.jobs(ACME, None, 10)
        assert page.items == []
        assert page.next_cursor is None

    async def test_active_jobs_are_those_of_all_tenants_that_have_not_ended(
        self, records: Records, clock: ManualClock
    ) -> None:
        by_state = {state: await in_state(records, clock, state) for state in RunState}
        foreign = await created(records, clock, tenant=OTHER)
        active = {job.job_id: job for job in await records.active_jobs()}
        expected = {job.job_id for state, job in by_state.items() if state not in ENDED} | {foreign.job_id}
        assert set(active) == expected
        assert active[foreign.job_id].tenant == OTHER
        for state, job in by_state.items():
            if state not in ENDED:
                assert active[job.job_id].state is state


class TestExpiry:
    async def test_an_expired_job_is_gone_from_every_read(self, records: Records, clock: ManualClock) -> None:
        brief = await created(records, clock, expires_in=DAY)
        lasting = await created(records, clock, expires_in=2 * DAY)
        clock.advance(DAY - 1)
        assert await records.job(ACME, brief.job_id) is not None
        clock.advance(1)
        assert await records.job(ACME, brief.job_id) is None
        assert [job.job_id for job in (await records.jobs(ACME, None, 10)).items] == [lasting.job_id]
        assert [job.job_id for job in await records.active_jobs()] == [lasting.job_id]

    async def test_pages_are_full_although_expired_jobs_lie_between(self, records: Records, clock: ManualClock) -> None:
        lasting = []
        for number in range(20):
            job = await created(records, clock, expires_in=DAY if number % 2 else 3 * DAY)
            if number % 2 == 0:
                lasting.append(job.job_id)
        clock.advance(2 * DAY)
        first = await records.jobs(ACME, None, 6)
        second = await records.jobs(ACME, first.next_cursor, 6)
        assert [job.job_id for job in [*first.items, *second.items]] == lasting[::-1]
        assert len(first.items) == 6
        assert second.next_cursor is None


class TestTenants:
    async def test_nothing_of_a_tenant_is_seen_by_another(self, records: Records, clock: ManualClock) -> None:
        mine = await created(records, clock)
        theirs = await created(records, clock, tenant=OTHER)
        assert await records.job(OTHER, mine.job_id) is None
        assert await records.job(ACME, theirs.job_id) is None
        assert [job.job_id for job in (await records.jobs(OTHER, None, 10)).items] == [theirs.job_id]
        assert (await records.notices(OTHER, mine.job_id, None, 10)).items == []

    async def test_a_foreign_cursor_shows_nothing_foreign(self, records: Records, clock: ManualClock) -> None:
        mine = [await created(records, clock) for _ in range(3)]
        theirs = [await created(records, clock, tenant=OTHER) for _ in range(3)]
        cursor = (await records.jobs(OTHER, None, 1)).next_cursor
        page = await records.jobs(ACME, cursor, 10)
        assert {job.tenant for job in page.items} <= {ACME}
        assert {job.job_id for job in page.items} <= {job.job_id for job in mine}
        assert len(theirs) == 3

    async def test_a_name_that_begins_another_is_another(self, records: Records, clock: ManualClock) -> None:
        longer = TenantId("acme2")
        await created(records, clock, tenant=longer)
        assert (await records.jobs(ACME, None, 10)).items == []
        assert len((await records.jobs(longer, None, 10)).items) == 1


class TestMoves:
    @pytest.mark.parametrize(("source", "target"), LEGAL)
    async def test_every_legal_move(
        self, records: Records, clock: ManualClock, source: RunState, target: RunState
    ) -> None:
        job = await in_state(records, clock, source)
        clock.advance(5)
        notice = make_notice(clock, job, f"run.{target}", why="test")
        assert await records.move_run(job.job_id, job.run.run_id, sources_of(target), target, "a reason", notice)
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
        assert not await records.move_run(job.job_id, job.run.run_id, sources_of(target), target, "no", notice)
        assert await stored(records, job) == before
        assert await events(records, job) == told

    @pytest.mark.parametrize(("source", "target"), LEGAL)
    async def test_one_of_many_callers_moves_it(
        self, records: Records, clock: ManualClock, source: RunState, target: RunState
    ) -> None:
        job = await in_state(records, clock, source)
        moved = await asyncio.gather(
            *(
                records.move_run(
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
        page = await records.notices(ACME, job.job_id, None, 100)
        (told,) = [event for event in page.items if event.event == "run.moved"]
        assert told.data == {"caller": moved.index(True)}
        assert (await stored(records, job)).reason == f"reason {moved.index(True)}"

    async def test_rival_targets_have_one_winner(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        targets = [RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED] * 6
        moved = await asyncio.gather(
            *(
                records.move_run(
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
        assert not await records.move_run(*where, *arguments, make_notice(clock, job, "run.completed"))
        assert (await stored(records, job)).state is RunState.RUNNING
        await records.latch(*where)
        assert await records.move_run(*where, *arguments, make_notice(clock, job, "run.completed"))
        assert (await events(records, job)).count("run.completed") == 1

    async def test_an_unlatched_run_can_still_fail(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        target = RunState.FAILED
        assert await records.move_run(job.job_id, job.run.run_id, sources_of(target), target, "why", None)
        assert await events(records, job) == ["job.accepted"]

    async def test_a_move_without_a_reason_clears_the_last(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.RUNNING}, RunState.PAUSED, "the target is down", None)
        assert (await stored(records, job)).reason == "the target is down"
        await records.move_run(*where, {RunState.PAUSED}, RunState.RUNNING, None, None)
        assert (await stored(records, job)).reason is None

    async def test_an_unknown_run_does_not_move(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock), await created(records, clock)
        notice = make_notice(clock, one, "run.never")
        target = RunState.CANCELLED
        assert not await records.move_run(JobId("job_nothing"), RunId("run_nothing"), RunState, target, None, notice)
        assert not await records.move_run(one.job_id, two.run.run_id, RunState, target, None, notice)
        assert (await stored(records, one)).state is RunState.RUNNING
        assert (await stored(records, two)).state is RunState.RUNNING
        assert await events(records, one) == ["job.accepted"]


class TestTotalAndLatch:
    async def test_the_total_is_absolute(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        for total in (5, 5, 7, 7, 6):
            await records.set_total(*where, total)
            assert (await stored(records, job)).run.total == total

    async def test_it_is_refused_once_latched(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        await records.set_total(*where, 5)
        await records.latch(*where)
        await records.set_total(*where, 9)
        assert (await stored(records, job)).run.total == 5

    async def test_the_latch_makes_an_ingesting_run_running(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        await records.set_total(job.job_id, job.run.run_id, 3)
        run = await records.latch(job.job_id, job.run.run_id)
        assert run is not None
        assert (run.state, run.last_batch, run.total) == (RunState.RUNNING, True, 3)
        found = await stored(records, job)
        assert found.state is RunState.RUNNING
        assert found.run == run

    @pytest.mark.parametrize("state", [RunState.PAUSED, RunState.FAILED, RunState.CANCELLED])
    async def test_any_other_state_stays(self, records: Records, clock: ManualClock, state: RunState) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        assert await records.move_run(*where, sources_of(state), state, "why", None)
        run = await records.latch(*where)
        assert run is not None
        assert run.state is state
        found = await stored(records, job)
        assert found.state is state
        assert found.reason == "why"

    async def test_latching_again_changes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        runs = await asyncio.gather(*(records.latch(job.job_id, job.run.run_id) for _ in range(CALLERS)))
        assert len({(run.state, run.last_batch, run.total) for run in runs if run is not None}) == 1
        assert None not in runs

    async def test_latching_nothing_is_none(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock, latched=False), await created(records, clock, latched=False)
        assert await records.latch(JobId("job_nothing"), RunId("run_nothing")) is None
        assert await records.latch(one.job_id, two.run.run_id) is None
        assert not (await stored(records, two)).run.last_batch
        await records.set_total(one.job_id, two.run.run_id, 99)
        assert (await stored(records, two)).run.total == 0


class TestCheckpoints:
    async def test_it_is_kept_and_shown_as_the_total(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        assert await records.checkpointed(job.run.run_id) is None
        for at in (Checkpoint(100, 4096), Checkpoint(200, 8192), Checkpoint(200, 8192)):
            assert await records.checkpoint(*where, at, 1)
            assert await records.checkpointed(job.run.run_id) == at
            assert (await stored(records, job)).run.total == at.next_index

    async def test_a_stale_fence_writes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        assert await records.checkpoint(*where, Checkpoint(100, 1000), 3)
        for stale in (1, 2):
            assert not await records.checkpoint(*where, Checkpoint(900, 9000), stale)
        assert await records.checkpointed(job.run.run_id) == Checkpoint(100, 1000)
        assert (await stored(records, job)).run.total == 100
        assert await records.checkpoint(*where, Checkpoint(50, 500), 4), "a later holder may start further back"
        assert not await records.checkpoint(*where, Checkpoint(200, 2000), 3)
        assert await records.checkpointed(job.run.run_id) == Checkpoint(50, 500)

    async def test_a_latched_run_takes_none(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        await records.checkpoint(*where, Checkpoint(100, 1000), 1)
        await records.latch(*where)
        assert not await records.checkpoint(*where, Checkpoint(200, 2000), 1)
        assert await records.checkpointed(job.run.run_id) == Checkpoint(100, 1000)
        assert (await stored(records, job)).run.total == 100

    @pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
    @pytest.mark.parametrize("before", [True, False])
    async def test_an_ended_run_takes_none(
        self, records: Records, clock: ManualClock, state: RunState, before: bool
    ) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        if before:
            await records.checkpoint(*where, Checkpoint(100, 1000), 1)
        await records.move_run(*where, sources_of(state), state, None, None)
        assert not await records.checkpoint(*where, Checkpoint(200, 2000), 2)
        assert await records.checkpointed(job.run.run_id) == (Checkpoint(100, 1000) if before else None)
        assert (await stored(records, job)).run.total == (100 if before else 0)

    async def test_a_paused_run_takes_them(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.INGESTING}, RunState.PAUSED, None, None)
        assert await records.checkpoint(*where, Checkpoint(10, 100), 1)

    async def test_an_unknown_run_takes_none(self, records: Records, clock: ManualClock) -> None:
        one = await created(records, clock, latched=False)
        two = await created(records, clock, latched=False)
        assert not await records.checkpoint(JobId("job_nothing"), RunId("run_nothing"), Checkpoint(1, 1), 1)
        assert not await records.checkpoint(one.job_id, two.run.run_id, Checkpoint(1, 1), 1)
        assert await records.checkpointed(two.run.run_id) is None


class TestSweeping:
    async def test_an_ended_run_is_found_until_it_is_swept(self, records: Records, clock: ManualClock) -> None:
        await created(records, clock)
        job = await in_state(records, clock, RunState.CANCELLED)
        (found,) = await records.ended_unswept(10)
        assert (found.job_id, found.state, found.tenant) == (job.job_id, RunState.CANCELLED, ACME)
        await records.mark_swept(job.job_id, job.run.run_id)
        assert await records.ended_unswept(10) == []
        await records.mark_swept(job.job_id, job.run.run_id)

    async def test_a_run_that_goes_on_can_not_be_swept(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        await records.mark_swept(job.job_id, job.run.run_id)
        await records.move_run(job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.FAILED, None, None)
        assert [found.job_id for found in await records.ended_unswept(10)] == [job.job_id]

    async def test_it_is_bounded(self, records: Records, clock: ManualClock) -> None:
        jobs = {(await in_state(records, clock, RunState.FAILED)).job_id for _ in range(5)}
        some = await records.ended_unswept(3)
        assert len(some) == 3
        assert {job.job_id for job in some} <= jobs

    async def test_an_expired_job_is_swept_all_the_same(self, records: Records, clock: ManualClock) -> None:
        job = await in_state(records, clock, RunState.FAILED)
        clock.advance(100 * DAY)
        assert [found.job_id for found in await records.ended_unswept(10)] == [job.job_id]


class TestNotices:
    async def test_they_come_oldest_first_in_pages(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        for number in range(10):
            target, source = (
                (RunState.PAUSED, RunState.RUNNING) if number % 2 == 0 else (RunState.RUNNING, RunState.PAUSED)
            )
            notice = make_notice(clock, job, "run.moved", number=number)
            clock.advance(1)
            assert await records.move_run(job.job_id, job.run.run_id, {source}, target, None, notice)
        got, cursor = [], None
        while True:
            page = await records.notices(ACME, job.job_id, cursor, 3)
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.items) == 3
        assert [event.data.get("number") for event in got] == [None, *range(10)]
        assert [event.seq for event in got] == sorted({event.seq for event in got})
        assert [event.at for event in got] == sorted(event.at for event in got)

    @pytest.mark.parametrize("cursor", ["", "x", "-1", "1.5", "٣", "9" * 40, "1 OR 1=1"])
    async def test_a_cursor_of_somebody_else_is_refused(
        self, records: Records, clock: ManualClock, cursor: str
    ) -> None:
        job = await created(records, clock)
        with pytest.raises(BadCursor):
            await records.notices(ACME, job.job_id, cursor, 10)


def key(clock: ManualClock, key_id: str, tenant: TenantId = ACME, **fields: object) -> ApiKey:
    return ApiKey(key_id, tenant, f"name of {key_id}", "0" * 64, clock.now(), **fields)  # type: ignore[arg-type]


class TestKeys:
    async def test_a_key_is_read_back(self, records: Records, clock: ManualClock) -> None:
        plain, full = key(clock, "k1"), key(clock, "k2", revoked_at=5.0, expires_at=clock.now() + 9)
        unnamed = msgspec.structs.replace(key(clock, "k3"), name=None)
        for made in (plain, full, unnamed):
            await records.create_key(made)
            assert await records.key(made.key_id) == made
        assert await records.key("nothing") is None
        assert await records.key("k") is None

    async def test_keys_of_one_tenant_or_of_all(self, records: Records, clock: ManualClock) -> None:
        for key_id, tenant in (("k1", ACME), ("k2", OTHER), ("k3", ACME)):
            await records.create_key(key(clock, key_id, tenant))
        assert {each.key_id for each in await records.keys(ACME)} == {"k1", "k3"}
        assert {each.key_id for each in await records.keys(OTHER)} == {"k2"}
        assert {each.key_id for each in await records.keys(None)} == {"k1", "k2", "k3"}
        assert await records.keys(TenantId("third")) == []

    async def test_a_key_is_revoked_once(self, records: Records, clock: ManualClock) -> None:
        await records.create_key(key(clock, "k1"))
        await records.create_key(key(clock, "k2"))
        assert await records.revoke_key("k1", 100.0)
        await records.revoke_key("k1", 200.0)
        revoked = await records.key("k1")
        assert revoked is not None
        assert revoked.revoked_at == 100.0
        other = await records.key("k2")
        assert other is not None
        assert other.revoked_at is None
        assert not await records.revoke_key("nothing", 100.0)

    async def test_the_engine_does_not_judge_expiry_of_keys(self, records: Records, clock: ManualClock) -> None:
        """Auth answers an expired key as it answers a revoked one; it needs the row for that."""
        await records.create_key(key(clock, "k1", expires_at=clock.now() + 1))
        clock.advance(2)
        assert await records.key("k1") is not None

"""The Records seam, over every engine behind it."""

import asyncio
import itertools

import msgspec
import pytest

from conveyor.engines.ingest_sums import sums_of
from conveyor.engines.records import Document, IdempotencyClaim, Records
from conveyor.errors import BadCursor
from conveyor.model import (
    ApiKey,
    Backoff,
    Compression,
    FailureThreshold,
    Gateway,
    Ingested,
    Job,
    JobId,
    JobKind,
    ListFormat,
    Mode,
    Range,
    ResultLayout,
    RunId,
    Source,
    TenantId,
    UploadRecord,
)
from conveyor.states import ENDED, MOVES, ReasonCode, RunState, sources_of
from tests.clocks import ManualClock
from tests.jobs import ACME, DAY, OTHER, make_job, make_notice

CALLERS = 20
LEASE = 10.0
LIST = Source("uploads/acme/one", 1000, "0" * 64)
ALL_PAIRS = list(itertools.product(RunState, RunState))
# Of runs that are latched, or ingesting: those that failed before their latch have tests of their own.
LEGAL = [
    (source, target)
    for source, targets in MOVES.items()
    for target in sorted(targets)
    if target is not RunState.INGESTING
]


def row(
    clock: ManualClock, key: str = "k1", tenant: TenantId = ACME, route: str = "POST /v1/jobs", ttl: float = 60.0
) -> IdempotencyClaim:
    """A claim as a request makes it, with an id of its own for what it is to make."""
    now = clock.now()
    return IdempotencyClaim(tenant, route, key, f"sha of {key}", clock.new_id("job"), now + LEASE, now + ttl)


def answered(claim: IdempotencyClaim, body: bytes = b"the answer\0\xff") -> IdempotencyClaim:
    return msgspec.structs.replace(claim, status=201, body=body)


async def created(records: Records, clock: ManualClock, **fields: object) -> Job:
    job = make_job(clock, **fields)  # type: ignore[arg-type]
    assert await records.create_job(job, make_notice(clock, job), None) is None
    return job


async def in_state(records: Records, clock: ManualClock, state: RunState) -> Job:
    """A job in this state, brought there by legal moves only; latched unless it is ingesting."""
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
        await records.create_job(job, make_notice(clock, job, total=7), None)
        found = await stored(records, job)
        assert msgspec.to_builtins(found) == msgspec.to_builtins(job)
        assert found.key == job.key
        assert await records.run(job.job_id, job.run.run_id) == job.run

    async def test_its_notice_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        job = make_job(clock)
        notice = make_notice(clock, job, total=7, note="ü")
        await records.create_job(job, notice, None)
        page = await records.notices(ACME, job.job_id, None, 10)
        (event,) = page.items
        assert event.id == notice.notice_id
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
        assert await records.ranges(RunId("run_nothing")) == []
        assert await records.range(RunId("run_nothing"), 0) is None
        assert await records.ingested(RunId("run_nothing")) == Ingested(0, 0, 0, 0, 0, 0)
        assert (await records.notices(ACME, JobId("job_nothing"), None, 10)).items == []

    async def test_a_run_is_found_only_under_its_job(self, records: Records, clock: ManualClock) -> None:
        one, two = await created(records, clock), await created(records, clock)
        assert await records.run(two.job_id, one.run.run_id) is None


class TestClaims:
    async def test_the_first_gets_the_key(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        claimed = await records.claim(claim)
        assert claimed.granted
        assert claimed.row == claim

    async def test_one_of_many_at_once_gets_it(self, records: Records, clock: ManualClock) -> None:
        claims = [row(clock) for _ in range(CALLERS)]
        claimed = await asyncio.gather(*map(records.claim, claims))
        (winner,) = [claim for claim, got in zip(claims, claimed, strict=True) if got.granted]
        assert [got.row for got in claimed] == [winner] * CALLERS

    async def test_the_answer_is_written_with_the_job(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), row(clock)
        await records.claim(claim)
        assert await records.create_job(job, make_notice(clock, job), answered(claim)) is None
        again = await records.claim(row(clock))
        assert not again.granted
        assert again.row == answered(claim)

    async def test_an_answered_claim_writes_nothing_more(self, records: Records, clock: ManualClock) -> None:
        first, claim = make_job(clock), row(clock)
        await records.claim(claim)
        await records.create_job(first, make_notice(clock, first), answered(claim))
        second = make_job(clock)
        late = answered(claim, b"another")
        assert await records.create_job(second, make_notice(clock, second), late) == answered(claim)
        assert await records.job(ACME, second.job_id) is None
        assert await records.run(second.job_id, second.run.run_id) is None
        assert (await records.notices(ACME, second.job_id, None, 10)).items == []

    async def test_a_lapsed_claim_is_taken_over_with_its_subject(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        await records.claim(claim)
        clock.advance(LEASE - 0.5)
        assert not (await records.claim(row(clock))).granted
        clock.advance(1)
        taken = await records.claim(row(clock))
        assert taken.granted
        assert taken.row.subject == claim.subject
        assert taken.row.lease_until == pytest.approx(clock.now() + LEASE)
        assert not (await records.claim(row(clock))).granted

    async def test_another_request_does_not_take_it_over(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        await records.claim(claim)
        clock.advance(LEASE + 1)
        other = await records.claim(msgspec.structs.replace(row(clock), fingerprint="another"))
        assert not other.granted
        assert other.row == claim

    async def test_who_was_overtaken_and_who_overtook_make_one(self, records: Records, clock: ManualClock) -> None:
        """Both carry the same subject: the first to write wins, whichever that is."""
        claim = row(clock)
        await records.claim(claim)
        clock.advance(LEASE + 1)
        taken = (await records.claim(row(clock))).row
        late, second = make_job(clock), make_job(clock)
        assert await records.create_job(late, make_notice(clock, late), answered(claim, b"late")) is None
        standing = await records.create_job(second, make_notice(clock, second), answered(taken, b"second"))
        assert standing is not None
        assert standing.body == b"late"
        assert await records.job(ACME, second.job_id) is None

    async def test_a_claim_that_is_given_back_is_free(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        await records.claim(claim)
        await records.unclaim(claim)
        fresh = msgspec.structs.replace(row(clock), fingerprint="another")
        assert (await records.claim(fresh)).granted

    async def test_only_ones_own_claim_is_given_back(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        await records.claim(claim)
        clock.advance(LEASE + 1)
        taken = await records.claim(row(clock))
        await records.unclaim(claim)
        assert not (await records.claim(row(clock))).granted
        job = make_job(clock)
        await records.create_job(job, make_notice(clock, job), answered(taken.row))
        await records.unclaim(taken.row)
        assert (await records.claim(row(clock))).row.status == 201

    async def test_an_expired_row_is_free(self, records: Records, clock: ManualClock) -> None:
        job, claim = make_job(clock), row(clock, ttl=60)
        await records.claim(claim)
        await records.create_job(job, make_notice(clock, job), answered(claim))
        clock.advance(59)
        assert not (await records.claim(row(clock))).granted
        clock.advance(1)
        fresh = msgspec.structs.replace(row(clock), fingerprint="another")
        claimed = await records.claim(fresh)
        assert claimed.granted
        assert claimed.row == fresh

    async def test_a_key_is_of_one_tenant_and_one_route(self, records: Records, clock: ManualClock) -> None:
        rows = [
            row(clock),
            row(clock, tenant=OTHER),
            row(clock, route="POST /v1/uploads"),
            row(clock, key="k2"),
        ]
        for claim in rows:
            assert (await records.claim(claim)).granted

    async def test_expired_rows_are_swept(self, records: Records, clock: ManualClock) -> None:
        await records.claim(row(clock, ttl=5))
        await records.claim(row(clock, key="k2", ttl=50))
        clock.advance(6)
        await records.purge_expired(10)
        assert await records.purge_expired(10) == 0
        assert (await records.claim(row(clock))).granted
        assert not (await records.claim(row(clock, key="k2"))).granted


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

    async def test_the_code_comes_and_goes_with_the_reason(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        where = (job.job_id, job.run.run_id)
        assert job.run.reason_code is None
        await records.move_run(*where, {RunState.RUNNING}, RunState.PAUSED, "why", None, code=ReasonCode.PAUSED)
        assert (await stored(records, job)).run.reason_code == ReasonCode.PAUSED
        assert [found.run.reason_code for found in await records.active_jobs()] == [ReasonCode.PAUSED]
        await records.move_run(*where, {RunState.PAUSED}, RunState.RUNNING, None, None)
        assert (await stored(records, job)).run.reason_code is None
        await records.move_run(*where, {RunState.RUNNING}, RunState.FAILED, "why", None, code="later_code")
        assert [run.reason_code for run in await records.runs(job.job_id)] == ["later_code"]
        run = await records.run(*where)
        assert run is not None
        assert run.reason_code == "later_code"

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
            await records.set_total(*where, total, total // 2)
            run = (await stored(records, job)).run
            assert (run.total, run.invalid) == (total, total // 2)

    async def test_it_is_refused_once_latched(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        where = (job.job_id, job.run.run_id)
        await records.set_total(*where, 5, 1)
        await records.latch(*where)
        await records.set_total(*where, 9, 2)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (5, 1)

    async def test_the_latch_makes_an_ingesting_run_running(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock, latched=False, state=RunState.INGESTING)
        await records.set_total(job.job_id, job.run.run_id, 3, 0)
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
        await records.set_total(one.job_id, two.run.run_id, 99, 9)
        assert (await stored(records, two)).run.total == 0


def part(number: int, start: int, end: int | None, **fields: object) -> Range:
    plain = {"format": ListFormat.TEXT, "compression": Compression.NONE, "source": LIST, "header": None}
    first = number * 10
    return Range(number=number, start=start, end=end, first_index=first, index=first, offset=start, **plain | fields)  # type: ignore[arg-type]


def moved(one: Range, tasks: int, offset: int, invalid: int = 0, done: bool = False) -> Range:
    return msgspec.structs.replace(
        one, index=one.first_index + tasks + invalid, offset=offset, tasks=tasks, invalid=invalid, done=done
    )


async def ingesting(records: Records, clock: ManualClock, *ranges: Range, **fields: object) -> Job:
    job = await created(records, clock, latched=False, state=RunState.INGESTING, **fields)
    if ranges:
        assert await records.split(job.job_id, job.run.run_id, ranges)
    return job


class TestRanges:
    async def test_they_are_read_back_in_order(self, records: Records, clock: ManualClock) -> None:
        ranges = [part(0, 0, 500), part(1, 500, None, header="url,id", format=ListFormat.CSV)]
        job = await ingesting(records, clock, *ranges)
        assert await records.ranges(job.run.run_id) == ranges
        assert [await records.range(job.run.run_id, number) for number in (0, 1, 2)] == [*ranges, None]
        assert (await stored(records, job)).run.sealed

    async def test_a_list_is_split_once(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock)
        where = (job.job_id, job.run.run_id)
        split = await asyncio.gather(*(records.split(*where, [part(0, 0, None)]) for _ in range(CALLERS)))
        assert sum(split) == 1
        assert len(await records.ranges(job.run.run_id)) == 1

    async def test_an_ended_run_is_not_split(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock)
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, None, None)
        assert not await records.split(*where, [part(0, 0, None)])
        assert await records.ranges(job.run.run_id) == []

    async def test_progress_is_kept_and_shown_as_the_total(self, records: Records, clock: ManualClock) -> None:
        one, two = part(0, 0, 500), part(1, 500, None)
        job = await ingesting(records, clock, one, two)
        run_id = job.run.run_id
        assert await records.ingested(run_id) == Ingested(2, 0, 0, 0, 0, 1000)
        assert await records.checkpoint(run_id, moved(one, 3, 200, invalid=1), 1)
        assert await records.checkpoint(run_id, moved(two, 5, 1001, done=True), 1)
        assert await records.ranges(run_id) == [moved(one, 3, 200, invalid=1), moved(two, 5, 1001, done=True)]
        # A last line without a newline is counted with one; it is not read beyond the end all the same.
        assert await records.ingested(run_id) == Ingested(2, 1, 8, 1, 700, 1000)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (8, 1)
        assert await records.checkpoint(run_id, moved(one, 3, 200, invalid=1), 1), "again changes nothing"
        assert (await records.ingested(run_id)).tasks == 8

    async def test_a_compressed_list_has_no_known_end_before_it(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None, compression=Compression.GZIP)
        job = await ingesting(records, clock, one)
        await records.checkpoint(job.run.run_id, moved(one, 3, 5000), 1)
        assert await records.ingested(job.run.run_id) == Ingested(1, 0, 3, 0, 5000, None)
        await records.checkpoint(job.run.run_id, moved(one, 9, 20_000, done=True), 1)
        assert await records.ingested(job.run.run_id) == Ingested(1, 1, 9, 0, 20_000, 20_000)

    async def test_a_stale_fence_writes_nothing(self, records: Records, clock: ManualClock) -> None:
        one, other = part(0, 0, 500), part(1, 500, None)
        job = await ingesting(records, clock, one, other)
        run_id = job.run.run_id
        assert await records.checkpoint(run_id, moved(one, 10, 100), 3)
        for stale in (1, 2):
            assert not await records.checkpoint(run_id, moved(one, 90, 400), stale)
        assert (await records.range(run_id, 0)) == moved(one, 10, 100)
        assert await records.checkpoint(run_id, moved(one, 5, 50), 4), "a later holder may start further back"
        assert not await records.checkpoint(run_id, moved(one, 20, 200), 3)
        assert await records.checkpoint(run_id, moved(other, 1, 510), 1), "each range has a fence of its own"

    @pytest.mark.parametrize("state", [RunState.FAILED, RunState.CANCELLED])
    async def test_an_ended_run_takes_none(self, records: Records, clock: ManualClock, state: RunState) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.move_run(job.job_id, job.run.run_id, sources_of(state), state, None, None)
        assert not await records.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        assert (await stored(records, job)).run.total == 0

    async def test_a_paused_run_takes_them(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.move_run(job.job_id, job.run.run_id, {RunState.INGESTING}, RunState.PAUSED, None, None)
        assert await records.checkpoint(job.run.run_id, moved(one, 5, 50), 1)

    async def test_the_total_of_a_latched_run_stays(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        await records.set_total(job.job_id, job.run.run_id, 7, 2)
        await records.latch(job.job_id, job.run.run_id)
        await records.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (7, 2)

    async def test_unknown_runs_and_ranges_take_none(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        assert not await records.checkpoint(RunId("run_nothing"), part(0, 0, None), 1)
        assert not await records.checkpoint(job.run.run_id, part(1, 0, None), 1)

    async def test_a_run_that_failed_before_its_latch_goes_on(self, records: Records, clock: ManualClock) -> None:
        one = part(0, 0, None)
        job = await ingesting(records, clock, one)
        where = (job.job_id, job.run.run_id)
        await records.checkpoint(job.run.run_id, moved(one, 5, 50), 1)
        await records.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None, keep=True)
        assert await records.ended_unswept(10) == [], "what it has is not cleared away"
        assert await records.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)
        found = await stored(records, job)
        assert (found.state, found.reason, found.run.ended_at, found.run.total) == (RunState.INGESTING, None, None, 5)
        assert await records.checkpoint(job.run.run_id, moved(one, 6, 60), 2)

    async def test_without_keep_it_is_swept(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None)
        assert [each.job_id for each in await records.ended_unswept(10)] == [job.job_id]

    async def test_one_that_went_on_and_ends_again_is_swept(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.INGESTING}, RunState.FAILED, "why", None, keep=True)
        await records.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)
        await records.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, "by hand", None)
        assert [each.job_id for each in await records.ended_unswept(10)] == [job.job_id]

    async def test_a_latched_run_does_not(self, records: Records, clock: ManualClock) -> None:
        job = await in_state(records, clock, RunState.FAILED)
        where = (job.job_id, job.run.run_id)
        assert not await records.move_run(*where, sources_of(RunState.INGESTING), RunState.INGESTING, None, None)


class TestOpenJobs:
    async def append(
        self, records: Records, job: Job, lines: int, answer: IdempotencyClaim | None = None, seal: bool = False
    ) -> Range | IdempotencyClaim | None:
        return await records.append_range(job.job_id, job.run.run_id, LIST, lines, answer, seal)

    async def test_indexes_are_handed_out_once(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        sizes = list(range(1, CALLERS + 1))
        added = await asyncio.gather(*(self.append(records, job, lines) for lines in sizes))
        given: list[int] = []
        for one, lines in zip(added, sizes, strict=True):
            assert isinstance(one, Range)
            given += range(one.first_index, one.first_index + lines)
        assert sorted(given) == list(range(sum(sizes)))
        assert [one.number for one in await records.ranges(job.run.run_id)] == list(range(CALLERS))

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
        assert not await records.seal(job.job_id, job.run.run_id, "late")
        assert (await stored(records, job)).reason is None

    async def test_it_is_sealed_once_and_says_why(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        sealed = await asyncio.gather(*(records.seal(*where, "nobody added") for _ in range(CALLERS)))
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
        assert not await records.seal(*where, "nobody added", touched_at=seen)
        found = await stored(records, job)
        assert (found.run.sealed, found.reason) == (False, None)
        assert isinstance(await self.append(records, job, 1), Range)
        assert await records.seal(*where, "nobody added", touched_at=found.run.touched_at)
        assert (await stored(records, job)).reason == "nobody added"

    async def test_a_batch_and_an_idle_close_at_once(self, records: Records, clock: ManualClock) -> None:
        """One of them is first: a batch that was taken keeps the run open, or is refused."""
        for _ in range(CALLERS):
            job = await ingesting(records, clock, mode=Mode.OPEN)
            where = (job.job_id, job.run.run_id)
            seen = (await stored(records, job)).run.touched_at
            clock.advance(50)
            added, sealed = await asyncio.gather(
                self.append(records, job, 3), records.seal(*where, "nobody added", touched_at=seen)
            )
            assert sealed == (added is None)
            assert len(await records.ranges(job.run.run_id)) == (0 if sealed else 1)

    async def test_the_sums_are_those_of_all_batches(self, records: Records, clock: ManualClock) -> None:
        """However they are written: side by side, repeated, set back, and by a stale hand."""
        job = await ingesting(records, clock, mode=Mode.OPEN)
        run_id = job.run.run_id
        added = await asyncio.gather(*(self.append(records, job, lines) for lines in range(1, 9)))
        batches = [one for one in added if isinstance(one, Range)]
        assert await records.ingested(run_id) == sums_of(*batches).ingested
        await asyncio.gather(*(records.checkpoint(run_id, moved(one, 1, 40), 2) for one in batches))
        await records.checkpoint(run_id, moved(batches[0], 1, 40), 2)
        await records.checkpoint(run_id, moved(batches[1], 0, 0), 3)
        await records.checkpoint(run_id, moved(batches[2], 9, 900, done=True), 1)
        await asyncio.gather(
            self.append(records, job, 3),
            *(records.checkpoint(run_id, moved(one, 2, 1000, invalid=1, done=True), 4) for one in batches[3:]),
        )
        ranges = await records.ranges(run_id)
        assert await records.ingested(run_id) == sums_of(*ranges).ingested
        run = (await stored(records, job)).run
        assert (run.total, run.invalid) == (sum(one.tasks for one in ranges), sum(one.invalid for one in ranges))

    async def test_an_ended_run_takes_nothing(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        await records.move_run(*where, {RunState.INGESTING}, RunState.CANCELLED, None, None)
        assert await self.append(records, job, 1) is None
        assert not await records.seal(*where, None)

    async def test_a_batch_and_its_answer_are_one_write(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        claim = row(clock, route="tasks")
        await records.claim(claim)
        assert isinstance(await self.append(records, job, 3, answered(claim)), Range)
        assert await self.append(records, job, 3, answered(claim, b"again")) == answered(claim)
        assert len(await records.ranges(job.run.run_id)) == 1

    async def test_the_reason_outlives_completion(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, mode=Mode.OPEN)
        where = (job.job_id, job.run.run_id)
        await records.seal(*where, "nobody added", code=ReasonCode.IDLE_TIMEOUT)
        await records.latch(*where)
        assert await records.move_run(*where, {RunState.RUNNING}, RunState.COMPLETED, None, None)
        found = await stored(records, job)
        assert (found.reason, found.run.reason_code) == ("nobody added", ReasonCode.IDLE_TIMEOUT)


def upload(clock: ManualClock, upload_id: str = "upload_1", tenant: TenantId = ACME, ttl: float = 60.0) -> UploadRecord:
    now = clock.now()
    return UploadRecord(tenant, upload_id, f"uploads/{tenant}/{upload_id}", 7, "0" * 64, now, now + ttl)


class TestUploads:
    async def test_it_is_read_back_until_it_expires(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        assert await records.create_upload(one, None) is None
        assert await records.upload(one.upload_id) == one
        assert await records.upload("upload_nothing") is None
        clock.advance(60)
        assert await records.upload(one.upload_id) is None
        assert not await records.mark_stored(one.upload_id)

    async def test_it_is_stored_once(self, records: Records, clock: ManualClock) -> None:
        await records.create_upload(upload(clock), None)
        stored_by = await asyncio.gather(*(records.mark_stored("upload_1") for _ in range(CALLERS)))
        assert sum(stored_by) == 1
        found = await records.upload("upload_1")
        assert found is not None
        assert found.stored_at == pytest.approx(clock.now())

    async def test_its_answer_is_written_with_it(self, records: Records, clock: ManualClock) -> None:
        claim = row(clock)
        await records.claim(claim)
        assert await records.create_upload(upload(clock), answered(claim)) is None
        late = upload(clock, "upload_2")
        assert await records.create_upload(late, answered(claim, b"late")) == answered(claim)
        assert await records.upload("upload_2") is None

    async def test_it_is_kept_longer_never_shorter(self, records: Records, clock: ManualClock) -> None:
        await records.create_upload(upload(clock), None)
        await records.keep_upload("upload_1", clock.now() + 10)
        clock.advance(59)
        assert await records.upload("upload_1") is not None
        await records.keep_upload("upload_1", clock.now() + 100)
        clock.advance(99)
        assert await records.upload("upload_1") is not None

    async def test_an_expired_one_is_found_until_it_is_forgotten(self, records: Records, clock: ManualClock) -> None:
        """Its object is removed in between: were the row first to go, nobody would know of it after a crash."""
        for number in range(5):
            await records.create_upload(upload(clock, f"upload_{number}", ttl=60 + number if number < 3 else 600), None)
        assert await records.expired_uploads(clock.now(), 10) == []
        assert not await records.forget_upload("upload_0")
        clock.advance(65)
        assert await records.expired_uploads(clock.now() - 30, 10) == []
        for _ in range(2):
            found = await records.expired_uploads(clock.now(), 2)
            assert [each.upload_id for each in found] == ["upload_0", "upload_1"]
        assert [await records.forget_upload(each.upload_id) for each in found] == [True, True]
        assert [each.upload_id for each in await records.expired_uploads(clock.now(), 2)] == ["upload_2"]
        assert not await records.forget_upload("upload_0")
        await records.keep_upload("upload_2", clock.now() + 60)
        assert not await records.forget_upload("upload_2"), "kept meanwhile"
        assert await records.upload("upload_3") is not None


class TestReferences:
    """An upload is kept while a job or a row refers to it."""

    async def test_a_row_keeps_it_when_the_last_job_goes(self, records: Records, clock: ManualClock) -> None:
        await row_keeps_an_upload(records, clock)

    async def test_a_job_keeps_it_when_the_last_row_goes(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        await records.create_upload(one, None)
        job = await created(records, clock, source=Source(one.key, one.size, one.sha256))
        schedule = referring("schedule_1", one.upload_id)
        await records.create_rows([schedule])
        assert await records.remove_row(schedule)
        assert await records.upload(one.upload_id) == one
        await forgotten(records, job)
        assert await records.upload(one.upload_id) is None

    async def test_the_last_of_several_rows_lets_go_of_it(self, records: Records, clock: ManualClock) -> None:
        one = upload(clock)
        await records.create_upload(one, None)
        rows = [referring(f"schedule_{number}", one.upload_id) for number in range(3)]
        await records.create_rows(rows)
        for each in rows:
            assert await records.upload(one.upload_id) == one
            assert await records.remove_row(each)
            assert not await records.remove_row(each)
        assert await records.upload(one.upload_id) is None

    async def test_a_row_that_turns_to_another_lets_go_of_the_first(self, records: Records, clock: ManualClock) -> None:
        first, second = upload(clock), upload(clock, "upload_2")
        for each in (first, second):
            await records.create_upload(each, None)
        standing = referring("schedule_1", first.upload_id)
        await records.create_rows([standing])
        again = await records.replace_row(msgspec.structs.replace(standing, body=b"other times"))
        assert again is not None
        assert await records.upload(first.upload_id) == first, "it still refers to it"
        stale = msgspec.structs.replace(standing, upload_id=second.upload_id)
        assert await records.replace_row(stale) is None
        assert await records.upload(first.upload_id) == first, "nothing was written"
        other = await records.replace_row(msgspec.structs.replace(again, upload_id=second.upload_id))
        assert other is not None
        assert await records.row("schedule", ACME, "schedule_1") == other
        assert await records.upload(first.upload_id) is None
        clock.advance(600)
        assert await records.upload(second.upload_id) == second
        none = await records.replace_row(msgspec.structs.replace(other, upload_id=None))
        assert none is not None
        assert await records.upload(second.upload_id) is None

    async def test_time_does_not_take_one_that_is_referred_to(self, records: Records, clock: ManualClock) -> None:
        """A scheduler may be away for as long as it likes, and a run may take as long."""
        for name in ("upload_1", "upload_2", "upload_3"):
            await records.create_upload(upload(clock, name), None)
        schedule = referring("schedule_1", "upload_1")
        await records.create_rows([schedule])
        second = upload(clock, "upload_2")
        job = await created(records, clock, source=Source(second.key, second.size, second.sha256), expires_in=90 * DAY)
        clock.advance(60 * DAY)
        for _ in range(2):
            assert [each.upload_id for each in await records.expired_uploads(clock.now(), 10)] == ["upload_3"]
        for name in ("upload_1", "upload_2"):
            assert not await records.forget_upload(name)
            assert await records.upload(name) is not None
        assert await records.remove_row(schedule)
        await forgotten(records, job)
        found = await records.expired_uploads(clock.now(), 10)
        assert {each.upload_id for each in found} == {"upload_1", "upload_2", "upload_3"}


def referring(id: str, upload_id: str) -> Document:
    """A row that refers to an upload, as that of a schedule does."""
    return Document("schedule", ACME, id, b"every day", upload_id=upload_id)


async def forgotten(records: Records, job: Job) -> None:
    assert await records.hide_job(job.tenant, job.job_id)
    await records.forget_job(job.job_id)


async def row_keeps_an_upload(records: Records, clock: ManualClock) -> None:
    one = upload(clock)
    await records.create_upload(one, None)
    schedule = referring("schedule_1", one.upload_id)
    await records.create_rows([schedule])
    assert await records.row("schedule", ACME, "schedule_1") == schedule
    await forgotten(records, await created(records, clock, source=Source(one.key, one.size, one.sha256)))
    assert await records.upload(one.upload_id) == one
    assert await records.expired_uploads(clock.now(), 10) == []
    assert await records.remove_row(schedule)
    assert await records.upload(one.upload_id) is None
    assert [each.upload_id for each in await records.expired_uploads(clock.now(), 10)] == [one.upload_id]


class TestDeleting:
    async def test_it_is_hidden_at_once(self, records: Records, clock: ManualClock) -> None:
        job, other = await created(records, clock), await created(records, clock)
        assert await records.hide_job(ACME, job.job_id)
        assert await records.job(ACME, job.job_id) is None
        assert [found.job_id for found in (await records.jobs(ACME, None, 10)).items] == [other.job_id]
        assert [found.job_id for found in await records.active_jobs()] == [other.job_id]
        run = await records.run(job.job_id, job.run.run_id)
        assert run is not None
        assert run.state is RunState.CANCELLED
        assert not await records.hide_job(ACME, job.job_id)

    async def test_only_by_its_tenant(self, records: Records, clock: ManualClock) -> None:
        job = await created(records, clock)
        assert not await records.hide_job(OTHER, job.job_id)
        assert not await records.hide_job(ACME, JobId("job_nothing"))
        assert await records.job(ACME, job.job_id) is not None

    async def test_hidden_ones_are_found_by_their_time(self, records: Records, clock: ManualClock) -> None:
        await created(records, clock)
        expiring = await created(records, clock, expires_in=DAY)
        deleted = await created(records, clock)
        await records.hide_job(ACME, deleted.job_id)
        assert await records.hidden_jobs(clock.now() - 1, 10) == []
        assert [job.job_id for job in await records.hidden_jobs(clock.now(), 10)] == [deleted.job_id]
        clock.advance(DAY)
        found = [job.job_id for job in await records.hidden_jobs(clock.now(), 10)]
        assert found == [deleted.job_id, expiring.job_id]
        assert len(await records.hidden_jobs(clock.now(), 1)) == 1

    async def test_all_of_it_is_forgotten(self, records: Records, clock: ManualClock) -> None:
        job = await ingesting(records, clock, part(0, 0, None))
        await records.forget_job(job.job_id)
        assert await records.job(ACME, job.job_id) is not None, "one that is not hidden stays"
        await records.hide_job(ACME, job.job_id)
        await records.forget_job(job.job_id)
        assert await records.run(job.job_id, job.run.run_id) is None
        assert await records.ranges(job.run.run_id) == []
        assert (await records.notices(ACME, job.job_id, None, 10)).items == []
        assert await records.hidden_jobs(clock.now(), 10) == []

    async def test_an_upload_goes_with_the_last_job_made_of_it(self, records: Records, clock: ManualClock) -> None:
        one, unused = upload(clock), upload(clock, "upload_2")
        for each in (one, unused):
            await records.create_upload(each, None)
        source = Source(one.key, one.size, one.sha256)
        jobs = [await created(records, clock, source=source) for _ in range(2)]
        for job in jobs:
            assert await records.upload(one.upload_id) is not None
            await records.hide_job(ACME, job.job_id)
            await records.forget_job(job.job_id)
        assert await records.upload(one.upload_id) is None
        assert [each.upload_id for each in await records.expired_uploads(clock.now(), 10)] == [one.upload_id]
        assert await records.upload(unused.upload_id) is not None


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
            pair = (RunState.PAUSED, RunState.RUNNING)
            target, source = pair if number % 2 == 0 else pair[::-1]
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
        plain = key(clock, "k1")
        full = key(clock, "k2", revoked_at=5.0, expires_at=clock.now() + 9, admin=True)
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

"""Idempotency claims that SQLite holds in memory: the same rules as stored ones, until the answer is written."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import Depth, run_queue
from conveyor.engines.records import Claimed, HoldsClaims, IdempotencyClaim
from conveyor.engines.sqlite import SqliteEngine, held_claims
from conveyor.engines.sqlite.held_claims import HeldClaims
from conveyor.jobs.chunks import messages
from conveyor.model import Job
from tests.conformance.record_setup import LEASE, answered, make_claim
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, make_job, make_notice, seeds


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def engine(tmp_path: Path, clock: ManualClock) -> AsyncIterator[SqliteEngine]:
    async with SqliteEngine.open(tmp_path, clock) as engine:
        yield engine


@pytest.fixture
def access(engine: SqliteEngine) -> Any:
    assert isinstance(engine.records.access, HoldsClaims)
    return engine.records.access


async def accept(engine: SqliteEngine, clock: ManualClock, job: Job, answer: IdempotencyClaim) -> Any:
    given, queue = seeds(job.run.total), run_queue(job.run.run_id)
    notice = make_notice(clock, job)
    return await engine.accept_atomically(job, notice, answer, given, queue, messages(job.key, given, 10))


async def rows(engine: SqliteEngine) -> int:
    return int((await engine._database.row("SELECT count(*) FROM idempotency", {}))[0])


async def test_a_held_claim_is_respected_and_not_stored(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    claim = make_claim(clock)
    assert await access.hold_claim(claim) == Claimed(True, claim)
    assert await access.stored_claim(claim.tenant, claim.route, claim.key) == claim
    for again in (access.hold_claim, access.claim):
        assert await again(make_claim(clock)) == Claimed(False, claim)
    assert (await access.hold_claim(make_claim(clock, "another"))).granted
    assert await rows(engine) == 0


async def test_its_answer_is_stored_with_the_job(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    job, claim = make_job(clock, total=3), make_claim(clock)
    await access.hold_claim(claim)
    assert await accept(engine, clock, job, answered(claim)) is None
    assert len(access.held) == 0
    assert await access.stored_claim(claim.tenant, claim.route, claim.key) == answered(claim)
    assert await access.hold_claim(make_claim(clock)) == Claimed(False, answered(claim))


async def test_a_stored_claim_is_not_overtaken(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    """Both were granted before either was answered: the row decides."""
    job, claim, rival = make_job(clock, total=3), make_claim(clock), make_claim(clock)
    await access.hold_claim(claim)
    access.held._claims.clear()
    assert (await access.claim(rival)).granted
    access.held.hold(claim, clock.now())
    assert await accept(engine, clock, job, answered(claim)) == rival
    assert await engine.records.jobs.job(ACME, job.job_id) is None
    assert await engine.queue.depth(run_queue(job.run.run_id)) == Depth(0, 0, 0)


async def test_after_its_lease_the_same_request_takes_it_over(access: Any, clock: ManualClock) -> None:
    claim = make_claim(clock)
    await access.hold_claim(claim)
    clock.advance(LEASE + 1)
    other = msgspec.structs.replace(make_claim(clock), fingerprint="another")
    assert await access.hold_claim(other) == Claimed(False, claim)
    taken = await access.hold_claim(make_claim(clock))
    assert (taken.granted, taken.row.subject) == (True, claim.subject)
    assert not (await access.hold_claim(make_claim(clock))).granted


async def test_it_is_taken_over_into_the_database(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    claim = make_claim(clock)
    await access.hold_claim(claim)
    clock.advance(LEASE + 1)
    taken = await access.claim(make_claim(clock))
    assert (taken.granted, taken.row.subject, await rows(engine)) == (True, claim.subject, 1)
    late, second = make_job(clock, total=1), make_job(clock, total=1)
    assert await accept(engine, clock, late, answered(claim, b"late")) is None
    assert (await accept(engine, clock, second, answered(taken.row, b"second"))).body == b"late"


async def test_two_who_hold_it_in_turn_make_one_job(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    claim = make_claim(clock)
    await access.hold_claim(claim)
    clock.advance(LEASE + 1)
    taken = (await access.hold_claim(make_claim(clock))).row
    job = make_job(clock, total=2)
    first, second = await asyncio.gather(
        accept(engine, clock, job, answered(claim, b"first")), accept(engine, clock, job, answered(taken, b"second"))
    )
    assert [first, second].count(None) == 1
    assert {(first or second).body} <= {b"first", b"second"}
    assert [each.job_id for each in await engine.records.jobs.active_jobs()] == [job.job_id]


async def test_a_claim_that_is_released_is_free(access: Any, clock: ManualClock) -> None:
    claim = make_claim(clock)
    await access.hold_claim(claim)
    await access.release_claim(msgspec.structs.replace(claim, subject="another"))
    assert not (await access.hold_claim(make_claim(clock))).granted
    await access.release_claim(claim)
    assert (await access.hold_claim(make_claim(clock))).granted


async def test_an_expired_row_is_replaced(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    old, job = make_claim(clock, ttl=5.0), make_job(clock, total=1)
    await access.hold_claim(old)
    assert await accept(engine, clock, job, answered(old, b"old")) is None
    clock.advance(6)
    claim, next_job = make_claim(clock), make_job(clock, total=1)
    access.held.hold(claim, clock.now())
    assert await accept(engine, clock, next_job, answered(claim, b"new")) is None
    assert await access.stored_claim(claim.tenant, claim.route, claim.key) == answered(claim, b"new")


def test_failures_do_not_fill_the_memory(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_claims, "_MAX_CLAIMS", 3)
    held = HeldClaims()
    for number in range(10):
        assert held.hold(make_claim(clock, f"k{number}"), clock.now()).granted
    assert len(held) == 3


async def test_jobs_that_are_accepted_together_are_whole(engine: SqliteEngine, access: Any, clock: ManualClock) -> None:
    """With and without keys, with and without tasks, and one whose key is taken."""
    taken = make_claim(clock, "taken")
    await access.claim(taken)
    jobs = [make_job(clock, total=total) for total in (3, 12, 1, 25, 2)]
    claims = [make_claim(clock, f"k{number}") if number % 2 else None for number in range(4)]
    for claim in claims:
        if claim is not None:
            await access.hold_claim(claim)
    answers: list[Any] = [
        claim and answered(claim, job.job_id.encode()) for claim, job in zip(claims, jobs[:4], strict=True)
    ]
    stale = msgspec.structs.replace(answered(taken), subject="another")
    lost = await asyncio.gather(*(accept(engine, clock, *each) for each in zip(jobs, [*answers, stale], strict=True)))
    assert lost == [None, None, None, None, taken]
    for job in jobs[:4]:
        assert await engine.records.jobs.job(ACME, job.job_id) == job
        assert await engine.tasks.unfinished(job.key, range(30)) == frozenset(range(job.run.total))
        assert (await engine.queue.depth(run_queue(job.run.run_id))).ready == -(-job.run.total // 10)
        assert len((await engine.records.outbox.events(ACME, job.job_id, None, 10)).items) == 1
    assert await engine.records.jobs.job(ACME, jobs[4].job_id) is None
    for answer in filter(None, answers):
        assert await access.stored_claim(answer.tenant, answer.route, answer.key) == answer

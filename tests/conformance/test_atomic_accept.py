"""Atomic accept: records, tasks and queue are one database, and one transaction writes the job or nothing."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.engines.queue import CONTROL, Depth, Outgoing, run_queue
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.engines.tasks import TaskFilter
from conveyor.jobs.chunks import decode, messages
from conveyor.model import Job, ListFormat, Source
from conveyor.states import RunState
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME, make_job, make_notice, seeds


async def accept(
    engine: Any, clock: ManualClock, job: Job, row: IdempotencyClaim | None = None
) -> IdempotencyClaim | None:
    given = seeds(job.run.total)
    queue = run_queue(job.run.run_id)
    outgoing = messages(job.key, given, 10)
    taken: IdempotencyClaim | None = await engine.accept_atomically(
        job, make_notice(clock, job), row, given, queue, outgoing
    )
    return taken


def make_claim(clock: ManualClock, job: Job) -> IdempotencyClaim:
    now = clock.now()
    return IdempotencyClaim(ACME, "route", "key", "print", job.job_id, now + 30, now + 60)


def answered(claim: IdempotencyClaim, body: bytes) -> IdempotencyClaim:
    return msgspec.structs.replace(claim, status=201, body=body)


async def test_all_of_it_is_there_at_once(atomic_engine: Any, clock: ManualClock) -> None:
    job = make_job(clock, total=25, shards=4)
    assert await accept(atomic_engine, clock, job) is None
    assert await atomic_engine.records.jobs.job(ACME, job.job_id) == job
    assert len((await atomic_engine.records.outbox.events(ACME, job.job_id, None, 10)).items) == 1
    assert await atomic_engine.tasks.unfinished(job.key, range(30)) == frozenset(range(25))
    got = await atomic_engine.queue.receive(run_queue(job.run.run_id), 10, 30.0)
    assert sorted(ref.index for each in got for ref in decode(each.body).refs) == list(range(25))
    assert len(got) == 3


async def test_its_rows_are_there_with_it(atomic_engine: Any, clock: ManualClock) -> None:
    job = make_job(clock, total=2)
    queue, rows = run_queue(job.run.run_id), [Document("callback", ACME, "one", b"x", job_id=job.job_id)]
    assert await atomic_engine.accept_atomically(job, make_notice(clock, job), None, seeds(2), queue, [], rows) is None
    assert (await atomic_engine.records.documents.documents("callback", ACME, None, 10, job.job_id)).items == rows


async def test_a_taken_key_writes_no_rows(atomic_engine: Any, clock: ManualClock) -> None:
    first, second = make_job(clock, total=1), make_job(clock, total=1)
    claim = make_claim(clock, first)
    await atomic_engine.records.access.claim(claim)
    assert await accept(atomic_engine, clock, first, answered(claim, b"first")) is None
    rows = [Document("callback", ACME, "one", b"x")]
    late = answered(claim, b"second")
    standing = await atomic_engine.accept_atomically(
        second, make_notice(clock, second), late, seeds(1), CONTROL, [], rows
    )
    assert standing == answered(claim, b"first")
    assert await atomic_engine.records.documents.document("callback", ACME, "one") is None


async def test_a_taken_key_writes_none_of_it(atomic_engine: Any, clock: ManualClock) -> None:
    first, second = make_job(clock, total=3), make_job(clock, total=3)
    claim = make_claim(clock, first)
    assert (await atomic_engine.records.access.claim(claim)).granted
    assert await accept(atomic_engine, clock, first, answered(claim, b"first")) is None
    assert await accept(atomic_engine, clock, second, answered(claim, b"second")) == answered(claim, b"first")
    assert await atomic_engine.records.jobs.job(ACME, second.job_id) is None
    assert await atomic_engine.tasks.page(second.key, 0, None, 10, TaskFilter()) == []
    assert await atomic_engine.queue.depth(run_queue(second.run.run_id)) == Depth(0, 0, 0)


async def test_one_of_many_with_one_key_is_accepted(atomic_engine: Any, clock: ManualClock) -> None:
    jobs = [make_job(clock, total=5) for _ in range(20)]
    claim = make_claim(clock, jobs[0])
    assert (await atomic_engine.records.access.claim(claim)).granted
    rows = [answered(claim, job.job_id.encode()) for job in jobs]
    answers = await asyncio.gather(
        *(accept(atomic_engine, clock, job, row) for job, row in zip(jobs, rows, strict=True))
    )
    assert answers.count(None) == 1
    winner = jobs[answers.index(None)]
    assert {answer.body for answer in answers if answer is not None} == {winner.job_id.encode()}
    assert [job.job_id for job in await atomic_engine.records.jobs.active_jobs()] == [winner.job_id]
    for job in jobs:
        depth = await atomic_engine.queue.depth(run_queue(job.run.run_id))
        assert depth.ready == (job is winner)


async def test_an_error_in_any_part_leaves_nothing(atomic_engine: Any, clock: ManualClock) -> None:
    job = make_job(clock, total=3)
    queue = run_queue(job.run.run_id)
    spoiled = [Outgoing(b"fine"), Outgoing(object())]  # type: ignore[arg-type]
    rows = [Document("callback", ACME, "one", b"x")]
    with pytest.raises(Exception):  # noqa: B017  (whatever the engine says to a body that is not bytes)
        await atomic_engine.accept_atomically(job, make_notice(clock, job), None, seeds(3), queue, spoiled, rows)
    assert await atomic_engine.records.documents.document("callback", ACME, "one") is None
    assert await atomic_engine.records.jobs.job(ACME, job.job_id) is None
    assert await atomic_engine.records.jobs.run(job.job_id, job.run.run_id) is None
    assert await atomic_engine.tasks.unfinished(job.key, [0, 1, 2]) == frozenset()
    assert await atomic_engine.queue.depth(queue) == Depth(0, 0, 0)
    assert await accept(atomic_engine, clock, job) is None


async def test_a_staged_job_has_a_message_and_no_tasks(atomic_engine: Any, clock: ManualClock) -> None:
    source = Source("uploads/acme/one", 9, "a" * 64, ListFormat.TEXT)
    job = make_job(clock, source=source, latched=False, state=RunState.INGESTING)
    message = Outgoing(b"ingest it")
    assert await atomic_engine.accept_atomically(job, make_notice(clock, job), None, [], CONTROL, [message]) is None
    assert [each.body for each in await atomic_engine.queue.receive(CONTROL, 10, 30.0)] == [b"ingest it"]
    found = await atomic_engine.records.jobs.job(ACME, job.job_id)
    assert found is not None
    assert found.source == source

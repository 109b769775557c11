"""Bugs to plant in a child, and safety nets to take away from it, each by name. The harness must catch every bug.

A bug that one part makes good for another (the sweeper mends lost references, the live progress shows the total) is
planted with that net removed; the test runs the same without the bug too, and that must pass.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import apsw
import msgspec

from conveyor import lifecycle
from conveyor.accept import add_tasks, submit
from conveyor.engines.queue import Outgoing, Queue, QueueName, run_queue
from conveyor.engines.records import Receipts, RunFlush, RunFlushed
from conveyor.engines.sqlite import SqliteEngine, flushes, ingests, jobs, outbox, tasks
from conveyor.engines.sqlite.access import answer_claim
from conveyor.engines.sqlite.queue import SqliteQueue
from conveyor.engines.tasks import Finished
from conveyor.faults import crashpoint
from conveyor.ingest import pipeline
from conveyor.jobs import chunks as references
from conveyor.jobs.idempotency import Claim, Idempotency
from conveyor.lifecycle import Lifecycle
from conveyor.model import BodyRef, Counts, OutboxEvent, TaskEnd
from conveyor.process.body_store import BodyStore
from conveyor.process.outcome_writer import OutcomeWriter
from conveyor.recover import sweeper
from conveyor.recover.sweeper import Sweeper
from conveyor.states import RunState, TaskStatus, sources_of

PLANTS: dict[str, Callable[[Path], None]] = {}


def plant(function: Callable[[Path], None]) -> Callable[[Path], None]:
    PLANTS[function.__name__] = function
    return function


async def _nothing(*_: object) -> None:
    pass


# Nets and circumstances: right without them, or in them.


@plant
def no_sweeper(_: Path) -> None:
    """Nothing is mended; ended runs are still cleared."""
    Sweeper._check = Sweeper._check_ingest = _nothing  # type: ignore[method-assign, assignment]


@plant
def no_live_total(_: Path) -> None:
    """The total is not shown while the list is read."""
    hidden = ingests.SQL["add_sums"]
    for name in ("total", "invalid"):
        shown = f"{name} = iif(last_batch, {name}, range_{'tasks' if name == 'total' else name} + "
        assert shown in hidden
        start = hidden.index(shown)
        hidden = hidden[:start] + f"{name} = {name}" + hidden[hidden.index(")", start) + 1 :]
    ingests.SQL["add_sums"] = hidden


@plant
def picky_queue(_: Path) -> None:
    """A queue that refuses every third message of a batch."""
    send = SqliteQueue.send

    async def part(self: SqliteQueue, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        taken = [message for position, message in enumerate(messages) if position % 3 != 1]
        await send(self, queue, taken)
        return [position for position in range(len(messages)) if position % 3 == 1]

    SqliteQueue.send = part  # type: ignore[method-assign]


@plant
def late_latch(_: Path) -> None:
    """Every task has ended before the latch is set."""
    latch = Lifecycle.latch

    async def late(self: Lifecycle, job: Any, total: int, invalid: int) -> None:
        for _ in range(1000):
            if (await self._tasks.counts(job.key)).ended == total:
                break
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.02)
        await latch(self, job, total, invalid)

    Lifecycle.latch = late  # type: ignore[method-assign]


# Bugs.


@plant
def latch_before_total(_: Path) -> None:
    jobs.SQL["set_total"] = jobs.SQL["set_total"].replace("AND last_batch = 0", "")

    async def latch(self: Lifecycle, job: Any, total: int, invalid: int) -> None:
        run = await self._records.jobs.latch(job.job_id, job.run.run_id)
        crashpoint("lifecycle.latch.after")
        crashpoint("lifecycle.total.before")
        await self._records.jobs.set_total(job.job_id, job.run.run_id, total, invalid)
        if run is not None:
            latched = msgspec.structs.replace(job, run=msgspec.structs.replace(run, total=total))
            await self.settle(latched, await self._tasks.counts(job.key))

    Lifecycle.latch = latch  # type: ignore[method-assign]


@plant
def additive_total(_: Path) -> None:
    jobs.SQL["set_total"] = jobs.SQL["set_total"].replace("total = :total", "total = total + :total")


@plant
def unguarded_counter(_: Path) -> None:
    """Every end is counted, moved or not."""
    finish = tasks._finish

    def careless(db: apsw.Connection, number: int, ends: Sequence[TaskEnd], is_rerun: bool) -> Finished:
        finished = finish(db, number, ends, is_rerun)
        again = [end.status for end in ends]
        for index in finished.moved:
            again.remove(next(end.status for end in ends if end.index == index))
        more = Counts(again.count(TaskStatus.SUCCEEDED), again.count(TaskStatus.FAILED), 0)
        return Finished(finished.moved, tasks._count(db, number, more))

    tasks._finish = careless


@plant
def unconditional_end(_: Path) -> None:
    """A second end of a task is written over the first; what is counted is right."""
    finish = tasks._finish

    def careless(db: apsw.Connection, number: int, ends: Sequence[TaskEnd], is_rerun: bool) -> Finished:
        finished = finish(db, number, ends, is_rerun)
        again = [end for end in ends if end.index not in finished.moved]
        query = tasks.SQL["finish"].replace("AND tasks.status = 0", "")
        db.execute(query, {"run_no": number, "ends": msgspec.json.encode(again).decode()})
        return finished

    tasks._finish = careless


@plant
def acknowledge_before_write(_: Path) -> None:
    write, acknowledge = OutcomeWriter._write, OutcomeWriter._acknowledge

    async def hasty(self: OutcomeWriter, group: list[Any]) -> None:
        await acknowledge(self, group)
        await write(self, group)

    OutcomeWriter._write = hasty  # type: ignore[method-assign]
    OutcomeWriter._acknowledge = _nothing  # type: ignore[method-assign, assignment]


@plant
def unguarded_flush(_: Path) -> None:
    """Every end of a flush is counted, moved or not."""
    finish, count = flushes._finish, flushes._count
    all_ends: dict[int, list[TaskEnd]] = {}

    def noting(db: apsw.Connection, known: Sequence[int | None], runs: Sequence[RunFlush]) -> flushes.Moving:
        all_ends.clear()
        for number, run in zip(known, runs, strict=True):
            if number is not None:
                all_ends[number] = list(run.ends)
        return finish(db, known, runs)

    def careless(db: apsw.Connection, moving: flushes.Moving, reruns: set[int]) -> dict[int, Counts]:
        return count(db, dict(all_ends), reruns)

    flushes._finish, flushes._count = noting, careless


@plant
def unconditional_flush(_: Path) -> None:
    """A second end of a task is written over the first; what is counted is right."""
    finish = flushes._finish
    queries = {name: flushes.SQL[name] for name in ("finish", "finish_neighbours")}
    unconditional = {name: re.sub(r"AND (tasks\.)?status = 0", "", query) for name, query in queries.items()}
    assert all(unconditional[name] != query for name, query in queries.items())

    def careless(db: apsw.Connection, known: Sequence[int | None], runs: Sequence[RunFlush]) -> flushes.Moving:
        moved = finish(db, known, runs)
        pairs = [(number, end) for number, run in zip(known, runs, strict=True) for end in run.ends]
        again = [pair for pair in pairs if pair[0] is not None and pair[1] not in moved[pair[0]]]
        flushes.SQL.update(unconditional)
        flushes._update(db, sorted(again, key=lambda pair: (pair[0], pair[1].index)))
        flushes.SQL.update(queries)
        return moved

    flushes._finish = careless


@plant
def acknowledge_before_flush(_: Path) -> None:
    """Messages are acknowledged in a transaction of their own, before the outcomes are recorded."""
    record = SqliteEngine.record_flush

    async def hasty(self: SqliteEngine, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        await record(self, [], acks)
        crashpoint("recorder.flush.between")
        return await record(self, runs, [])

    SqliteEngine.record_flush = hasty  # type: ignore[method-assign]


@plant
def notice_outside_flush(_: Path) -> None:
    """The event of a completed run is written after the flush that completed it."""
    record = SqliteEngine.record_flush
    flushes.insert_events = lambda db, events: None

    async def forgetful(self: SqliteEngine, runs: Sequence[RunFlush], acks: Receipts) -> list[RunFlushed]:
        flushed = await record(self, runs, acks)
        moves = [each.moved for each in flushed if each.moved is not None]
        for move in moves:
            crashpoint("recorder.flush.between")
            await self._database.write(lambda db, event=move.event: outbox.insert_event(db, event))
        return flushed

    SqliteEngine.record_flush = forgetful  # type: ignore[method-assign]


@plant
def partial_failure_ignored(_: Path) -> None:
    async def send_all(queue: Queue, name: QueueName, outgoing: Sequence[Outgoing], clock: object) -> None:
        await queue.send(name, outgoing)

    for module in (references, pipeline, submit, add_tasks, sweeper):
        module.send_all = send_all  # type: ignore[attr-defined]


@plant
def unfenced_checkpoint(_: Path) -> None:
    ingests.SQL["checkpoint"] = ingests.SQL["checkpoint"].replace("AND fence <= :fence", "")


@plant
def no_recheck_after_latch(_: Path) -> None:
    """Whoever sets the latch does not look whether all tasks have ended already."""
    latch = jobs.SqliteJobs.latch

    async def blind(self: jobs.SqliteJobs, job_id: Any, run_id: Any) -> None:
        await latch(self, job_id, run_id)

    jobs.SqliteJobs.latch = blind  # type: ignore[method-assign]


@plant
def completes_unlatched(_: Path) -> None:
    """A run is complete when all that was written so far has ended."""
    jobs.SQL["move_run"] = jobs.SQL["move_run"].replace("OR last_batch = 1", "OR 1")
    lifecycle._complete = lambda run, counts: 0 < run.total <= counts.ended
    lifecycle.sources_of = lambda target: sources_of(target) | {RunState.INGESTING}


def _ingest_in_order(steps: str) -> None:
    """The pipeline with its steps in another order: p(ut), e(nqueue), c(heckpoint)."""

    async def ingest_range(self: pipeline.IngestPipeline, job: Any, range_: Any, lease: Any, *turns: Any) -> bool:
        pieces = pipeline.range_pieces(self._lists(job), range_)
        async for batch in pipeline.read(pieces, pipeline.reading_of(range_, job.kind)):
            range_ = pipeline._advanced(range_, batch)
            for step in steps:
                if step == "p":
                    await self.tasks.put(job.key, batch.seeds)
                    crashpoint("ingest.put.after")
                elif step == "e":
                    outgoing = references.messages(job.key, batch.seeds, job.options.chunk_size)
                    await references.send_all(self.queue, run_queue(job.run.run_id), outgoing, self.clock)
                    crashpoint("ingest.enqueue.after")
                else:
                    await self.records.ingests.checkpoint(job.run.run_id, range_, lease.fence)
                    crashpoint("ingest.checkpoint.after")
                # Others have time to look in between.
                await asyncio.sleep(0.03)
        await self.records.ingests.checkpoint(job.run.run_id, msgspec.structs.replace(range_, done=True), lease.fence)
        crashpoint("ingest.done.after")
        await self.finish(job)
        return True

    pipeline.IngestPipeline.ingest_range = ingest_range  # type: ignore[method-assign]


@plant
def slow_pipeline(_: Path) -> None:
    """No bug: the right order, with the pauses of the wrong ones."""
    _ingest_in_order("pec")


@plant
def references_before_rows(_: Path) -> None:
    _ingest_in_order("epc")


@plant
def checkpoint_before_enqueue(_: Path) -> None:
    _ingest_in_order("pce")


@plant
def checkpoint_before_rows(_: Path) -> None:
    _ingest_in_order("cpe")


@plant
def ids_of_the_attempt(directory: Path) -> None:
    """A batch that is read again makes other tasks."""
    read = pipeline.read
    shift = 1000 * ((directory / "starts").stat().st_size - 1)

    async def reread(pieces: Any, reading: Any) -> Any:
        async for batch in read(pieces, reading):
            seeds = [msgspec.structs.replace(seed, index=seed.index + shift) for seed in batch.seeds]
            yield msgspec.structs.replace(batch, seeds=seeds)

    pipeline.read = reread  # type: ignore[assignment]


@plant
def subject_of_the_attempt(_: Path) -> None:
    """Whoever takes a claim over makes a thing of another id."""
    claim = Idempotency._claim

    async def forgetful(self: Idempotency, tenant: Any, request: Any, subject: str, *more: Any) -> Any:
        ticket = await claim(self, tenant, request, subject, *more)
        return ticket._replace(subject=subject) if isinstance(ticket, Claim) else ticket

    Idempotency._claim = forgetful  # type: ignore[method-assign]


@plant
def answer_outside_create(_: Path) -> None:
    accept_atomically = SqliteEngine.accept_atomically

    async def loose(
        self: SqliteEngine, job: Any, notice: Any, answer: Any, seeds: Any, queue: Any, messages: Any, rows: Any = ()
    ) -> Any:
        await accept_atomically(self, job, notice, None, seeds, queue, messages, rows)
        crashpoint("accept.after")
        return await self._database.write(lambda db: answer_claim(db, answer))

    SqliteEngine.accept_atomically = loose  # type: ignore[method-assign]


@plant
def notice_outside_move(_: Path) -> None:
    async def move(
        self: Lifecycle, job: Any, target: RunState, reason: str | None, counts: Counts, keep: bool = False, **_: Any
    ) -> RunState | None:
        sources = sources_of(target)
        moved = await self._records.jobs.move_run(job.job_id, job.run.run_id, sources, target, reason, None, keep)
        crashpoint("lifecycle.move.after")
        if not moved:
            return None
        event, data = lifecycle._EVENTS[target], {"counts": msgspec.structs.asdict(counts), "reason": reason}
        new = self._clock.new_id("evt")
        notice = OutboxEvent(new, job.tenant, job.job_id, job.run.run_id, event, self._clock.now(), data)
        database = self._records.jobs._database  # type: ignore[attr-defined]
        await database.write(lambda db: outbox.insert_event(db, notice))
        return target

    Lifecycle.move = move  # type: ignore[method-assign]


@plant
def body_after_reference(_: Path) -> None:
    writing: set[asyncio.Task[None]] = set()

    async def later(self: BodyStore, key: str, body: bytes) -> None:
        await asyncio.sleep(0.02)
        await self._blobs.put(key, body)

    async def keep(
        self: BodyStore, batches: Sequence[tuple[Any, Sequence[Any]]], *_: Any
    ) -> list[list[BodyRef | None]]:
        kept: list[list[BodyRef | None]] = []
        for job, outcomes in batches:
            refs: list[BodyRef | None] = [None] * len(outcomes)
            for place, outcome in enumerate(outcomes):
                if outcome.body is not None:
                    key = self._key(job, "body")
                    refs[place] = BodyRef(key, len(outcome.body), sha256(outcome.body).hexdigest())
                    writing.add(asyncio.create_task(later(self, key, outcome.body)))
            kept.append(refs)
        return kept

    BodyStore.keep = keep  # type: ignore[method-assign]

"""Ready marks: whoever sends messages to a run, or changes its job, marks the run in the ready index, so that a worker
takes it or reads the job again.

The seams themselves mark (`marking_queue`, `marking_jobs`, `marking_accept`, `marking_flush`): no caller can forget it.
Marks collect while a call is under way and go together in the next. They may be lost: workers look at quiet runs from
time to time, and the sweeper restores missing ones (ready_runs.py).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil, frexp, inf
from typing import Any, TypeVar, cast

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Outgoing, QueueName, run_of
from conveyor.engines.ready import ReadyIndex, ReadyMark
from conveyor.engines.records import RunFlush, RunFlushed
from conveyor.errors import ConveyorError
from conveyor.model import Job, JobId, OutboxEvent, RunId, RunKey, TenantId
from conveyor.states import ENDED, RunState

log = structlog.get_logger()

T = TypeVar("T")

# Delays are rounded up, to one of this many steps between a power of two and the next.
_STEPS = 64
_LEAST_STEP = 0.05
_RETRY_SECONDS = 1.0
# Runs whose marks wait while the coordinator does not answer. Beyond that, marks are lost.
_MAX_WAITING = 10_000
_CLOSE_SECONDS = 2.0


class _ChunkHead(msgspec.Struct, frozen=True, array_like=True):
    """The first field of a Chunk."""

    run: RunKey


_chunk_head = msgspec.msgpack.Decoder(_ChunkHead)


class _Pending(msgspec.Struct):
    """What is to be said about one run. Its due times are by this process's clock."""

    tenant: TenantId = TenantId("")
    job_id: JobId = JobId("")
    is_changed: bool = False
    is_finished: bool = False
    due_times: set[float] = msgspec.field(default_factory=set)

    def is_news(self, now: float) -> bool:
        """Whether workers have to look now, and not only when a message is due, or to leave a finished run."""
        return self.is_changed or any(at <= now for at in self.due_times)


class ReadyMarks:
    """Collects marks and hands them to the index. `listeners` are called with runs that may be due."""

    def __init__(self, index: ReadyIndex, clock: Clock) -> None:
        self.listeners: list[Callable[[Collection[RunId]], None]] = []
        self._index = index
        self._clock = clock
        self._waiting: dict[RunId, _Pending] = {}
        self._flushing: asyncio.Task[None] | None = None

    def note_messages(self, run_id: RunId, messages: Iterable[Outgoing]) -> None:
        """Messages were sent to a queue of the run."""
        pending = self._pending(run_id)
        now = self._clock.monotonic()
        for message in messages:
            if not pending.tenant:
                pending.tenant, pending.job_id = owner_of(message.body)
            pending.due_times.add(_due_at(message.delay, now))

    def note_due(self, run_id: RunId, delay: float) -> None:
        """A message of the run is visible after `delay` seconds."""
        self._pending(run_id).due_times.add(_due_at(delay, self._clock.monotonic()))

    def note_returned(self, queue: QueueName, delay: float) -> None:
        """A message of this queue that no worker has received is visible after `delay` seconds."""
        if (run_id := run_of(queue)) is not None:
            self.note_due(run_id, delay)

    def note_job(self, job: Job) -> None:
        """The job was accepted with its messages."""
        pending = self._pending(job.run.run_id)
        pending.tenant, pending.job_id = job.tenant, job.job_id
        pending.due_times.add(self._clock.monotonic())

    def note_change(self, run_id: RunId, notice: OutboxEvent | None = None) -> None:
        """The stored job has changed: the run may be due, whatever it waited for."""
        pending = self._pending(run_id)
        pending.is_changed = True
        if notice is not None:
            pending.tenant, pending.job_id = notice.tenant, notice.job_id
            pending.due_times.add(self._clock.monotonic())

    def note_finished(self, run_id: RunId) -> None:
        self._pending(run_id).is_finished = True

    async def close(self) -> None:
        """Hand over what waits, if the index answers soon."""
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.wait([self._flushing])
        waiting, self._waiting = self._waiting, {}
        if waiting:
            try:
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._index.mark_runs(self._marks(waiting))
            except (ConveyorError, TimeoutError) as error:
                log.warning("marks of ready runs lost; the sweeper restores them", runs=len(waiting), error=str(error))

    def _pending(self, run_id: RunId) -> _Pending:
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush(), name="ready marks")
        pending = self._waiting.get(run_id)
        if pending is None:
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.pop(next(iter(self._waiting)))
            pending = self._waiting[run_id] = _Pending()
        return pending

    async def _flush(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, {}
                try:
                    await self._index.mark_runs(self._marks(waiting))
                except Exception as error:
                    log.warning("runs not marked as ready; trying again", runs=len(waiting), error=str(error))
                    self._put_back(waiting)
                    await self._clock.sleep(_RETRY_SECONDS)
                    continue
                now = self._clock.monotonic()
                ready = [run_id for run_id, pending in waiting.items() if pending.is_news(now)]
                for listener in self.listeners:
                    listener(ready)
        finally:
            self._flushing = None

    def _put_back(self, unsent: dict[RunId, _Pending]) -> None:
        newer, self._waiting = self._waiting, unsent
        for run_id, pending in newer.items():
            older = self._waiting.setdefault(run_id, pending)
            if older is not pending:
                older.tenant, older.job_id = pending.tenant or older.tenant, pending.job_id or older.job_id
                older.is_changed |= pending.is_changed
                older.is_finished |= pending.is_finished
                older.due_times |= pending.due_times

    def _marks(self, waiting: dict[RunId, _Pending]) -> list[ReadyMark]:
        now = self._clock.monotonic()
        return [mark for run_id, pending in waiting.items() for mark in _marks_of(run_id, pending, now)]


def _marks_of(run_id: RunId, pending: _Pending, now: float) -> Iterable[ReadyMark]:
    delays = sorted({max(0.0, at - now) for at in pending.due_times}) or [inf]
    for delay in delays:
        is_last = delay == delays[-1]
        yield ReadyMark(
            run_id,
            pending.tenant,
            pending.job_id,
            delay,
            is_changed=pending.is_changed and is_last,
            is_finished=pending.is_finished and is_last,
        )


def _due_at(delay: float, now: float) -> float:
    """When a message is visible, rounded up: the retries of many tasks have few different times."""
    if delay <= 0:
        return now
    step = max(_LEAST_STEP, 2.0 ** (frexp(delay)[1] - 1) / _STEPS)
    return ceil((now + delay) / step) * step


def owner_of(body: bytes) -> tuple[TenantId, JobId]:
    """The tenant and the job of a message; empty if it is not a chunk."""
    try:
        run = _chunk_head.decode(body).run
    except msgspec.MsgspecError:
        return TenantId(""), JobId("")
    return run.tenant, run.job_id


class _Marking:
    """An engine with some methods replaced. The others are its own, and set here, because isinstance with a capability
    does not ask __getattr__ (since Python 3.12)."""

    def __init__(self, engine: object, methods: dict[str, Any]) -> None:
        own = {name: getattr(engine, name) for name in dir(engine) if not name.startswith("_")}
        self.__dict__.update({name: method for name, method in own.items() if callable(method)} | methods)
        self._inner = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def marking_queue(queue: T, marks: ReadyMarks) -> T:
    """A measured Queue that marks the runs to whose queues it sends. A call that fails may have had its effect."""
    inner: Any = queue

    async def send(name: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        try:
            unsent: list[int] = await inner.send(name, messages)
        finally:
            if (run_id := run_of(name)) is not None and messages:
                marks.note_messages(run_id, messages)
        return unsent

    async def release(name: QueueName, receipts: Sequence[str], delay: float) -> None:
        try:
            await inner.release(name, receipts, delay)
        finally:
            if (run_id := run_of(name)) is not None:
                marks.note_due(run_id, delay)

    async def redrive(message_ids: Sequence[str]) -> int:
        letters = await inner.find_dead_letters(message_ids)
        count: int = await inner.redrive(message_ids)
        for letter in letters:
            if (run_id := run_of(letter.queue)) is not None:
                marks.note_messages(run_id, [Outgoing(letter.body)])
        return count

    async def hasten(name: QueueName) -> None:
        await inner.hasten(name)
        if (run_id := run_of(name)) is not None:
            marks.note_due(run_id, 0.0)

    async def reveal(name: QueueName, beyond: float) -> int:
        revealed: int = await inner.reveal(name, beyond)
        if revealed and (run_id := run_of(name)) is not None:
            marks.note_due(run_id, 0.0)
        return revealed

    methods = {"send": send, "release": release, "redrive": redrive}
    able = {method.__name__: method for method in (hasten, reveal) if hasattr(queue, method.__name__)}
    return cast(T, _Marking(queue, methods | able))


def marking_jobs(jobs: T, marks: ReadyMarks) -> T:
    """Measured JobRecords that mark the runs whose jobs they change."""
    inner: Any = jobs

    async def move_run(
        job_id: JobId,
        run_id: RunId,
        sources: object,
        target: RunState,
        reason: object,
        notice: Any,
        *more: Any,
        **how: Any,
    ) -> bool:
        try:
            moved: bool = await inner.move_run(job_id, run_id, sources, target, reason, notice, *more, **how)
        except BaseException:
            # It may have been moved: whoever takes the run looks.
            marks.note_change(run_id, notice)
            raise
        if moved:
            _note_move(marks, run_id, target, notice)
        return moved

    async def latch(job_id: JobId, run_id: RunId) -> Any:
        run = await inner.latch(job_id, run_id)
        marks.note_change(run_id)
        return run

    async def change_options(job_id: JobId, version: int, options: object, notice: OutboxEvent) -> bool:
        changed: bool = await inner.change_options(job_id, version, options, notice)
        if changed:
            marks.note_change(notice.run_id, notice)
        return changed

    async def mark_deleted(tenant: TenantId, job_id: JobId) -> bool:
        job: Job | None = await inner.job(tenant, job_id)
        deleted: bool = await inner.mark_deleted(tenant, job_id)
        if job is not None:
            marks.note_finished(job.run.run_id)
        return deleted

    methods = {
        "move_run": move_run,
        "latch": latch,
        "change_options": change_options,
        "mark_deleted": mark_deleted,
    }
    return cast(T, _Marking(jobs, methods))


def marking_accept(accept: T, marks: ReadyMarks) -> T:
    """A measured AtomicAccept that marks the runs of jobs with messages of their own."""
    inner: Any = accept

    async def accept_atomically(
        job: Job, notice: object, answer: object, seeds: object, queue: QueueName, messages: object, *more: Any
    ) -> Any:
        try:
            existing = await inner.accept_atomically(job, notice, answer, seeds, queue, messages, *more)
        finally:
            if run_of(queue) is not None:
                marks.note_job(job)
        return existing

    return cast(T, _Marking(accept, {"accept_atomically": accept_atomically}))


def marking_flush(flush: T, marks: ReadyMarks) -> T:
    """A measured AtomicFlush that marks the runs that it requeues references of, and those that it moves."""
    inner: Any = flush

    async def record_flush(runs: Sequence[RunFlush], acks: object) -> list[RunFlushed]:
        try:
            flushed: list[RunFlushed] = await inner.record_flush(runs, acks)
        finally:
            for run in runs:
                if run.messages:
                    marks.note_messages(run.job.run.run_id, run.messages)
        for run, result in zip(runs, flushed, strict=True):
            if result.moved is not None:
                _note_move(marks, run.job.run.run_id, result.moved.target, result.moved.event)
        return flushed

    return cast(T, _Marking(flush, {"record_flush": record_flush}))


def _note_move(marks: ReadyMarks, run_id: RunId, target: RunState, notice: OutboxEvent | None) -> None:
    if target in ENDED:
        marks.note_finished(run_id)
    else:
        marks.note_change(run_id, notice)

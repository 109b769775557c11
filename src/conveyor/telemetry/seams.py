"""Measures the engines: times every call, and counts jobs, runs and tasks from the results of the calls.

The wrapper has each method of the seam's Protocol, and the capabilities that the engine has, so that
`isinstance(tasks, ReadsByIndex)` gives the same answer as for the engine itself.
"""

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_origin

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs, StoresParts, SyncsLogs
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import (
    Hastens,
    KeepsArrivals,
    NamesQueues,
    Queue,
    QueueName,
    ReceivesMany,
    ReportsMessageAge,
    Reveals,
    SharesQueues,
    kind_of,
)
from conveyor.engines.records import (
    AccessRecords,
    AtomicAccept,
    AtomicFlush,
    DocumentRecords,
    HoldsClaims,
    IngestRecords,
    JobRecords,
    OutboxRecords,
    Receipts,
    Records,
    RunFlush,
    RunFlushed,
)
from conveyor.engines.tasks import CopiesRuns, Finished, ReadsByIndex, SettlesCounts, Tasks
from conveyor.errors import ConveyorError
from conveyor.model import Job, RunKey, TaskEnd, TaskSeed
from conveyor.states import RunState, TaskStatus
from conveyor.telemetry import metrics

T = TypeVar("T")

# Each seam, and the optional capabilities of its engines.
PROTOCOLS: Mapping[str, tuple[type, ...]] = {
    "jobs": (JobRecords,),
    "ingests": (IngestRecords,),
    "access": (AccessRecords, HoldsClaims),
    "documents": (DocumentRecords,),
    "outbox": (OutboxRecords,),
    "tasks": (Tasks, ReadsByIndex, CopiesRuns, SettlesCounts),
    "queue": (Queue, ReceivesMany, ReportsMessageAge, NamesQueues, Hastens, Reveals, SharesQueues, KeepsArrivals),
    "coordinator": (Coordinator,),
    "blobs": (Blobs, StoresParts, SyncsLogs),
    "atomic_accept": (AtomicAccept,),
    "atomic_flush": (AtomicFlush,),
}

_UNEXPECTED = "unexpected"


class _Metered:
    """An engine behind a seam. Attributes outside the seam are the engine's own."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def measured_engine(seam: str, engine: T, name: str, clock: Clock) -> T:
    """The engine, with every call measured as `name` behind `seam`."""
    wrapper = _Metered(engine)
    for protocol in PROTOCOLS[seam]:
        for method, of_protocol in inspect.getmembers(protocol, inspect.isfunction):
            call = None if method.startswith("_") else getattr(engine, method, None)
            if call is None:
                continue
            labels = (seam, name, method)
            if inspect.iscoroutinefunction(of_protocol):
                call = _timed(clock, call, labels, _COUNTERS.get((seam, method)))
            elif is_stream(of_protocol):
                call = _timed_stream(clock, call, labels)
            setattr(wrapper, method, call)
    return cast(T, wrapper)


def is_stream(method: Callable[..., Any]) -> bool:
    """Whether a method of a Protocol returns an asynchronous iterator."""
    return get_origin(inspect.signature(method).return_annotation) is AsyncIterator


def metered_records(records: Records, name: str, clock: Clock) -> Records:
    """The five parts of Records, each measured as a seam of its own."""
    return Records(
        jobs=measured_engine("jobs", records.jobs, name, clock),
        ingests=measured_engine("ingests", records.ingests, name, clock),
        access=measured_engine("access", records.access, name, clock),
        documents=measured_engine("documents", records.documents, name, clock),
        outbox=measured_engine("outbox", records.outbox, name, clock),
    )


CountCall = Callable[..., None]


def _timed(
    clock: Clock, call: Callable[..., Awaitable[Any]], labels: tuple[str, ...], count_call: CountCall | None
) -> Callable[..., Awaitable[Any]]:
    monotonic = clock.monotonic

    async def timed(*args: Any, **kwargs: Any) -> Any:
        began = monotonic()
        try:
            result = await call(*args, **kwargs)
        except Exception as error:
            metrics.ENGINE_SECONDS.observe(monotonic() - began, *labels)
            metrics.ENGINE_ERRORS.add(1, *labels, _code(error))
            raise
        metrics.ENGINE_SECONDS.observe(monotonic() - began, *labels)
        if count_call is not None:
            count_call(result, *args, **kwargs)
        return result

    return timed


def _timed_stream(clock: Clock, call: Callable[..., Any], labels: tuple[str, ...]) -> Callable[..., AsyncIterator[Any]]:
    async def timed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        began: float | None = clock.monotonic()
        pieces = call(*args, **kwargs)
        try:
            async for piece in pieces:
                if began is not None:
                    metrics.ENGINE_SECONDS.observe(clock.monotonic() - began, *labels)
                    began = None
                yield piece
        except Exception as error:
            metrics.ENGINE_ERRORS.add(1, *labels, _code(error))
            raise
        finally:
            await pieces.aclose()

    return timed


def _code(error: Exception) -> str:
    return error.code if isinstance(error, ConveyorError) else _UNEXPECTED


def _count_created(existing: object, job: Job, *_: object) -> None:
    if existing is None:
        metrics.JOBS_ACCEPTED.add(1, job.kind)


def _count_accepted(
    existing: object, job: Job, notice: object, answer: object, seeds: Sequence[TaskSeed], *_: object
) -> None:
    _count_created(existing, job)
    if existing is None:
        metrics.TASKS_WRITTEN.add(len(seeds))


def _count_moved(moved: bool, job_id: object, run_id: object, sources: object, target: RunState, *_: object) -> None:
    if moved and target in metrics.FINISHED_STATES:
        metrics.RUNS_FINISHED.add(1, target)


def _count_put(_: None, run: RunKey, seeds: Sequence[TaskSeed]) -> None:
    metrics.TASKS_WRITTEN.add(len(seeds))


def _count_finished(finished: Finished, run: RunKey, ends: Sequence[TaskEnd]) -> None:
    _count_ends([end for end in ends if end.index in finished.moved])


def _count_ends(ends: Sequence[TaskEnd]) -> None:
    """Count tasks that have finished, of any runs."""
    statuses = [end.status for end in ends]
    succeeded = statuses.count(TaskStatus.SUCCEEDED)
    metrics.TASKS_FINISHED.add(succeeded, TaskStatus.SUCCEEDED.label)
    if succeeded == len(statuses):
        return
    metrics.TASKS_FINISHED.add(statuses.count(TaskStatus.FAILED), TaskStatus.FAILED.label)
    codes = Counter(end.error_code for end in ends if end.error_code is not None)
    for code, count in codes.items():
        metrics.TASK_FAILURES.add(count, metrics.family_of(code))


def _count_flush(flushed: Sequence[RunFlushed], runs: Sequence[RunFlush], acks: Receipts) -> None:
    pairs = zip(flushed, runs, strict=True)
    _count_ends([end for done, run in pairs for end in run.ends if end.index in done.finished.moved])
    for done in flushed:
        if done.moved is not None:
            _count_moved(True, None, None, None, done.moved.target)


def _count_cancelled(count: int, *_: object) -> None:
    metrics.TASKS_FINISHED.add(count, TaskStatus.CANCELLED.label)


def _count_dead_lettered(_: None, queue: QueueName, receipts: Sequence[str], reason: str) -> None:
    metrics.DEAD_LETTERED.add(len(receipts), kind_of(queue))


# The counter of a call, which gets its result and its arguments.
_COUNTERS: Mapping[tuple[str, str], CountCall] = {
    ("jobs", "create_job"): _count_created,
    ("atomic_accept", "accept_atomically"): _count_accepted,
    ("atomic_flush", "record_flush"): _count_flush,
    ("jobs", "move_run"): _count_moved,
    ("tasks", "put"): _count_put,
    ("tasks", "finish"): _count_finished,
    ("tasks", "cancel_pending"): _count_cancelled,
    ("queue", "dead_letter"): _count_dead_lettered,
}

"""Extraction: between a fetched body and its record. Gets outcomes of attempts whose bodies are in memory or stored,
has the function of the job's `extract` called with each body in the handler processes, in batches, and returns the same
outcomes with what it made of them.

It is part of the attempt: the body, what was extracted and the status are recorded together. A task whose extraction
fails has the error `extract_failed` and keeps its body, so that a rerun extracts again without a request.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged, Unavailable
from conveyor.model import (
    EXTRACT_FAILED,
    BodyRef,
    Job,
    Outcome,
    ResultDetail,
    StoredAs,
    Task,
    TaskError,
    TaskId,
    TaskRef,
)
from conveyor.process.executors.python.handler_calls import CallResult, PageCall, SentPage, missing
from conveyor.process.outcomes import detail_json, with_error
from conveyor.read.body_reader import read_all
from conveyor.read.results import stream_body
from conveyor.states import TaskStatus

log = structlog.get_logger()

# Bytes of stored bodies that are read together, and how often at once.
_WINDOW_BYTES = 8 * 1024 * 1024
_WINDOWS = 4
# How long to wait for a store that failed; each failure in a row doubles it.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


@runtime_checkable
class CallsExtract(Protocol):
    """Calls the function of a job's `extract`: the python executor."""

    async def extract(self, job: Job, calls: Sequence[PageCall]) -> list[CallResult]:
        """Call it with each page. The results are in the order of the calls."""


class Extractor:
    """One for each worker. `caller` is its executor for handlers."""

    def __init__(self, caller: object, blobs: Blobs, clock: Clock) -> None:
        self._caller = caller if isinstance(caller, CallsExtract) else None
        self._blobs = blobs
        self._clock = clock
        self._reading = asyncio.Semaphore(_WINDOWS)

    async def extract(self, job: Job, refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        """Extract from the bodies of succeeded outcomes, and change these: they get the result, or have failed."""
        pairs = [(ref, outcome) for ref, outcome in zip(refs, outcomes, strict=True) if has_page(outcome)]
        arrived = [(ref, outcome, _sent_page(outcome)) for ref, outcome in pairs if outcome.body is not None]
        stored = [pair for pair in pairs if pair[1].body is None]
        if arrived:
            await self._call(job, arrived)
        for window in _windows(stored):
            await self._extract_stored(job, window)

    async def _extract_stored(self, job: Job, window: Sequence[tuple[TaskRef, Outcome]]) -> None:
        """Extract from stored bodies, once they can be read. While the store fails the tasks wait here: they were
        fetched, so another attempt would repeat the request, and a lost start would count against them."""
        pause = _FIRST_PAUSE
        while True:
            async with self._reading:
                try:
                    pages = await self._read(job, window)
                except Unavailable as error:
                    problem = error
                else:
                    await self._call(job, pages)
                    return
            log.warning("stored bodies not read; retrying", run=job.run.run_id, error=repr(problem), seconds=pause)
            await self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)
            # Those whose body cannot be sent have failed already.
            window = [pair for pair in window if has_page(pair[1])]

    async def _call(self, job: Job, pages: Sequence[tuple[TaskRef, Outcome, SentPage]]) -> None:
        calls = [PageCall(ref.index, ref.input, ref.attempt, ref.since, page) for ref, _, page in pages]
        if self._caller is None:
            results = [missing(job.options.extract, [])] * len(calls)
        else:
            results = await self._caller.extract(job, calls)
        for (_, outcome, _), result in zip(pages, results, strict=True):
            if result.code is not None:
                _fail(outcome, result.message)
                continue
            outcome.extracted = result.body
            if not job.options.keep_bodies:
                outcome.body = None

    async def _read(
        self, job: Job, window: Sequence[tuple[TaskRef, Outcome]]
    ) -> list[tuple[TaskRef, Outcome, SentPage]]:
        """The pages of outcomes whose bodies are stored. Those whose body cannot be sent have failed."""
        limit = job.options.max_body_bytes
        tasks = [_as_task(ref, outcome) for ref, outcome in window]
        bodies, damaged = await read_all(self._blobs, tasks)
        pages = []
        for place, (ref, outcome) in enumerate(window):
            assert outcome.kept is not None
            body, length = bodies[place], outcome.kept.length
            if length > limit:
                _fail(outcome, f"the body has {length} bytes, and `extract` gets at most `max_body_bytes`, {limit}")
            elif place in damaged:
                _fail(outcome, damaged[place].message)
            else:
                if body is None:
                    body = await self._read_long(outcome, outcome.kept)
                if body is not None:
                    pages.append((ref, outcome, _page(outcome, body, None, length)))
        return pages

    async def _read_long(self, outcome: Outcome, ref: BodyRef) -> bytes | None:
        try:
            return b"".join([piece async for piece in stream_body(self._blobs, ref)])
        except BodyDamaged as error:
            _fail(outcome, error.message)
            return None


def has_page(outcome: Outcome) -> bool:
    """Whether there is a body to extract from."""
    has_body = outcome.body is not None or outcome.kept is not None
    return outcome.status is TaskStatus.SUCCEEDED and has_body and not outcome.keeps_extracted


def _sent_page(outcome: Outcome) -> SentPage:
    body = outcome.body or b""
    return _page(outcome, body, outcome.stored, len(body) if outcome.stored is None else outcome.length)


def _page(outcome: Outcome, body: bytes | memoryview, stored: StoredAs | None, length: int) -> SentPage:
    return SentPage(memoryview(body), length, stored, outcome.http_status, detail_json(outcome))


def _windows(pairs: Sequence[tuple[TaskRef, Outcome]]) -> Iterator[list[tuple[TaskRef, Outcome]]]:
    """Outcomes whose bodies are read together, bounded in bytes."""
    window: list[tuple[TaskRef, Outcome]] = []
    size = 0
    for pair in pairs:
        length = 0 if pair[1].kept is None else pair[1].kept.length
        if window and size + length > _WINDOW_BYTES:
            yield window
            window, size = [], 0
        window.append(pair)
        size += length
    if window:
        yield window


def _as_task(ref: TaskRef, outcome: Outcome) -> Task:
    """What a reader of bodies needs of a task."""
    detail = ResultDetail(body=outcome.kept)
    return Task(TaskId(""), ref.index, msgspec.Raw(b"null"), outcome.status, detail=detail)


def _fail(outcome: Outcome, message: str) -> None:
    error = TaskError(EXTRACT_FAILED, message)
    outcome.status, outcome.error = TaskStatus.FAILED, error
    if outcome.detail is not None:
        outcome.detail = with_error(outcome.detail, error)

"""Extraction: between a fetched body and its record. Gets outcomes of attempts whose bodies are in memory or stored,
has the function of the job's `extract` called with each body in the handler processes, in batches, and returns the same
outcomes with what it made of them.

It is part of the attempt: the body, what was extracted and the status are recorded together. A task whose extraction
fails has the error `extract_failed` and keeps its body, so that a rerun extracts again without a request.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged
from conveyor.model import BodyRef, Job, Outcome, TaskError, TaskRef
from conveyor.process.executors.python.handler_calls import CallResult, PageCall, SentPage, missing
from conveyor.process.outcomes import detail_json, with_error
from conveyor.read.results import stream_body
from conveyor.states import TaskStatus

EXTRACT_FAILED = "extract_failed"


@runtime_checkable
class CallsExtract(Protocol):
    """Calls the function of a job's `extract`: the python executor."""

    async def extract(self, job: Job, calls: Sequence[PageCall]) -> list[CallResult]:
        """Call it with each page. The results are in the order of the calls."""


class Extractor:
    """One for each worker. `caller` is its executor for handlers."""

    def __init__(self, caller: object, blobs: Blobs) -> None:
        self._caller = caller if isinstance(caller, CallsExtract) else None
        self._blobs = blobs

    async def extract(self, job: Job, refs: Sequence[TaskRef], outcomes: Sequence[Outcome]) -> None:
        """Extract from the bodies of succeeded outcomes, and change these: they get the result, or have failed."""
        chosen: list[Outcome] = []
        calls: list[PageCall] = []
        for ref, outcome in zip(refs, outcomes, strict=True):
            if not has_page(outcome):
                continue
            page = await self._page(job, outcome)
            if page is not None:
                chosen.append(outcome)
                calls.append(PageCall(ref.index, ref.input, ref.attempt, ref.since, page))
        if not calls:
            return
        if self._caller is None:
            results = [missing(job.options.extract, [])] * len(calls)
        else:
            results = await self._caller.extract(job, calls)
        for outcome, result in zip(chosen, results, strict=True):
            if result.code is not None:
                _fail(outcome, result.message)
                continue
            outcome.extracted = result.body
            if not job.options.keep_bodies:
                outcome.body = None

    async def _page(self, job: Job, outcome: Outcome) -> SentPage | None:
        """The page of an outcome; None if its body cannot be sent, and the outcome has failed."""
        body, stored, length = outcome.body, outcome.stored, outcome.length
        if body is None:
            assert outcome.kept is not None
            body = await self._read(job, outcome, outcome.kept)
            if body is None:
                return None
            stored = None
        return SentPage(
            memoryview(body),
            len(body) if stored is None else length,
            stored,
            outcome.http_status,
            detail_json(outcome),
        )

    async def _read(self, job: Job, outcome: Outcome, ref: BodyRef) -> bytes | None:
        limit = job.options.max_body_bytes
        if ref.length > limit:
            _fail(outcome, f"the body has {ref.length} bytes, and `extract` gets at most `max_body_bytes`, {limit}")
            return None
        try:
            return b"".join([piece async for piece in stream_body(self._blobs, ref)])
        except BodyDamaged as error:
            _fail(outcome, error.message)
            return None


def has_page(outcome: Outcome) -> bool:
    """Whether there is a body to extract from."""
    return outcome.status is TaskStatus.SUCCEEDED and (outcome.body is not None or outcome.kept is not None)


def _fail(outcome: Outcome, message: str) -> None:
    error = TaskError(EXTRACT_FAILED, message)
    outcome.status, outcome.error = TaskStatus.FAILED, error
    if outcome.detail is not None:
        outcome.detail = with_error(outcome.detail, error)

"""Traces: one for each sampled job, from accept to the last webhook. All ids derive from the ids of the job and its
runs, so that spans of many processes, days apart, form one trace without any stored state.

    accept (of the job)
    ├── run (each run, from its creation to its end)
    │   ├── ingest split · ingest range
    │   └── batch (outcomes written together)
    │       └── task (a few: failed ones, and the slowest)
    └── webhook (each attempt)

A span is emitted when it has ended. Without a sink, each call only reads a variable.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Protocol

import msgspec

from conveyor.model import Job, JobId, RunId
from conveyor.telemetry.redact import redact

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Attributes = Mapping[str, str | int | float | bool]


class Span(msgspec.Struct, frozen=True):
    """One span. Times are seconds since 1970."""

    name: str
    trace_id: int
    # None: a random one.
    span_id: int | None
    parent_id: int | None
    began: float
    ended: float
    attributes: Attributes
    # The error, if any.
    error: str | None = None
    # The traceparent of the request.
    link: str | None = None


class Sink(Protocol):
    """A receiver of spans."""

    def emit(self, span: Span) -> int:
        """Accept a span and return its id."""


_sink: Sink | None = None
_ratio = 0.0
_caller: ContextVar[str | None] = ContextVar("caller", default=None)


@contextmanager
def tracing_to(sink: Sink, ratio: float) -> Iterator[None]:
    """Send the spans of a share of all jobs (`ratio`, from 0 to 1) to `sink` while the block runs."""
    # A process has one sink, as it has one log.
    global _sink, _ratio
    before = _sink, _ratio
    _sink, _ratio = sink, ratio
    try:
        yield
    finally:
        _sink, _ratio = before


def called_by(traceparent: str | None) -> None:
    """Link jobs that are accepted in this context to this span."""
    if _sink is not None:
        _caller.set(traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None)


def is_traced(job_id: JobId) -> bool:
    """Whether the job is sampled: the same in every process."""
    return _sink is not None and int.from_bytes(_digest(job_id)[24:]) < _ratio * 2**64


def trace_accept(job: Job, ended: float) -> None:
    """Emit the root span of a job."""
    if _sink is not None and is_traced(job.job_id):
        attributes = _of(job.job_id, None) | {"conveyor.kind": job.kind, "conveyor.tenant": job.tenant}
        span_id, link = _span_id(job.job_id), _caller.get()
        _emit(_sink, Span("accept", trace_id(job.job_id), span_id, None, job.created_at, ended, attributes, link=link))


def trace_run(job: Job, state: str, ended: float, reason: str | None) -> None:
    """Emit the span of a run, the parent of its other spans."""
    if _sink is not None and is_traced(job.job_id):
        run = job.run
        attributes = _of(job.job_id, run.run_id) | {"conveyor.state": state, "conveyor.run_number": run.number}
        parent = _span_id(job.job_id)
        span = Span("run", trace_id(job.job_id), _span_id(run.run_id), parent, run.created_at, ended, attributes)
        _emit(_sink, msgspec.structs.replace(span, error=reason if state == "failed" else None))


def span(
    name: str,
    job_id: JobId,
    run_id: RunId | None,
    began: float,
    ended: float,
    attributes: Attributes,
    *,
    error: str | None = None,
    parent_id: int | None = None,
) -> int | None:
    """Emit a span of a run or of a job, below `parent_id` if given. Returns its id."""
    if _sink is None or not is_traced(job_id):
        return None
    above = parent_id or _span_id(run_id or job_id)
    every = {**_of(job_id, run_id), **attributes}
    return _emit(_sink, Span(name, trace_id(job_id), None, above, began, ended, every, error))


def trace_id(job_id: JobId) -> int:
    return int.from_bytes(_digest(job_id)[:16]) or 1


def _span_id(subject: str) -> int:
    return int.from_bytes(_digest(subject)[16:24]) or 1


def _emit(sink: Sink, span: Span) -> int:
    return sink.emit(span if span.error is None else msgspec.structs.replace(span, error=redact(span.error)))


def _of(job_id: JobId, run_id: RunId | None) -> dict[str, str | int | float | bool]:
    return {"conveyor.job_id": job_id, **({} if run_id is None else {"conveyor.run_id": run_id})}


def _digest(subject: str) -> bytes:
    return sha256(f"trace:{subject}".encode()).digest()

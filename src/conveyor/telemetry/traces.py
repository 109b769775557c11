"""Traces: one for each job that is sampled, from accept to the last webhook. All ids follow from the ids of the job and
its runs, so that spans of many processes, made days apart, are one trace, and nothing is stored for it.

    accept (of the job)
    ├── run (of each run, from its making to its end)
    │   ├── ingest split · ingest range
    │   └── batch (outcomes that were written together)
    │       └── task (a few of them: those that failed, and the slowest)
    └── webhook (each try)

A span is told of when it has ended. Where nobody listens, each call here is one look at a variable.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import sha256
from typing import Protocol

import msgspec

from conveyor.model import Job, JobId, RunId
from conveyor.telemetry.redact import redacted

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Attributes = Mapping[str, str | int | float | bool]


class Span(msgspec.Struct, frozen=True):
    """One span. Times are seconds since 1970."""

    name: str
    trace_id: int
    # None: any that no other has.
    span_id: int | None
    parent_id: int | None
    began: float
    ended: float
    attributes: Attributes
    # What went wrong, if anything did.
    error: str | None = None
    # The traceparent of whoever asked for it.
    link: str | None = None


class Sink(Protocol):
    """Where spans go."""

    def emit(self, span: Span) -> int:
        """Take a span; returns its id."""


_sink: Sink | None = None
_ratio = 0.0
_caller: ContextVar[str | None] = ContextVar("caller", default=None)


@contextmanager
def listening(sink: Sink, ratio: float) -> Iterator[None]:
    """Have `sink` told of the spans of this part of all jobs, of 1, while the block lasts."""
    # One process has one place for its spans, as it has one for its log.
    global _sink, _ratio
    before = _sink, _ratio
    _sink, _ratio = sink, ratio
    try:
        yield
    finally:
        _sink, _ratio = before


def called_by(traceparent: str | None) -> None:
    """What is accepted from here on, in this context, was asked for by this span."""
    if _sink is not None:
        _caller.set(traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None)


def is_traced(job_id: JobId) -> bool:
    """The same answer in every process."""
    return _sink is not None and int.from_bytes(_digest(job_id)[24:]) < _ratio * 2**64


def accepted(job: Job, ended: float) -> None:
    """The root."""
    if _sink is not None and is_traced(job.job_id):
        attributes = _of(job.job_id, None) | {"conveyor.kind": job.kind, "conveyor.tenant": job.tenant}
        span_id, link = _span_id(job.job_id), _caller.get()
        _emit(_sink, Span("accept", trace_id(job.job_id), span_id, None, job.created_at, ended, attributes, link=link))


def run_ended(job: Job, state: str, ended: float, reason: str | None) -> None:
    """The span that all others of the run hang under."""
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
    """A span of a run, or of the job; under another that is known by its id. Returns its own."""
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
    return sink.emit(span if span.error is None else msgspec.structs.replace(span, error=redacted(span.error)))


def _of(job_id: JobId, run_id: RunId | None) -> dict[str, str | int | float | bool]:
    return {"conveyor.job_id": job_id, **({} if run_id is None else {"conveyor.run_id": run_id})}


def _digest(subject: str) -> bytes:
    return sha256(f"trace:{subject}".encode()).digest()

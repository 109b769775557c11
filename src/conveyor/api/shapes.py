"""The shapes of answers, for the OpenAPI page. Answers are made elsewhere; a test holds them to these."""

from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from conveyor.accept.answer import CountsView
from conveyor.api.problems import MEDIA_TYPE, Problem
from conveyor.model import JobId, JobKind, Mode, ResultLayout, RunId, TaskError, TaskId
from conveyor.states import RunState


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer with these fields and no others."""


class RunShape(Shape, frozen=True):
    """One pass over a job's tasks."""

    id: RunId
    number: int
    state: RunState
    total: int
    counts: CountsView
    created_at: str
    ended_at: str | None


class ErrorCount(Shape, frozen=True):
    """How many tasks failed with a code."""

    code: str
    count: int


class IngestShape(Shape, frozen=True):
    """How far a job's list is. Ranges are the parts of it that are read side by side."""

    tasks: int
    invalid: int
    bytes_read: int
    # Not known for a compressed list before its end.
    bytes_total: int | None
    ranges: int
    ranges_done: int


class JobShape(Shape, frozen=True):
    """A job, with its latest run as it is now."""

    id: JobId
    name: str | None
    state: RunState
    reason: str | None
    kind: JobKind
    mode: Mode
    task_shard_count: int
    result_layout: ResultLayout
    options: dict[str, Any]
    created_at: str
    expires_at: str
    run: RunShape
    # None for a job that was written whole when it was accepted.
    ingest: IngestShape | None
    # Lines of its list that were no task.
    invalid_lines: int
    # Tasks a second.
    rate: float
    # Seconds.
    eta: float | None
    top_errors: list[ErrorCount]


class TaskShape(Shape, frozen=True):
    """A task and its result."""

    task_id: TaskId
    index: int
    input: Any
    status: str
    attempts: int
    http_status: int | None
    error: TaskError | None
    content_type: str | None
    size: int | None
    sha256: str | None
    final_url: str | None
    headers: list[tuple[str, str]] | None
    elapsed: float | None
    finished_at: str | None
    body_url: str | None


class EventShape(Shape, frozen=True):
    """Something that happened to a job or to one of its tasks."""

    seq: int
    at: str
    event: str
    run_id: RunId
    index: int | None
    data: dict[str, Any]


class UploadShape(Shape, frozen=True):
    """A place for a list."""

    upload_id: str
    size: int
    sha256: str
    stored: bool
    expires_at: str


class InvalidShape(Shape, frozen=True):
    """A line of a list that was no task; `line` counts from 1."""

    line: int
    reason: str
    # The beginning of the line.
    text: str


class LetterShape(Shape, frozen=True):
    """A message that was given up: `control` for an ingest, `run` for tasks."""

    id: str
    queue: str
    job_id: JobId
    run_id: RunId
    reason: str
    at: str


class KeyShape(Shape, frozen=True):
    """A key, without its secret."""

    key_id: str
    tenant: str
    name: str | None
    admin: bool
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewKeyShape(Shape, frozen=True):
    """A key, this once with its secret."""

    key: str
    key_id: str
    tenant: str


class HealthShape(Shape, frozen=True):
    """It is well."""

    status: str


class JobsPage(Shape, frozen=True):
    """Jobs, newest first."""

    items: list[JobShape]
    next_cursor: str | None


class ResultsPage(Shape, frozen=True):
    """Tasks, in order of task_id."""

    items: list[TaskShape]
    next_cursor: str | None


class EventsPage(Shape, frozen=True):
    """Events, oldest first."""

    items: list[EventShape]
    next_cursor: str | None


class InvalidPage(Shape, frozen=True):
    """Lines that were no task, in the order of the list."""

    items: list[InvalidShape]
    next_cursor: str | None


class LettersPage(Shape, frozen=True):
    """Dead letters, oldest first."""

    items: list[LetterShape]
    next_cursor: str | None


class KeysPage(Shape, frozen=True):
    """Keys, oldest first."""

    items: list[KeyShape]
    next_cursor: str | None


def problems(*statuses: int, key: bool = True) -> dict[int, ResponseSpec]:
    """Problems with these statuses; a missing key is one where a key is needed."""
    return {
        status: ResponseSpec(
            Problem, generate_examples=False, media_type=MEDIA_TYPE, description="A problem; see `code`."
        )
        for status in ((401, *statuses) if key else statuses)
    }


def shaped(shape: type[msgspec.Struct], *statuses: int) -> dict[int, ResponseSpec]:
    """An answer with this shape; 200 unless it is said."""
    spec = ResponseSpec(shape, generate_examples=False, description=shape.__doc__ or "")
    return dict.fromkeys(statuses or (200,), spec)


def answers(shape: type[Shape], *statuses: int) -> dict[int, ResponseSpec]:
    """200 with this shape, or problems."""
    return {**shaped(shape), **problems(*statuses)}

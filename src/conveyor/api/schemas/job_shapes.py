"""Responses about jobs and runs."""

from typing import Any

import msgspec

from conveyor.accept.answer import CountsView
from conveyor.api.schemas.shape import Shape
from conveyor.coordination.durations import TaskTime
from conveyor.model import Counts, JobId, JobKind, Mode, ResultLayout, RunId
from conveyor.states import RunState


class LineageShape(Shape, frozen=True):
    """The tasks of a rerun: those of the parent run, and of the runs before it, that match."""

    parent: RunId
    # Empty: any status.
    status: list[str]
    error_code: str | None
    http_status: int | None
    tag: str | None
    # Only these tasks; all, if it is empty.
    indexes: list[int]
    # Only dead-lettered tasks.
    dead_lettered: bool
    # Only tasks whose body is damaged or missing.
    damaged: bool
    # Only tasks with a stored body; the run extracts from these and makes no request.
    extract_only: bool
    # The run compares pages with those that are stored.
    changed_only: bool
    # Only tasks with this host in the URL of their input.
    host: str | None
    # The options that this run overrides.
    options: dict[str, Any]


class RunShape(Shape, frozen=True):
    """One pass over a job's tasks."""

    id: RunId
    number: int
    state: RunState
    # Why it is in this state; None where nothing but its tasks brought it there.
    reason_code: str | None
    total: int
    counts: CountsView
    created_at: str
    ended_at: str | None
    # None for the first run of a job.
    lineage: LineageShape | None


class WaitShape(Shape, frozen=True):
    """What a job waits for: `paused`, `ingesting`, `open`, `breaker`, or another reason."""

    code: str
    detail: str
    until: str | None
    # Of a breaker: its target, and the error that opened it.
    target: str | None
    error: str | None


class VerifiedRun(Shape, frozen=True):
    """The counters of a run, compared with its rows; wrong counters are corrected."""

    run: RunId
    number: int
    kept: Counts
    counted: Counts
    drift: int
    # Whether nothing changed meanwhile. If not, `drift` is by how much the counters are ahead.
    exact: bool


class VerifyShape(Shape, frozen=True):
    """The counters of all runs, compared with the rows."""

    drift: int
    runs: list[VerifiedRun]


class ErrorCount(Shape, frozen=True):
    """Number of tasks that failed with a code."""

    code: str
    count: int


class IngestShape(Shape, frozen=True):
    """Ingest progress of a job's list. Ranges of the list are read in parallel."""

    tasks: int
    invalid: int
    bytes_read: int
    # Null for a compressed list until it is read to its end.
    bytes_total: int | None
    ranges: int
    ranges_done: int


class TransfersShape(Shape, frozen=True):
    """Downloads in progress, at most 200 of them, added up in bytes, by the progress that they last stored."""

    tasks: int
    done: int
    # Null while the size of a file is unknown.
    total: int | None
    # Bytes a second.
    rate: float


class ListedJob(Shape, frozen=True):
    """A job, with its latest run. `total`, `counts` and `top_errors` are those of `view`."""

    id: JobId
    name: str | None
    state: RunState
    reason: str | None
    # Stable, where the text of the reason may change.
    reason_code: str | None
    # Null unless the job waits.
    waiting: WaitShape | None
    kind: JobKind
    mode: Mode
    task_shard_count: int
    result_layout: ResultLayout
    options: dict[str, Any]
    created_at: str
    # Null while the latest run has not finished: an unfinished job does not expire.
    expires_at: str | None
    # `latest-per-task`: by the latest outcome of each task over all runs; or the id of the run that was asked for.
    view: str
    total: int
    counts: CountsView
    # The latest run.
    run: RunShape
    # Null for a job that was accepted together with its tasks.
    ingest: IngestShape | None
    # Number of invalid lines in its list.
    invalid_lines: int
    # Throughput, in tasks a second.
    rate: float
    # Estimated time left, in seconds.
    eta: float | None
    # Latency of the last attempts, in seconds.
    task_time: TaskTime | None
    # Null unless the job downloads files now.
    transfers: TransfersShape | None
    top_errors: list[ErrorCount]


class JobShape(ListedJob, frozen=True, kw_only=True):
    """A job with all its runs, newest first."""

    runs: list[RunShape]
    # Present if the request asked for it.
    verify: VerifyShape | msgspec.UnsetType = msgspec.UNSET


class JobsPage(Shape, frozen=True):
    """Jobs, newest first, and how many jobs were read for the page."""

    items: list[ListedJob]
    next_cursor: str | None
    read: int

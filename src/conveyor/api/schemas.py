"""The shapes of answers, for the OpenAPI page. Answers are made elsewhere; a test holds them to these."""

from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from conveyor.accept.answer import CountsView
from conveyor.api.problems import MEDIA_TYPE, Problem
from conveyor.coordination.durations import TaskTime
from conveyor.jobs.dead_letters import RedriveAction
from conveyor.model import Counts, JobId, JobKind, Mode, ResultLayout, RunId, TaskError, TaskId
from conveyor.states import RunState


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer with these fields and no others."""


class LineageShape(Shape, frozen=True):
    """Where the tasks of a run come from: those of an earlier one, and of the runs before it, that match."""

    parent: RunId
    # However they ended, if it is empty.
    status: list[str]
    error_code: str | None
    http_status: int | None
    tag: str | None
    # Only these tasks; all, if it is empty.
    indexes: list[int]
    # Those that were given for this run.
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
    """What a job waits for: `paused`, `ingesting`, `open`, or what holds it back."""

    code: str
    detail: str
    until: str | None


class VerifiedRun(Shape, frozen=True):
    """The counts of a run as they were kept and as its rows are; they are mended where they differ."""

    run: RunId
    number: int
    kept: Counts
    counted: Counts
    drift: int
    # Whether nothing moved meanwhile. If not, `drift` is by how much the kept counts are ahead.
    exact: bool


class VerifyShape(Shape, frozen=True):
    """The counts of all runs, held to the rows."""

    drift: int
    runs: list[VerifiedRun]


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


class ListedJob(Shape, frozen=True):
    """A job, with its latest run as it is now."""

    id: JobId
    name: str | None
    state: RunState
    reason: str | None
    # Stable, where the text of the reason may change.
    reason_code: str | None
    # None unless it waits.
    waiting: WaitShape | None
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
    # Of their last attempts, in seconds.
    task_time: TaskTime | None
    top_errors: list[ErrorCount]


class JobShape(ListedJob, frozen=True, kw_only=True):
    """A job with all its runs, newest first."""

    runs: list[RunShape]
    # If it was asked for.
    verify: VerifyShape | msgspec.UnsetType = msgspec.UNSET


class ProgressShape(Shape, frozen=True):
    """How far an attempt is, when it last said so: bytes of a download, or whatever a function counts."""

    at: str
    attempt: int
    done: int
    total: int | None
    # A second, over the last interval.
    rate: float
    note: str | None


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
    # Of one task alone, while it has not ended and has said how far it is.
    progress: ProgressShape | msgspec.UnsetType = msgspec.UNSET


class EventShape(Shape, frozen=True):
    """Something that happened to a job or to one of its tasks. That of a job has the id that its webhooks have."""

    id: str | None
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
    # A new link, while the list is not there and goes straight to an object store.
    url: str | msgspec.UnsetType = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class InvalidShape(Shape, frozen=True):
    """A line of a list that was no task; `line` counts from 1."""

    line: int
    reason: str
    # The beginning of the line.
    text: str


class LetterShape(Shape, frozen=True):
    """A dead letter. Its queue is `control` for a part of an ingest, `run` for tasks."""

    id: str
    queue: str
    job_id: JobId
    run_id: RunId
    reason: str
    at: str
    # What redriving it does now, and a sentence that says so.
    redrive: RedriveAction
    redrive_effect: str


class WebhookShape(Shape, frozen=True):
    """An endpoint, without its secrets."""

    id: str
    url: str
    # All, if it is null; none but those that jobs ask for, if it is empty.
    events: list[str] | None
    description: str | None
    disabled: bool
    # Why, if nobody asked for that.
    reason: str | None
    created_at: str


class NewWebhookShape(WebhookShape, frozen=True):
    """An endpoint, this once with its secret."""

    secret: str


class SecretShape(Shape, frozen=True):
    """A secret that webhooks are signed with."""

    secret: str


class AttemptShape(Shape, frozen=True):
    """One try of a webhook: the status that was answered, or why there was none."""

    at: str
    status: int | None
    error: str | None
    seconds: float


class DeliveryShape(Shape, frozen=True):
    """An event on its way to a receiver, with its last tries."""

    id: str
    # None for a URL that the job named itself.
    webhook_id: str | None
    job_id: JobId
    event_id: str
    event: str
    # pending, delivered or failed.
    status: str
    created_at: str
    next_attempt_at: str | None
    attempts: int
    log: list[AttemptShape]


class DeliveryDetailShape(DeliveryShape, frozen=True):
    """A delivery, with what is sent."""

    payload: dict[str, Any]


class CallbackShape(Shape, frozen=True):
    """A state machine that waits for the job, without its token."""

    id: str
    # step_functions
    type: str
    job_id: JobId
    run_id: RunId
    # pending, in_progress, completed, failed, timed_out or callback_sent.
    status: str
    created_at: str
    # Who runs a long task of it, if that is known.
    worker: str | None
    last_progress_at: str
    last_heartbeat_at: str | None
    next_at: str | None
    # That of the event which it is told, and the error, once there is an answer.
    event_id: str | None
    error: str | None
    answered_at: str | None


class FireShape(Shape, frozen=True):
    """One fire of a schedule: when it was for, when it was made, and what came of it."""

    at: str
    made_at: str
    job_id: JobId | None
    error: str | None
    # Missed fires that it stands for, beside its own.
    coalesced: int


class ScheduleShape(Shape, frozen=True):
    """A schedule, its next fires and its last ones."""

    id: str
    name: str | None
    cron: str
    timezone: str
    missed: str
    paused: bool
    created_at: str
    next_fires: list[str]
    # How often it has fired.
    fired: int
    fires: list[FireShape]
    job: dict[str, Any]


class ExportProgressShape(Shape, frozen=True):
    """Tasks that were read, of how many, and bytes that were written."""

    tasks: int
    total: int
    bytes: int


class ExportCountsShape(Shape, frozen=True):
    """What the files hold."""

    tasks: int
    pending: int
    succeeded: int
    failed: int
    cancelled: int
    bodies: int
    body_bytes: int


class ExportPartShape(Shape, frozen=True):
    """A file of an export that is whole."""

    number: int
    name: str
    size: int
    sha256: str
    tasks: int
    url: str


class ExportSelectShape(Shape, frozen=True):
    """Which tasks are in it."""

    status: str | None
    error_code: str | None
    http_status: int | None
    tag: str | None
    run: str


class ExportShape(Shape, frozen=True):
    """An export: queued, running, ready or failed."""

    id: str
    job_id: JobId
    state: str
    error: TaskError | None
    format: str
    compression: str
    bodies: str
    select: ExportSelectShape
    part_bytes: int | None
    run_ids: list[RunId]
    created_at: str
    started_at: str | None
    finished_at: str | None
    expires_at: str
    progress: ExportProgressShape
    counts: ExportCountsShape
    parts: list[ExportPartShape]


class ExportFileShape(Shape, frozen=True):
    """A file, as the manifest names it."""

    name: str
    size: int
    sha256: str
    tasks: int


class ExportManifestShape(Shape, frozen=True):
    """What the files of an export hold, and how to check them."""

    export_id: str
    job_id: JobId
    run_ids: list[RunId]
    format: str
    compression: str
    bodies: str
    select: ExportSelectShape
    created_at: str
    counts: ExportCountsShape
    parts: list[ExportFileShape]


class ExportsPage(Shape, frozen=True):
    """Exports, oldest first."""

    items: list[ExportShape]
    next_cursor: str | None


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


class SampleShape(Shape, frozen=True):
    """The counts of a run at a time."""

    at: str
    succeeded: int
    failed: int
    cancelled: int


class DurationShape(Shape, frozen=True):
    """How many tasks took about so long in their last attempt; each step is a tenth longer than the one before."""

    seconds: float
    count: int


class StatisticsShape(Shape, frozen=True):
    """How a run went: counts over time, oldest first; task times, shortest first; errors, most frequent first."""

    run_id: RunId
    samples: list[SampleShape]
    durations: list[DurationShape]
    errors: list[ErrorCount]


class BreakerShape(Shape, frozen=True):
    """A target that is left alone (`open`) or tried again by a few at once (`half_open`)."""

    target: str
    state: str
    since: str
    until: str
    # Times in a row that it was found down.
    times: int
    # Tasks that may try it at once when it is tried again.
    at_once: int


class DepthShape(Shape, frozen=True):
    """Messages of a queue that wait, are held by workers, or are delayed."""

    ready: int
    held: int
    delayed: int


class LaneShape(Shape, frozen=True):
    """A run that has not ended, as workers see it. What comes again stands in a queue of its own."""

    job_id: JobId
    run_id: RunId
    name: str | None
    kind: JobKind
    state: RunState
    priority: int
    concurrency: int
    running: int
    queue: DepthShape
    recovery: DepthShape
    waiting: WaitShape | None


class LongTaskShape(Shape, frozen=True):
    """A long task that a worker runs."""

    job_id: JobId
    run_id: RunId
    index: int


class BusyWorkerShape(Shape, frozen=True):
    """A worker that runs long tasks of the tenant, and when it last said so."""

    name: str
    at: str
    tasks: list[LongTaskShape]


class WorkersShape(Shape, frozen=True):
    """Worker loops that are alive; how many tasks all of them may run at once, if that is limited."""

    alive: int
    slots: int | None
    long_tasks: list[BusyWorkerShape]


class SessionShape(Shape, frozen=True):
    """Who is signed in."""

    tenant: str
    key_id: str
    key_name: str | None


class LinkShape(Shape, frozen=True):
    """A path that opens the dashboard, once."""

    path: str
    expires_at: str


class HealthShape(Shape, frozen=True):
    """It is well."""

    status: str


class JobsPage(Shape, frozen=True):
    """Jobs, newest first."""

    items: list[ListedJob]
    next_cursor: str | None


class ResultsPage(Shape, frozen=True):
    """Tasks, in order of task_id."""

    items: list[TaskShape]
    next_cursor: str | None


class FoundPage(Shape, frozen=True):
    """Tasks that match, and how many rows were read for that."""

    items: list[TaskShape]
    next_cursor: str | None
    read: int


class BreakersPage(Shape, frozen=True):
    """All breakers that are not closed, in order of target."""

    items: list[BreakerShape]
    next_cursor: None


class LanesPage(Shape, frozen=True):
    """Runs that have not ended, newest job first."""

    items: list[LaneShape]
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


class WebhooksPage(Shape, frozen=True):
    """Endpoints, oldest first."""

    items: list[WebhookShape]
    next_cursor: str | None


class DeliveriesPage(Shape, frozen=True):
    """Deliveries, by receiver and then oldest first."""

    items: list[DeliveryShape]
    next_cursor: str | None


class CallbacksPage(Shape, frozen=True):
    """All callbacks of a job."""

    items: list[CallbackShape]
    next_cursor: None


class SchedulesPage(Shape, frozen=True):
    """Schedules, oldest first."""

    items: list[ScheduleShape]
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

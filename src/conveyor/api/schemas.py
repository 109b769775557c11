"""Response schemas, for the OpenAPI page. Responses are built elsewhere; a test compares them with these schemas."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from litestar.openapi.datastructures import ResponseSpec

from conveyor.accept.answer import CountsView
from conveyor.api.problems import MEDIA_TYPE, Problem
from conveyor.coordination.durations import TaskTime
from conveyor.model import Counts, JobId, JobKind, Mode, ResultLayout, RunId, TaskError, TaskId, TenantId
from conveyor.states import RunState


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A response with exactly these fields."""


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


class ProgressShape(Shape, frozen=True):
    """The last reported progress of an attempt: bytes of a download, or units of a function."""

    at: str
    attempt: int
    done: int
    total: int | None
    # Units a second, over the last interval.
    rate: float
    note: str | None


class TaskShape(Shape, frozen=True):
    """A task and its result."""

    task_id: TaskId
    index: int
    input: Any
    status: str
    # It succeeded with the body of an earlier outcome, which its run compared it with.
    unchanged: bool
    attempts: int
    http_status: int | None
    error: TaskError | None
    # It failed and waits for a redrive; after a redrive, the result of an earlier run keeps it.
    dead_lettered: bool
    content_type: str | None
    size: int | None
    sha256: str | None
    final_url: str | None
    headers: list[tuple[str, str]] | None
    elapsed: float | None
    finished_at: str | None
    body_url: str | None
    # What the job's `extract` returned for the body: an object or a list of objects. Null if that was nothing, or is
    # longer than 64 KiB, or the page has 8 MiB already; `extracted_url` has it then.
    extracted: Any
    extracted_url: str | None
    # Only for a single task whose last attempt took a second or more: seconds until the head of the response had
    # arrived.
    first_byte: float | msgspec.UnsetType = msgspec.UNSET
    # Only for a single task that is running and has reported progress.
    progress: ProgressShape | msgspec.UnsetType = msgspec.UNSET


class EventShape(Shape, frozen=True):
    """An event of a job or of one of its tasks. An event of a job has the same id in webhooks."""

    id: str | None
    seq: int
    at: str
    event: str
    run_id: RunId
    index: int | None
    data: dict[str, Any]


class UploadShape(Shape, frozen=True):
    """An upload of one list."""

    upload_id: str
    size: int
    sha256: str
    stored: bool
    expires_at: str
    # A fresh link, while the list is not stored and goes directly to an object store.
    url: str | msgspec.UnsetType = msgspec.UNSET
    method: str | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class InvalidLineShape(Shape, frozen=True):
    """An invalid line of a list; `line` counts from 1."""

    line: int
    reason: str
    # The start of the line.
    text: str


class DeadLetterShape(Shape, frozen=True):
    """A dead letter: a dead-lettered task, or a message. Its queue is `control` for an ingest, `run` for tasks."""

    id: str
    queue: str
    job_id: JobId
    run_id: RunId
    # Of a dead-lettered task; null for a message.
    task_id: TaskId | None
    index: int | None
    attempts: int | None
    error_code: str | None
    reason: str
    at: str
    # What redriving it does now, and a sentence that says so.
    redrive: Literal["requeue", "rerun_task", "none"]
    redrive_effect: str


class WebhookShape(Shape, frozen=True):
    """An endpoint, without its secrets."""

    id: str
    url: str
    # Null: all events. Empty: only events that jobs request.
    events: list[str] | None
    description: str | None
    disabled: bool
    # Why the server disabled it; null if a user did.
    reason: str | None
    # Since when attempts fail, and the error of the first of them; null if the last attempt succeeded.
    failing_since: str | None
    error: str | None
    created_at: str


class DeliveryCounts(Shape, frozen=True):
    """The stored deliveries of an endpoint, by status: of the first 1,000."""

    delivered: int
    failed: int
    pending: int


class WebhookDetailShape(WebhookShape, frozen=True):
    """An endpoint, with the numbers of its deliveries."""

    deliveries: DeliveryCounts


class NewWebhookShape(WebhookShape, frozen=True):
    """A new endpoint, with its secret."""

    secret: str


class SecretShape(Shape, frozen=True):
    """A secret that signs webhooks."""

    secret: str


class AttemptShape(Shape, frozen=True):
    """One attempt of a delivery: the status of the response, or the error."""

    at: str
    status: int | None
    error: str | None
    seconds: float
    # The first 500 characters of the response's body, in the last attempt only.
    answer: str | None


class DeliveryShape(Shape, frozen=True):
    """A delivery of one event to one receiver, with its latest attempts."""

    id: str
    # Null for a receiver that only the job names.
    webhook_id: str | None
    # webhook, start_execution or eventbridge.
    type: str
    # Null for a test.
    job_id: JobId | None
    event_id: str
    event: str
    # pending, delivered or failed.
    status: str
    created_at: str
    next_attempt_at: str | None
    attempts: int
    log: list[AttemptShape]


class DeliveryDetailShape(DeliveryShape, frozen=True):
    """A delivery, with its payload."""

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
    # The worker that runs a long task of the job, if known.
    worker: str | None
    last_progress_at: str
    last_heartbeat_at: str | None
    next_at: str | None
    # The event that it was answered with, and the error, once it is answered.
    event_id: str | None
    error: str | None
    answered_at: str | None


class FireShape(Shape, frozen=True):
    """One fire of a schedule: its planned time, its actual time, and its job or error."""

    at: str
    made_at: str
    job_id: JobId | None
    error: str | None
    # Number of missed fires that this one also covers.
    coalesced: int


class FireOutcome(Shape, frozen=True):
    """What the job of a fire has come to."""

    name: str | None
    state: str
    total: int
    counts: CountsView


class FireDetail(FireShape, frozen=True):
    """One fire of a schedule, with its job's state and counts."""

    # Null without a job, and once the job was deleted or purged.
    outcome: FireOutcome | None


class ScheduleShape(Shape, frozen=True):
    """A schedule, with its next and its latest fires."""

    id: str
    name: str | None
    cron: str
    # The expression in words.
    cron_text: str
    timezone: str
    missed: str
    paused: bool
    # Whether each job compares its pages with those of the one before.
    changed_only: bool
    created_at: str
    next_fires: list[str]
    # Total number of fires.
    fired: int
    fires: Sequence[FireShape]
    job: dict[str, Any]


class ScheduleDetail(ScheduleShape, frozen=True):
    """A schedule, with its next fires, and its latest ones with the outcomes of their jobs."""

    fires: Sequence[FireDetail]


class StartedFire(Shape, frozen=True):
    """A fire that was asked for: its time, and the id that its job will have."""

    at: str
    job_id: JobId


class ExportProgressShape(Shape, frozen=True):
    """Tasks read so far, tasks in total, and bytes written."""

    tasks: int
    total: int
    bytes: int


class ExportCountsShape(Shape, frozen=True):
    """Contents of the files."""

    tasks: int
    pending: int
    succeeded: int
    failed: int
    cancelled: int
    bodies: int
    body_bytes: int
    damaged: int


class ExportPartShape(Shape, frozen=True):
    """A complete file of an export."""

    number: int
    name: str
    size: int
    sha256: str
    tasks: int
    url: str


class ExportSelectShape(Shape, frozen=True):
    """The tasks that an export contains."""

    status: str | None
    error_code: str | None
    http_status: int | None
    tag: str | None
    run: str
    # Without unchanged tasks.
    changed: bool


class ExportShape(Shape, frozen=True):
    """An export: queued, running, ready or failed."""

    id: str
    job_id: JobId
    state: str
    error: TaskError | None
    warning: str | None
    format: str
    compression: str
    bodies: str
    select: ExportSelectShape
    part_bytes: int | None
    names: str | None
    run_ids: list[RunId]
    created_at: str
    started_at: str | None
    finished_at: str | None
    expires_at: str
    progress: ExportProgressShape
    counts: ExportCountsShape
    parts: list[ExportPartShape]


class ExportFileShape(Shape, frozen=True):
    """A file in the manifest."""

    name: str
    size: int
    sha256: str
    tasks: int


class ExportManifestShape(Shape, frozen=True):
    """The files of an export, with counts and checksums."""

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
    """An API key, without its secret."""

    key_id: str
    tenant: str
    name: str | None
    admin: bool
    created_at: str
    expires_at: str | None
    revoked_at: str | None


class NewKeyShape(Shape, frozen=True):
    """A new API key, with its secret."""

    # Null in the answer to a repeated Idempotency-Key: the secret is shown once.
    key: str | None
    key_id: str
    tenant: str


class SampleShape(Shape, frozen=True):
    """The counts of a run at one time."""

    at: str
    succeeded: int
    failed: int
    cancelled: int


class DurationShape(Shape, frozen=True):
    """Number of tasks by duration of their last attempt; each bucket is a tenth longer than the one before."""

    seconds: float
    count: int


class AttemptsShape(Shape, frozen=True):
    """Attempts that ended in the interval that begins at `at`."""

    at: str
    succeeded: int
    failed: int
    # Failed attempts that were retried.
    retried: int


class SeriesShape(Shape, frozen=True):
    """Attempts over time, oldest first, in intervals of `seconds`; those without any are left out."""

    seconds: int
    items: list[AttemptsShape]


class StatisticsShape(Shape, frozen=True):
    """Statistics of a run: counts over time, oldest first; latency, shortest first. And the errors of `view`, most
    frequent first."""

    run_id: RunId
    # As in a job.
    view: str
    samples: list[SampleShape]
    series: SeriesShape
    durations: list[DurationShape]
    errors: list[ErrorCount]


class ErrorSampleShape(Shape, frozen=True):
    """A failed attempt."""

    task_id: TaskId
    index: int
    attempt: int
    at: str
    message: str
    http_status: int | None


class ErrorGroupShape(Shape, frozen=True):
    """Failed attempts with one error code at one host: `failed` of tasks that failed, `retried` of tasks that were
    retried. The samples have different messages."""

    # Null for all codes without a group of their own.
    code: str | None
    # Null if the tasks have no host; with `is_other`, for all hosts without a group of their own.
    host: str | None
    is_other: bool
    failed: int
    retried: int
    last_at: str | None
    samples: list[ErrorSampleShape]


class ErrorGroups(Shape, frozen=True):
    """The errors of a run by code and host, those with the most failed tasks first."""

    run_id: RunId
    # Whether all counts are exact. If not, those of retried attempts and of hosts may be too low.
    is_exact: bool
    # When workers last added to it.
    at: str | None
    # Exact: failed tasks of the run.
    failed: int
    retried: int
    items: list[ErrorGroupShape]


class HostBreaker(Shape, frozen=True):
    """The breaker of a host that is not closed."""

    target: str
    state: str
    until: str
    error: str | None


class RunPace(Shape, frozen=True):
    """The pace of a host under `pace: auto`: `limit` requests at once, over all workers."""

    limit: int
    in_flight: int
    paused_until: str | None


class HostAttempts(Shape, frozen=True):
    """Attempts at a host: the last ones of tasks that `succeeded` or `failed`, and `retried` ones."""

    attempts: int
    succeeded: int
    failed: int
    retried: int
    # Attempts a second: in the last 30 to 60 seconds, or, of a finished run, from the first to the last.
    rate: float
    # Latency of attempts in seconds, within a tenth.
    p50: float | None
    p95: float | None
    first_at: str | None
    last_at: str | None


class RunHost(HostAttempts, frozen=True):
    """One host of a run."""

    # Null if the tasks have no host.
    host: str | None
    # The three most frequent, of failed and retried attempts.
    errors: list[ErrorCount]
    breaker: HostBreaker | None
    pace: RunPace | None


class RunHosts(Shape, frozen=True):
    """The hosts of a run, those with the most attempts first, and all others together."""

    run_id: RunId
    # Whether the counts are exact. If not, they may be too low.
    is_exact: bool
    # When workers last added to it.
    at: str | None
    items: list[RunHost]
    other: HostAttempts | None


class BreakerShape(Shape, frozen=True):
    """A breaker: `open` keeps all tasks from the target, `half_open` lets a few probes through."""

    tenant: TenantId
    # Scheme, host and port of a URL, `gateway:` and those of a gateway, or `upstream:` and the name that jobs give.
    target: str
    state: str
    # The error that opened it; null if it is unknown.
    error: str | None
    since: str
    until: str
    # How often in a row it has opened.
    times: int
    # Maximum number of probes at once.
    at_once: int
    # Unfinished runs that it blocks; at most 20.
    runs: list[RunId]


class ResetBreaker(Shape, frozen=True):
    """A breaker that was reset."""

    tenant: TenantId
    target: str


class ResetBreakers(Shape, frozen=True):
    """The breakers that were reset; those that were closed already are left out."""

    reset: list[ResetBreaker]


class HostShape(Shape, frozen=True):
    """The pace of a host: `limit` requests at once, over all workers."""

    host: str
    limit: int
    in_flight: int
    # Workers that sent requests there in the last seconds.
    workers: int
    # Mean latency of the last requests, in seconds.
    latency: float
    # The host asked for a pause (Retry-After); null if it is over.
    paused_until: str | None
    # When it was last reported.
    at: str


class LoadPointShape(Shape, frozen=True):
    """The interval that begins at `at`. `waiting` and `running` are the largest numbers of tasks that were seen."""

    at: str
    succeeded: int
    failed: int
    # Failed attempts that were retried.
    retried: int
    waiting: int
    running: int


class LoadSeries(Shape, frozen=True):
    """Intervals of `seconds`, oldest first; those in which nothing was seen are left out."""

    seconds: int
    items: list[LoadPointShape]


class LoadShape(Shape, frozen=True):
    """The load of a tenant: the last 240 minutes, and the last 168 hours."""

    minutes: LoadSeries
    hours: LoadSeries


class DepthShape(Shape, frozen=True):
    """Messages of a queue that are ready, in flight (`held`), or delayed. `unknown`: there may be more."""

    ready: int
    held: int
    delayed: int
    unknown: bool


class LaneShape(Shape, frozen=True):
    """An unfinished run, as workers see it. Retried and requeued references are in its recovery queue."""

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
    """A worker that runs long tasks of the tenant, with its last heartbeat."""

    name: str
    at: str
    tasks: list[LongTaskShape]


class WorkerShape(Shape, frozen=True):
    """A live worker: where it runs, how many tasks it runs at once, and when it last reported."""

    name: str
    host: str
    process: int
    version: str
    slots: int
    # Null if it does not tell.
    handlers: list[str] | None
    # Whether it makes requests to private addresses. Null if it does not tell.
    private_targets: bool | None
    started_at: str
    at: str


class WorkersShape(Shape, frozen=True):
    """Worker loops that are alive; the maximum number of tasks that they run at once, if limited."""

    alive: int
    slots: int | None
    workers: list[WorkerShape]
    long_tasks: list[BusyWorkerShape]


class SessionShape(Shape, frozen=True):
    """The current session."""

    tenant: str
    key_id: str
    key_name: str | None
    # Until when the session acts as an administrator; null if it does not.
    admin_until: str | None


class AdminSession(Shape, frozen=True):
    """A session that acts as an administrator."""

    admin_until: str


class LinkShape(Shape, frozen=True):
    """A path that opens the dashboard, once."""

    path: str
    expires_at: str


class HealthShape(Shape, frozen=True):
    """The status of the process."""

    status: str


class JobsPage(Shape, frozen=True):
    """Jobs, newest first, and how many jobs were read for the page."""

    items: list[ListedJob]
    next_cursor: str | None
    read: int


class ResultsPage(Shape, frozen=True):
    """Tasks. `order` says how they are sorted: by `index`, the order of the list, or by `task_id`, where the engine has
    no such order or the cursor is of a listing by `task_id`."""

    items: list[TaskShape]
    next_cursor: str | None
    order: Literal["index", "task_id"]


class TaskSearchPage(Shape, frozen=True):
    """Tasks that match, how they are sorted, and the number of rows read."""

    items: list[TaskShape]
    next_cursor: str | None
    read: int
    order: Literal["index", "task_id"]


class BreakersPage(Shape, frozen=True):
    """All breakers that are not closed, in order of target."""

    items: list[BreakerShape]
    next_cursor: None


class HostsPage(Shape, frozen=True):
    """The paces of hosts, in order of host."""

    items: list[HostShape]
    next_cursor: None


class LanesPage(Shape, frozen=True):
    """Unfinished runs, newest job first."""

    items: list[LaneShape]
    next_cursor: str | None


class EventsPage(Shape, frozen=True):
    """Events, oldest first."""

    items: list[EventShape]
    next_cursor: str | None


class InvalidLinesPage(Shape, frozen=True):
    """Invalid lines, in the order of the list."""

    items: list[InvalidLineShape]
    next_cursor: str | None


class DeadLettersPage(Shape, frozen=True):
    """Dead letters: messages, oldest first, then dead-lettered tasks by run."""

    items: list[DeadLetterShape]
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


class TenantShape(Shape, frozen=True):
    """A tenant, as its keys tell."""

    tenant: str
    # Keys that are neither revoked nor expired.
    active_keys: int
    keys: int
    # When its first key was created.
    created_at: str


class TenantsPage(Shape, frozen=True):
    """Tenants, by name."""

    items: list[TenantShape]
    next_cursor: str | None


class KeysPage(Shape, frozen=True):
    """Keys, oldest first."""

    items: list[KeyShape]
    next_cursor: str | None


def problems(*statuses: int, key: bool = True) -> dict[int, ResponseSpec]:
    """Problem responses with these statuses; plus those of the key where one is required."""
    return {
        status: ResponseSpec(
            Problem, generate_examples=False, media_type=MEDIA_TYPE, description="A problem; see `code`."
        )
        for status in (sorted({401, 429, *statuses}) if key else statuses)
    }


def shaped(shape: type[msgspec.Struct], *statuses: int) -> dict[int, ResponseSpec]:
    """Responses with this schema; status 200 by default."""
    spec = ResponseSpec(shape, generate_examples=False, description=shape.__doc__ or "")
    return dict.fromkeys(statuses or (200,), spec)


def answers(shape: type[Shape], *statuses: int) -> dict[int, ResponseSpec]:
    """200 with this schema, or a problem."""
    return {**shaped(shape), **problems(*statuses)}

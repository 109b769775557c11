"""The catalogue of all metrics. The tables in SPEC §12 and docs/ are generated from it; the Grafana dashboard and the
alerts under deploy/grafana use no other metrics.

A label never holds a job, a tenant, a host or a URL, so the number of series does not grow with use.
"""

from collections.abc import Sequence

import msgspec

from conveyor.model import JobKind
from conveyor.states import RunState
from conveyor.telemetry.instruments import OTHER, Counter, Gauge, Histogram

_KINDS = tuple(JobKind)
FINISHED_STATES = (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)
_QUEUES = ("control", "runs", "recovery")

# Bounds in seconds: for calls to engines and requests, and for tasks, which may take hours.
_CALLS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TASKS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

_FAILURES = (
    *("http_3xx", "http_4xx", "http_5xx", "timeout", "connect_timeout", "connect_failed", "dns_failed", "tls_failed"),
    *("read_failed", "decode_failed", "target_refused", "target_down", "bad_url", "bad_input", "bad_redirect"),
    *("too_many_redirects", "body_too_large", "gateway_failed", "range_failed", "file_changed", "checksum_mismatch"),
    *("blocked_by_robots", "robots_unavailable"),
    *("too_slow", "export_failed", "export_timeout", "bad_answer", "handler_raised"),
    *("process_failed", "worker_lost", "stuck", "deadline", "store_failed", "internal", OTHER),
)
_DELIVERIES = (
    *("delivered", "http_3xx", "http_4xx", "http_5xx", "timeout", "connect_failed", "dns_failed", "tls_failed"),
    *("read_failed", "target_refused", "bad_url", "endpoint_disabled", OTHER),
)

# Jobs, runs and tasks.
JOBS_ACCEPTED = Counter("conveyor_jobs_accepted_total", "Jobs that the server accepted.", kind=_KINDS)
RUNS_FINISHED = Counter("conveyor_runs_finished_total", "Finished runs, by final state.", state=FINISHED_STATES)
TASKS_WRITTEN = Counter(
    "conveyor_tasks_written_total",
    "Tasks written as pending. An ingest that repeats a write counts it again.",
)
TASKS_FINISHED = Counter(
    "conveyor_tasks_finished_total",
    "Finished tasks, each counted once, by final status.",
    status=("succeeded", "failed", "cancelled"),
)
TASK_FAILURES = Counter("conveyor_task_failures_total", "Failed tasks, by error code.", code=_FAILURES)
ATTEMPTS = Counter(
    "conveyor_attempts_total",
    "Recorded attempts, by outcome. `waited` spends no attempt: the target was unavailable.",
    kind=_KINDS,
    outcome=("succeeded", "failed", "retried", "waited"),
)
ATTEMPT_SECONDS = Histogram("conveyor_attempt_seconds", "Duration of attempts.", _TASKS, kind=_KINDS)
TASK_SECONDS = Histogram(
    "conveyor_task_seconds",
    "Time from the start of a task's first attempt until it finished; accurate to a second for retried tasks.",
    _TASKS,
    kind=_KINDS,
)

# Lists and listings.
INGESTED = Counter("conveyor_ingested_total", "Ingested lines of lists.", result=("task", "invalid"))
ROWS_READ = Counter("conveyor_rows_read_total", "Rows that listings of results read from the shards of runs.")
ROWS_RETURNED = Counter("conveyor_rows_returned_total", "Rows that listings of results returned.")

# Backlog. The sampler sets these, in the process that has the role `sweep`.
RUNS = Gauge(
    "conveyor_runs", "Unfinished runs, by state.", state=(RunState.INGESTING, RunState.RUNNING, RunState.PAUSED)
)
RUNS_UNSAMPLED = Gauge("conveyor_runs_unsampled", "Runs whose queues the sampler skipped in its last pass.")
RUN_IDLE_SECONDS = Gauge(
    "conveyor_run_idle_seconds", "Longest time without progress, over all runs that are ingesting or running."
)
QUEUE_MESSAGES = Gauge(
    "conveyor_queue_messages",
    "Messages in queues, over all runs; a queue that runs share counts once. A message of a run carries one chunk of "
    "tasks.",
    queue=_QUEUES,
    state=("ready", "in_flight", "delayed"),
)
WORK_WAITING_SECONDS = Gauge(
    "conveyor_work_waiting_seconds",
    "Time that the live workers would take for the tasks that could start now. Made for autoscaling.",
)
TASKS_WAITING = Gauge("conveyor_tasks_waiting", "Tasks that could start now if there were slots.")
QUEUE_AGE_SECONDS = Gauge(
    "conveyor_queue_age_seconds",
    "Age of the oldest message that is ready; of dead letters, the time since the oldest was dead-lettered.",
    queue=(*_QUEUES, "dead_letters"),
)
DEAD_LETTERS = Gauge("conveyor_dead_letters", "Dead letters, counted up to 100.")
DEAD_LETTERED = Counter(
    "conveyor_dead_lettered_total",
    "Dead-lettered tasks and messages, by the queue that they came from.",
    queue=(*_QUEUES, OTHER),
)
DUE_LAG_SECONDS = Gauge(
    "conveyor_due_lag_seconds",
    "How long the oldest due document has been overdue, by kind; 0 if none is.",
    kind=("outbox", "delivery", "schedule", "callback", "deadline", "progress", "worker"),
)
WORKERS = Gauge("conveyor_workers", "Worker loops that are alive.")
BREAKERS = Gauge("conveyor_breakers", "Breakers that are not closed, by state.", state=("open", "half_open"))

# What the sampler sets: in one of several processes, and cleared in the others.
SAMPLED: Sequence[Gauge] = (
    *(RUNS, RUNS_UNSAMPLED, RUN_IDLE_SECONDS, QUEUE_MESSAGES, WORK_WAITING_SECONDS, TASKS_WAITING, QUEUE_AGE_SECONDS),
    *(DEAD_LETTERS, DUE_LAG_SECONDS, WORKERS, BREAKERS),
)

# Recovery.
SWEPT = Counter(
    "conveyor_swept_total",
    "Runs that the sweeper checked, and its repairs.",
    result=(
        "checked",
        "completed",
        "requeued",
        "resumed",
        "closed",
        "failed",
        "cancelled",
        "cleared",
        "settled",
        "revealed",
    ),
)
COUNTER_DRIFT = Counter(
    "conveyor_counter_drift_total", "Tasks by which counters were wrong when the sweeper recounted."
)
MONITORED = Counter(
    "conveyor_monitored_total",
    "Documents that the monitor checked, and its actions.",
    result=("checked", "requeued", "failed", "workers", "orphans", "settled", "overdue", "expired"),
)
CALLBACKS = Counter(
    "conveyor_callbacks_total",
    "Step Functions callbacks that were checked, and the calls made for them.",
    result=("checked", "heartbeats", "stuck", "answers", "timed_out", "later"),
)
PURGED = Counter(
    "conveyor_purged_total",
    "Items that retention purged.",
    what=("jobs", "tasks", "blobs", "letters", "uploads", "orphans", "exports", "expired"),
)
BREAKER_CHANGES = Counter("conveyor_breaker_changes_total", "Breakers opened or closed.", to=("open", "closed"))
CHILD_RESTARTS = Counter(
    "conveyor_child_restarts_total", "Child processes that exited unexpectedly.", kind=("fetcher", "handler")
)

# Webhooks.
WEBHOOKS = Counter("conveyor_webhook_attempts_total", "Webhook attempts, by outcome.", outcome=_DELIVERIES)
WEBHOOKS_FAILED = Counter("conveyor_webhooks_failed_total", "Webhook deliveries that failed after their last retry.")
WEBHOOK_SECONDS = Histogram("conveyor_webhook_seconds", "Duration of webhook attempts.", _CALLS)

# The API.
REQUESTS = Counter(
    "conveyor_http_requests_total",
    "HTTP requests, by route template and status class.",
    method=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", OTHER),
    route=None,
    status=("2xx", "3xx", "4xx", "5xx", OTHER),
)
REQUEST_SECONDS = Histogram("conveyor_http_seconds", "Time until the response was sent.", _CALLS, route=None)
REFUSALS = Counter(
    "conveyor_refusals_total",
    "Requests refused for lack of capacity, quota or workers.",
    code=("quota_exceeded", "overloaded", "no_workers"),
    reason=("jobs", "tasks", "bytes", "requests", "workers"),
)

# The process.
ENGINE_SECONDS = Histogram(
    "conveyor_engine_call_seconds",
    "Duration of calls to engines; for a stream, until its first item.",
    _CALLS,
    seam=None,
    engine=None,
    method=None,
)
ENGINE_ERRORS = Counter(
    "conveyor_engine_errors_total",
    "Failed calls to engines, by error code.",
    seam=None,
    engine=None,
    method=None,
    error=None,
)
TICK_SECONDS = Histogram("conveyor_role_tick_seconds", "Duration of a role's ticks.", _CALLS, role=None)
TICK_ERRORS = Counter("conveyor_role_errors_total", "Failed ticks of a role.", role=None)
ITEM_ERRORS = Counter("conveyor_role_item_errors_total", "Failed items within a role's ticks.", role=None)
TICKED_AT = Gauge("conveyor_role_tick_timestamp_seconds", "Time of a role's last successful tick.", role=None)
CHILDREN = Gauge("conveyor_child_processes", "Child processes that are alive.", kind=("fetcher", "handler"))
CHILD_BYTES = Gauge("conveyor_child_resident_bytes", "Resident memory of child processes.", kind=("fetcher", "handler"))
LOGGED = Counter("conveyor_logged_total", "Warnings and errors in the log.", level=("warning", "error"))
INFO = Gauge("conveyor_info", "Always 1; the label is the version.", version=None)

CATALOGUE: Sequence[Counter | Gauge | Histogram] = tuple(
    value for value in list(globals().values()) if isinstance(value, Counter | Gauge | Histogram)
)


def add_counts(metric: Counter, done: msgspec.Struct) -> None:
    """Add the counts of one pass: each field of `done` is a label value."""
    for name, amount in msgspec.structs.asdict(done).items():
        if isinstance(amount, int) and amount:
            metric.add(amount, name)


def family_of(code: str) -> str:
    """An error code as a label value; HTTP statuses are grouped by class, such as http_5xx."""
    return f"{code[:6]}xx" if code.startswith("http_") and len(code) == 8 else code

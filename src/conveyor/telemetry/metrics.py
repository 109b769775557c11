"""The catalogue: every metric of Conveyor, once. SPEC §12 and docs/ have their tables from here; the dashboard and the
alerts under deploy/grafana name nothing else.

No label ever holds a job, a tenant, a host or a URL.
"""

from collections.abc import Sequence

import msgspec

from conveyor.model import JobKind
from conveyor.states import RunState
from conveyor.telemetry.instruments import OTHER, Counter, Gauge, Histogram

_KINDS = tuple(JobKind)
ENDED = (RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED)
_LANES = ("control", "runs", "recovery")

# Seconds: of a call to an engine or a request, and of a task, which may take hours.
_CALLS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TASKS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

_FAILURES = (
    *("http_3xx", "http_4xx", "http_5xx", "timeout", "connect_timeout", "connect_failed", "dns_failed", "tls_failed"),
    *("read_failed", "decode_failed", "target_refused", "target_down", "bad_url", "bad_input", "bad_redirect"),
    *("too_many_redirects", "body_too_large", "gateway_failed", "range_failed", "file_changed", "checksum_mismatch"),
    *("content_encoded", "too_slow", "export_failed", "export_timeout", "bad_answer", "handler_raised"),
    *("process_failed", "worker_lost", "stuck", "deadline", "store_failed", "internal", OTHER),
)
_DELIVERIES = (
    *("delivered", "http_3xx", "http_4xx", "http_5xx", "timeout", "connect_failed", "dns_failed", "tls_failed"),
    *("read_failed", "target_refused", "bad_url", "endpoint_disabled", OTHER),
)

# What is accepted and what comes of it.
JOBS_ACCEPTED = Counter("conveyor_jobs_accepted_total", "Jobs that were accepted.", kind=_KINDS)
RUNS_ENDED = Counter("conveyor_runs_ended_total", "Runs that ended, by the state that they ended in.", state=ENDED)
TASKS_WRITTEN = Counter(
    "conveyor_tasks_written_total",
    "Tasks that were written as pending; one that a repeated ingest writes counts again.",
)
TASKS_ENDED = Counter(
    "conveyor_tasks_ended_total",
    "Tasks that ended, each once, by their status.",
    status=("succeeded", "failed", "cancelled"),
)
TASK_FAILURES = Counter("conveyor_task_failures_total", "Tasks that failed, by error code.", code=_FAILURES)
ATTEMPTS = Counter(
    "conveyor_attempts_total",
    "Attempts whose outcome is written. `waited` ones spent no attempt: their target was not there.",
    kind=_KINDS,
    outcome=("succeeded", "failed", "retried", "waited"),
)
ATTEMPT_SECONDS = Histogram("conveyor_attempt_seconds", "How long attempts took.", _TASKS, kind=_KINDS)
TASK_SECONDS = Histogram(
    "conveyor_task_seconds",
    "From the beginning of a task's first attempt to its end, within a second once it was tried again.",
    _TASKS,
    kind=_KINDS,
)

# Lists.
INGESTED = Counter("conveyor_ingested_total", "Lines of lists that were ingested.", result=("task", "invalid"))
ROWS_READ = Counter("conveyor_rows_read_total", "Rows that listings of results read from the shards of runs.")
ROWS_RETURNED = Counter("conveyor_rows_returned_total", "Rows that these listings returned.")

# What waits. Looked at by the sampler, in the process that has the role `sweep`.
RUNS = Gauge(
    "conveyor_runs", "Runs that have not ended.", state=(RunState.INGESTING, RunState.RUNNING, RunState.PAUSED)
)
RUNS_UNSAMPLED = Gauge("conveyor_runs_unsampled", "Runs beyond those whose queues one pass looks at.")
RUN_IDLE_SECONDS = Gauge(
    "conveyor_run_idle_seconds", "How long the run that has not moved for longest has not, of those that should."
)
QUEUE_MESSAGES = Gauge(
    "conveyor_queue_messages",
    "Messages in queues, those of all runs together; a message of a run holds a chunk of tasks.",
    lane=_LANES,
    part=("ready", "held", "delayed"),
)
QUEUE_AGE_SECONDS = Gauge(
    "conveyor_queue_age_seconds",
    "How long the message that waits longest could have been taken; of dead letters, since it was buried.",
    lane=(*_LANES, "dead_letters"),
)
DEAD_LETTERS = Gauge("conveyor_dead_letters", "Dead letters, counted up to 100.")
DEAD_LETTERED = Counter("conveyor_dead_lettered_total", "Messages that were given up.", lane=(*_LANES, OTHER))
DUE_LAG_SECONDS = Gauge(
    "conveyor_due_lag_seconds",
    "How late what is due first is, by kind of row; 0 where nothing is late.",
    kind=("notice", "delivery", "schedule", "callback", "deadline", "progress", "worker"),
)
WORKERS = Gauge("conveyor_workers", "Worker loops that are alive.")
BREAKERS = Gauge("conveyor_breakers", "Breakers of targets that are not closed.", state=("open", "half_open"))

# What recovers.
SWEPT = Counter(
    "conveyor_swept_total",
    "What the sweeper looked at and did.",
    result=("checked", "completed", "requeued", "resumed", "closed", "cancelled", "cleared"),
)
DRIFT = Counter("conveyor_counter_drift_total", "Tasks by which kept counts were wrong when the sweeper counted.")
MONITORED = Counter(
    "conveyor_monitored_total",
    "What the monitor looked at and did.",
    result=("looked", "requeued", "failed", "workers", "orphans", "settled", "overdue", "expired"),
)
CALLBACKS = Counter(
    "conveyor_callbacks_total",
    "What was done for state machines that wait.",
    result=("looked", "heartbeats", "stuck", "answers", "timed_out", "later"),
)
REMOVED = Counter(
    "conveyor_removed_total",
    "What retention removed.",
    what=("jobs", "tasks", "blobs", "letters", "uploads", "exports", "expired"),
)
BREAKER_CHANGES = Counter(
    "conveyor_breaker_changes_total", "Breakers that were opened or closed.", to=("open", "closed")
)
CHILD_RESTARTS = Counter(
    "conveyor_child_restarts_total", "Child processes that ended before their time.", kind=("fetcher", "handler")
)

# Who is told.
WEBHOOKS = Counter("conveyor_webhook_attempts_total", "Tries of webhooks, by what came of them.", outcome=_DELIVERIES)
WEBHOOKS_GIVEN_UP = Counter("conveyor_webhooks_given_up_total", "Webhooks that will not be tried again.")
WEBHOOK_SECONDS = Histogram("conveyor_webhook_seconds", "How long tries of webhooks took.", _CALLS)

# The API.
REQUESTS = Counter(
    "conveyor_http_requests_total",
    "Requests that were answered, by the template of their route.",
    method=("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", OTHER),
    route=None,
    status=("2xx", "3xx", "4xx", "5xx", OTHER),
)
REQUEST_SECONDS = Histogram("conveyor_http_seconds", "From a request to the end of its answer.", _CALLS, route=None)
REFUSALS = Counter(
    "conveyor_refusals_total",
    "Work that was not accepted because there was no room for it.",
    code=("quota_exceeded", "overloaded", "no_workers"),
    reason=("jobs", "tasks", "bytes", "requests", "workers"),
)

# The process.
ENGINE_SECONDS = Histogram(
    "conveyor_engine_call_seconds",
    "How long calls to engines took; of a stream, until its first piece.",
    _CALLS,
    seam=None,
    engine=None,
    method=None,
)
ENGINE_ERRORS = Counter(
    "conveyor_engine_errors_total",
    "Calls to engines that raised, by the code of the error.",
    seam=None,
    engine=None,
    method=None,
    error=None,
)
TICK_SECONDS = Histogram("conveyor_role_tick_seconds", "How long ticks of roles took.", _CALLS, role=None)
TICK_ERRORS = Counter("conveyor_role_errors_total", "Ticks of roles that failed.", role=None)
ITEM_ERRORS = Counter("conveyor_role_item_errors_total", "Items of a role's pass that failed.", role=None)
TICKED_AT = Gauge("conveyor_role_tick_timestamp_seconds", "When a tick of a role last ended well.", role=None)
CHILDREN = Gauge("conveyor_child_processes", "Child processes that are there.", kind=("fetcher", "handler"))
CHILD_BYTES = Gauge("conveyor_child_resident_bytes", "Their memory.", kind=("fetcher", "handler"))
LOGGED = Counter("conveyor_logged_total", "Lines of the log that are warnings or errors.", level=("warning", "error"))
INFO = Gauge("conveyor_info", "1, with the version.", version=None)

CATALOGUE: Sequence[Counter | Gauge | Histogram] = tuple(
    value for value in list(globals().values()) if isinstance(value, Counter | Gauge | Histogram)
)


def count(metric: Counter, done: msgspec.Struct) -> None:
    """Add what one pass did, as its own counts name it."""
    for name, amount in msgspec.structs.asdict(done).items():
        if isinstance(amount, int) and amount:
            metric.add(amount, name)


def family_of(code: str) -> str:
    """An error code as a label: statuses by their hundreds."""
    return f"{code[:6]}xx" if code.startswith("http_") and len(code) == 8 else code

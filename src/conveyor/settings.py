"""One frozen Settings, made once from the environment and passed down. Only this module reads the environment.

Each field is the variable CONVEYOR_<FIELD>; its comment is its description in `conveyor doctor` and in SPEC §9.
"""

import ipaddress
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from conveyor.errors import InvalidSetting

PREFIX = "CONVEYOR_"

_SHORTEST_SECRET = 32


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set. The defaults are the embedded system on this machine, closed to all others."""

    # Directory of the embedded engines: database, blobs, the local key.
    data: Path = Path("conveyor-data")
    # Where jobs are kept: postgres://… or dynamodb://…; embedded without it.
    records: str | None = None
    # Where tasks are kept: postgres://… or dynamodb://…; embedded without it.
    tasks: str | None = None
    # Where messages are kept: postgres://… or sqs://…; embedded without it.
    queue: str | None = None
    # Where leases and limits are kept: redis://…; embedded without it.
    coordinator: str | None = None
    # Where lists, bodies and exports are kept: s3://…, gs://… or az://…; a directory under `data` without it.
    blobs: str | None = None
    # Address that the API listens on.
    host: str = "127.0.0.1"
    # Port that the API listens on; 0 takes a free one.
    port: int = 8080
    # Server that the command line talks to.
    url: str = "http://127.0.0.1:8080"
    # Key that the command line sends; without it, the one that `conveyor up` left in the data directory.
    api_key: str | None = None
    # Module with the functions registered by @conveyor.task, as module or module:name.
    app: str | None = None
    # Worker loops in this process.
    workers: int = 1
    # Tasks that one worker loop runs at once.
    worker_concurrency: int = 256
    # Processes that fetch for the workers of this one; 0: the worker fetches in its own.
    fetchers: int = 2
    # Fetch from private, loopback and link-local addresses too.
    allow_private_targets: bool = False
    # Gateway for jobs that name none: an HTTP proxy URL, or a URL template with {url}.
    gateway: str | None = None
    # Largest request body, in bytes.
    max_request_bytes: int = 64 * 1024 * 1024
    # Most tasks in one request body.
    max_inline_tasks: int = 100_000
    # Most tasks of a job that is written in the request itself; one with more is ingested.
    sync_task_limit: int = 1000
    # Shards of a large or open job, on engines that want them.
    task_shard_count: int = 8
    # Shard on engines that do not want it too, to try the layout out.
    force_task_shards: bool = False
    # Largest staged list, in bytes, as it is stored and once decompressed.
    max_list_bytes: int = 8 * 1024 * 1024 * 1024
    # Bytes of a plain list that one ingest worker takes at a time.
    ingest_range_bytes: int = 4 * 1024 * 1024
    # Ingest loops in this process.
    ingesters: int = 2
    # Seconds until an upload that nobody made a job of expires.
    upload_seconds: float = 86_400.0
    # Seconds that an answer is kept for replay under its Idempotency-Key.
    idempotency_seconds: float = 86_400.0
    # Seconds after which an unanswered request under an Idempotency-Key may be taken over.
    idempotency_lease_seconds: float = 60.0
    # Secret that upload links are signed with and webhook secrets made from, at least 32 characters; without it, one is
    # kept in the data directory.
    signing_key: str | None = None
    # The signing key before this one: task tokens that were sealed with it can still be used.
    previous_signing_key: str | None = None
    # Runs that have a queue of their own on SQS; those beyond share one.
    run_queue_limit: int = 500
    # Seconds that a worker holds a message between heartbeats.
    lease_seconds: float = 30.0
    # Starts of a chunk without an outcome before its tasks are tried alone; then as many again for each.
    max_lost_starts: int = 3
    # Longest time a result waits for others before it is written, in seconds.
    flush_seconds: float = 0.05
    # Longest time between two writes of a long task's progress, in seconds.
    progress_seconds: float = 120.0
    # Part of a long task, of 1, after which its progress is written sooner.
    progress_share: float = 0.05
    # Seconds without progress after which a long task counts as stuck.
    stuck_after: float = 600.0
    # Seconds between two passes of the monitor.
    monitor_seconds: float = 60.0
    # Times that a run past its deadline is queued again before it fails.
    deadline_tries: int = 3
    # References that come again which a worker takes for each new one, while there are both.
    recovery_ratio: int = 4
    # Part of a target's attempts, of 1, that fail when it is taken to be down; above 1: never.
    breaker_ratio: float = 0.7
    # Attempts at a target in the window before that is decided.
    breaker_least: int = 20
    # Seconds over which they are counted.
    breaker_window: float = 60.0
    # Seconds after which a target that is down is tried again; twice as long each time that it still is.
    breaker_seconds: float = 30.0
    # Longest time until it is tried again, in seconds.
    breaker_longest: float = 900.0
    # Memory for large bodies that are being read, in bytes, over all fetchers of a worker's process.
    body_budget_bytes: int = 512 * 1024 * 1024
    # Memory for messages that one worker loop holds, in bytes; above it only runs that wait for work get more.
    worker_held_bytes: int = 128 * 1024 * 1024
    # Tasks that all workers together run at once; 0: as many as each may.
    fleet_concurrency: int = 0
    # Worker loops that must be alive for jobs to be accepted.
    min_workers: int = 0
    # Unfinished tasks of all tenants above which no more are accepted.
    max_queued_tasks: int = 50_000_000
    # Unfinished tasks of one tenant above which no more are accepted.
    tenant_queued_tasks: int = 10_000_000
    # Jobs that have not ended, of all tenants, above which no more are accepted.
    max_jobs: int = 10_000
    # Jobs that have not ended, of one tenant, above which no more are accepted.
    tenant_jobs: int = 1_000
    # Bytes of lists that wait for their ingest, of all tenants, above which no more are accepted.
    max_staged_bytes: int = 256 * 1024 * 1024 * 1024
    # Bytes of lists that wait for their ingest, of one tenant, above which no more are accepted.
    tenant_staged_bytes: int = 64 * 1024 * 1024 * 1024
    # Requests with a body that are carried out at once in this process.
    max_requests: int = 1000
    # Bytes of their bodies together.
    max_requests_bytes: int = 512 * 1024 * 1024
    # Largest piece that a download is kept in, in bytes; small files are kept in smaller ones.
    download_piece_bytes: int = 16 * 1024 * 1024
    # Times that a failed call of an export API is made again.
    export_retries: int = 5
    # Seconds before the first of them.
    export_retry_base: float = 60.0
    # How many times longer each wait is than the one before.
    export_retry_rate: float = 2.0
    # Longest wait before a call of an export API is made again, in seconds.
    export_retry_cap: float = 900.0
    # Processes that run the handlers of a worker's python tasks; 0 runs them inside the worker, without protection.
    handler_processes: int = 2
    # Handlers that are not async which one such process runs at once.
    handler_threads: int = 16
    # Calls after which such a process is replaced; 0: never.
    handler_calls: int = 1_000_000
    # Memory above which such a process is replaced, in MiB; 0: never.
    handler_mib: int = 1024
    # Seconds that the receiver of a webhook has to answer.
    webhook_timeout: float = 15.0
    # Seconds before each further try of a webhook, separated by blanks; after the last it is given up.
    webhook_retries: str = "5 30 120 600 3600 10800 28800 86400 86400"
    # Webhooks that are under way to one endpoint at once, in this process.
    webhook_concurrency: int = 8
    # Webhooks that are under way at once in all, in this process; a tenant may have a quarter of them.
    webhook_slots: int = 256
    # Seconds that a webhook and the log of its tries are kept.
    webhook_log_seconds: float = 1_209_600.0
    # Seconds that the old secret of an endpoint signs beside the new one.
    webhook_overlap_seconds: float = 86_400.0
    # Most endpoints of one tenant.
    max_webhooks: int = 50
    # Least seconds between two notices that tasks of a run have failed.
    failure_notice_seconds: float = 60.0
    # Event streams that one tenant may have open at once, in this process.
    max_streams: int = 50
    # Most schedules of one tenant.
    max_schedules: int = 1000
    # Most fires of a schedule that are made up for after a downtime, if it asks for all.
    schedule_catch_up: int = 100
    # Seconds after which a fire that is skipped when missed counts as missed.
    schedule_grace_seconds: float = 60.0
    # Seconds that a schedule may take to read its list from a URL.
    schedule_fetch_seconds: float = 600.0
    # Where the state machines are that wait for jobs: stepfunctions://REGION; without it, jobs carry no task tokens.
    step_functions: str | None = None
    # HeartbeatSeconds of those state machines, unless a job says otherwise: heartbeats are sent well within it.
    callback_heartbeat_seconds: float = 300.0
    # Seconds without any progress of a run after which a state machine that waits for it is told WORKER_STUCK.
    callback_stuck_after: float = 1200.0
    # Seconds that is kept what a state machine was told.
    callback_log_seconds: float = 1_209_600.0
    # Queues that jobs come in by, separated by blanks, the first one first: sqs://REGION/NAME, or a queue of our own.
    intake: str | None = None
    # Tenant of the jobs that come in by queue.
    intake_tenant: str = "local"
    # Loops in this process that make exports.
    exporters: int = 1
    # Seconds that an export is kept.
    export_seconds: float = 3 * 86_400.0
    # Bytes of an export that are made durable at a time: what a crash repeats.
    export_piece_bytes: int = 16 * 1024 * 1024
    # Seconds in which a link that signs in to the dashboard can be used, once.
    sign_in_link_seconds: float = 3600.0
    # Seconds after which a session of the dashboard ends.
    session_seconds: float = 14 * 86_400.0
    # Level of the log on standard error: debug, info, warning, error.
    log_level: str = "info"
    # Form of its lines: json, console, or auto, which is console on a terminal and json elsewhere.
    log_format: str = "auto"
    # Secret that a scraper sends as its Bearer token to read /metrics, at least 32 characters; without it, /metrics of
    # the API takes an administrator's key.
    metrics_token: str | None = None
    # Port on which every command that runs a role serves /metrics and /healthz too; 0: none.
    metrics_port: int = 0
    # Address of that port; one that is not loopback takes CONVEYOR_METRICS_TOKEN.
    metrics_host: str = "127.0.0.1"
    # Seconds between two looks at the depth and the age of queues, for the metrics.
    sample_seconds: float = 15.0
    # Where spans of jobs are sent, by OTLP over HTTP: http://HOST:4318; without it, none are made.
    otlp_endpoint: str | None = None
    # Part of all jobs, of 1, that are traced.
    trace_ratio: float = 0.1
    # For tests: die at a crash point, as name:n.
    crash_at: str | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> "Settings":
        """From CONVEYOR_* variables; an override that is None counts as not given."""
        source = os.environ if environ is None else environ
        raw: dict[str, Any] = {
            field: source[PREFIX + field.upper()]
            for field in cls.__struct_fields__
            if source.get(PREFIX + field.upper(), "") != ""
        }
        raw.update({name: value for name, value in overrides.items() if value is not None})
        try:
            settings = msgspec.convert(raw, cls, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise InvalidSetting(_explain(error)) from None
        _check(settings)
        return settings


def foreign_environment() -> dict[str, str]:
    """The environment for processes that run the user's own functions: all of it but Conveyor's settings, which hold
    secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _decode(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


def _explain(error: msgspec.ValidationError) -> str:
    message, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    return f"{PREFIX}{field.upper()}: {message}" if field else message


_LEAST = {
    "workers": 1,
    "worker_concurrency": 1,
    "fetchers": 0,
    "max_inline_tasks": 1,
    "max_request_bytes": 1024,
    "max_lost_starts": 1,
    "run_queue_limit": 0,
    "lease_seconds": 0.001,
    "flush_seconds": 0,
    "task_shard_count": 1,
    "max_list_bytes": 1,
    "ingest_range_bytes": 1,
    "ingesters": 1,
    "upload_seconds": 1,
    "idempotency_seconds": 1,
    "idempotency_lease_seconds": 0,
    "progress_seconds": 0.001,
    "progress_share": 0,
    "stuck_after": 0.001,
    "monitor_seconds": 0.01,
    "deadline_tries": 0,
    "recovery_ratio": 1,
    "breaker_ratio": 0.01,
    "breaker_least": 1,
    "breaker_window": 0.1,
    "breaker_seconds": 0.01,
    "breaker_longest": 0.01,
    "body_budget_bytes": 1024 * 1024,
    "worker_held_bytes": 1024 * 1024,
    "fleet_concurrency": 0,
    "min_workers": 0,
    "max_queued_tasks": 1,
    "tenant_queued_tasks": 1,
    "max_jobs": 1,
    "tenant_jobs": 1,
    "max_staged_bytes": 1,
    "tenant_staged_bytes": 1,
    "max_requests": 1,
    "max_requests_bytes": 1024 * 1024,
    "download_piece_bytes": 64 * 1024,
    "exporters": 0,
    "export_seconds": 60,
    "export_piece_bytes": 64 * 1024,
    "export_retries": 0,
    "export_retry_base": 0,
    "export_retry_rate": 1,
    "export_retry_cap": 0,
    "handler_processes": 0,
    "handler_threads": 1,
    "handler_calls": 0,
    "handler_mib": 0,
    "webhook_timeout": 0.1,
    "webhook_concurrency": 1,
    "webhook_slots": 1,
    "webhook_log_seconds": 1,
    "webhook_overlap_seconds": 0,
    "callback_heartbeat_seconds": 1,
    "callback_stuck_after": 1,
    "callback_log_seconds": 1,
    "max_webhooks": 0,
    "failure_notice_seconds": 0,
    "max_streams": 0,
    "max_schedules": 0,
    "schedule_catch_up": 1,
    "schedule_grace_seconds": 0,
    "schedule_fetch_seconds": 1,
    "sign_in_link_seconds": 1,
    "session_seconds": 1,
    "sample_seconds": 0.01,
    "trace_ratio": 0,
}
_LOG_FORMATS = ("auto", "console", "json")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _check(settings: Settings) -> None:
    for field, least in _LEAST.items():
        # Written so that a NaN is refused too.
        if not least <= getattr(settings, field) < math.inf:
            raise InvalidSetting(f"{PREFIX}{field.upper()} must be at least {least}")
    if not 0 <= settings.port <= 65535:
        raise InvalidSetting(f"{PREFIX}PORT must be between 0 and 65535")
    _check_telemetry(settings)
    if settings.log_level not in _LOG_LEVELS:
        raise InvalidSetting(f"{PREFIX}LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}")
    if not all(_is_seconds(text) for text in settings.webhook_retries.split()):
        raise InvalidSetting(f"{PREFIX}WEBHOOK_RETRIES must be numbers of seconds, separated by blanks")
    if settings.signing_key is not None and len(settings.signing_key) < _SHORTEST_SECRET:
        raise InvalidSetting(f"{PREFIX}SIGNING_KEY must have at least {_SHORTEST_SECRET} characters")
    if settings.previous_signing_key is not None and len(settings.previous_signing_key) < _SHORTEST_SECRET:
        raise InvalidSetting(f"{PREFIX}PREVIOUS_SIGNING_KEY must have at least {_SHORTEST_SECRET} characters")


def _check_telemetry(settings: Settings) -> None:
    if not 0 <= settings.metrics_port <= 65535:
        raise InvalidSetting(f"{PREFIX}METRICS_PORT must be between 0 and 65535")
    if settings.metrics_token is not None and len(settings.metrics_token) < _SHORTEST_SECRET:
        raise InvalidSetting(f"{PREFIX}METRICS_TOKEN must have at least {_SHORTEST_SECRET} characters")
    if settings.metrics_token is None and settings.metrics_port and not _is_loopback(settings.metrics_host):
        raise InvalidSetting(f"{PREFIX}METRICS_HOST is open to others: set {PREFIX}METRICS_TOKEN")
    if settings.otlp_endpoint is not None and not settings.otlp_endpoint.startswith(("http://", "https://")):
        raise InvalidSetting(f"{PREFIX}OTLP_ENDPOINT must be a URL: http://HOST:4318")
    if settings.log_format not in _LOG_FORMATS:
        raise InvalidSetting(f"{PREFIX}LOG_FORMAT must be one of {', '.join(_LOG_FORMATS)}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False

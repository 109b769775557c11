"""One frozen Settings, made once from the environment and conveyor.toml, and passed down. Only this module reads the
environment.

Each field is the variable CONVEYOR_<FIELD>; its comment is its description in `conveyor doctor` and in SPEC §9.
"""

import ipaddress
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from conveyor.config_files import ConfigFile, config_files, place_of
from conveyor.errors import InvalidSetting
from conveyor.export_places import ExportPlaces, Location

PREFIX = "CONVEYOR_"
# Where the command line looks for a server if nothing says otherwise.
DEFAULT_URL = "http://127.0.0.1:8080"

_MIN_SECRET_LENGTH = 32


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. The defaults run the embedded system on this machine, reachable from this machine only."""

    # Directory of the embedded engines: the database, the blobs and the local key.
    data: Path = Path("conveyor-data")
    # Where to keep jobs: postgres://… or dynamodb://…. Default: the embedded database.
    records: str | None = None
    # Where to keep tasks: postgres://… or dynamodb://…. Default: the embedded database.
    tasks: str | None = None
    # Task engines beside `tasks` that still hold jobs, separated by spaces: postgres://…, dynamodb://… or `embedded`.
    # Their jobs stay readable and run to their end there; new jobs go to `tasks`.
    other_tasks: str | None = None
    # Where to keep messages: postgres://… or sqs://…. Default: the embedded database.
    queue: str | None = None
    # Where to keep leases and limits: redis://…, redis+cluster://… or redis+sentinel://…. Default: the embedded
    # database.
    coordinator: str | None = None
    # Where to keep lists, bodies and exports: s3://…, gs://…, az://…, or file:///DIR for a directory that all processes
    # share. Default: a directory under `data`.
    blobs: str | None = None
    # Address that the API listens on.
    host: str = "127.0.0.1"
    # Port that the API listens on; 0 picks a free one.
    port: int = 8080
    # Host names that the API answers to, separated by spaces; *.example.com is every name below example.com, * is any.
    # Default: on a loopback address loopback names, elsewhere any.
    allowed_hosts: str | None = None
    # Addresses and networks of proxies whose X-Forwarded-Proto, -For and -Host count, separated by spaces: 10.0.0.0/8.
    # Default: none.
    trusted_proxies: str | None = None
    # URL by which clients reach the API, such as https://jobs.example.com, for links in events and in answers to state
    # machines. Default: events have no links, and answers have paths.
    public_url: str | None = None
    # How long an idle connection to the API stays open, in seconds. Keep it longer than a load balancer's idle timeout.
    keep_alive_seconds: float = 75.0
    # How long a process may take to stop after SIGTERM, in seconds; open responses are cut off after a sixth of it.
    drain_seconds: float = 60.0
    # Server that the command line talks to. Default: the `conveyor up` on the data directory, else
    # http://127.0.0.1:8080.
    url: str | None = None
    # API key that the command line sends, to CONVEYOR_URL alone. Default: the key that `conveyor up` left in the data
    # directory.
    api_key: str | None = None
    # Module with the functions registered by @conveyor.task, as module or module:name.
    app: str | None = None
    # Worker loops in this process.
    workers: int = 1
    # Maximum number of tasks that one worker loop runs at once.
    worker_concurrency: int = 256
    # Child processes that fetch for the workers of this process; 0: the worker fetches by itself.
    fetchers: int = 2
    # Allow requests to private, loopback and link-local addresses.
    allow_private_targets: bool = False
    # Gateway for jobs that name none: the URL of an HTTP or SOCKS proxy, or a URL template with {url}. Several, with
    # blanks between them, are a pool.
    gateway: str | None = None
    # File with certificates of authorities, in PEM, to trust besides those of the system: for targets, gateways,
    # webhooks and lists. It is read when a process starts.
    ca_bundle: Path | None = None
    # Allow jobs with `insecure`, whose requests verify no certificate.
    allow_insecure: bool = False
    # Maximum size of a request body, in bytes.
    max_request_bytes: int = 64 * 1024 * 1024
    # Maximum number of tasks in one request body.
    max_inline_tasks: int = 100_000
    # Maximum number of tasks of a job that the request itself writes; a larger job is ingested.
    sync_task_limit: int = 1000
    # Maximum size of a stored list that the request itself reads, in bytes; a larger list is ingested.
    sync_list_bytes: int = 64 * 1024
    # Shards of a large or open job, on engines that shard.
    task_shard_count: int = 8
    # For tests: shard on engines that do not need it, too.
    force_task_shards: bool = False
    # Maximum size of a staged list, in bytes, both stored and decompressed.
    max_list_bytes: int = 8 * 1024 * 1024 * 1024
    # Size of the ranges that a plain list is split into for ingest workers, in bytes.
    ingest_range_bytes: int = 4 * 1024 * 1024
    # Buckets from which the server reads lists for its tenants, separated by spaces: TENANT=s3://BUCKET/PREFIX, with
    # ?region= and &endpoint= where they differ from the environment; * is every tenant. Default: none.
    source_buckets: str | None = None
    # Ingest loops in this process.
    ingesters: int = 2
    # How long to keep an upload that no job uses, in seconds.
    upload_seconds: float = 86_400.0
    # How long an Idempotency-Key replays its response, in seconds.
    idempotency_seconds: float = 86_400.0
    # How long a claimed Idempotency-Key blocks other requests before they may take it over, in seconds.
    idempotency_lease_seconds: float = 60.0
    # Secret that signs upload links and derives webhook secrets, at least 32 characters. Default: a key kept in the
    # data directory.
    signing_key: str | None = None
    # The signing key before this one, so that task tokens sealed with it stay usable.
    previous_signing_key: str | None = None
    # Maximum number of runs with an SQS queue of their own; further runs share one queue.
    run_queue_limit: int = 500
    # How long a worker leases a message between two renewals, in seconds.
    lease_seconds: float = 30.0
    # Maximum number of lost starts of a chunk before its tasks run alone; then of each task before it fails.
    max_lost_starts: int = 3
    # How long a result may wait for others before it is written, in seconds.
    flush_seconds: float = 0.05
    # Maximum time between two writes of a long task's progress, in seconds.
    progress_seconds: float = 120.0
    # Share of a long task, from 0 to 1, after which its progress is written sooner.
    progress_share: float = 0.05
    # How long a long task may go without progress before it counts as stuck, in seconds.
    stuck_after: float = 600.0
    # Interval between two passes of the monitor, in seconds.
    monitor_seconds: float = 60.0
    # How long a run may stay unfinished, paused or not, before it fails, in seconds; 0: no limit.
    max_lifetime_seconds: float = 0.0
    # How often a run past its deadline is requeued before it fails.
    deadline_tries: int = 3
    # How many retried or requeued references a worker takes for each new one, while both wait.
    recovery_ratio: int = 4
    # Share of failed attempts, from 0 to 1, that opens a target's breaker; above 1 it never opens.
    breaker_ratio: float = 0.7
    # Minimum number of attempts in the window before a breaker may open.
    breaker_least: int = 20
    # Window in which a breaker counts attempts, in seconds.
    breaker_window: float = 60.0
    # How long a breaker stays open before the first probe, in seconds; doubles while probes fail.
    breaker_seconds: float = 30.0
    # Maximum time between two probes of an open breaker, in seconds.
    breaker_longest: float = 900.0
    # Memory for large bodies that are being read, in bytes, over all fetchers of this process.
    body_budget_bytes: int = 512 * 1024 * 1024
    # Memory for the messages that one worker loop has in flight, in bytes; above it only idle runs receive more.
    worker_held_bytes: int = 128 * 1024 * 1024
    # Maximum number of tasks that all workers together run at once; 0: no limit.
    fleet_concurrency: int = 0
    # Number of worker loops that must be alive before jobs are accepted.
    min_workers: int = 0
    # Maximum number of unfinished tasks of all tenants; above it the server refuses more.
    max_queued_tasks: int = 50_000_000
    # Maximum number of unfinished tasks of one tenant; above it the server refuses more.
    tenant_queued_tasks: int = 10_000_000
    # Maximum number of unfinished jobs of all tenants; above it the server refuses more.
    max_jobs: int = 10_000
    # Maximum number of unfinished jobs of one tenant; above it the server refuses more.
    tenant_jobs: int = 1_000
    # Maximum size of all lists that wait for ingest, in bytes; above it the server refuses more.
    max_staged_bytes: int = 256 * 1024 * 1024 * 1024
    # Maximum size of one tenant's lists that wait for ingest, in bytes; above it the server refuses more.
    tenant_staged_bytes: int = 64 * 1024 * 1024 * 1024
    # Maximum number of open client connections of the API; above it only health checks are answered.
    max_connections: int = 2000
    # Maximum number of requests with a body that this process handles at once.
    max_requests: int = 1000
    # Maximum total size of the request bodies that this process handles at once, in bytes.
    max_requests_bytes: int = 512 * 1024 * 1024
    # Maximum size of the pieces that a download is stored in, in bytes; small files get smaller ones.
    download_piece_bytes: int = 16 * 1024 * 1024
    # How often a failed call of an export API is retried.
    export_retries: int = 5
    # Wait before the first retry of a call of an export API, in seconds.
    export_retry_base: float = 60.0
    # Factor by which the wait grows with each further retry of a call of an export API.
    export_retry_rate: float = 2.0
    # Maximum wait before a retry of a call of an export API, in seconds.
    export_retry_cap: float = 900.0
    # Child processes that run the handlers of a worker's python tasks; 0 runs them in the worker, without isolation.
    handler_processes: int = 2
    # Maximum number of synchronous handlers that one handler process runs at once.
    handler_threads: int = 16
    # Number of calls after which a handler process is replaced; 0: never.
    handler_calls: int = 1_000_000
    # Memory above which a handler process is replaced, in MiB; 0: never.
    handler_mib: int = 1024
    # How long the receiver of a webhook may take to respond, in seconds.
    webhook_timeout: float = 15.0
    # Waits before the retries of a webhook, in seconds, separated by spaces; after the last one the delivery fails.
    webhook_retries: str = "5 30 120 600 3600 10800 28800 86400 86400"
    # Maximum number of deliveries to one endpoint at once, in this process.
    webhook_concurrency: int = 8
    # Maximum number of deliveries at once, in this process; one tenant gets at most a quarter.
    webhook_slots: int = 256
    # How long to keep a delivery and the log of its attempts, in seconds.
    webhook_log_seconds: float = 1_209_600.0
    # How long the old secret of an endpoint still signs after a rotation, in seconds.
    webhook_overlap_seconds: float = 86_400.0
    # Maximum number of webhook endpoints of one tenant.
    max_webhooks: int = 50
    # Minimum interval between two `tasks.failed` events of a run, in seconds.
    failure_notice_seconds: float = 60.0
    # Maximum number of event streams that one tenant has open at once, in this process.
    max_streams: int = 50
    # Maximum number of schedules of one tenant.
    max_schedules: int = 1000
    # Maximum number of missed fires that a schedule catches up on, if it asks for all.
    schedule_catch_up: int = 100
    # How late a fire may be before it counts as missed, in seconds.
    schedule_grace_seconds: float = 60.0
    # How long reading a whole list from a URL may take, in seconds: for a schedule, or for a job whose URL serves no
    # ranges.
    schedule_fetch_seconds: float = 600.0
    # Region of the state machines that wait for jobs: stepfunctions://REGION. Without it, jobs cannot have task tokens.
    step_functions: str | None = None
    # State machines and event buses to which the server sends events of its tenants' jobs, separated by spaces:
    # TENANT=ARN, with ?endpoint= where it differs from that of AWS; * is every tenant. Default: none.
    event_targets: str | None = None
    # HeartbeatSeconds of state machines that wait for jobs, unless a job says otherwise; heartbeats are sent well
    # within it.
    callback_heartbeat_seconds: float = 300.0
    # How long a run may go without progress before its state machine gets WORKER_STUCK, in seconds.
    callback_stuck_after: float = 1200.0
    # How long to keep the log of a callback, in seconds.
    callback_log_seconds: float = 1_209_600.0
    # Queues that jobs arrive by, separated by spaces, highest priority first: sqs://REGION/NAME, or a queue of
    # Conveyor's own.
    intake: str | None = None
    # Tenant of the jobs that arrive by queue.
    intake_tenant: str = "local"
    # Maximum number of messages that the intake receives in one batch (BatchSize); SQS returns at most 10.
    intake_batch_size: int = 5
    # Maximum number of batches that all intakes together accept at once (MaximumConcurrency).
    intake_concurrency: int = 10
    # How many batches the intake takes from a queue for each batch of the next queue, while both have messages.
    intake_priority_ratio: int = 4
    # How long a message stays in its queue when there is no capacity for its job, in seconds.
    intake_delay_seconds: float = 300.0
    # Places below which the server writes exports for its tenants, with its own credentials, separated by spaces:
    # TENANT=s3://BUCKET/PREFIX/, gs://…, az://… or file:///DIR/; * is every tenant. Default: none.
    export_buckets: str | None = None
    # Export loops in this process.
    exporters: int = 1
    # How long to keep an export, in seconds.
    export_seconds: float = 3 * 86_400.0
    # How many bytes of an export become durable at a time, and so at most how many a crash repeats.
    export_piece_bytes: int = 16 * 1024 * 1024
    # How long a link that signs in to the dashboard stays valid, in seconds; it works once.
    sign_in_link_seconds: float = 3600.0
    # Maximum number of invalid keys and sign-in links that one address may present in a minute, in this process.
    failed_keys_per_minute: int = 300
    # How long a dashboard session lasts, in seconds.
    session_seconds: float = 14 * 86_400.0
    # Level of the log on standard error: debug, info, warning or error.
    log_level: str = "info"
    # Format of the log: json, console, or auto (console on a terminal, json elsewhere).
    log_format: str = "auto"
    # Bearer token for /metrics, at least 32 characters. Without it, /metrics of the API takes an administrator's key.
    metrics_token: str | None = None
    # Port on which every command that runs a role also serves /metrics and /healthz; 0: none.
    metrics_port: int = 0
    # Address of CONVEYOR_METRICS_PORT; any other than loopback requires CONVEYOR_METRICS_TOKEN.
    metrics_host: str = "127.0.0.1"
    # How long all ticks of a role may fail before /healthz on CONVEYOR_METRICS_PORT fails, in seconds.
    unhealthy_seconds: float = 300.0
    # Interval between two samples of queue depth and age for the metrics, in seconds.
    sample_seconds: float = 15.0
    # Namespace under which the sampler also prints its backlog, on standard output, as embedded metrics of CloudWatch.
    cloudwatch_namespace: str | None = None
    # Where to send traces, by OTLP over HTTP: http://HOST:4318. Without it, none are made.
    otlp_endpoint: str | None = None
    # Share of jobs, from 0 to 1, that are traced.
    trace_ratio: float = 0.1
    # For tests: die at a crash point, as name:n.
    crash_at: str | None = None

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> "Settings":
        """Read conveyor.toml and the CONVEYOR_* variables, which win over it. An override replaces its variable,
        unless it is None."""
        source = os.environ if environ is None else environ
        files = own_files() if environ is None else []
        raw: dict[str, Any] = {}
        for file in reversed(files):
            raw.update(file.settings)
        raw.update(_variables(source))
        raw.update({name: value for name, value in overrides.items() if value is not None})
        try:
            settings = msgspec.convert(raw, cls, strict=False, dec_hook=_decode)
        except msgspec.ValidationError as error:
            raise InvalidSetting(_placed(_explain(error), files, source)) from None
        try:
            _check(settings)
        except InvalidSetting as error:
            raise InvalidSetting(_placed(error.message, files, source)) from None
        return settings


def own_files() -> list[ConfigFile]:
    """The conveyor.toml of the current directory, and the user's. Raises InvalidSetting."""
    return config_files(Path(), os.environ, Settings.__struct_fields__)


def setting_sources() -> dict[str, str]:
    """Where each setting comes from that is not its default: its variable, or a line of a file."""
    files = own_files()
    sources = {name: place_of(files, name) or "" for file in files for name in file.settings}
    return {**sources, **{name: PREFIX + name.upper() for name in _variables(os.environ)}}


def _variables(source: Mapping[str, str]) -> dict[str, str]:
    names = {field: PREFIX + field.upper() for field in Settings.__struct_fields__}
    return {field: source[name] for field, name in names.items() if source.get(name, "") != ""}


def _placed(message: str, files: list[ConfigFile], source: Mapping[str, str]) -> str:
    """The message about a variable, with the line of the file that has its value."""
    name = re.match(f"{PREFIX}([A-Z_]+)", message)
    field = "" if name is None else name[1].lower()
    place = None if field in _variables(source) else place_of(files, field)
    return message if place is None else f"{place}: {message.replace(PREFIX + field.upper(), f'`{field}`', 1)}"


def handler_environment() -> dict[str, str]:
    """The environment for processes that run the user's own functions: without Conveyor's settings, which hold
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


_MINIMUM = {
    "workers": 1,
    "worker_concurrency": 1,
    "fetchers": 0,
    "keep_alive_seconds": 0,
    "drain_seconds": 1,
    "unhealthy_seconds": 1,
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
    "max_lifetime_seconds": 0,
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
    "max_connections": 1,
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
    "intake_batch_size": 1,
    "intake_concurrency": 1,
    "intake_priority_ratio": 1,
    "intake_delay_seconds": 1,
    "max_webhooks": 0,
    "failure_notice_seconds": 0,
    "max_streams": 0,
    "max_schedules": 0,
    "schedule_catch_up": 1,
    "schedule_grace_seconds": 0,
    "schedule_fetch_seconds": 1,
    "sign_in_link_seconds": 1,
    "failed_keys_per_minute": 1,
    "session_seconds": 1,
    "sample_seconds": 0.01,
    "trace_ratio": 0,
}
_PUBLIC_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")
_BUCKET_URL = re.compile(r"(?P<scheme>s3|gs|az)://(?P<bucket>[^/?#]+)(?P<path>[^?#]*)")
_LOG_FORMATS = ("auto", "console", "json")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _check(settings: Settings) -> None:
    for field, minimum in _MINIMUM.items():
        # In this form, the comparison refuses a NaN too.
        if not minimum <= getattr(settings, field) < math.inf:
            raise InvalidSetting(f"{PREFIX}{field.upper()} must be at least {minimum}")
    if not 0 <= settings.port <= 65535:
        raise InvalidSetting(f"{PREFIX}PORT must be between 0 and 65535")
    if not all(_is_network(text) for text in (settings.trusted_proxies or "").split()):
        raise InvalidSetting(f"{PREFIX}TRUSTED_PROXIES must be addresses or networks, separated by spaces: 10.0.0.0/8")
    if settings.public_url is not None and not _PUBLIC_URL.fullmatch(settings.public_url):
        raise InvalidSetting(f"{PREFIX}PUBLIC_URL must be a URL without a query: https://jobs.example.com")
    blob_directory(settings)
    export_places(settings)
    _check_telemetry(settings)
    if settings.log_level not in _LOG_LEVELS:
        raise InvalidSetting(f"{PREFIX}LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}")
    if not all(_is_seconds(text) for text in settings.webhook_retries.split()):
        raise InvalidSetting(f"{PREFIX}WEBHOOK_RETRIES must be numbers of seconds, separated by spaces")
    if settings.signing_key is not None and len(settings.signing_key) < _MIN_SECRET_LENGTH:
        raise InvalidSetting(f"{PREFIX}SIGNING_KEY must have at least {_MIN_SECRET_LENGTH} characters")
    if settings.previous_signing_key is not None and len(settings.previous_signing_key) < _MIN_SECRET_LENGTH:
        raise InvalidSetting(f"{PREFIX}PREVIOUS_SIGNING_KEY must have at least {_MIN_SECRET_LENGTH} characters")


def _check_telemetry(settings: Settings) -> None:
    if not 0 <= settings.metrics_port <= 65535:
        raise InvalidSetting(f"{PREFIX}METRICS_PORT must be between 0 and 65535")
    if settings.metrics_token is not None and len(settings.metrics_token) < _MIN_SECRET_LENGTH:
        raise InvalidSetting(f"{PREFIX}METRICS_TOKEN must have at least {_MIN_SECRET_LENGTH} characters")
    if settings.metrics_token is None and settings.metrics_port and not is_loopback(settings.metrics_host):
        raise InvalidSetting(f"{PREFIX}METRICS_HOST is not a loopback address. Set {PREFIX}METRICS_TOKEN")
    if settings.otlp_endpoint is not None and not settings.otlp_endpoint.startswith(("http://", "https://")):
        raise InvalidSetting(f"{PREFIX}OTLP_ENDPOINT must be a URL: http://HOST:4318")
    if settings.log_format not in _LOG_FORMATS:
        raise InvalidSetting(f"{PREFIX}LOG_FORMAT must be one of {', '.join(_LOG_FORMATS)}")


def blob_directory(settings: Settings) -> Path | None:
    """The directory that holds the blobs; None where an object store does."""
    if settings.blobs is None:
        return settings.data / "blobs"
    if not settings.blobs.startswith("file:"):
        return None
    place = urlsplit(settings.blobs)
    path = Path(unquote(place.path))
    if place.netloc or place.query or place.fragment or not place.path.startswith("/") or path == Path("/"):
        raise InvalidSetting(f"{PREFIX}BLOBS must name an absolute directory: file:///srv/conveyor/blobs")
    return path


def export_places(settings: Settings) -> ExportPlaces:
    """Where the server may write exports. Raises InvalidSetting if that is where it keeps its own data."""
    places = ExportPlaces.parse(settings.export_buckets)
    for own in _own_locations(settings):
        for place in places.locations:
            if place.is_below(own) or own.is_below(place):
                raise InvalidSetting(
                    f"{PREFIX}EXPORT_BUCKETS: {place.url} is where the server keeps its own data. List another place."
                )
    return places


def _own_locations(settings: Settings) -> list[Location]:
    directories = [settings.data, blob_directory(settings)]
    # Without a look at the disk.
    paths = [os.path.abspath(path) for path in directories if path is not None]  # noqa: PTH100  (resolve() follows links)
    own = [Location("file", "", Path(path).parts[1:]) for path in paths]
    # As its engine reads it, which takes more prefixes than a place may have.
    if (blobs := _BUCKET_URL.match(settings.blobs or "")) is not None:
        own.append(Location(blobs["scheme"], blobs["bucket"], tuple(filter(None, blobs["path"].split("/")))))
    return own


def public_link(public_url: str | None, link: str) -> str:
    """A path of the API as an absolute link, where CONVEYOR_PUBLIC_URL says how clients reach it."""
    return link if public_url is None or not link.startswith("/") else public_url.rstrip("/") + link


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _is_seconds(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False

"""Typed options of jobs and exports, and filters for tasks.

The names and meanings are those of SPEC §7.3. The server checks the values and has the defaults.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from conveyor.errors import BadInput

Kind: TypeAlias = Literal["fetch", "download", "export_download", "python"]
ListFormat: TypeAlias = Literal["text", "jsonl", "csv"]
Compression: TypeAlias = Literal["none", "gzip", "zstd", "bzip2"]
ResultLayout: TypeAlias = Literal["object", "packed"]
Status: TypeAlias = Literal["pending", "succeeded", "failed", "cancelled"]
ExportFormat: TypeAlias = Literal["zip", "jsonl", "csv", "parquet"]
ExportCompression: TypeAlias = Literal["none", "deflate", "gzip", "zstd"]
ExportBodies: TypeAlias = Literal["none", "file", "text", "base64", "binary"]


class BackoffOptions(TypedDict, total=False):
    """Delay before the next attempt, in seconds."""

    base: float
    rate: float
    cap: float
    jitter: bool


class PooledGatewayOptions(TypedDict, total=False):
    """One gateway of a pool, which gets requests in proportion to its weight."""

    proxy: str | None
    url: str | None
    headers: Mapping[str, str]
    weight: int


class GatewayOptions(TypedDict, total=False):
    """Fetch through a proxy, or an API gateway given as a template with {url}; or through one of a pool of them."""

    proxy: str | None
    url: str | None
    headers: Mapping[str, str]
    pool: Sequence[PooledGatewayOptions]
    sticky: Literal["host"] | None


class FailureThresholdOptions(TypedDict, total=False):
    """When a job fails because too many of its tasks failed."""

    failed: int | None
    ratio: float | None
    after: int


class OutageOptions(TypedDict, total=False):
    """How to retry while a target is down."""

    quick_tries: int
    delay: float


class BreakerOptions(TypedDict, total=False):
    """Whether tasks wait while their target is down, and for how long."""

    enabled: bool
    patience: float


class DownloadOptions(TypedDict, total=False):
    """How to download a large file."""

    max_bytes: int
    min_rate: float
    min_rate_seconds: float


class ExportCallOptions(TypedDict):
    """A request to an export API."""

    url: str
    method: NotRequired[str | None]
    headers: NotRequired[Mapping[str, str]]
    body: NotRequired[Any]


class ExportPollOptions(TypedDict, total=False):
    """How often to poll the state of an export."""

    first: float
    rate: float
    cap: float
    timeout: float


class ExportRetryOptions(TypedDict, total=False):
    """How often to retry a failed call."""

    retries: int
    base: float
    rate: float
    cap: float


class ExportApiOptions(TypedDict):
    """An API that makes a file on request."""

    create: ExportCallOptions
    id: str
    status: ExportCallOptions
    state: str
    ready: Sequence[str]
    download: str | ExportCallOptions
    failed: NotRequired[Sequence[str]]
    poll: NotRequired[ExportPollOptions]
    retry: NotRequired[ExportRetryOptions | None]


class JobOptions(TypedDict, total=False):
    """How to run the tasks of a job."""

    concurrency: int
    rate_per_host: float | None
    concurrency_per_host: int | None
    pace: Literal["auto", "fixed"] | None
    attempts: int
    backoff: BackoffOptions
    retry_statuses: Sequence[int]
    retry_errors: Sequence[str] | None
    outage: OutageOptions | None
    on_exhausted: Literal["fail", "dead_letter"]
    upstream: str | None
    breaker: BreakerOptions
    task_deadline: float | None
    deadline: float | None
    stuck_after: float | None
    timeout: float
    connect_timeout: float
    max_body_bytes: int
    max_redirects: int
    headers: Mapping[str, str]
    success_statuses: Sequence[int]
    gateway: GatewayOptions | None
    insecure: bool
    http2: bool
    robots: Literal["obey", "ignore"] | None
    handler: str | None
    extract: str | None
    keep_bodies: bool
    changed_from: str | None
    download: DownloadOptions
    export: ExportApiOptions | None
    priority: int
    retention_days: float
    max_lifetime: float | None
    failure_threshold: FailureThresholdOptions | None
    chunk_size: int
    on_invalid: Literal["skip", "reject"]
    idle_timeout: float


class Filter(TypedDict, total=False):
    """Select tasks that match all conditions, by their latest outcome over all runs. `run`, the id or number of a run
    or "latest", selects in that run alone."""

    status: Status | None
    error_code: str | None
    http_status: int | None
    tag: str | None
    run: str | int | None


class ExportOptions(Filter, total=False):
    """Which results to export, and how. The default format is that of the file name, else zip."""

    format: ExportFormat | None
    compression: ExportCompression | None
    bodies: ExportBodies | None
    part_bytes: int | None
    # A template for the names of bodies in a zip, such as "{tag}/{id}{ext}".
    names: str | None
    # Export the results so far while the job is still running.
    partial: bool
    # Only tasks of the latest run, or of `run`, that succeeded with another body than before.
    changed: bool


def rerun_choice(
    failed: bool = False,
    cancelled: bool = False,
    all: bool = False,
    error_code: str | None = None,
    http_status: int | None = None,
    tag: str | None = None,
    damaged: bool = False,
    extract_only: bool = False,
    host: str | None = None,
    indexes: Sequence[int] | None = None,
    changed_only: bool = False,
) -> str | dict[str, Any]:
    """Make the `select` of POST /v1/jobs/{id}/rerun: by default failed tasks, or all that can be extracted from or
    compared. Raises BadInput."""
    conditions: dict[str, Any] = {"error_code": error_code, "http_status": http_status, "tag": tag, "host": host}
    if indexes is not None and not indexes:
        raise BadInput("`indexes` is empty. Name at least one task, or leave it out.")
    conditions["indexes"] = None if indexes is None else list(indexes)
    conditions["damaged"] = True if damaged else None
    conditions = {name: value for name, value in conditions.items() if value is not None}
    statuses = [status for status, is_selected in (("failed", failed), ("cancelled", cancelled)) if is_selected]
    if all and (conditions or statuses):
        raise BadInput("`all` selects every task and cannot be combined with other conditions.")
    if all:
        return "all"
    if extract_only and not conditions and statuses == ["failed"]:
        # Those whose extraction failed; the others have nothing to extract from.
        return "failed"
    default = "all" if extract_only or changed_only else "failed"
    return {**conditions, **({"status": statuses} if statuses else {})} or default

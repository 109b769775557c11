"""The nouns: job, run, task, result. Values are frozen and do no I/O."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Generic, Literal, NamedTuple, NewType, TypeVar

import msgspec

from conveyor.states import INGEST_CODES, RunState, TaskStatus

TenantId = NewType("TenantId", str)
JobId = NewType("JobId", str)
RunId = NewType("RunId", str)
TaskId = NewType("TaskId", str)
# A task's input as JSON text: a URL string or an object for `fetch`, any value for `python`.
InputJson = NewType("InputJson", str)

T = TypeVar("T")

MAX_INDEX = (1 << 40) - 1

_TASK_ID = re.compile(r"[0-9a-f]{64}")

# The prefix of uploaded lists in blob storage.
UPLOADS = "uploads/"


def first_run_id(job_id: str) -> RunId:
    """Derived from the job's id: a second attempt of a submit under the same claim writes the same rows."""
    return RunId(job_id.replace("job_", "run_", 1))


def task_id(run_id: RunId, index: int) -> TaskId:
    """Deterministic: writing a task twice overwrites it and never makes a second one."""
    return TaskId(sha256(f"{run_id}:{index}".encode()).hexdigest())


def is_task_id(text: str) -> bool:
    """Whether a text may be the id of a task."""
    return _TASK_ID.fullmatch(text) is not None


def shard_of(task: TaskId, shard_count: int) -> int:
    """fnv32a(task_id) % N; a job with N ≤ 1 has one shard."""
    return 0 if shard_count <= 1 else fnv32a(task) % shard_count


def fnv32a(text: str) -> int:
    """The hash that spreads keys. Its values are stored, so it never changes."""
    acc = 0x811C9DC5
    for byte in text.encode():
        acc = ((acc ^ byte) * 0x01000193) & 0xFFFFFFFF
    return acc


class JobKind(StrEnum):
    """Which executor runs the tasks."""

    FETCH = "fetch"
    DOWNLOAD = "download"
    EXPORT_DOWNLOAD = "export_download"
    PYTHON = "python"


# Kinds whose tasks may take hours: a message carries one reference, and a worker takes no more than it can start.
LONG_KINDS = frozenset({JobKind.DOWNLOAD, JobKind.EXPORT_DOWNLOAD})
# Kinds whose tasks are requests to hosts, which get them at a pace.
PACED_KINDS = frozenset({JobKind.FETCH, JobKind.DOWNLOAD})


class ResultLayout(StrEnum):
    """How bodies are stored: one object each, or many in a segment. Fixed when the job is accepted."""

    OBJECT = "object"
    PACKED = "packed"


class ListFormat(StrEnum):
    """What a line of a list is: a URL, an input as JSON, or a row under a header."""

    TEXT = "text"
    JSONL = "jsonl"
    CSV = "csv"


# Endings of file names, for the SDK and the server alike.
_LIST_SUFFIXES = {
    ".jsonl": ListFormat.JSONL,
    ".ndjson": ListFormat.JSONL,
    ".csv": ListFormat.CSV,
    ".tsv": ListFormat.CSV,
    ".txt": ListFormat.TEXT,
}
_COMPRESSED_SUFFIXES = frozenset({".gz", ".zst", ".zstd", ".bz2"})


def format_from_name(path: str) -> ListFormat | None:
    """The format that the name of a list file indicates, or None."""
    suffixes = [suffix.lower() for suffix in PurePath(path).suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED_SUFFIXES:
        suffixes.pop()
    return _LIST_SUFFIXES.get(suffixes[-1]) if suffixes else None


class Compression(StrEnum):
    """How a staged list is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"
    BZIP2 = "bzip2"


class Mode(StrEnum):
    """Whether the list is complete when the job is accepted, or tasks are added until the job is closed."""

    CLOSED = "closed"
    OPEN = "open"


class OnInvalid(StrEnum):
    """What to do with invalid lines: skip and show them, or reject the whole list."""

    SKIP = "skip"
    REJECT = "reject"


class OnExhausted(StrEnum):
    """What becomes of a task that fails because no retry is left: it only fails, or it is a dead letter as well."""

    FAIL = "fail"
    DEAD_LETTER = "dead_letter"


class Backoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delay before attempt n+1: random in [0, min(cap, base * rate**(n-1))] when `jitter`, else that bound."""

    base: float = 1.0
    rate: float = 2.0
    cap: float = 300.0
    jitter: bool = True


class Sticky(StrEnum):
    """What stays with one gateway of a pool: all requests to a host."""

    HOST = "host"


class PooledGateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One gateway of a pool. It gets requests in proportion to its weight."""

    proxy: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    weight: int = 1


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fetch through a proxy (`proxy`, an HTTP proxy URL) or an API gateway (`url`, a template with {url}); or through
    one of a `pool` of them."""

    proxy: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    pool: Sequence[PooledGateway] = ()
    # None: each attempt may go through another gateway of the pool.
    sticky: Sticky | None = None

    @property
    def members(self) -> "tuple[Gateway, ...]":
        """The gateways of the pool; without one, this gateway."""
        return tuple(Gateway(each.proxy, each.url, each.headers) for each in self.pool) or (self,)


class FailureThreshold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fail the job at `failed` failed tasks, or when more than `ratio` of at least `after` finished tasks failed."""

    failed: int | None = None
    ratio: float | None = None
    after: int = 100


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to do while a target is down: after each `quick_tries` attempts in a row, the task waits `delay` seconds in
    the queue, without a worker."""

    quick_tries: int = 2
    delay: float = 900.0


class Breaking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whether a breaker keeps tasks from a target that is down, without spending attempts; and for how many seconds,
    before the tasks fail."""

    enabled: bool = True
    patience: float = 3600.0


class Download(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to download a large file: at most `max_bytes`. An attempt fails, and is retried, when it receives fewer than
    `min_rate` bytes a second over `min_rate_seconds`."""

    max_bytes: int = 50 * 1024**3
    min_rate: float = 1024.0
    min_rate_seconds: float = 60.0


class ExportCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request to an export API, with placeholders {input}, {input.name}, {id} and {task_id}. A body that is not text
    is sent as JSON."""

    url: str
    # Default: POST to create the export, GET for the other calls.
    method: str | None = None
    headers: Mapping[str, str] = {}
    body: Any = None


class ExportPoll(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How often to poll the state of an export, and for how long in all, in seconds."""

    first: float = 5.0
    rate: float = 1.5
    cap: float = 60.0
    timeout: float = 86_400.0


class ExportRetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How often to retry a failed call of the export API, and the backoff in seconds."""

    retries: int = 5
    base: float = 60.0
    rate: float = 2.0
    cap: float = 900.0


class ExportApi(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An API that makes a file on request. `id`, `state` and `download` are paths into its responses, as a JSON Pointer
    (/data/id) or a dotted path ($.data.id); `download` may be a call of its own."""

    create: ExportCall
    id: str
    status: ExportCall
    state: str
    ready: Sequence[str]
    download: str | ExportCall
    failed: Sequence[str] = ()
    poll: ExportPoll = ExportPoll()
    # None: the default of the server.
    retry: ExportRetry | None = None


class Pace(StrEnum):
    """How many requests a host gets at once: `auto` finds it by how the host responds, `fixed` is what the job's limits
    allow."""

    AUTO = "auto"
    FIXED = "fixed"


class RobotsMode(StrEnum):
    """Whether to fetch what robots.txt of a site disallows."""

    OBEY = "obey"
    IGNORE = "ignore"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How to run a job's tasks. Every field has a default that is polite and safe."""

    concurrency: int = 64
    rate_per_host: float | None = None
    concurrency_per_host: int | None = None
    # None: fixed, as jobs of earlier versions are stored; accept/default_pace.py is for new ones.
    pace: Pace | None = None
    attempts: int = 4
    backoff: Backoff = Backoff()
    retry_statuses: Sequence[int] = (408, 425, 429, 500, 502, 503, 504)
    # Error codes to retry; None: those of transient failures.
    retry_errors: Sequence[str] | None = None
    # None: every retry waits for the backoff.
    outage: Outage | None = None
    on_exhausted: OnExhausted = OnExhausted.FAIL
    # The name of the target that the tasks depend on; None: the host of each task, and the gateway.
    upstream: str | None = None
    breaker: Breaking = Breaking()
    # Seconds after the start of its first attempt in which a task may start another; None: no limit.
    task_deadline: float | None = None
    # Seconds after which a run is overdue: its unfinished tasks are requeued a few times, then the run fails.
    deadline: float | None = None
    # Seconds without progress after which a long task is stuck; None: the default of the server.
    stuck_after: float | None = None
    timeout: float = 30.0
    connect_timeout: float = 10.0
    max_body_bytes: int = 32 * 1024 * 1024
    max_redirects: int = 5
    headers: Mapping[str, str] = {}
    # Empty means 200 to 299.
    success_statuses: Sequence[int] = ()
    gateway: Gateway | None = None
    # Whether connections to targets, and to the job's own gateway, are made without verifying certificates.
    insecure: bool = False
    # Whether sites may choose HTTP/2 in the TLS handshake.
    http2: bool = False
    # For the kinds "fetch" and "download"; None: ignore.
    robots: RobotsMode | None = None
    # The registered name of the function, for kind "python".
    handler: str | None = None
    # The registered name of the function that gets each body, for kinds that fetch; None: bodies are only stored.
    extract: str | None = None
    # Whether bodies are stored from which `extract` has got its result.
    keep_bodies: bool = True
    # The id of an earlier job: the first run compares pages with those of its tasks. None: with nothing.
    changed_from: str | None = None
    # For the kinds "download" and "export_download".
    download: Download = Download()
    # For kind "export_download".
    export: ExportApi | None = None
    # Workers take tasks of a tenant's run with a higher number first.
    priority: int = 0
    # Days after the end of the latest run for which the job is kept.
    retention_days: float = 14.0
    # Seconds after its creation at which an unfinished run fails, paused or not; None: never.
    max_lifetime: float | None = None
    failure_threshold: FailureThreshold | None = None
    chunk_size: int = 100
    on_invalid: OnInvalid = OnInvalid.SKIP
    # Seconds without a new batch after which an open job is closed.
    idle_timeout: float = 3600.0


class TaskSeed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A task before it has run."""

    index: int
    input: InputJson
    # Of a task of a rerun: the latest outcome that it has from the runs before, as `prior_text` writes it.
    prior: str | None = None


class TaskRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A reference: what a worker needs to run one task. It travels in a Chunk, with what its references share."""

    index: int
    input: InputJson
    attempt: int = 1
    # When its first attempt started, in seconds since 1970; 0: none has.
    since: int = 0


class RunKey(msgspec.Struct, frozen=True, array_like=True):
    """The key of a run's rows, in every engine."""

    tenant: TenantId
    job_id: JobId
    run_id: RunId
    shard_count: int = 1
    # The id of the task engine that holds the rows; empty: the configured one.
    store: str = ""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A message on a run's queue: references of one run. `version` is for messages in flight during a deploy."""

    run: RunKey
    refs: list[TaskRef]
    version: int = 1
    # Its task was in a chunk that lost its workers too often, and now runs alone.
    alone: bool = False
    # Why its task fails without another attempt: a poison task that killed its workers.
    lost: str = ""
    # The error code of a task that fails for another reason than that.
    code: str = ""
    # Its generation: how often the monitor had requeued its task. A message of an older generation is dropped.
    turn: int = 0
    # When its retry is due, by the wall clock; 0 if it waits for a breaker, and may start as soon as that closes.
    due: float = 0.0


class RemoteSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A list that the ingester reads where it is: an object in a bucket, or the response of a URL. The version is the
    one that the client named, or the one that the ingest found first."""

    url: str
    headers: dict[str, str] = {}
    version_id: str | None = None
    etag: str | None = None
    last_modified: str | None = None


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A list at the time when the job was accepted. Ingest refuses one whose hash has changed."""

    # Empty for a list that is not staged.
    key: str
    size: int
    # Empty for a list that nobody has read yet.
    sha256: str
    # None: detected from the first bytes.
    format: ListFormat | None = None
    compression: Compression | None = None
    remote: RemoteSource | None = None
    # The column of a csv that has the URLs; None: `url`.
    url_column: str | None = None


class Walk(NamedTuple):
    """Tasks of an earlier run that a rerun copies: those in one shard, or in all, with one status, or with any. It is
    stored as a JSON array with its tag; a Source is stored as an object."""

    run_id: RunId
    # None: all shards.
    shard: int | None
    # None: any status.
    status: TaskStatus | None
    origin: Literal["walk"] = "walk"

    @property
    def size(self) -> int:
        """In bytes, as that of a list: a walk reads none."""
        return 0


class IngestJob(msgspec.Struct, frozen=True, tag="ingest_job", tag_field="op"):
    """A message on the control queue: split the run's list into ranges."""

    tenant: TenantId
    job_id: JobId
    run_id: RunId
    version: int = 1


class IngestRange(msgspec.Struct, frozen=True, tag="ingest_range", tag_field="op"):
    """A message on the control queue: ingest one range of the run's list."""

    tenant: TenantId
    job_id: JobId
    run_id: RunId
    number: int
    version: int = 1


# The form of a walk in ranges that earlier versions stored: JSON in the key of a source without a hash. -1: all shards.
_stored_walk = msgspec.json.Decoder(tuple[RunId, int, TaskStatus | None])


class Range(msgspec.Struct, frozen=True):
    """A part of a list that one ingester reads, with its checkpoint. Everything before `offset` is durable and enqueued
    as the tasks below `index`."""

    number: int
    # Its origin.
    source: Source | Walk
    format: ListFormat
    compression: Compression
    # Where it starts and ends, in bytes of the decompressed list; None: the end of the list.
    start: int
    end: int | None
    first_index: int
    header: str | None = None
    # Of the bytes between start and end; None for a range that reads the whole source, whose hash is known.
    sha256: str | None = None
    index: int = 0
    offset: int = 0
    tasks: int = 0
    invalid: int = 0
    done: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.source, Source) and not self.source.sha256:
            run_id, shard, status = _stored_walk.decode(self.source.key)
            walk = Walk(run_id, None if shard < 0 else shard, status)
            msgspec.structs.force_setattr(self, "source", walk)


MAX_RETENTION_DAYS = 365
_DAY = 86_400.0


def expiry_of(options: Options, ended_at: float | None) -> float | None:
    """When a job whose latest run ended at this time expires; None: the run has not finished."""
    return None if ended_at is None else ended_at + options.retention_days * _DAY


# The reason of a run whose ingest failed begins with this.
INGEST_FAILED = "ingest failed: "


class Ingested(msgspec.Struct, frozen=True):
    """The progress of a run's ingest, summed over its ranges."""

    ranges: int
    ranges_done: int
    tasks: int
    invalid: int
    # Bytes of the decompressed list; the total of a compressed one is unknown until it is read.
    bytes_read: int
    bytes_total: int | None

    @property
    def done(self) -> bool:
        return self.ranges_done == self.ranges


class UploadRecord(msgspec.Struct, frozen=True):
    """An upload: a place for one list, reserved before the client sends the list."""

    tenant: TenantId
    upload_id: str
    key: str
    size: int
    sha256: str
    created_at: float
    expires_at: float
    stored_at: float | None = None


class TaskError(msgspec.Struct, frozen=True):
    """Why a task failed, or why an attempt is retried."""

    code: str
    message: str


class StoredAs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How a body is encoded where it is stored."""

    # `deflate` is raw deflate (RFC 1951). A later version may know others.
    encoding: str
    # Stored bytes.
    length: int
    # CRC-32 of the body, and of the stored bytes.
    crc: int
    stored_crc: int


class BlockSums(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Checksums of the blocks of a long body."""

    # Bytes of each block but the last.
    size: int
    # A CRC-32 for each, in four bytes; base64 in JSON.
    crcs: bytes


class BodyRef(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a body is: here in the row, an object of its own, `stored_length` bytes at `offset` of a segment, or
    several pieces."""

    # Empty for a body in the row.
    key: str
    # Of the body itself, however it is stored.
    length: int
    sha256: str
    # -1: the object holds only this body.
    offset: int = -1
    # Above 0: it is in the objects `piece_key(key, 0)` and on, each of this size but the last.
    piece: int = 0
    # A small body itself; base64 in JSON.
    inline: bytes | None = None
    # None: it is stored as it is.
    stored: StoredAs | None = None
    # Of a body over 8 MiB; none in rows of earlier versions.
    sums: BlockSums | None = None

    @property
    def stored_length(self) -> int:
        """How many bytes it takes where it is stored."""
        return self.length if self.stored is None else self.stored.length


def piece_key(key: str, number: int) -> str:
    """The key of the object that holds one piece of a body."""
    return f"{key}/{number:06d}"


class Outcome(msgspec.Struct, gc=False):
    """The outcome of one attempt. Status, error and attempts decide whether the task is retried (`retry_delay`);
    `retry_after` is the delay in seconds that the target asked for, on top of the backoff."""

    status: TaskStatus
    http_status: int | None = None
    error: TaskError | None = None
    # As it is to be stored: see `stored`.
    body: bytes | memoryview | None = None
    content_type: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None
    elapsed: float = 0.0
    retry_after: float | None = None
    # The JSON of its detail and the digest of its body, if another process has computed them already.
    detail: str | None = None
    sha256: str | None = None
    # How another process has encoded the body already, and the length that it had before.
    stored: StoredAs | None = None
    length: int = 0
    # A body that the executor has stored already.
    kept: BodyRef | None = None
    # The segment that holds the body, if a fetcher has written it: the detail says where. It is not durable yet.
    segment: str | None = None
    # False: the task only waits. It is requeued after `retry_after`, as the same attempt.
    spends_attempt: bool = True
    # When the task's first attempt started, if the executor knows it and the reference may not; else 0.
    since: int = 0
    # Whether the task waits for a breaker.
    is_blocked: bool = False
    # What the job's `extract` made of the body, as JSON, and where that is stored, once it is durable.
    extracted: bytes | None = None
    extracted_ref: BodyRef | None = None
    # Seconds until the head of the last response had arrived; 0: none did, or the executor does not know.
    first_byte: float = 0.0
    # The page is the one that an earlier run stored; and what that run extracted from it holds, too.
    unchanged: bool = False
    keeps_extracted: bool = False


class ResultDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a finished task that no query filters by; stored as one JSON value in its row."""

    error: TaskError | None = None
    content_type: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None
    body: BodyRef | None = None
    elapsed: float = 0.0
    # It failed and waits for a redrive.
    dead_lettered: bool = False
    # What the job's `extract` made of the body.
    extracted: BodyRef | None = None
    # As in Outcome, and the worker, of a slow attempt.
    first_byte: float = 0.0
    worker: str = ""


# The kind of the documents of exports.
EXPORT = "export"


def export_prefix(tenant: TenantId, job_id: JobId, export_id: str) -> str:
    """The prefix of all objects of an export: its files, and the pieces that they are made of."""
    return f"exports/{tenant}/{job_id}/{export_id}"


# The kind of the documents with the progress of long tasks.
PROGRESS = "progress"


def progress_id(run_id: RunId, index: int) -> str:
    """The id of the progress document of one task."""
    return f"{run_id}:{index}"


class TaskProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a long task: the body of its document, as JSON. The document is due when the task is stuck, and
    never while no attempt runs. An attempt writes the document when it starts, and so takes the task over."""

    run_id: RunId
    index: int
    attempt: int
    # The attempt that owns the task; empty after the monitor took it over.
    holder: str
    at: float
    done: int = 0
    total: int | None = None
    # A second, over the last interval.
    rate: float = 0.0
    note: str | None = None
    # Attempts in a row that were lost without progress beyond `begun`, where they started.
    lost: int = 0
    begun: int = 0
    # Its generation: how often the monitor took it from a stuck or lost attempt and requeued it.
    turn: int = 0
    # What the executor needs to resume.
    state: msgspec.Raw = msgspec.Raw(b"null")
    # When the task's first attempt started, in seconds since 1970; 0 in documents of earlier versions.
    since: int = 0


# The kind and the tenant of the documents that list the long tasks of a worker.
BEAT = "worker"
BEAT_TENANT = TenantId("~workers")
# The semaphore of which each live worker has one permit.
WORKERS = "workers"


class LongTask(msgspec.Struct, frozen=True, array_like=True):
    """A long task that a worker runs."""

    tenant: TenantId
    job_id: JobId
    run_id: RunId
    index: int


class Beat(msgspec.Struct, frozen=True):
    """The heartbeat of a worker that runs long tasks: the body of its document, as JSON. The document is due when the
    worker counts as dead."""

    at: float
    tasks: list[LongTask]


class TaskEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The terminal transition of a task, as it is written."""

    index: int
    status: TaskStatus
    attempts: int
    http_status: int | None
    error_code: str | None
    detail: str
    at: float


class Task(msgspec.Struct, frozen=True):
    """A task as it is read back."""

    task_id: TaskId
    index: int
    input: msgspec.Raw
    status: TaskStatus
    attempts: int = 0
    http_status: int | None = None
    error_code: str | None = None
    detail: ResultDetail = ResultDetail()
    finished_at: float | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether it succeeded with the same body as the earlier outcome that its run compared it with."""
        return self.status is TaskStatus.SUCCEEDED and self.error_code == UNCHANGED


# What the row of a succeeded task has for an error code if its body is that of an earlier outcome.
UNCHANGED = "unchanged"


class Counts(msgspec.Struct, frozen=True):
    """The finished tasks of a run by status. The rest of the total is pending."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    # Those of the succeeded ones whose body is that of an earlier outcome.
    unchanged: int = 0

    @property
    def ended(self) -> int:
        return self.succeeded + self.failed + self.cancelled


# The error code of a task whose body arrived and is stored, but `extract` failed with it.
EXTRACT_FAILED = "extract_failed"
OUTCOMES = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED})


def prior_text(task: Task) -> str:
    """The outcome of a task as a rerun stores it with its own task: the digit of the status, and the error code of a
    failed one, or `unchanged`. A task that a finished run left pending counts as cancelled: the sweeper will cancel
    it."""
    status = TaskStatus.CANCELLED if task.status is TaskStatus.PENDING else task.status
    code = task.error_code if status in OUTCOMES else None
    return f"{int(status)}{code or ''}"


def count_ends(ends: Sequence[TaskEnd]) -> Counts:
    """Count terminal transitions."""
    coded = [end for end in ends if end.error_code is not None]
    unchanged = len([end for end in coded if end.error_code == UNCHANGED and end.status is TaskStatus.SUCCEEDED])
    return counts_by_status(Counter([end.status for end in ends]), unchanged)


def counts_by_status(statuses: Mapping[TaskStatus, int], unchanged: int) -> Counts:
    """The counts of finished tasks."""
    return Counts(
        statuses.get(TaskStatus.SUCCEEDED, 0),
        statuses.get(TaskStatus.FAILED, 0),
        statuses.get(TaskStatus.CANCELLED, 0),
        unchanged,
    )


class Replaced(msgspec.Struct, frozen=True):
    """The earlier outcomes that a rerun's succeeded and failed tasks replace in the job's view: by status, and the
    failed ones by error code."""

    counts: Counts = Counts()
    codes: dict[str, int] = {}


def count_replaced(ends: Iterable[tuple[TaskStatus, str | None]]) -> Replaced:
    """Count the earlier outcomes of tasks that finished with these statuses. A cancelled task replaces none."""
    priors = Counter(prior for status, prior in ends if status in OUTCOMES and prior)
    statuses: Counter[TaskStatus] = Counter()
    codes: Counter[str] = Counter()
    unchanged = 0
    for prior, count in priors.items():
        status, code = TaskStatus(int(prior[0])), prior[1:]
        statuses[status] += count
        if status is TaskStatus.FAILED and code:
            codes[code] += count
        elif status is TaskStatus.SUCCEEDED and code == UNCHANGED:
            unchanged += count
    return Replaced(counts_by_status(statuses, unchanged), dict(codes))


class Lineage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the tasks of a rerun come from: tasks of the parent run and of the runs before it whose latest outcome
    matches. They keep their indexes."""

    parent: RunId
    # Only tasks of these statuses; empty: all.
    statuses: Sequence[TaskStatus] = ()
    error_code: str | None = None
    http_status: int | None = None
    tag: str | None = None
    # Only these tasks; empty: all.
    indexes: Sequence[int] = ()
    # Only dead-lettered tasks; only tasks whose body is damaged or missing.
    dead_lettered: bool = False
    damaged: bool = False
    # Only tasks with a body to extract from, which is what the run does, without requests.
    extract_only: bool = False
    # Requests say which body the task has, and one that is still the same is not stored again.
    changed_only: bool = False
    # Only tasks with this host in the URL of their input.
    host: str | None = None
    # Options that differ from the parent's.
    overrides: dict[str, Any] = {}


class Run(msgspec.Struct, frozen=True):
    """One pass over a job's tasks."""

    run_id: RunId
    number: int
    state: RunState
    total: int
    # The latch: all tasks are written and `total` is final. A run completes only once it is latched.
    last_batch: bool
    created_at: float
    ended_at: float | None = None
    # No range will be added: the list was split, or the open job was closed.
    sealed: bool = True
    # Invalid lines.
    invalid: int = 0
    # When a batch was last added to an open job.
    touched_at: float = 0.0
    # None for the first run of a job.
    lineage: Lineage | None = None
    # A ReasonCode: why the run is in its state. A string, because a later version may have more of them.
    reason_code: str | None = None


class Job(msgspec.Struct, frozen=True):
    """A job and its latest run."""

    tenant: TenantId
    job_id: JobId
    name: str | None
    kind: JobKind
    mode: Mode
    options: Options
    task_shard_count: int
    result_layout: ResultLayout
    state: RunState
    reason: str | None
    created_at: float
    # None while the latest run has not finished: an unfinished job does not expire.
    expires_at: float | None
    run: Run
    # The staged list of a closed job that is ingested.
    source: Source | None = None
    # Incremented with every change of the options.
    version: int = 1
    # The id of the task engine that holds the rows of all its runs; empty in jobs of earlier versions.
    task_store: str = ""

    @property
    def key(self) -> RunKey:
        """Where the rows of its latest run are."""
        return self.key_of(self.run)

    def key_of(self, run: Run) -> RunKey:
        """Where the rows of one of its runs are."""
        return RunKey(self.tenant, self.job_id, run.run_id, self.task_shard_count, self.task_store)


def invalid_prefix(job: Job) -> str:
    """The prefix of the objects with the invalid lines of a run's list."""
    return f"invalid/{job.tenant}/{job.job_id}/{job.run.run_id}/"


def lifetime_of(job: Job, limit: float) -> float:
    """Seconds after its creation at which an unfinished run of the job fails: its own maximum or `limit`, the
    operator's, whichever is lower. Of either, 0 or None is no limit."""
    return min(job.options.max_lifetime or math.inf, limit or math.inf)


def invalid_key(job: Job, range_number: int, index: int) -> str:
    """The key of the object with the invalid lines of a range before this index: a repeated ingest overwrites it."""
    return f"{invalid_prefix(job)}{range_number:06d}-{index:012d}.jsonl"


def is_resumable(job: Job) -> bool:
    """Whether the job failed because its ingest failed. Its tasks are kept, and the ingest can be resumed."""
    return job.state is RunState.FAILED and not job.run.last_batch and job.run.reason_code in INGEST_CODES


class OutboxEvent(msgspec.Struct, frozen=True):
    """An outbox event, written in one step with the change that it reports."""

    notice_id: str
    tenant: TenantId
    job_id: JobId
    run_id: RunId
    event: str
    at: float
    data: dict[str, Any]


class EventRecord(msgspec.Struct, frozen=True):
    """An entry of a job's audit trail."""

    seq: int
    at: float
    event: str
    run_id: RunId
    index: int | None
    data: dict[str, Any]
    # The id of its outbox event; an event of a task has none.
    id: str | None = None


class ApiKey(msgspec.Struct, frozen=True):
    """A key as it is stored: the secret only as its hash."""

    key_id: str
    tenant: TenantId
    name: str | None
    secret_sha256: str
    created_at: float
    revoked_at: float | None = None
    expires_at: float | None = None
    # Whether it may create, list and revoke the keys of all tenants.
    admin: bool = False


class Page(msgspec.Struct, Generic[T], frozen=True):
    """A page of a listing. `next_cursor` is None on the last page."""

    items: list[T]
    next_cursor: str | None = None

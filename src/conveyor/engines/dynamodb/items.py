"""Records as items: their keys, and how each is written and read.

A field is an attribute of the same name. Nested values are JSON text, except a run, which is a map inside its job.
`v` is the version of the form. An item without it, without a shard count or without a revision is older than these:
it is read as version 1, unsharded, never changed.

Items are never rewritten, so keys and attributes keep the words of the first version: a document is `Rows#…`, `row#…`,
an outbox event is `…#notice#…` with a `notice_id`, and an event that is not dispatched yet is indexed as `Untold#…`.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import structlog

from conveyor.engines.dynamodb.lifetimes import at_expiry, until_purged, while_in_use
from conveyor.engines.dynamodb.schema import ACTIVE_PARTITIONS, bucket
from conveyor.engines.dynamodb.table import Item, Key
from conveyor.engines.job_records import bucket_of
from conveyor.engines.newer_rows import read_row
from conveyor.engines.records import Document, IdempotencyClaim
from conveyor.errors import EngineFailed
from conveyor.model import (
    ApiKey,
    Job,
    JobId,
    JobKind,
    Lineage,
    Mode,
    Options,
    OutboxEvent,
    ResultLayout,
    Run,
    RunId,
    Source,
    TenantId,
    UploadRecord,
)
from conveyor.states import ENDED, ReasonCode, RunState

T = TypeVar("T")

log = structlog.get_logger()

FORM = 1

_options = msgspec.json.Decoder(Options)
_source = msgspec.json.Decoder(Source)
_lineage = msgspec.json.Decoder(Lineage)

# Reasons that earlier versions wrote without a code, in the order in which they are tried.
_REASONS = [
    (re.compile(pattern, re.DOTALL), code)
    for pattern, code in (
        (r"ingest failed: .*\(tried \d+ times\)", ReasonCode.INGEST_FAILED),
        (r"ingest failed: The list has .* not valid: .*", ReasonCode.LIST_REJECTED),
        (r"ingest failed: .*", ReasonCode.LIST_UNREADABLE),
        (r"failure threshold: .*", ReasonCode.FAILURE_THRESHOLD),
        (r"deadline: .*", ReasonCode.DEADLINE),
        (r"cancelled on request", ReasonCode.CANCELLED),
        (r"paused on request", ReasonCode.PAUSED),
        (r".*(there were no tasks|the list has no tasks \(.*)", ReasonCode.NO_TASKS),
        (r"closed: nothing was added for .*", ReasonCode.IDLE_TIMEOUT),
    )
]


class RunRow(msgspec.Struct, frozen=True):
    """A run with the engine's own fields."""

    run: Run
    swept: bool = False
    # For an open job: the first index and the number of the next range.
    next_index: int = 0
    ranges: int = 0


class JobRow(msgspec.Struct, frozen=True):
    """A job with its latest run. Earlier runs are items of their own."""

    job: Job
    latest: RunRow
    deleted: bool = False

    def with_run(self, latest: RunRow, **changes: Any) -> "JobRow":
        """The job shows the state of its latest run."""
        job = msgspec.structs.replace(self.job, **{"state": latest.run.state, **changes}, run=latest.run)
        return msgspec.structs.replace(self, job=job, latest=latest)


def job_partition(job_id: JobId) -> str:
    return f"Job#{job_id}"


def job_key(tenant: TenantId, job_id: JobId) -> Key:
    return Key(job_partition(job_id), f"{tenant}#job")


def notices_key(tenant: TenantId, job_id: JobId) -> Key:
    """The number of outbox events of a job. It sorts right after the job, so one query reads both."""
    return Key(job_partition(job_id), f"{tenant}#job#notices")


def notice_key(tenant: TenantId, job_id: JobId, seq: int) -> Key:
    return Key(job_partition(job_id), f"{tenant}#notice#{seq:012d}")


def run_key(tenant: TenantId, job_id: JobId, number: int) -> Key:
    return Key(job_partition(job_id), f"{tenant}#run#{number:08d}")


def ranges_partition(run_id: RunId) -> str:
    return f"Run#{run_id}"


def request_key(row: IdempotencyClaim) -> Key:
    return request_address(row.tenant, row.route, row.key)


def request_address(tenant: TenantId, route: str, key: str) -> Key:
    return Key(f"Request#{tenant}#{route}#{key}", "request")


def upload_key(upload_id: str) -> Key:
    return Key(f"Upload#{upload_id}", "upload")


def upload_use_key(upload_id: str, job_id: JobId) -> Key:
    """The reference of a job to its upload."""
    return Key(f"Upload#{upload_id}", f"job#{job_id}")


def upload_row_key(upload_id: str, row: Document) -> Key:
    """The reference of a document to an upload."""
    return Key(f"Upload#{upload_id}", f"row#{row.kind}#{row.tenant}#{row.id}")


def api_key_key(key_id: str) -> Key:
    return Key(f"Key#{key_id}", "key")


def row_key(kind: str, tenant: TenantId, id: str) -> Key:
    return Key(f"Rows#{kind}#{tenant}", f"row#{id}")


def active_partition(bucket: int) -> str:
    """The partition of the index of active jobs that has this bucket of jobs."""
    return f"Active#{bucket % ACTIVE_PARTITIONS:02d}"


def active_prefix(bucket: int) -> str:
    return f"{bucket:02d}#"


def readable(items: Iterable[Item], read: Callable[[Item], T]) -> list[T]:
    """The items of a listing, without those that a newer Conveyor wrote in a form or with a value unknown here: one of
    them must not hide the others."""
    found: list[T] = []
    for item in items:
        try:
            found.append(read(item))
        except (EngineFailed, msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            log.warning("item_skipped", pk=item.get("pk"), sk=item.get("sk"), error=str(error))
    return found


def checked(item: Item) -> Item:
    """Refuse an item that a newer Conveyor wrote in an unknown form."""
    if item.get("v", FORM) > FORM:
        raise EngineFailed("An item in DynamoDB was written by a newer Conveyor: upgrade this one.")
    return item


def job_item(row: JobRow) -> Item:
    job, run = row.job, row.latest.run
    where = bucket(job.job_id)
    active = job.state not in ENDED
    unswept = not active and run.ended_at is not None and not row.latest.swept
    own = bucket_of(job.job_id)
    return {
        "v": FORM,
        **_fields(job, "options", "source", "run"),
        "options": _text(job.options),
        "source": None if job.source is None else _text(job.source),
        "deleted": row.deleted or None,
        **_run_attributes(row.latest),
        "lp": None if row.deleted else f"Jobs#{job.tenant}",
        "ls": None if row.deleted else job.job_id,
        "ap": active_partition(own) if active else None,
        "as": active_prefix(own) + job.job_id if active else None,
        "dp": f"Unswept#{where}" if unswept else None,
        "ds": run.ended_at if unswept else None,
        "ep": None if job.expires_at is None else f"Jobs#{where}",
        "es": job.expires_at,
        "ttl": while_in_use(run.created_at) if job.expires_at is None else until_purged(job.expires_at),
    }


def job_row(item: Item) -> JobRow:
    """A job. Raises EngineFailed if a newer Conveyor wrote it in a form or with a value unknown here."""
    return read_row(item, _job_row)


def _job_row(item: Item) -> JobRow:
    checked(item)
    latest = run_row(item)
    state = RunState(item["state"])
    job = Job(
        tenant=item["tenant"],
        job_id=item["job_id"],
        name=item.get("name"),
        kind=JobKind(item["kind"]),
        mode=Mode(item["mode"]),
        options=_options.decode(item["options"]),
        task_shard_count=item.get("task_shard_count", 1),
        result_layout=ResultLayout(item["result_layout"]),
        state=state,
        reason=item.get("reason"),
        created_at=float(item["created_at"]),
        # An earlier version wrote it when it accepted the job. An unfinished job does not expire.
        expires_at=_float(item.get("expires_at")) if state in ENDED else None,
        run=latest.run,
        source=_source.decode(item["source"]) if "source" in item else None,
        version=item.get("version", 1),
        task_store=item.get("task_store", ""),
    )
    return JobRow(job, latest, item.get("deleted", False))


def run_item(tenant: TenantId, job_id: JobId, row: RunRow) -> Item:
    """An earlier run of a job."""
    unswept = row.run.ended_at is not None and not row.swept
    return {
        "v": FORM,
        "tenant": tenant,
        "job_id": job_id,
        **_run_attributes(row),
        "dp": f"Unswept#{bucket(job_id)}" if unswept else None,
        "ds": row.run.ended_at if unswept else None,
        "ttl": while_in_use(row.run.ended_at or row.run.created_at),
    }


def run_row(item: Item) -> RunRow:
    checked(item)
    run: Item = item["run"]
    return RunRow(
        Run(
            run_id=run["run_id"],
            number=run.get("number", 1),
            state=RunState(run["state"]),
            total=run["total"],
            last_batch=run["last_batch"],
            created_at=float(run["created_at"]),
            ended_at=_float(run.get("ended_at")),
            sealed=run.get("sealed", True),
            invalid=run.get("invalid", 0),
            touched_at=float(run.get("touched_at", 0.0)),
            lineage=_lineage.decode(run["lineage"]) if "lineage" in run else None,
            reason_code=run.get("reason_code") or _code_of(item.get("reason")),
        ),
        swept=item.get("swept", False),
        next_index=item.get("next_index", 0),
        ranges=item.get("ranges", 0),
    )


def _code_of(reason: str | None) -> str | None:
    """The code of a run in an item that an earlier version wrote: it had the reason alone."""
    return next((code for pattern, code in _REASONS if reason is not None and pattern.fullmatch(reason)), None)


def notice_item(notice: OutboxEvent, seq: int) -> Item:
    return {
        "v": FORM,
        **_fields(notice, "data"),
        "data": _text(notice.data),
        "seq": seq,
        "dp": f"Untold#{bucket(notice.notice_id)}",
        "ds": notice.at,
        "ttl": while_in_use(notice.at),
    }


def notice_of(item: Item) -> OutboxEvent:
    checked(item)
    return OutboxEvent(
        notice_id=item["notice_id"],
        tenant=item["tenant"],
        job_id=item["job_id"],
        run_id=item["run_id"],
        event=item["event"],
        at=float(item["at"]),
        data=msgspec.json.decode(item["data"]),
    )


def request_item(row: IdempotencyClaim) -> Item:
    return {"v": FORM, **_fields(row), "ttl": at_expiry(row.expires_at)}


def request_of(item: Item) -> IdempotencyClaim:
    return _read(checked(item), IdempotencyClaim)


def upload_item(upload: UploadRecord) -> Item:
    return {
        "v": FORM,
        **_fields(upload),
        "ep": f"Uploads#{bucket(upload.upload_id)}",
        **upload_expiry(upload.expires_at),
    }


def upload_expiry(expires_at: float) -> Item:
    """The attributes of an upload that change with its expiry."""
    return {"expires_at": expires_at, "es": expires_at, "ttl": until_purged(expires_at)}


def upload_of(item: Item) -> UploadRecord:
    return _read(checked(item), UploadRecord)


def api_key_item(key: ApiKey) -> Item:
    return {"v": FORM, **_fields(key), "lp": "Keys", "ls": f"{key.tenant}#{key.key_id}"}


def api_key_of(item: Item) -> ApiKey:
    return _read({"name": None, **checked(item)}, ApiKey)


def row_item(row: Document) -> Item:
    return {
        "v": FORM,
        **_fields(row),
        "dp": None if row.due_at is None else f"Due#{row.kind}#{bucket(row.id)}",
        "ds": row.due_at,
        "lp": None if row.job_id is None else f"JobRows#{row.job_id}",
        "ls": None if row.job_id is None else f"{row.kind}#{row.tenant}#{row.id}",
        "ttl": _document_ttl(row),
    }


def row_of(item: Item) -> Document:
    return _read({"version": 1, **checked(item)}, Document)


def _document_ttl(row: Document) -> int | None:
    if row.expires_at is None:
        return None
    # The owner of a due document still acts on it, expired or not.
    return at_expiry(row.expires_at) if row.due_at is None else until_purged(row.expires_at)


def _run_attributes(row: RunRow) -> Item:
    run = {**_fields(row.run, "lineage"), "lineage": None if row.run.lineage is None else _text(row.run.lineage)}
    return {
        "run": {name: value for name, value in run.items() if value is not None},
        "swept": row.swept,
        "next_index": row.next_index,
        "ranges": row.ranges,
    }


def _fields(value: msgspec.Struct, *nested: str) -> Item:
    return {name: getattr(value, name) for name in value.__struct_fields__ if name not in nested}


def _read(item: Item, kind: type[T]) -> T:
    return msgspec.convert(item, kind, builtin_types=(bytes,))


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)

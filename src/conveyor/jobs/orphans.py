"""Orphans: tasks and objects that a request writes before the record that they belong to.

A submit notes what it is about to write in a document, and removes the document once its job is written. The document
of a submit that died is due when no request can finish that submit any more; retention then removes what it names.
"""

from collections.abc import Sequence

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.model import JobId, RunKey, TenantId, UploadRecord, first_run_id
from conveyor.system import System

ORPHANS = "orphans"

# Longer than any request, after its idempotency claim has expired.
_MARGIN_SECONDS = 3600.0
# How long a client may go on sending an upload that it began before the upload expired.
_LATE_SECONDS = 86_400.0
_TRIES = 5


class Orphans(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the document, as JSON."""

    # Objects, and all objects under a prefix.
    keys: list[str] = []
    prefix: str | None = None
    # Tasks of this run. Its job, once it is written, keeps all of it.
    run: RunKey | None = None
    # Whether retention has begun to remove them: no request may write them again.
    is_doomed: bool = False


_decoder = msgspec.json.Decoder(Orphans)


def orphans_of(row: Document) -> Orphans:
    """Raises msgspec.MsgspecError."""
    return _decoder.decode(row.body)


async def note_submit(
    system: System, tenant: TenantId, job_id: str, is_repeated: bool, keys: Sequence[str] = ()
) -> Document:
    """Write the document, before anything of the job is written; `keys` are objects beside its list. If `is_repeated`,
    an earlier attempt may have left the document, whose time then starts anew. Raises EngineFailed while retention
    removes what that attempt wrote."""
    documents = system.records.documents
    # A job whose tasks are written before it has one shard.
    run = RunKey(tenant, JobId(job_id), first_run_id(job_id))
    due_at = system.clock.now() + system.settings.idempotency_seconds + _MARGIN_SECONDS
    row = _row(tenant, job_id, Orphans(list(keys), f"lists/{tenant}/{job_id}/", run), due_at)
    crashpoint("orphans.note.before")
    for _ in range(_TRIES):
        existing = await documents.document(ORPHANS, tenant, job_id) if is_repeated else None
        if existing is None:
            await documents.create_documents([row])
            crashpoint("orphans.note.after")
            return row
        noted = orphans_of(existing)
        if noted.is_doomed:
            raise EngineFailed("What an earlier attempt of this request wrote is being removed. Try again later.")
        both = msgspec.structs.replace(noted, keys=sorted({*noted.keys, *keys}))
        renewed = await documents.replace_document(
            msgspec.structs.replace(existing, body=msgspec.json.encode(both), due_at=due_at)
        )
        if renewed is not None:
            return renewed
    raise EngineFailed("The start of a submit was not written: too many concurrent writes.")


async def forget_note(records: Records, row: Document) -> None:
    """Remove the document: the job is written. If it stays, retention finds the job, and removes the document alone."""
    crashpoint("orphans.forget.before")
    await records.documents.remove_document(row)
    crashpoint("orphans.forget.after")


async def note_upload(records: Records, clock: Clock, upload: UploadRecord) -> None:
    """Write the document of an upload that is purged while a client may still be sending it, straight to the store."""
    row = _row(upload.tenant, upload.upload_id, Orphans([upload.key]), clock.now() + _LATE_SECONDS)
    await records.documents.create_documents([row])


def _row(tenant: TenantId, id: str, orphans: Orphans, due_at: float) -> Document:
    return Document(ORPHANS, tenant, id, msgspec.json.encode(orphans), due_at=due_at)

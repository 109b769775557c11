"""Dead letters: whose they are. The message in a letter names its tenant, job and run; it is read only here."""

import msgspec

from conveyor.engines.queue import CONTROL, DeadLetter
from conveyor.jobs.chunks import decode
from conveyor.model import Chunk, IngestJob, IngestRange, JobId, RunId, TenantId

_control = msgspec.json.Decoder(IngestJob | IngestRange)


class DeadLetterOwner(msgspec.Struct, frozen=True):
    """A dead letter, read."""

    message_id: str
    tenant: TenantId
    job_id: JobId
    run_id: RunId
    # The tasks in it; None for a part of an ingest.
    chunk: Chunk | None
    reason: str
    at: float


def read_letter(letter: DeadLetter) -> DeadLetterOwner | None:
    """None for a message that this version does not know: it is nobody's."""
    try:
        if letter.queue == CONTROL:
            message = _control.decode(letter.body)
            return _letter(letter, message.tenant, message.job_id, message.run_id, None)
        chunk = decode(letter.body)
        return _letter(letter, chunk.run.tenant, chunk.run.job_id, chunk.run.run_id, chunk)
    except msgspec.MsgspecError:
        return None


def _letter(given: DeadLetter, tenant: TenantId, job_id: JobId, run_id: RunId, chunk: Chunk | None) -> DeadLetterOwner:
    return DeadLetterOwner(given.message_id, tenant, job_id, run_id, chunk, given.reason, given.at)

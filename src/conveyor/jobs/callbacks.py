"""Callbacks: the answers to state machines that wait for a job with a task token. Each has a document, written in one
step with the job, with the sealed token and the state of the callback.

The answer is written into the document once and never changed: by the dispatcher when the run has finished
(notify/callback_answers.py), or by the monitor when the run is stuck or deleted (notify/callback_monitor.py). The first
write on the document's version wins. The process that claims the document then sends the answer until Step Functions
accepts it: every attempt sends the same answer, and Step Functions accepts one.
"""

from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.records import Document
from conveyor.engines.step_functions import StepFunctions
from conveyor.jobs.event_names import Notify, StepFunctionsNotify, notify_id
from conveyor.model import Job, JobId, RunId
from conveyor.settings import Settings

CALLBACK = "callback"

# A token is valid for a year at most, and so its document expires then.
_LONGEST = 366 * 86_400.0
# The part of a token's hash in the id of its document.
_DIGEST = 32


class CallbackStatus(StrEnum):
    """The status of a callback."""

    # The run has made no progress yet.
    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    # The run has finished: the answer is stored, and has to be sent.
    COMPLETED = "completed"
    FAILED = "failed"
    # The state machine no longer waited when it was called.
    TIMED_OUT = "timed_out"
    # Step Functions accepted the answer.
    SENT = "callback_sent"


class CallbackAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a state machine: an output, or an error with its cause."""

    at: float
    # The id of the outbox event that it passes on.
    event_id: str | None = None
    # JSON.
    output: str | None = None
    error: str | None = None
    cause: str | None = None


class CallbackMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a run when it was last read. If one of these has changed, the run has made progress."""

    ended: int = 0
    # Of its list: tasks and invalid lines, and bytes.
    ingested: int = 0
    read: int = 0
    # When one of its long tasks last wrote its progress.
    written_at: float = 0.0
    # The version of the document of its export.
    export: int = 0


class Callback(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the document, as JSON. The document is due when the next heartbeat, or the answer, has to be sent."""

    job_id: JobId
    run_id: RunId
    # Sealed.
    token: str
    created_at: float
    heartbeat_seconds: float
    stuck_after: float
    status: CallbackStatus = CallbackStatus.PENDING
    marks: CallbackMarks = CallbackMarks()
    # When the run last made progress, and when the last heartbeat was accepted.
    progress_at: float = 0.0
    heartbeat_at: float | None = None
    # The worker that runs a long task of the run, if known.
    worker: str | None = None
    # Calls in a row that were not accepted.
    tries: int = 0
    # A call with the answer was started, and its outcome is unknown.
    doubtful: bool = False
    # The format of the wanted export, its id once it was requested, and the answer if it is removed.
    export: str | None = None
    export_id: str | None = None
    output: str | None = None
    answer: CallbackAnswer | None = None
    answered_at: float | None = None


_callback = msgspec.json.Decoder(Callback)


def callback_of(row: Document) -> Callback:
    """Raises msgspec.MsgspecError."""
    return _callback.decode(row.body)


def with_callback(row: Document, callback: Callback, due_at: float | None) -> Document:
    """The document to write."""
    return msgspec.structs.replace(row, body=msgspec.json.encode(callback), due_at=due_at)


def seal_name(row: Document) -> str:
    """The name that the token of a document is sealed for."""
    return f"{row.tenant}/{row.id}"


def callback_documents(
    job: Job, entries: Sequence[Notify], waiters: StepFunctions | None, settings: Settings
) -> list[Document]:
    """The documents to write with the job. They are not removed with it: a state machine that waits for a deleted job
    gets an answer."""
    if waiters is None:
        return []
    return [
        _document(job, notify_id(job.job_id, number), entry, waiters, settings, job.created_at)
        for number, entry in enumerate(entries)
        if isinstance(entry, StepFunctionsNotify)
    ]


def attached_document(
    job: Job, entry: StepFunctionsNotify, waiters: StepFunctions, settings: Settings, now: float
) -> Document:
    """The document of a token that is attached to a job that exists already. A token has the same document each
    time."""
    digest = sha256(entry.task_token.encode()).hexdigest()
    return _document(job, f"{job.job_id}.t{digest[:_DIGEST]}", entry, waiters, settings, now)


def _document(
    job: Job, id: str, entry: StepFunctionsNotify, waiters: StepFunctions, settings: Settings, now: float
) -> Document:
    row = Document(CALLBACK, job.tenant, id, b"", expires_at=now + _LONGEST)
    callback = Callback(
        job_id=job.job_id,
        run_id=job.run.run_id,
        token=waiters.seal(entry.task_token, seal_name(row)),
        created_at=now,
        heartbeat_seconds=entry.heartbeat_seconds or settings.callback_heartbeat_seconds,
        stuck_after=entry.stuck_after or _patience(job, settings),
        progress_at=now,
        export=entry.export,
    )
    # Due at once: the state machine may have waited for a while already.
    return with_callback(row, callback, now)


def _patience(job: Job, settings: Settings) -> float:
    """How long the run may be without progress: long enough for a silent attempt, and for the monitor to requeue a
    stuck task."""
    options = job.options
    return max(settings.callback_stuck_after, 2 * max(options.stuck_after or settings.stuck_after, options.timeout))


def callbacks_cursor(job_id: JobId) -> str:
    """The cursor before all callbacks of a job, in order of id."""
    return f"{job_id}."


def is_callback_of(row: Document, job_id: JobId) -> bool:
    """Whether a document after that cursor is a callback of the job."""
    return row.id.startswith(f"{job_id}.")


def error_answer(at: float, error: str, callback: Callback, reason: str) -> CallbackAnswer:
    """An error that no outbox event reports."""
    cause = {"job_id": callback.job_id, "run_id": callback.run_id, "reason": reason}
    return CallbackAnswer(at, error=error, cause=msgspec.json.encode(cause).decode())


def callback_json(row: Document) -> dict[str, Any]:
    """A callback as the API shows it, without its token."""
    callback = callback_of(row)
    answer = callback.answer
    return {
        "id": row.id,
        "type": "step_functions",
        "job_id": callback.job_id,
        "run_id": callback.run_id,
        "status": callback.status,
        "created_at": iso_text(callback.created_at),
        "worker": callback.worker,
        "last_progress_at": iso_text(callback.progress_at),
        "last_heartbeat_at": _iso(callback.heartbeat_at),
        "next_at": _iso(row.due_at),
        "event_id": None if answer is None else answer.event_id,
        "error": None if answer is None else answer.error,
        "answered_at": _iso(callback.answered_at),
    }


def _iso(at: float | None) -> str | None:
    return None if at is None else iso_text(at)

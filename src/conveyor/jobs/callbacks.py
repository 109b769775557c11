"""Callbacks: state machines that wait for a job with a task token, and what they are told. A row each, written in one
step with the job, before anything of it is dispatched; it holds the token sealed, and how far we are with it.

The answer is put into the row once and never changed: by what the outbox says of the run's end
(notify/step_functions.py), or by the monitor that finds the run stuck or gone (notify/callback_monitor.py). The first
write on the row's version wins. The claimant of the row then sends it until Step Functions takes it: every try sends
the same answer, and Step Functions takes one.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.engines.records import Document
from conveyor.engines.step_functions import StepFunctions
from conveyor.jobs.event_names import Notify, StepFunctionsNotify, notify_id
from conveyor.model import Job, JobId, RunId
from conveyor.settings import Settings

CALLBACK = "callback"

# A token is good for a year at most; so is its row, whatever becomes of it.
_LONGEST = 366 * 86_400.0


class CallbackStatus(StrEnum):
    """How a callback stands."""

    # Nothing of the run has moved yet.
    PENDING = "pending"
    IN_PROGRESS = "in_progress"
    # The run has ended, well or not: the answer is there, and is to be sent.
    COMPLETED = "completed"
    FAILED = "failed"
    # Nobody waited any more when we came.
    TIMED_OUT = "timed_out"
    # The answer was taken.
    SENT = "callback_sent"


class CallbackAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a state machine is told: a result, or an error with its cause."""

    at: float
    # That of the notice which it passes on.
    event_id: str | None = None
    # JSON.
    output: str | None = None
    error: str | None = None
    cause: str | None = None


class CallbackMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was last seen of a run. If one of these is another, it has moved."""

    ended: int = 0
    # Of its list: tasks and lines that were none, and bytes.
    ingested: int = 0
    read: int = 0
    # When one of its long tasks last wrote how far it is.
    written_at: float = 0.0
    # Version of the row of its export.
    export: int = 0


class Callback(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the row, as JSON. Its `due_at` is when the next heartbeat, or the answer, is to be sent."""

    job_id: JobId
    run_id: RunId
    # Sealed.
    token: str
    created_at: float
    heartbeat_seconds: float
    stuck_after: float
    status: CallbackStatus = CallbackStatus.PENDING
    marks: CallbackMarks = CallbackMarks()
    # When the run was last seen to have moved, and the last heartbeat was taken.
    progress_at: float = 0.0
    heartbeat_at: float | None = None
    # Who runs a long task of it, as far as is known.
    worker: str | None = None
    # Calls in a row that were not taken.
    tries: int = 0
    # A call with the answer was begun of which nobody knows what became.
    doubtful: bool = False
    # The format of the export that is wanted; its id once it is being made, and what is told if it comes to nothing.
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
    """The row as it is to be written."""
    return msgspec.structs.replace(row, body=msgspec.json.encode(callback), due_at=due_at)


def seal_name(row: Document) -> str:
    """What the token of a row is sealed for."""
    return f"{row.tenant}/{row.id}"


def callback_rows(
    job: Job, entries: Sequence[Notify], waiters: StepFunctions | None, settings: Settings
) -> list[Document]:
    """The rows to write with the job. They stand under its id, and do not go with it: whoever waits for a job that was
    deleted is to be told so."""
    rows = []
    for number, entry in enumerate(entries):
        if isinstance(entry, StepFunctionsNotify) and waiters is not None:
            row = Document(
                CALLBACK, job.tenant, notify_id(job.job_id, number), b"", expires_at=job.created_at + _LONGEST
            )
            callback = Callback(
                job_id=job.job_id,
                run_id=job.run.run_id,
                token=waiters.seal(entry.task_token, seal_name(row)),
                created_at=job.created_at,
                heartbeat_seconds=entry.heartbeat_seconds or settings.callback_heartbeat_seconds,
                stuck_after=entry.stuck_after or _patience(job, settings),
                progress_at=job.created_at,
                export=entry.export,
            )
            # At once: nobody knows for how long the state machine has waited already.
            rows.append(with_callback(row, callback, job.created_at))
    return rows


def _patience(job: Job, settings: Settings) -> float:
    """How long nothing of the run may move: long enough for an attempt that says nothing, and for a task that is stuck
    to be taken from it and begun again."""
    options = job.options
    return max(settings.callback_stuck_after, 2 * max(options.stuck_after or settings.stuck_after, options.timeout))


def first_of(job_id: JobId) -> str:
    """The cursor before all callbacks of a job, in order of id."""
    return f"{job_id}."


def is_of(row: Document, job_id: JobId) -> bool:
    """Whether a row that follows that cursor is one of them."""
    return row.id.startswith(f"{job_id}.")


def failure(at: float, error: str, callback: Callback, reason: str) -> CallbackAnswer:
    """An error that no notice tells of."""
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

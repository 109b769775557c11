"""What a server answers, as values. A newer server may say more than is known here; that is passed over."""

from typing import Any

import msgspec

from conveyor.model import TaskError


class Answered(msgspec.Struct, frozen=True):
    """A value out of an answer."""

    def as_dict(self) -> dict[str, Any]:
        """As it was in the answer: for JSON, or a table of such rows."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Result(Answered, frozen=True):
    """A task, and what it came to."""

    task_id: str
    index: int
    input: Any
    # pending, succeeded, failed or cancelled.
    status: str
    attempts: int = 0
    http_status: int | None = None
    error: TaskError | None = None
    content_type: str | None = None
    # Of its body; None if it has none.
    size: int | None = None
    sha256: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None
    elapsed: float | None = None
    finished_at: str | None = None
    body_url: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "succeeded"


class Event(Answered, frozen=True):
    """Something that happened to a job, such as run.completed."""

    event: str
    at: str
    id: str | None = None
    seq: int = 0
    run_id: str | None = None
    index: int | None = None
    data: dict[str, Any] = {}


class Ended(Answered, frozen=True):
    """Tasks of a run that have ended, by how."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0


class Progress(Answered, frozen=True):
    """How far a run is, in a stream: at most once a second, while it changes."""

    job_id: str
    run_id: str
    state: str
    total: int
    reason: str | None = None
    counts: Ended = Ended()


class InvalidLine(Answered, frozen=True):
    """A line of a list that was no task; lines count from 1."""

    line: int
    reason: str
    text: str = ""


class Upload(Answered, frozen=True):
    """A list that was sent, to make jobs of."""

    upload_id: str
    # None: found from its first bytes.
    format: str | None = None
    compression: str | None = None

    def source(self) -> dict[str, str]:
        """What POST /v1/jobs is told of it."""
        given = {"upload_id": self.upload_id, "format": self.format, "compression": self.compression}
        return {name: value for name, value in given.items() if value is not None}

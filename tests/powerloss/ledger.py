"""The ledger: what clients were told, and where in the record they were told it."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from tests.powerloss.recorder import Recorder


class Told(StrEnum):
    """What an answer says. `subject` and `detail` of an entry are as described."""

    # An installation signs with this key: the key.
    SIGNING_KEY = "signing key"
    # `conveyor up` has written a key for the other commands: the key.
    LOCAL_KEY = "local key"
    # An upload is stored: its id; its size and sha256.
    UPLOAD = "upload"
    # A job is made of an upload, which goes when the job does: the upload's id; the job's.
    SOURCE = "source"
    # A job is accepted: its id; the inputs of its tasks, or None if it is open.
    JOB = "job"
    # A batch is added to an open job: the job's id; the inputs of its tasks.
    BATCH = "batch"
    # A rerun is accepted: the job's id; the number of the run.
    RERUN = "rerun"
    # A request under a key is answered: the key; the answer.
    ANSWER = "answer"
    # A task is finished: its task id; where it is, how it ended, and the sha256 of its body, if it has one.
    TASK = "task"
    # So much of a download is there: its URL; the bytes.
    PROGRESS = "progress"
    # A `conveyor run` has ended well: what it wrote; the command, and the sha256 of each file.
    RUN = "run"
    # A run has ended: its id; the job's id and the run's state.
    END = "end"
    # An export is ready: its id; the job's id, and the sha256 of each file.
    EXPORT = "export"
    # An export is deleted: its id.
    EXPORT_DELETED = "export deleted"
    # A job is deleted: its id.
    DELETED = "deleted"
    # A deleted job has no rows any more: its id. Only an operator sees that.
    PURGED = "purged"


class Entry(NamedTuple):
    """One answer. The request was sent when `asked_at` operations had been recorded, and answered at `told_at`."""

    told: Told
    subject: str
    detail: Any
    asked_at: int
    told_at: int


class ShownTask(NamedTuple):
    """A finished task as a client saw it."""

    job_id: str
    run_id: str
    index: int
    status: str
    sha256: str | None


class Ledger:
    """All answers, in their order."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self.entries: list[Entry] = []

    def tell(self, told: Told, subject: str, detail: Any = None, asked_at: int | None = None) -> None:
        """Write down an answer that was given just now."""
        now = self._record.position
        self.entries.append(Entry(told, subject, detail, now if asked_at is None else asked_at, now))

    def asking(self) -> int:
        """Where the record is when a request is sent."""
        return self._record.position

    def at(self, cut: int) -> "Known":
        """What was told when the power failed at a cut."""
        return Known(
            [entry for entry in self.entries if entry.told_at <= cut],
            [entry for entry in self.entries if entry.asked_at <= cut < entry.told_at],
        )


class Known(NamedTuple):
    """Answers that were given, and requests that had been sent: those may have taken effect, or not."""

    answers: list[Entry]
    under_way: list[Entry]

    def of(self, *kinds: Told) -> Iterator[Entry]:
        return (entry for entry in self.answers if entry.told in kinds)

    def subjects(self, *kinds: Told) -> set[str]:
        """What was told, or may have happened."""
        return {entry.subject for entry in (*self.answers, *self.under_way) if entry.told in kinds}

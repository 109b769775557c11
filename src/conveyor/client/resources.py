"""Values in the answers of the server. Unknown fields of a newer server are ignored."""

from typing import Any

import msgspec

from conveyor.model import TaskError


class ApiValue(msgspec.Struct, frozen=True):
    """A value from an answer."""

    def as_dict(self) -> dict[str, Any]:
        """The value as a dict, for JSON or a row of a table."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


class Result(ApiValue, frozen=True):
    """A task and its result."""

    task_id: str
    index: int
    input: Any
    # pending, succeeded, failed or cancelled.
    status: str
    # It succeeded with the body of an earlier run, which its run compared it with.
    unchanged: bool = False
    attempts: int = 0
    http_status: int | None = None
    error: TaskError | None = None
    # It failed and waits for a redrive.
    dead_lettered: bool = False
    content_type: str | None = None
    # Size of the body in bytes; None without a body.
    size: int | None = None
    sha256: str | None = None
    final_url: str | None = None
    headers: list[tuple[str, str]] | None = None
    elapsed: float | None = None
    finished_at: str | None = None
    body_url: str | None = None
    # What the job's `extract` returned for the body: an object or a list of objects. None if that was nothing, or is
    # longer than 64 KiB: `job.extracted(result)` gets it then.
    extracted: Any = None
    extracted_url: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == "succeeded"


class Event(ApiValue, frozen=True):
    """An event of a job, such as run.completed."""

    event: str
    at: str
    id: str | None = None
    seq: int = 0
    run_id: str | None = None
    index: int | None = None
    data: dict[str, Any] = {}


class FinishedCounts(ApiValue, frozen=True):
    """Finished tasks of a run or of a job, by state."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    # Some of the succeeded ones.
    unchanged: int = 0


class JobProgress(ApiValue, frozen=True):
    """The tasks of a job, by their latest outcome over all runs."""

    total: int = 0
    counts: FinishedCounts = FinishedCounts()


class Progress(ApiValue, frozen=True):
    """Progress of a run, in a stream: at most once per second, while it changes. `job` has the counts of the job."""

    job_id: str
    run_id: str
    state: str
    total: int
    reason: str | None = None
    counts: FinishedCounts = FinishedCounts()
    job: JobProgress = JobProgress()


class InvalidLine(ApiValue, frozen=True):
    """An invalid line of a list. Lines are counted from 1."""

    line: int
    reason: str
    text: str = ""


class RemoteList(ApiValue, frozen=True):
    """A list that the server reads where it is: `s3://BUCKET/KEY`, or an http or https URL. `version_id`, `etag` or
    `sha256` name its version; without one, the server reads the version that it finds."""

    url: str
    version_id: str | None = None
    etag: str | None = None
    sha256: str | None = None
    # Sent with requests for an http or https URL.
    headers: dict[str, str] | None = None
    # None: the server detects them from the first bytes.
    format: str | None = None
    compression: str | None = None

    def source(self) -> dict[str, Any]:
        """The `source` of POST /v1/jobs."""
        return {name: value for name, value in self.as_dict().items() if value is not None}


class Upload(ApiValue, frozen=True):
    """An uploaded list, to create jobs from."""

    upload_id: str
    # None: the server detects it from the first bytes.
    format: str | None = None
    compression: str | None = None

    def source(self) -> dict[str, str]:
        """The `source` of POST /v1/jobs."""
        fields = {"upload_id": self.upload_id, "format": self.format, "compression": self.compression}
        return {name: value for name, value in fields.items() if value is not None}

"""Responses that break a run down by error and by host."""

from conveyor.api.schemas.job_shapes import ErrorCount
from conveyor.api.schemas.shape import Shape
from conveyor.model import RunId, TaskId


class ErrorSampleShape(Shape, frozen=True):
    """A failed attempt."""

    task_id: TaskId
    index: int
    attempt: int
    at: str
    message: str
    http_status: int | None


class ErrorGroupShape(Shape, frozen=True):
    """Failed attempts with one error code at one host: `failed` of tasks that failed, `retried` of tasks that were
    retried. The samples have different messages."""

    # Null for all codes without a group of their own.
    code: str | None
    # Null if the tasks have no host; with `is_other`, for all hosts without a group of their own.
    host: str | None
    is_other: bool
    failed: int
    retried: int
    last_at: str | None
    samples: list[ErrorSampleShape]


class ErrorGroups(Shape, frozen=True):
    """The errors of a run by code and host, those with the most failed tasks first."""

    run_id: RunId
    # Whether all counts are exact. If not, those of retried attempts and of hosts may be too low.
    is_exact: bool
    # When workers last added to it.
    at: str | None
    # Exact: failed tasks of the run.
    failed: int
    retried: int
    items: list[ErrorGroupShape]


class HostBreaker(Shape, frozen=True):
    """The breaker of a host that is not closed."""

    target: str
    state: str
    until: str
    error: str | None


class RunPace(Shape, frozen=True):
    """The pace of a host under `pace: auto`: `limit` requests at once, over all workers."""

    limit: int
    in_flight: int
    paused_until: str | None


class HostAttempts(Shape, frozen=True):
    """Attempts at a host: the last ones of tasks that `succeeded` or `failed`, and `retried` ones."""

    attempts: int
    succeeded: int
    failed: int
    retried: int
    # Attempts a second: in the last 30 to 60 seconds, or, of a finished run, from the first to the last.
    rate: float
    # Latency of attempts in seconds, within a tenth.
    p50: float | None
    p95: float | None
    first_at: str | None
    last_at: str | None


class RunHost(HostAttempts, frozen=True):
    """One host of a run."""

    # Null if the tasks have no host.
    host: str | None
    # The three most frequent, of failed and retried attempts.
    errors: list[ErrorCount]
    breaker: HostBreaker | None
    pace: RunPace | None


class RunHosts(Shape, frozen=True):
    """The hosts of a run, those with the most attempts first, and all others together."""

    run_id: RunId
    # Whether the counts are exact. If not, they may be too low.
    is_exact: bool
    # When workers last added to it.
    at: str | None
    items: list[RunHost]
    other: HostAttempts | None
    # Finished tasks that are not counted here: their worker has not added them yet, or was killed before it could.
    missing: int

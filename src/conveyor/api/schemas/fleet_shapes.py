"""Responses about workers, lanes, breakers, hosts and load."""

from conveyor.api.schemas.job_shapes import WaitShape
from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId, JobKind, RunId, TenantId
from conveyor.states import RunState


class BreakerShape(Shape, frozen=True):
    """A breaker: `open` keeps all tasks from the target, `half_open` lets a few probes through."""

    tenant: TenantId
    # Scheme, host and port of a URL, `gateway:` and those of a gateway, or `upstream:` and the name that jobs give.
    target: str
    state: str
    # The error that opened it; null if it is unknown.
    error: str | None
    since: str
    until: str
    # How often in a row it has opened.
    times: int
    # Maximum number of probes at once.
    at_once: int
    # Unfinished runs that it blocks; at most 20.
    runs: list[RunId]


class ResetBreaker(Shape, frozen=True):
    """A breaker that was reset."""

    tenant: TenantId
    target: str


class ResetBreakers(Shape, frozen=True):
    """The breakers that were reset; those that were closed already are left out."""

    reset: list[ResetBreaker]


class HostShape(Shape, frozen=True):
    """The pace of a host: `limit` requests at once, over all workers."""

    host: str
    limit: int
    in_flight: int
    # Workers that sent requests there in the last seconds.
    workers: int
    # Mean latency of the last requests, in seconds.
    latency: float
    # The host asked for a pause (Retry-After); null if it is over.
    paused_until: str | None
    # When it was last reported.
    at: str


class LoadPointShape(Shape, frozen=True):
    """The interval that begins at `at`. `waiting` and `running` are the largest numbers of tasks that were seen."""

    at: str
    succeeded: int
    failed: int
    # Failed attempts that were retried.
    retried: int
    waiting: int
    running: int


class LoadSeries(Shape, frozen=True):
    """Intervals of `seconds`, oldest first; those in which nothing was seen are left out."""

    seconds: int
    items: list[LoadPointShape]


class LoadShape(Shape, frozen=True):
    """The load of a tenant: the last 240 minutes, and the last 168 hours."""

    minutes: LoadSeries
    hours: LoadSeries


class DepthShape(Shape, frozen=True):
    """Messages of a queue that are ready, in flight (`held`), or delayed. `unknown`: there may be more."""

    ready: int
    held: int
    delayed: int
    unknown: bool


class LaneShape(Shape, frozen=True):
    """An unfinished run, as workers see it. Retried and requeued references are in its recovery queue."""

    job_id: JobId
    run_id: RunId
    name: str | None
    kind: JobKind
    state: RunState
    priority: int
    concurrency: int
    running: int
    queue: DepthShape
    recovery: DepthShape
    waiting: WaitShape | None


class LongTaskShape(Shape, frozen=True):
    """A long task that a worker runs."""

    job_id: JobId
    run_id: RunId
    index: int


class BusyWorkerShape(Shape, frozen=True):
    """A worker that runs long tasks of the tenant, with its last heartbeat."""

    name: str
    at: str
    tasks: list[LongTaskShape]


class WorkerShape(Shape, frozen=True):
    """A live worker: where it runs, how many tasks it runs at once, and when it last reported."""

    name: str
    host: str
    process: int
    version: str
    slots: int
    # Null if it does not tell.
    handlers: list[str] | None
    # Whether it makes requests to private addresses. Null if it does not tell.
    private_targets: bool | None
    started_at: str
    at: str


class WorkersShape(Shape, frozen=True):
    """Worker loops that are alive; the maximum number of tasks that they run at once, if limited."""

    alive: int
    slots: int | None
    workers: list[WorkerShape]
    long_tasks: list[BusyWorkerShape]


class BreakersPage(Shape, frozen=True):
    """All breakers that are not closed, in order of target."""

    items: list[BreakerShape]
    next_cursor: None


class HostsPage(Shape, frozen=True):
    """The paces of hosts, in order of host."""

    items: list[HostShape]
    next_cursor: None


class LanesPage(Shape, frozen=True):
    """Unfinished runs, newest job first."""

    items: list[LaneShape]
    next_cursor: str | None

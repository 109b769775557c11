"""Catalogue: who is measured, how it is run, and what it keeps of each task."""

from dataclasses import dataclass
from typing import Literal

Job = Literal["noop", "fetch"]
CONCURRENCY = 100


@dataclass(frozen=True)
class Peer:
    """One way to do a job. `program` is a file in programs/, or module:function of the bench, run by Conveyor's own
    Python. `package` names the distribution whose version is shown."""

    job: Job
    name: str
    program: str
    count: int
    keeps: str
    way: str
    package: str | None = None
    needs: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("Conveyor")


_ROWS = "status, attempts, times and result of each task; exact counts; one completion event"
_GONE = "nothing: a finished task is gone"

PEERS = [
    Peer("noop", "Conveyor, SQLite", "bench.noop:ours", 100_000, _ROWS, "one job over the API's code, one worker"),
    Peer(
        "noop",
        "Conveyor, Postgres",
        "bench.postgres:noop",
        100_000,
        _ROWS,
        "the same, records, tasks and queue on Postgres",
        needs=("postgres",),
    ),
    Peer(
        "noop",
        "pgqueuer",
        "pgqueuer_noop.py",
        50_000,
        "a line in its log table",
        "enqueued by 5,000, drained by 1,000, one worker",
        "pgqueuer",
        ("postgres",),
    ),
    Peer("noop", "huey", "huey_noop.py", 10_000, _GONE, "Redis, 2 processes, no results", "huey", ("redis",)),
    Peer(
        "noop",
        "dramatiq",
        "dramatiq_noop.py",
        10_000,
        _GONE,
        "Redis, 2 processes of 8 threads, no results",
        "dramatiq",
        ("redis",),
    ),
    Peer(
        "noop",
        "Celery",
        "celery_noop.py",
        5_000,
        _GONE,
        "Redis, 2 processes, prefetch 128, results ignored",
        "celery",
        ("redis",),
    ),
    Peer("noop", "a bare script", "bare_noop.py", 100_000, "a line in a file", "one process, a sync per 1,000"),
    Peer(
        "fetch",
        "Conveyor, SQLite",
        "bench.fetch:ours",
        50_000,
        "every body, durable, with its sha256; status, headers and times of each task; exact counts",
        "one job from a list",
        needs=("nginx",),
    ),
    Peer("fetch", "Scrapy", "scrapy_fetch.py", 5_000, "a file, not synced", "one spider", "scrapy", ("nginx",)),
    Peer(
        "fetch",
        "Crawlee",
        "crawlee_fetch.py",
        2_000,
        "an item of its dataset and a request, a file each",
        "HttpCrawler, storage on disk",
        "crawlee",
        ("nginx",),
    ),
    Peer("fetch", "curl --parallel", "bench.fetch:by_curl", 50_000, "a file, not synced", "one list", None, ("nginx",)),
    Peer("fetch", "aria2", "aria2_fetch.py", 10_000, "a file, not synced", "one list", None, ("nginx",)),
    Peer(
        "fetch",
        "a bare script",
        "bench.fetch:writes_files",
        50_000,
        "a file, not synced",
        "pyreqwest in a loop",
        None,
        ("nginx",),
    ),
]

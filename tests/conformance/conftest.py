"""Engines for the conformance suites. One suite states the contract of one seam; an engine is one line in ENGINES.

An engine opens in a directory of its own with a clock that the test moves, and hands out an object with an attribute
for each of its seams. One that keeps time itself is given its time by that clock too. An engine on a server opens
through tests/servers/<name>.py, which starts the server once for each test process; what stands in the directory's
place there is a namespace of its own, the same one each time that the directory is opened.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from conveyor.engines.blobs import Blobs
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.queue import Queue
from conveyor.engines.records import Records
from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.tasks import Tasks
from tests.support.clocks import ManualClock
from tests.support.places import quick_place


class Engine(NamedTuple):
    """What stands behind some of the seams."""

    seams: frozenset[str]
    open: Callable[[Path, ManualClock], AbstractAsyncContextManager[Any]]


def served(name: str) -> Callable[[Path, ManualClock], AbstractAsyncContextManager[Any]]:
    """Opens by `open_engine(place, clock)` of tests/servers/<name>.py, which is imported no earlier than that."""

    def open_engine(place: Path, clock: ManualClock) -> AbstractAsyncContextManager[Any]:
        opened: AbstractAsyncContextManager[Any] = import_module(f"tests.servers.{name}").open_engine(place, clock)
        return opened

    return open_engine


@asynccontextmanager
async def open_local(place: Path, clock: ManualClock) -> AsyncIterator[Any]:
    yield SimpleNamespace(blobs=LocalBlobs(place / "blobs"))


ENGINES: dict[str, Engine] = {
    "sqlite": Engine(frozenset({"records", "tasks", "queue", "coordinator", "atomic_accept"}), SqliteEngine.open),
    "local": Engine(frozenset({"blobs"}), open_local),
    "dynamodb": Engine(frozenset({"records", "tasks"}), served("dynamodb")),
    "postgres": Engine(frozenset({"records", "tasks", "queue", "atomic_accept"}), served("postgres")),
    # Postgres once more, through a pooler in transaction mode. Its records are those of the stack that is tested so.
    "pgbouncer": Engine(frozenset({"tasks", "queue", "atomic_accept"}), served("pgbouncer")),
    "redis": Engine(frozenset({"coordinator"}), served("redis")),
    "redis-cluster": Engine(frozenset({"coordinator"}), served("redis_cluster")),
    "redis-sentinel": Engine(frozenset({"coordinator"}), served("redis_sentinel")),
    "redis-tls": Engine(frozenset({"coordinator"}), served("redis_tls")),
    "s3": Engine(frozenset({"blobs"}), served("s3")),
    "sqs": Engine(frozenset({"queue"}), served("sqs")),
}

Opener = Callable[[], AbstractAsyncContextManager[Any]]


# These need no server: `make quick` runs the suites on them alone.
EMBEDDED = {"sqlite", "local"}


def behind(seam: str) -> list[Any]:
    """The names of the engines behind a seam, as parameters of a fixture or a test."""
    return [
        pytest.param(name, marks=[] if name in EMBEDDED else pytest.mark.server)
        for name, engine in ENGINES.items()
        if seam in engine.seams
    ]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def place() -> Iterator[Path]:
    with quick_place() as directory:
        yield directory


def _opener(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> Opener:
    return lambda: ENGINES[request.param].open(place, clock)


@pytest.fixture(params=behind("records"))
async def records(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> AsyncIterator[Records]:
    async with _opener(request, place, clock)() as engine:
        yield engine.records


@pytest.fixture(params=behind("tasks"))
async def tasks(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> AsyncIterator[Tasks]:
    async with _opener(request, place, clock)() as engine:
        yield engine.tasks


@pytest.fixture(params=behind("queue"))
async def queue(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> AsyncIterator[Queue]:
    async with _opener(request, place, clock)() as engine:
        yield engine.queue


@pytest.fixture(params=behind("coordinator"))
async def coordinator(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> AsyncIterator[Coordinator]:
    async with _opener(request, place, clock)() as engine:
        yield engine.coordinator


@pytest.fixture(params=behind("coordinator"))
def coordinators(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> Opener:
    """Opens the same coordinator again and again, as restarts do."""
    return _opener(request, place, clock)


@pytest.fixture(params=behind("blobs"))
async def blobs(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Blobs]:
    """On the real disk: what is slow about it belongs to the suite."""
    async with _opener(request, tmp_path, clock)() as engine:
        yield engine.blobs


@pytest.fixture(params=behind("atomic_accept"))
async def atomic_engine(request: pytest.FixtureRequest, place: Path, clock: ManualClock) -> AsyncIterator[Any]:
    """An engine whose records, tasks and queue are one database."""
    async with _opener(request, place, clock)() as engine:
        yield engine

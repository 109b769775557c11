"""An event loop whose time is an input. It jumps to the next timer as soon as nobody has anything to do, so that every
sleep, every timeout and every timer of asyncio is on the fake clock, and a run of the loop is the same each time.

What Conveyor gives to threads is done on the loop itself, one turn later: nothing is left to the scheduler of the
operating system.
"""

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from conveyor.clock import sortable_id
from conveyor.engines.sqlite import database

T = TypeVar("T")
V = TypeVar("V")

# Far from `monotonic`, so that mixing up the two shows; five seconds before a full minute, so that cron fires soon.
_START = 1_800_000_000.0 - 5.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` moves only when nothing else can happen; before it does, `on_rest` is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_rest: Callable[[], None] = lambda: None
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":
        """Do it now, and have it known a turn of the loop later, as it is with a thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_set, future, None, error)
        else:
            self.call_soon(_set, future, result, None)
        return future


def _set(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class _Selector(selectors.DefaultSelector):
    """Never waits: where there is nothing to read or write, time goes on to the next timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nobody has anything to do, now or later, and yet something is awaited")
        if timeout > 0:
            self._loop.on_rest()
            self._loop.now += timeout
        return []


class LoopClock:
    """The clock of that loop; chance and ids come from a seed, and ids made in one moment sort by their making."""

    def __init__(self, loop: VirtualLoop, seed: int = 1) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._made = itertools.count()

    def now(self) -> float:
        return _START + self._loop.now

    def monotonic(self) -> float:
        return 1000.0 + self._loop.now

    def jitter(self) -> float:
        return self._random.random()

    def new_id(self, prefix: str) -> str:
        return sortable_id(prefix, self.now(), next(self._made) << 48 | self._random.getrandbits(48))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class LoopDatabase(database.SqliteDatabase):
    """The database with its writer on the loop: the same transactions, and what arrives in one turn shares one."""

    def start(self) -> None:
        self._due = False
        # The writer's thread finds nothing to do and ends.
        self._inbox.put(None)
        super().start()
        self._thread.join()
        # Nobody cuts the power here.
        self._writer.execute("PRAGMA synchronous=OFF")

    async def write(self, work: database.Work[T]) -> T:
        self._commit_soon()
        return await super().write(work)

    # Quoted: `bench fleet` also runs on an earlier revision, which does not have it.
    async def write_jointly(self, joint: "database.JointWork[V, T]", item: V) -> T:
        self._commit_soon()
        return await super().write_jointly(joint, item)

    def _commit_soon(self) -> None:
        """In the next turn, when what is written in this one is in the queue."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._commit_waiting)

    def _commit_waiting(self) -> None:
        self._due = False
        while not self._inbox.empty():
            first = self._inbox.get()
            if first is not None:
                batch, _ = self._gather(first)
                self._commit(batch)
                database._resolve(batch)


@contextmanager
def database_on_loop() -> Iterator[None]:
    """Databases that are opened meanwhile write on the loop."""
    threaded, database.SqliteDatabase = database.SqliteDatabase, LoopDatabase  # type: ignore[misc]  # the one place that makes them
    try:
        yield
    finally:
        database.SqliteDatabase = threaded  # type: ignore[misc]  # as above

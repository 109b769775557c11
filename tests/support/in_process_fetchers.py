"""Fetchers without processes: the class that runs in a fetching process, in this one, over pipes in memory, with an
executor whose attempts end when the test says so."""

import asyncio
import itertools

from conveyor.clock import SystemClock
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors.fetch.child import ChildFetcher
from conveyor.process.executors.fetch.launch import Launched
from conveyor.process.executors.fetch.packs import Packer
from conveyor.settings import Settings
from conveyor.states import TaskStatus

# Turns of the loop after which whatever can go on without the test has done so.
_TURNS = 30


async def idle() -> None:
    """Let everybody act until all wait for the test."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class PipeEnd:
    """The writing end of a pipe in memory."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._closed = False

    def write(self, data: bytes) -> None:
        if self._closed:
            # As uvloop does.
            raise RuntimeError("the handler is closed")
        self._reader.feed_data(data)

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._reader.feed_eof()


class Attempts:
    """An executor whose attempts go on until they are ended."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, str], asyncio.Future[Outcome]] = {}
        # How often each reference was attempted.
        self.starts: list[tuple[str, int]] = []
        self.max_running = 0

    async def attempt_one(self, job: Job, ref: TaskRef, gateway: int = 0, condition: object = None) -> Outcome:
        key = (len(self.starts), job.run.run_id)
        self.starts.append((job.run.run_id, ref.index))
        ending = self._running[key] = asyncio.get_running_loop().create_future()
        self.max_running = max(self.max_running, len(self._running))
        try:
            return await ending
        finally:
            del self._running[key]

    def running(self, job: Job | None = None) -> int:
        return len([run_id for _, run_id in self._running if job is None or run_id == job.run.run_id])

    def end(self, count: int, error: Exception | None = None) -> None:
        """End the oldest `count` attempts, all in one step of the loop."""
        for ending in list(self._running.values())[:count]:
            if error is not None:
                ending.set_exception(error)
            else:
                ending.set_result(Outcome(TaskStatus.SUCCEEDED, http_status=200, body=b"a page"))


class InProcess:
    """A fetching process that is none."""

    _pids = itertools.count(1_000_000)

    def __init__(self, fetcher: ChildFetcher, orders: asyncio.StreamReader, *ends: PipeEnd) -> None:
        self.pid = next(self._pids)
        self.killed = False
        self._fetcher = fetcher
        self._serving = asyncio.create_task(fetcher.serve(orders))
        self._ends = ends

    def kill(self) -> None:
        self.killed = True
        self._serving.cancel()
        for end in self._ends:
            end.close()
        for lane in self._fetcher._lanes.values():
            lane.waiting.clear()
            for runner in lane.running:
                runner.cancel()

    async def wait(self) -> None:
        await asyncio.wait([self._serving])


class Launcher:
    """Launches fetchers in this process, each with its own executor. `failures` are raised first, one a launch."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.fetchers: list[ChildFetcher] = []
        self.executors: list[Attempts] = []
        self.processes: list[InProcess] = []

    async def __call__(self, settings: Settings) -> Launched:
        if self.failures:
            raise self.failures.pop(0)
        there, here = asyncio.StreamReader(), asyncio.StreamReader()
        back, forth = PipeEnd(here), PipeEnd(there)
        executor = Attempts()
        fetcher = ChildFetcher(executor, back, Packer(back, SystemClock(), linger=0.0))
        process = InProcess(fetcher, there, back, forth)
        self.fetchers.append(fetcher)
        self.executors.append(executor)
        self.processes.append(process)
        return Launched(here, forth, process)

    def running(self) -> int:
        return sum(executor.running() for executor in self.executors)

    def end(self, count: int) -> None:
        for executor in self.executors:
            executor.end(count)

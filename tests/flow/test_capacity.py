"""A machine without a descriptor left: processes are started once there are some again, and no task pays for it."""

import asyncio
import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conveyor.model import InputJson, TaskRef
from conveyor.process.executors.fetch.launch import launch_fetcher
from conveyor.process.executors.python.children import Child, NoCapacity
from conveyor.process.executors.python.handler_calls import Setup
from conveyor.process.executors.python.python_executor import PythonExecutor
from conveyor.settings import Settings
from tests.support.handlers_app import handlers
from tests.support.in_process_fetchers import idle
from tests.support.make_jobs import make_job
from tests.support.small_fleet import open_fleet

APP = "tests.support.handlers_app:handlers"
MAX_NEEDED = 12


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open `count` more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for each in free:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def opened() -> set[int]:
    """The descriptors of this process."""
    found = set()
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        # One of them was for the listing itself.
        with suppress(OSError):
            os.fstat(descriptor)
            found.add(descriptor)
    return found


async def test_a_handler_waits_for_a_process_that_the_machine_has_no_capacity_for() -> None:
    async with open_fleet(handler_processes=1) as fleet:
        executor = PythonExecutor(handlers, fleet.system.settings, fleet.clock, fleet.system.records, sys.path, APP)
        refs = [TaskRef(index, InputJson(str(index))) for index in range(3)]
        with descriptors_left(0):
            attempting = asyncio.create_task(executor.attempt(make_job(fleet.clock, handler="double"), refs))
            try:
                for pause in (0.2, 0.4, 0.8, 1.6, 3.2):
                    await idle()
                    assert fleet.clock.next_wake() == pytest.approx(pause)
                    fleet.clock.advance(pause)
            except BaseException:
                attempting.cancel()
                await asyncio.wait([attempting])
                raise
        said = [log["seconds"] for log in fleet.logs if log["event"].startswith("no capacity for a process")]
        assert said == [0.2, 0.4, 0.8, 1.6, 3.2]
        outcomes = await attempting
        await executor.close()
        assert [outcome.body for outcome in outcomes] == [b"0", b"2", b"4"]


async def least_needed(start: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> int:
    """How many descriptors it takes to start a process; with fewer, nothing is left behind."""
    for count in range(MAX_NEEDED):
        before, end = opened(), None
        with descriptors_left(count), suppress(NoCapacity, OSError):
            end = await start()
        if end is not None:
            await end()
        await idle()
        assert opened() == before, f"with {count} descriptors"
        if end is not None:
            return count
    raise AssertionError("it was never started")


async def test_a_child_that_can_not_be_started_leaves_nothing_behind() -> None:
    async def start() -> Callable[[], Awaitable[None]]:
        child = Child(Setup(APP, [], list(sys.path)), Settings.load({}), lambda _: None)
        await child.start()
        return child.end

    assert await least_needed(start) > 2


async def test_a_fetcher_that_can_not_be_launched_leaves_nothing_behind() -> None:
    async def start() -> Callable[[], Awaitable[None]]:
        launched = await launch_fetcher(Settings.load({}))
        launched.writer.close()
        return launched.process.wait

    assert await least_needed(start) > 2

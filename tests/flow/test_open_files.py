"""A process without a free file descriptor: tasks wait for one, and no target is blamed."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from conveyor.cli import doctor_checks, loop
from conveyor.clock import SystemClock
from conveyor.egress.descriptors import OutOfDescriptors
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import InputJson, JobKind, Outcome, TaskRef
from conveyor.process.executors.download.long_tasks import outcome_of
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.process.retry import is_outage, retry_delay
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from tests.support.make_jobs import make_job
from tests.support.target_site import Site


def highest_descriptor() -> int:
    return max(int(path.name) for path in Path("/proc/self/fd").iterdir())


@contextmanager
def no_descriptor_left() -> Iterator[list[int]]:
    """The descriptors that are in the way: whoever closes one leaves room for another."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hogs = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 1, hard))
    try:
        while True:
            try:
                hogs.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield hogs
    finally:
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def fetching() -> AsyncIterator[FetchExecutor]:
    made = new_executor()
    yield made
    await made.close()


async def attempt(executor: FetchExecutor, url: str, timeout: float) -> Outcome:
    ref = TaskRef(0, InputJson(msgspec.json.encode(url).decode()))
    (outcome,) = await executor.attempt(make_job(SystemClock(), kind=JobKind.FETCH, timeout=timeout), [ref])
    return outcome


def new_executor() -> FetchExecutor:
    clock = SystemClock()
    return FetchExecutor(Settings(), clock, TargetGuard(allow_private=True, clock=clock))


async def check_nobody_is_blamed(executor: FetchExecutor) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        # The client opens files of its own, once, with the first attempt.
        outcome = await attempt(executor, url, timeout=10.0)
        assert outcome.error is not None and outcome.error.code == "connect_failed"
        with no_descriptor_left():
            outcome = await attempt(executor, url, timeout=0.3)
    assert outcome.error is not None
    assert (outcome.status, outcome.error.code) == (TaskStatus.FAILED, "too_many_open_files")
    assert not is_outage(outcome), "no breaker counts it"
    options = make_job(SystemClock(), attempts=1).options
    assert retry_delay(options, 1, outcome, 0.5) == 5.0, "it spends no attempt, not even the last"


async def test_a_task_without_a_descriptor_waits_and_blames_nobody() -> None:
    executor = new_executor()
    await check_nobody_is_blamed(executor)
    await executor.close()


async def test_an_attempt_goes_on_once_there_is_a_descriptor(fetching: FetchExecutor) -> None:
    async with Site() as site:
        await check_nobody_is_blamed(fetching)
        with no_descriptor_left() as hogs:
            running = asyncio.create_task(attempt(fetching, site.url("/ok"), timeout=60.0))
            done, _ = await asyncio.wait([running], timeout=0.3)
            assert not done, "it waits"
            while hogs:
                os.close(hogs.pop())
            outcome = await running
    assert outcome.status is TaskStatus.SUCCEEDED


async def test_a_name_that_could_not_be_looked_up_is_looked_up_again() -> None:
    fails = True

    async def resolver(host: str, port: int) -> Sequence[str]:
        if fails:
            raise socket.gaierror(socket.EAI_AGAIN, "as glibc says it")
        return ["127.0.0.1"]

    guard = TargetGuard(allow_private=True, clock=SystemClock(), resolver=resolver)
    with no_descriptor_left(), pytest.raises(OutOfDescriptors):
        await guard.resolve("site.example", 80)
    fails = False
    assert await guard.resolve("site.example", 80) == "127.0.0.1"
    await guard.close()


def test_a_long_task_waits_too() -> None:
    outcome = outcome_of(OutOfDescriptors(), frozenset())
    assert outcome.error is not None
    assert (outcome.error.code, outcome.spends_attempt, outcome.retry_after) == ("too_many_open_files", False, 5.0)


def test_the_soft_limit_is_raised_and_doctor_looks_at_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = highest_descriptor() + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        loop.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 65_536), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert doctor_checks._open_files(Settings()).verdict == "ok"
    check = doctor_checks._open_files(Settings(worker_concurrency=10_000_000))
    assert check.verdict == "warn"
    assert "ulimit" in (check.advice or "")

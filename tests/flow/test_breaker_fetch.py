"""The breaker over real fetching processes: a target that answers 503 is left alone, others go on, and it is tried and
released when it is back. And what a process that fetches may cost: memory within its budget, replaced when it hangs."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.coordination.waits import waiting
from conveyor.egress.body_budget import BodyBudget
from conveyor.embedded import Embedded
from conveyor.engines.tasks import TaskFilter
from conveyor.model import Job, JobId, Task
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.places import quick_place
from tests.support.processes import fetchers_of
from tests.support.target_site import Listener, read_request
from tests.support.working import until

MIB = 1024 * 1024


class Target(Listener):
    """Answers 503 while it is down, and 200 otherwise; counts, and may take its time."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.down = False
        self.asked = 0
        self.body = b"ok"

    def url(self, number: int) -> str:
        return f"http://{self.host}:{self.port}/{number}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            self.asked += 1
            status, body = (503, b"away") if self.down else (200, self.body)
            # A moment, as any target takes: not all of a list is tried before the first answer is known.
            await asyncio.sleep(0.005)
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
            await writer.drain()


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, allow_private_targets=True, fetchers=2)


@pytest.fixture
async def bad() -> AsyncIterator[Target]:
    async with Target("127.0.0.1") as made:
        made.down = True
        yield made


@pytest.fixture
async def good() -> AsyncIterator[Target]:
    async with Target("127.0.0.2") as made:
        yield made


async def submitted(embedded: Embedded, urls: list[str], **options: Any) -> Job:
    spec = decode_spec(msgspec.json.encode({"tasks": urls, **options}))
    accepted = await embedded.submit.submit(ACME, spec)
    return await embedded.job(ACME, JobId(accepted.subject))


async def tasks_of(system: System, job: Job) -> list[Task]:
    return await system.tasks.page(job.key, 0, None, 5000, TaskFilter())


async def test_parked_tried_and_released(system: System, clock: JumpingClock, bad: Target, good: Target) -> None:
    embedded = Embedded(system)
    urls = [target.url(number) for number in range(400) for target in (bad, good)]
    async with embedded.running({"work"}):
        await embedded.until_ready()
        job = await submitted(
            embedded,
            urls,
            concurrency=16,
            chunk_size=50,
            backoff={"base": 1000, "cap": 1000, "jitter": False},
            # Otherwise the pace of the host that is down could keep its breaker closed for long enough.
            pace="fixed",
        )
        await until(lambda: system.tasks.counts(job.key), lambda counts: counts.succeeded == 400)
        said = await until(lambda: waiting(system.coordinator, job.run.run_id), lambda said: said is not None)
        assert said is not None
        assert f"breaker open for {bad.url(0)[:-2]} until" in said.detail
        tried = bad.asked
        assert 20 <= tried <= 200, "those that had not begun were called back"
        assert good.asked == 400

        bad.down = False
        clock.advance(40)
        # All that had no attempt yet is done, without waiting for the backoff of those that had.
        await until(lambda: system.tasks.counts(job.key), lambda counts: counts.succeeded >= 800 - tried)
        clock.advance(1100)
        found = await until(lambda: embedded.job(ACME, job.job_id), lambda found: found.state in ENDED)
    assert found.state is RunState.COMPLETED
    tasks = await tasks_of(system, job)
    assert {task.status for task in tasks} == {TaskStatus.SUCCEEDED}
    assert sum(task.attempts for task in tasks) == bad.asked + good.asked, "every attempt was one request"
    assert sum(task.attempts - 1 for task in tasks) == tried


async def test_large_bodies_take_turns_within_the_budget(
    system: System, good: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    good.body = b"x" * (3 * MIB)
    changed = msgspec.structs.replace(system.settings, fetchers=0, body_budget_bytes=8 * MIB)
    object.__setattr__(system, "settings", changed)
    most = 0
    take = BodyBudget._take

    async def watched(self: BodyBudget, amount: int) -> None:
        nonlocal most
        await take(self, amount)
        most = max(most, self.taken)

    monkeypatch.setattr(BodyBudget, "_take", watched)
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        job = await submitted(embedded, [good.url(number) for number in range(40)], concurrency=20)
        found = await until(lambda: embedded.job(ACME, job.job_id), lambda found: found.state in ENDED)
    assert (await system.tasks.counts(found.key)).succeeded == 40
    assert most == 6 * MIB, "two at a time"


async def test_a_process_that_hangs_is_replaced(system: System, clock: JumpingClock, good: Target) -> None:
    embedded = Embedded(system)
    async with embedded.running({"work"}):
        await embedded.until_ready()
        first = await submitted(embedded, [good.url(number) for number in range(10)])
        await until(lambda: embedded.job(ACME, first.job_id), lambda found: found.state in ENDED)
        stopped = fetchers_of(os.getpid())
        for child in stopped:
            os.kill(child, signal.SIGSTOP)
        job = await submitted(embedded, [good.url(number) for number in range(50)], timeout=5)

        async def later() -> Job:
            # They are given the references at some time, and then silent for too long.
            clock.advance(2)
            return await embedded.job(ACME, job.job_id)

        found = await until(later, lambda found: found.state in ENDED)
        assert (await system.tasks.counts(found.key)).succeeded == 50
        assert not set(stopped) & set(fetchers_of(os.getpid())), "they were killed"

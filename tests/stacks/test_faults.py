"""The whole system on a bad day: every role at work, and something wrong with every engine at once.

A seed decides what goes wrong, how often, and for how long: then all heals, and whatever was handed over has to end,
each task once, counted once, told once. `CONVEYOR_FAULT_CASES` asks for more seeds.
"""

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from conveyor import faults
from conveyor.embedded import Embedded
from conveyor.engines.queue import run_queues
from conveyor.engines.sqs.address import parse
from conveyor.model import JobKind
from conveyor.recover.sweeper import Sweeper
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.system import System, migrate, open_system
from tests.faults.shim import Answer, Call, DynamoFaults, Forward, S3Faults, Shim
from tests.faults.shim_sqs import CLEAN, DOUBTFUL
from tests.faults.shim_sqs import Shim as SqsShim
from tests.servers import dynamodb, postgres, s3, sqs
from tests.servers.aws import aws
from tests.servers.redis import Leak, redis
from tests.servers.sqs import together
from tests.stacks.ledger import Ledger, Uneven, audit, watched
from tests.support.clocks import ManualClock
from tests.support.places import quick_place

CASES = int(os.environ.get("CONVEYOR_FAULT_CASES", "8"))
PATIENCE = 300.0

_STEP = 0.005
_RATE = 4.0
_LEAP = 5.0

pytestmark = pytest.mark.timeout(300)


class Weather:
    """What goes wrong on one day, as a seed decides it, by the number of calls that were made: a slow machine has the
    same weather as a quick one."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"weather {seed}")
        self.calls = 0
        self.dynamo = DynamoFaults(self.random)
        self.s3 = S3Faults(self.random)
        self.sqs = SqsShim(seed)
        self.shim = Shim(aws(), self, self.dynamo, self.s3)
        self.leak: Leak | None = None
        self._ends_at = self.random.randint(150, 600)
        self._flushes = set(self.random.sample(range(30, 400), self.random.choice((0, 1, 1, 3))))
        self._leaks = self.random.choice((0.0, 0.01, 0.05))
        self._busy = 0
        self._healed = False
        self._asked = 0

    @asynccontextmanager
    async def between(self, place: Path) -> AsyncIterator[dict[str, Any]]:
        """The URLs of the AWS stack, with all of it on the way."""
        async with self.shim, self.sqs.running() as queues, Leak.open(redis().port) as self.leak:
            given = {"wait": self.random.choice((0, 1, 5)), "settle": self.random.choice((0, 10))}
            yield {
                "records": dynamodb.url_for(place, self.shim.url),
                "tasks": dynamodb.url_for(place, self.shim.url),
                "queue": sqs.url_of(place, queues, **given),
                "coordinator": f"{self.leak.url}?prefix={place.name}",
                "blobs": s3.url_of(place, self.shim.url),
            }

    def begin(self) -> None:
        for each in (self.dynamo, self.s3):
            for kind, rate in self._some([name for name in vars(each) if name != "random"]).items():
                setattr(each, kind, rate)
        self.sqs.rates = self._some([*CLEAN, *DOUBTFUL])

    def _some(self, kinds: list[str]) -> dict[str, float]:
        return {kind: self.random.choice((0.01, 0.04, 0.12)) for kind in kinds if self.random.random() < 0.5}

    def heal(self) -> None:
        self.dynamo.heal()
        self.s3.heal()
        self.sqs.rates = {}
        self._leaks = 0.0
        self._flushes = set()
        self._healed = True

    def may_leap(self) -> bool:
        """Whether all is well, and everybody waits for time to pass: nobody has asked for anything since this was last
        called, nor waits for an answer."""
        asked, self._asked = self._asked, self.calls + len(self.sqs.calls)
        return self._healed and asked == self._asked and self._busy == self.sqs.busy == 0

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        self.calls += 1
        if self.calls in self._flushes:
            redis().say("FLUSHALL")
        if self.calls == self._ends_at:
            self.heal()
        if self.leak is not None and self.random.random() < self._leaks:
            self.leak.losing = 1
        self._busy += 1
        try:
            return await forward(call)
        finally:
            self._busy -= 1


@asynccontextmanager
async def hurrying(clock: ManualClock, leap: Callable[[], bool]) -> AsyncIterator[None]:
    """Time goes a few times as fast as it would, and by leaps whenever it may."""

    async def hurry() -> None:
        while True:
            await asyncio.sleep(_STEP)
            clock.advance(_LEAP if leap() else _RATE * _STEP)

    task = asyncio.create_task(hurry())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def at_work(system: System, executor: Uneven) -> AsyncIterator[None]:
    """The roles that move a job: workers, ingesters, the sweeper."""
    embedded = Embedded(system, dict.fromkeys(JobKind, executor))
    sweeper = Service(
        Sweeper(system.records, system.tasks, system.queue, embedded.lifecycle, system.clock), system.clock
    )
    sweeping = asyncio.create_task(sweeper.run())
    try:
        async with embedded.running({"work", "ingest"}):
            yield
    finally:
        sweeper.stop()
        await sweeping


async def through(system: System, ledger: Ledger) -> list[str]:
    """Hand jobs of each sort over, wait until they have ended, and say what is wrong with them then."""
    system, tasks = watched(system)
    async with at_work(system, Uneven()):
        try:
            async with asyncio.timeout(PATIENCE):
                await asyncio.gather(ledger.small(15), ledger.staged(40), ledger.opened([12, 18, 0]))
                await ledger.until_ended()
        except TimeoutError:
            return [f"they have not ended: {await system.records.jobs.active_jobs()}"]
    wrong = [line for entry in ledger.entries for line in await audit(system, entry)]
    wrong += [f"{each} ended {times} times" for each, times in tasks.moved.items() if times > 1]
    for entry in ledger.entries:
        job = await system.records.jobs.job(entry.tenant, entry.job_id)
        assert job is not None
        for queue in run_queues(job.run.run_id):
            wrong += [f"{queue} has {left}" for left in await system.queue.receive(queue, 10, 1.0)]
    return wrong + [f"given up: {letter}" for letter in (await system.queue.dead_letters(None, 10)).items]


@pytest.mark.parametrize("seed", range(CASES))
async def test_a_bad_day_on_aws(seed: int) -> None:
    weather, clock = Weather(seed), ManualClock(seed=seed)
    chance = random.Random(f"jobs {seed}")
    with quick_place() as place, capture_logs(), together(clock):
        async with weather.between(place) as urls, hurrying(clock, weather.may_leap):
            settings = Settings.load(
                {},
                data=place,
                flush_seconds=0.005,
                lease_seconds=15,
                ingesters=1,
                task_shard_count=chance.choice((2, 4, 8)),
                run_queue_limit=chance.choice((500, 500, 1, 0)),
                ingest_range_bytes=chance.choice((100, 400, 1_000_000)),
                # That a lease lapses in the storm is no task's fault.
                max_lost_starts=50,
                **urls,
            )
            await migrate(settings, clock)
            weather.begin()
            async with open_system(settings, clock) as system:
                ledger = Ledger(system, chunk_size=chance.choice((1, 7, 100)), backoff={"base": 0.5})
                wrong = await through(system, ledger)
                wrong += await queues_left(system)
    assert not wrong, f"seed {seed}: " + "\n".join(wrong)


async def queues_left(system: System) -> list[str]:
    """Queues of runs that are still there."""
    assert system.settings.queue is not None
    queue: Any = system.queue
    answer = await queue._calls.ask("list_queues", QueueNamePrefix=parse(system.settings.queue).runs)
    return [f"left behind: {url}" for url in answer.get("QueueUrls", ())]


class Forgetting:
    """Empties the Redis at every so many durable steps, so often."""

    def __init__(self, every: int, times: int) -> None:
        self.passed: Counter[str] = Counter()
        self.times = times
        self._every = every
        self._seen = 0

    def __call__(self, point: str) -> None:
        self.passed[point] += 1
        if self.times and self.passed.total() % self._every == 0:
            self.times -= 1
            redis().say("FLUSHALL")

    def may_leap(self) -> bool:
        """Whether nothing was done since this was last called."""
        seen, self._seen = self._seen, self.passed.total()
        return seen == self._seen


@pytest.mark.parametrize(("every", "times"), [(3, 40), (7, 40), (20, 20)])
async def test_redis_forgets_in_the_middle_of_runs(every: int, times: int, tmp_path: Path) -> None:
    """Leases of ingesters, what workers hold of a run and of a target, rates, tallies: all gone, again and again."""
    clock, forgetting = ManualClock(), Forgetting(every, times)
    with capture_logs():
        database = postgres.url_of(tmp_path)
        settings = Settings.load(
            {},
            data=tmp_path,
            records=database,
            tasks=database,
            queue=database,
            coordinator=f"{redis().url}?prefix={tmp_path.name}",
            workers=2,
            worker_concurrency=5,
            ingest_range_bytes=100,
            fleet_concurrency=8,
        )
        await migrate(settings, clock)
        faults.arm(forgetting)
        try:
            async with hurrying(clock, forgetting.may_leap), open_system(settings, clock) as system:
                limits = {"concurrency": 6, "concurrency_per_host": 3, "rate_per_host": 500}
                wrong = await through(system, Ledger(system, chunk_size=4, backoff={"base": 0.5}, **limits))
        finally:
            faults.arm(None)
    assert not wrong, "\n".join(wrong)
    assert forgetting.times == 0, f"only {forgetting.passed.total()} steps were passed"

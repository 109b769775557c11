"""house: housekeeping of small jobs, with every call to an engine 10 ms slower than it is. In one process: runs whose
completion was missed are completed and cleared, outbox events are dispatched, webhooks are delivered, jobs are purged.

The bare limit is what ten million small jobs a day need, ten times a million: 116 jobs a second through each role. The
JSON has the calls that a job costs, and the rate of the same calls made one after the other, which is what a role
reached that worked on one item at a time. `quiet` counts the calls of the sweeper for runs in which nothing moves.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from typing import Any

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure
from conveyor.deploy.aws_prices import PRICES

COUNT = 400
LATENCY = 0.010
NEEDED = 10_000_000 / 86_400
ENDPOINTS = 4
QUIET_RUNS = 1000

# An active job in the index, in units of an eventually consistent read: 936 bytes of 8 KiB.
JOB_UNITS = 936 / 8192
COUNT_UNITS = 0.5

_LOOK_SECONDS = 0.01
_PATIENCE = 600.0


def run(setup: Setup) -> list[Figure]:
    count = setup.count(COUNT, 50)
    measured = [setup.ours("bench.house:ours", count=count) for _ in range(setup.repeat)]
    needed = [NEEDED] * len(measured)
    figures = [
        Figure(
            "house",
            name,
            "jobs/s",
            [each[name]["rate"] for each in measured],
            "10 M jobs a day",
            needed,
            ("at least", 1.0),
            {more: measured[-1][name][more] for more in ("calls", "one_at_a_time", "cpu_ms")},
        )
        for name in ("sweep", "dispatch", "deliver", "purge")
    ]
    quiet = [setup.ours("bench.house:quiet", count=QUIET_RUNS) for _ in range(setup.repeat)]
    dollars = [each["dollars"] for each in quiet]
    calls = quiet[-1]["calls"]
    limit = "a dollar a day"
    return [
        *figures,
        Figure("house", f"{QUIET_RUNS} quiet runs", "$/day", dollars, limit, [1.0] * len(dollars), None, calls),
    ]


class Slow:
    """A seam that counts its calls and takes a while for each."""

    def __init__(self, seam: Any, calls: Counter[str], latency: float) -> None:
        self._seam = seam
        self._calls = calls
        self._latency = latency

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._seam, name)

        async def slow(*given: Any, **named: Any) -> Any:
            self._calls[name] += 1
            if self._latency:
                await asyncio.sleep(self._latency)
            return await call(*given, **named)

        return slow


def slowed(system: Any, calls: Counter[str], latency: float = LATENCY) -> Any:
    """The system with slow engines."""
    records = type(system.records)(
        **{part.name: Slow(getattr(system.records, part.name), calls, latency) for part in fields(system.records)}
    )
    parts = ("tasks", "queue", "coordinator", "blobs")
    return replace(system, records=records, **{part: Slow(getattr(system, part), calls, latency) for part in parts})


async def ours(count: int, place: str) -> dict[str, Any]:
    from bench.belt import store
    from conveyor.lifecycle import Lifecycle
    from conveyor.notify.deliverer import Deliverer
    from conveyor.notify.dispatcher import OutboxDispatcher
    from conveyor.recover import retention
    from conveyor.recover.sweeper import Sweeper

    retention.SETTLE_SECONDS = 0.0
    async with store(place) as system:
        jobs = await _finished_jobs(system, count)
        calls: Counter[str] = Counter()
        slow = slowed(system, calls)
        records, clock, settings = slow.records, system.clock, system.settings
        sweeper = Sweeper(records, slow.tasks, slow.queue, Lifecycle(records, slow.tasks, clock), clock)
        dispatcher = OutboxDispatcher(settings, records, slow.tasks, clock)
        receiver: Any = _Receiver()
        deliverer = Deliverer(settings, records, clock, system.signing_key, receiver)
        purger = retention.Retention(records, slow.tasks, slow.queue, slow.coordinator, slow.blobs, clock)

        async def is_swept() -> bool:
            return not await system.records.jobs.active_jobs() and not await system.records.jobs.unswept_jobs(1)

        async def is_dispatched() -> bool:
            return not await system.records.outbox.undispatched(1)

        async def is_delivered() -> bool:
            return bool(receiver.posts >= count)

        async def is_purged() -> bool:
            return not await system.records.jobs.purgeable_jobs(clock.now(), 1)

        measured = {
            "sweep": await _measured(sweeper, clock, is_swept, calls, count),
            "dispatch": await _measured(dispatcher, clock, is_dispatched, calls, count),
            "deliver": await _measured(deliverer, clock, is_delivered, calls, count),
        }
        for job in jobs:
            await system.records.jobs.mark_deleted(job.tenant, job.job_id)
        measured["purge"] = await _measured(purger, clock, is_purged, calls, count)
    return measured


async def _finished_jobs(system: Any, count: int) -> list[Any]:
    """Jobs of one task, over a few tenants with a webhook each. All tasks have finished, and nobody has seen it."""
    from conveyor.accept.spec import decode_spec
    from conveyor.accept.submit import Submit
    from conveyor.model import TaskEnd, TenantId
    from conveyor.notify.webhooks import Webhooks, WebhookSpec
    from conveyor.states import TaskStatus

    spec = decode_spec(b'{"kind": "python", "handler": "bench.noop", "tasks": [1]}')
    tenants = [TenantId(f"bench-{number}") for number in range(ENDPOINTS)]
    for tenant in tenants:
        await Webhooks(system).create(tenant, WebhookSpec("https://receiver.example/", ["run.completed"]))
    jobs = []
    for number in range(count):
        tenant = tenants[number % ENDPOINTS]
        accepted = await Submit(system).submit(tenant, spec)
        job = await system.records.jobs.job(tenant, accepted.subject)
        await system.tasks.finish(job.key, [TaskEnd(0, TaskStatus.SUCCEEDED, 1, None, None, "{}", 0.0)])
        jobs.append(job)
    return jobs


class _Receiver:
    """A receiver of webhooks that answers after a while."""

    def __init__(self) -> None:
        self.posts = 0

    async def post(self, *_: object) -> Any:
        from conveyor.egress.outbound import PostReply

        await asyncio.sleep(LATENCY)
        self.posts += 1
        return PostReply(200, None, b"")

    async def close(self) -> None:
        """Nothing is open."""


async def _measured(
    role: Any, clock: Any, is_done: Callable[[], Awaitable[bool]], calls: Counter[str], count: int
) -> dict[str, Any]:
    """Run the role as its service does until its work is done."""
    from conveyor.service import Service, run_until

    calls.clear()
    began, cpu = time.perf_counter(), time.process_time()

    async def done() -> None:
        while not await is_done():
            if time.perf_counter() - began > _PATIENCE:
                raise MeasurementFailed(f"{role.name} was not done within {_PATIENCE:g} seconds")
            await asyncio.sleep(_LOOK_SECONDS)

    await run_until([Service(role, clock)], done)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    each = sum(calls.values()) / count
    return {
        "rate": count / seconds,
        "calls": {name: round(number / count, 2) for name, number in calls.most_common()},
        "one_at_a_time": round(1 / (each * LATENCY), 1),
        "cpu_ms": round(cpu / count * 1000, 2),
    }


async def quiet(count: int, place: str) -> dict[str, Any]:
    """A day of the sweeper over runs in which nothing moves, on a clock that is moved."""
    from bench.belt import store
    from conveyor.lifecycle import Lifecycle
    from conveyor.recover.sweeper import Sweeper

    async with store(place) as system:
        await _waiting_jobs(system, count)
        calls: Counter[str] = Counter()
        slow = slowed(system, calls, 0.0)
        clock: Any = _Fast(system.clock)
        lifecycle = Lifecycle(slow.records, slow.tasks, clock)
        sweeper = Sweeper(slow.records, slow.tasks, slow.queue, lifecycle, clock, 0.0, *_together(slow, clock))
        # The second hour: in the first, every run is new.
        for hour in range(2):
            if hour == 1:
                calls.clear()
            end = clock.passed + 3600.0
            while clock.passed < end:
                clock.passed += max(await sweeper.tick(), 0.1)
    day = {name: number * 24 for name, number in calls.items()}
    reads = day.get("active_jobs", 0) * count * JOB_UNITS + day.get("counts", 0) * COUNT_UNITS
    dollars = day.get("depth", 0) / 1e6 * PRICES["sqs request"] + reads / 1e6 * PRICES["dynamodb read unit"]
    return {"dollars": dollars, "calls": day}


def _together(system: Any, clock: Any) -> tuple[Any, ...]:
    """The active jobs as the roles of a process read them, where they do that together."""
    try:
        from conveyor.jobs.active_jobs import FRESH_SECONDS, ActiveJobs
    except ImportError:
        return ()
    return (ActiveJobs(system.records.jobs, clock, fresh_seconds=FRESH_SECONDS),)


async def _waiting_jobs(system: Any, count: int) -> None:
    from conveyor.accept.spec import decode_spec
    from conveyor.accept.submit import Submit
    from conveyor.model import TenantId

    spec = decode_spec(b'{"kind": "python", "handler": "bench.noop", "tasks": [1]}')
    for _ in range(count):
        await Submit(system).submit(TenantId("bench"), spec)


class _Fast:
    """A clock that the bench moves."""

    def __init__(self, clock: Any) -> None:
        self._clock = clock
        self.passed = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def now(self) -> float:
        return float(self._clock.now()) + self.passed

    def monotonic(self) -> float:
        return float(self._clock.monotonic()) + self.passed

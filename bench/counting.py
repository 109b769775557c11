"""Counts the calls of each seam of a system: what a role costs, whatever the machine does meanwhile.

python -m bench.counting 500 1000      calls a second of one idle worker with so many quiet runs
"""

import asyncio
import dataclasses
import inspect
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.embedded import Embedded
from conveyor.engines.queue import run_queue
from conveyor.engines.records import Records
from conveyor.jobs.chunks import messages
from conveyor.model import InputJson, JobId, JobKind, Mode, TaskSeed, TenantId
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.system import System, open_system
from conveyor.telemetry.seams import PROTOCOLS

_WARM_UP = 150.0
_MEASURED = 60.0
_DELAY = 86_400.0
# Turns of the loop in which everybody acts before the clock moves.
_ROUNDS = 30


class _Counting:
    def __init__(self, seam: str, engine: Any, calls: Counter[str]) -> None:
        self._engine = engine
        for protocol in PROTOCOLS[seam]:
            for method, _ in inspect.getmembers(protocol, inspect.isfunction):
                call = None if method.startswith("_") else getattr(engine, method, None)
                if call is not None:
                    setattr(self, method, _counted(f"{seam}.{method}", call, calls))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _counted(name: str, call: Any, calls: Counter[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return call(*args, **kwargs)

    return counted


def counting(system: System) -> tuple[System, Counter[str]]:
    """The system as a role sees it whose calls are counted, and the counts by seam and method."""
    calls: Counter[str] = Counter()
    parts: Any = {
        part.name: _Counting(part.name, getattr(system.records, part.name), calls)
        for part in dataclasses.fields(Records)
    }
    seams: Any = {
        name: _Counting(name, getattr(system, name), calls) for name in ("tasks", "queue", "coordinator", "blobs")
    }
    return dataclasses.replace(system, records=Records(**parts), **seams), calls


async def idle_worker(
    clock: Any, runs: int, warm_up: float = _WARM_UP, measured: float = _MEASURED
) -> dict[str, float]:
    """Calls a second of one worker whose runs all wait for a retry that is due tomorrow."""

    with tempfile.TemporaryDirectory() as place:
        settings = Settings(data=Path(place))
        async with open_system(settings, clock) as system:
            for _ in range(runs):
                spec = JobSpec(kind=JobKind.FETCH, mode=Mode.OPEN)
                accepted = await Submit(system).submit(TenantId("bench"), spec)
                job = await system.records.jobs.job(TenantId("bench"), JobId(accepted.subject))
                assert job is not None
                late = [msgspec.structs.replace(message, delay=_DELAY) for message in messages(job.key, [_SEED], 1)]
                await system.queue.send(run_queue(job.run.run_id), late)
            counted, calls = counting(system)
            executors: Any = {JobKind.FETCH: FetchExecutor(settings, clock, None)}  # type: ignore[arg-type]
            worker = Embedded(counted, executors)._roles(executors)["work"][0]
            return await _drive(worker, clock, calls, warm_up, measured)


_SEED = TaskSeed(0, InputJson('"http://example.com/"'))


async def _drive(worker: Any, clock: Any, calls: Counter[str], warm_up: float, measured: float) -> dict[str, float]:

    service = Service(worker, clock)
    task = asyncio.create_task(service.run())
    await _pass(clock, warm_up)
    calls.clear()
    await _pass(clock, measured)
    rates = {name: count / measured for name, count in calls.most_common()}
    service.stop()
    while not task.done():
        await _pass(clock, 0.1)
    return rates


async def _pass(clock: Any, seconds: float) -> None:
    end = clock.monotonic() + seconds
    while clock.monotonic() < end:
        # Time for the threads of the database too.
        for _ in range(_ROUNDS):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        clock.advance(min(0.05, max(0.001, end - clock.monotonic())))


if __name__ == "__main__":
    from tests.support.clocks import ManualClock

    for count in map(int, sys.argv[1:] or ["500"]):
        found = asyncio.run(idle_worker(ManualClock(), count))
        print(
            f"{count} quiet runs: {sum(found.values()):.1f} calls/s",
            {name: round(rate, 2) for name, rate in found.items()},
        )

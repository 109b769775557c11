"""flood: ten times more than the system can do, for a minute, over HTTP.

One tenant asks for ten times what the slots can run; another has a small job now and then. What is accepted must end,
what is refused must say when to come again; the figures are how much longer the small jobs take than on the idle system
a moment before, and how much more memory the server needs than then.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure
from bench.meter import Meter, peak_mib

SECONDS = 60
IDLE_SECONDS = 15

# What can be run: so many at once, each so long, in seconds.
_SLOTS = 32
_TASK_SECONDS = 0.05
_TIMES = 10
_QUEUED = 5000
_JOBS = 100


def run(setup: Setup) -> list[Figure]:
    # As seconds: a part of the size is a part of the minute.
    seconds, idle_seconds = setup.seconds(SECONDS), setup.seconds(IDLE_SECONDS)
    given = {"seconds": seconds, "idle_seconds": idle_seconds}
    flooded = [setup.ours("bench.flood:flooded", **given) for _ in range(setup.repeat)]
    before, during = ([each[when] for each in flooded] for when in ("before", "during"))
    idle, busy = ([each[when] for each in flooded] for when in ("idle_mib", "busy_mib"))
    more = {
        "seconds": seconds,
        **{name: flooded[-1][name] for name in ("offered", "accepted", "refused", "tasks_a_second")},
    }
    limit = "before the flood"
    return [
        Figure("flood", "another tenant's small job, p95", "ms", during, limit, before, ("at most", 3.0), more),
        Figure("flood", "peak memory", "MiB", busy, limit, idle, ("at most", 1.5)),
    ]


async def flooded(seconds: float, idle_seconds: float, place: str) -> dict[str, Any]:
    from bench.api import new_key, outside, served_api
    from bench.app import PausingExecutor
    from bench.belt import store
    from bench.visitors import FLOOD_TASKS
    from conveyor.embedded import Embedded
    from conveyor.model import JobKind

    capacity = _SLOTS / _TASK_SECONDS
    given = {"worker_concurrency": _SLOTS, "tenant_queued_tasks": _QUEUED, "tenant_jobs": _JOBS}
    async with store(place, **given) as system:
        embedded = Embedded(system, executors={JobKind.FETCH: PausingExecutor(_TASK_SECONDS)})
        meter = Meter()
        async with embedded.running(), served_api(system) as api:
            keys = [await new_key(system, tenant) for tenant in ("polite", "flood")]
            times = (idle_seconds, seconds, _TIMES * capacity / FLOOD_TASKS)
            visits = asyncio.to_thread(outside, "bench.visitors", api.url, *keys, *map(str, times))
            idle_peak = asyncio.create_task(_peak_after(idle_seconds))
            seen = await visits
            ended = await _all_ended(system)
        spent = meter.stop()
    flood = seen["flood"]
    wrong = {name: count for name, count in flood.items() if name.startswith("wrong")}
    if wrong or ended != flood.get("accepted", 0):
        raise MeasurementFailed(f"{flood.get('accepted', 0)} jobs were accepted and {ended} ended well; {wrong}")
    return {
        "count": ended,
        "before": _p95(seen["before"]),
        "during": _p95(seen["during"]),
        "idle_mib": await idle_peak,
        "busy_mib": spent["peak_mib"],
        "offered": sum(flood.values()),
        "accepted": ended,
        "refused": {name: count for name, count in flood.items() if name.startswith("refused")},
        "tasks_a_second": round(capacity),
        **spent,
    }


async def _peak_after(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return peak_mib()


async def _all_ended(system: Any) -> int:
    """How many jobs of the flood were completed with every task, once nothing is under way."""
    from conveyor.model import TenantId
    from conveyor.states import RunState

    while await system.records.jobs.active_jobs():  # noqa: ASYNC110  (seen from outside)
        await asyncio.sleep(0.1)
    well, cursor = 0, None
    while True:
        page = await system.records.jobs.jobs(TenantId("flood"), cursor, 100)
        for job in page.items:
            counts = await system.tasks.recount(job.key)
            well += job.state is RunState.COMPLETED and counts.succeeded == job.run.total
        cursor = page.next_cursor
        if cursor is None:
            return well


def _p95(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=20, method="inclusive")[18]

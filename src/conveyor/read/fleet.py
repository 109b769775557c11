"""Fleet: what works, and what keeps it from working, as one tenant may see it. Its targets that are down, its runs with
what waits in their queues, and the workers that are there."""

import asyncio
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.coordination.breaker import breakers_of
from conveyor.coordination.limits import run_slots
from conveyor.coordination.waits import waiting
from conveyor.engines.queue import Depth, recovery_queue, run_queue
from conveyor.model import BEAT, BEAT_TENANT, WORKERS, Beat, Job, TenantId
from conveyor.read.results import iso_time
from conveyor.system import System

# What a lane waits with is asked of the queue; whoever looks within this time shares the answer.
_FRESH = 2.0
# Rows of workers that are looked at.
_MOST_WORKERS = 1000

_depths = msgspec.json.Decoder(tuple[Depth, Depth])
_beats = msgspec.json.Decoder(Beat)


async def breakers_json(system: System, tenant: TenantId) -> list[dict[str, Any]]:
    """Targets that are open, and those that are tried again."""
    now = system.clock.now()
    return [
        {
            "target": target,
            "state": "open" if now < state.until else "half_open",
            "since": iso_text(state.since),
            "until": iso_text(state.until),
            "times": state.times,
            "at_once": 1 << state.level,
        }
        for target, state in await breakers_of(system.coordinator, system.clock, tenant)
    ]


async def lanes_json(system: System, tenant: TenantId, cursor: str | None, limit: int) -> dict[str, Any]:
    """The tenant's runs that have not ended, newest job first."""
    active = [job for job in await system.records.jobs.active_jobs() if job.tenant == tenant]
    after = sorted(
        (job for job in active if cursor is None or job.job_id < cursor), key=lambda job: job.job_id, reverse=True
    )
    shown = after[:limit]
    items = await asyncio.gather(*(_lane_json(system, job) for job in shown))
    return {"items": items, "next_cursor": shown[-1].job_id if len(after) > limit else None}


async def workers_json(system: System, tenant: TenantId) -> dict[str, Any]:
    """How many there are; and of those that run long tasks of the tenant, which."""
    alive, rows = await asyncio.gather(
        system.coordinator.held(WORKERS), system.records.documents.documents(BEAT, BEAT_TENANT, None, _MOST_WORKERS)
    )
    busy = []
    for row in rows.items:
        beat = _beats.decode(row.body)
        own = [task for task in beat.tasks if task.tenant == tenant]
        if own:
            tasks = [{"job_id": task.job_id, "run_id": task.run_id, "index": task.index} for task in own]
            busy.append({"name": row.id, "at": iso_text(beat.at), "tasks": tasks})
    return {"alive": alive, "slots": system.settings.fleet_concurrency or None, "long_tasks": busy}


async def _lane_json(system: System, job: Job) -> dict[str, Any]:
    run = job.run
    (fresh, again), running, wait = await asyncio.gather(
        _queued(system, job),
        system.coordinator.held(run_slots(run.run_id)),
        waiting(system.coordinator, run.run_id),
    )
    return {
        "job_id": job.job_id,
        "run_id": run.run_id,
        "name": job.name,
        "kind": job.kind,
        "state": run.state,
        "priority": job.options.priority,
        "concurrency": job.options.concurrency,
        "running": running,
        "queue": msgspec.structs.asdict(fresh),
        "recovery": msgspec.structs.asdict(again),
        "waiting": None if wait is None else {"code": wait.code, "detail": wait.detail, "until": iso_time(wait.until)},
    }


async def _queued(system: System, job: Job) -> tuple[Depth, Depth]:
    key = f"lane:{job.run.run_id}"
    kept = await system.coordinator.cached(key)
    if kept is not None:
        return _depths.decode(kept)
    run_id = job.run.run_id
    found = (await system.queue.depth(run_queue(run_id)), await system.queue.depth(recovery_queue(run_id)))
    await system.coordinator.cache(key, msgspec.json.encode(found), _FRESH)
    return found

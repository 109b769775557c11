"""Fleet: what one tenant may see of it. Breakers that are open or half-open, unfinished runs with their queues, and
workers."""

import asyncio
from typing import Any

import msgspec

from conveyor.clock import iso_text
from conveyor.coordination.breaker_states import current_wait, list_breakers
from conveyor.coordination.limits import run_slots
from conveyor.coordination.paces import list_paces
from conveyor.coordination.waits import Wait
from conveyor.engines.queue import Depth, recovery_queue, run_queue
from conveyor.jobs.announced_workers import live_workers
from conveyor.jobs.load_history import load_history
from conveyor.model import BEAT, BEAT_TENANT, WORKERS, Beat, Job, Mode, TenantId
from conveyor.read.status import wait_json, wait_of
from conveyor.states import RunState
from conveyor.system import System

# How long the depth of a queue is cached, in seconds.
_FRESH = 2.0
# Workers that are read.
_MAX_WORKERS = 1000

_depths = msgspec.json.Decoder(tuple[Depth, Depth])
_beats = msgspec.json.Decoder(Beat)


async def breakers_json(system: System, tenant: TenantId | None) -> list[dict[str, Any]]:
    """The breakers of a tenant, or of all, that are open or half-open and that an unfinished run needs."""
    now = system.clock.now()
    breakers = await list_breakers(system.coordinator, tenant)
    active = {job.run.run_id for job in await system.records.jobs.active_jobs()} if breakers else set()
    return [
        {
            "tenant": owner,
            "target": target,
            "state": "open" if now < state.until else "half_open",
            "error": state.error or None,
            "since": iso_text(state.since),
            "until": iso_text(state.until),
            "times": state.times,
            "at_once": 1 << state.level,
            "runs": [run_id for run_id in state.runs if run_id in active],
        }
        for owner, target, state in breakers
        if not state.runs or not active.isdisjoint(state.runs)
    ]


async def hosts_json(system: System, tenant: TenantId) -> list[dict[str, Any]]:
    """The paces of a tenant's hosts, as workers shared them last."""
    now = system.clock.now()
    states = await list_paces(system.coordinator, tenant)
    return [
        {
            "host": host,
            "limit": max(1, int(state.limit)),
            "in_flight": sum(part.in_flight for part in parts.values()),
            "workers": len(parts),
            "latency": round(state.latency, 4),
            "paused_until": iso_text(state.paused_until) if state.paused_until > now else None,
            "at": iso_text(state.at),
        }
        for host, state, parts in sorted((host, state, state.live_parts(now)) for host, state in states.items())
    ]


async def load_json(system: System, tenant: TenantId) -> dict[str, Any]:
    """The load of a tenant over time, by minute and by hour; intervals in which nothing was seen are left out."""
    history = await load_history(system.records.documents, tenant)
    return {
        name: {
            "seconds": seconds,
            "items": [
                {"at": iso_text(number * seconds), **msgspec.structs.asdict(point)}
                for number, point in sorted(points.items())
            ],
        }
        for name, seconds, points in (("minutes", 60, history.minutes), ("hours", 3600, history.hours))
    }


async def lanes_json(system: System, tenant: TenantId, cursor: str | None, limit: int) -> dict[str, Any]:
    """The tenant's unfinished runs, newest job first."""
    active = [job for job in await system.records.jobs.active_jobs() if job.tenant == tenant]
    after = sorted(
        (job for job in active if cursor is None or job.job_id < cursor), key=lambda job: job.job_id, reverse=True
    )
    shown = after[:limit]
    items = await asyncio.gather(*(_lane_json(system, job) for job in shown))
    return {"items": items, "next_cursor": shown[-1].job_id if len(after) > limit else None}


async def workers_json(system: System, tenant: TenantId) -> dict[str, Any]:
    """How many workers are alive, and which of them run long tasks of the tenant."""
    alive, rows, workers = await asyncio.gather(
        system.coordinator.permits_in_use(WORKERS),
        system.records.documents.documents(BEAT, BEAT_TENANT, None, _MAX_WORKERS),
        live_workers(system.records.documents, system.clock.now()),
    )
    busy = []
    for row in rows.items:
        beat = _beats.decode(row.body)
        own = [task for task in beat.tasks if task.tenant == tenant]
        if own:
            tasks = [{"job_id": task.job_id, "run_id": task.run_id, "index": task.index} for task in own]
            busy.append({"name": row.id, "at": iso_text(beat.at), "tasks": tasks})
    shown = [
        {
            "name": name,
            "host": said.host,
            "process": said.process,
            "version": said.version,
            "slots": said.slots,
            "handlers": said.handlers,
            "private_targets": said.private_targets,
            "started_at": iso_text(said.started_at),
            "at": iso_text(said.at),
        }
        for name, said in workers
    ]
    return {
        "alive": alive,
        "slots": system.settings.fleet_concurrency or None,
        "workers": shown,
        "long_tasks": busy,
    }


async def _lane_json(system: System, job: Job) -> dict[str, Any]:
    run = job.run
    (queued, recovering), running, wait = await asyncio.gather(
        _queue_depths(system, job),
        system.coordinator.permits_in_use(run_slots(run.run_id)),
        _lane_wait(system, job),
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
        "queue": msgspec.structs.asdict(queued),
        "recovery": msgspec.structs.asdict(recovering),
        "waiting": None if wait is None else wait_json(wait),
    }


async def _lane_wait(system: System, job: Job) -> Wait | None:
    """Why no task of the run starts now. Only an open job may have none left, and wait for more."""
    if job.mode is not Mode.OPEN or job.run.state is not RunState.INGESTING:
        return await current_wait(system.coordinator, system.clock, job)
    counts = await system.tasks.counts(job.key)
    return await wait_of(system.coordinator, system.clock, job, counts)


async def _queue_depths(system: System, job: Job) -> tuple[Depth, Depth]:
    key = f"lane:{job.run.run_id}"
    cached = await system.coordinator.cached(key)
    if cached is not None:
        return _depths.decode(cached)
    run_id = job.run.run_id
    depths = (await system.queue.depth(run_queue(run_id)), await system.queue.depth(recovery_queue(run_id)))
    await system.coordinator.cache(key, msgspec.json.encode(depths), _FRESH)
    return depths

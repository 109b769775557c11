"""The end of an example: with faults off, everything comes to its end, whether targets are up or down for good."""

import asyncio
import json
from typing import Any

from conveyor.coordination.breaker_states import list_breakers
from conveyor.errors import ConveyorError
from conveyor.model import Job
from conveyor.states import ENDED, RunState
from tests.machine.checks import Violation, check_step
from tests.machine.draws import Ending
from tests.machine.profile import SETTINGS
from tests.machine.targets import GATEWAY_HOST, REFUSED
from tests.machine.world import World
from tests.support.make_jobs import ACME

# Seconds without any progress of anything, with nothing in the way: a retry, a breaker and a poll are shorter. Where a
# process died, or was not answered, what it had comes again when leases lapse; what the monitor had begun with a run
# that is past its deadline takes longest.
_STALL = 25.0
_STALL_AFTER_FAULTS = 80.0
_STALL_PAST_DEADLINE = 330.0
# What a target that is down for longer than a job's patience may take to be seen as that by its last task: alone, a job
# of 60 tasks takes up to 9 s, and a run that feeds nothing while its breaker is open more than 80 s; one whose tasks
# have a single attempt 12 s, which is not noticed.
_PATIENCE_SLACK = 20.0
_MOST = 3000.0
# After its lease, a message is received within this time.
_REDELIVERY_SECONDS = 3.0


async def drain(world: World, ending: Ending | None) -> None:
    """With faults off, everything ends: with all targets up, or with some of them down for good, and a last job that
    comes when they are."""
    if world.crashed or world.killed:
        # What those that died had comes again after its lease, and calls may still fail then.
        await world.advance(SETTINGS["lease_seconds"] + _REDELIVERY_SECONDS)
        await world.replace_dead()
        check_step(world)
    world.faults.off()
    since = world.clock.now()
    world.targets.deaths.clear()
    world.targets.down.clear()
    for host in ending.down if ending else ():
        world.targets.take_down(host, REFUSED)
    await asyncio.sleep(0)
    if ending is not None:
        await world.submit(ending.job.spec, ending.job.tasks.urls, None, prefer_async=False)
    while await world.unschedule():
        pass
    await _let_go(world)
    moved_at, seen = since, await _progress(world)
    while not await _all_ended(world):
        await world.advance(0.5)
        check_step(world)
        if (now := await _progress(world)) != seen:
            moved_at, seen = world.clock.now(), now
        elif world.clock.now() - moved_at > (stall := await _longest_stall(world)):
            raise Violation(f"stalled: nothing moved for {stall:g} s; {await _unfinished(world)}")
        if world.clock.now() - since > _MOST:
            raise Violation(f"endless: not done after {_MOST:g} s; {await _unfinished(world)}")
        await _check_patience(world, since)
        await _let_go(world)


async def _longest_stall(world: World) -> float:
    if not world.disturbed:
        return _STALL
    due = any(job.options.deadline is not None and job.state not in ENDED for job in await world.jobs())
    return _STALL_PAST_DEADLINE if due else _STALL_AFTER_FAULTS


async def _let_go(world: World) -> None:
    """Paused jobs are resumed, open ones closed."""
    for job in await world.jobs():
        try:
            if job.state is RunState.PAUSED:
                await world.resume(job.job_id)
            elif not job.run.sealed and job.state is RunState.INGESTING and job.mode == "open" and not job.run.lineage:
                await world.close_job(job.job_id)
        except ConveyorError:
            # It ended meanwhile.
            continue


async def _all_ended(world: World) -> bool:
    if any(job.state not in ENDED for job in await world.jobs()):
        return False
    exports = [json.loads(row.body) for row in await world.exports()]
    return all(export.get("state", "queued") in ("ready", "failed") for export in exports)


async def _progress(world: World) -> Any:
    jobs = []
    for job in await world.jobs():
        counts = await world.system.tasks.counts(job.key)
        jobs.append((job.run.run_id, job.state, counts.ended, job.run.total))
    exports = [
        (row.id, json.loads(row.body).get("state"), json.loads(row.body).get("read")) for row in await world.exports()
    ]
    # Attempts are progress too: each task has so many. Those of downloads are not counted there, and may be many.
    return jobs, exports, len(world.targets.starts), world.sql("SELECT sum(next_index) FROM ranges")


async def _unfinished(world: World) -> str:
    parts = []
    for job in await world.jobs():
        if job.state in ENDED:
            continue
        counts = await world.system.tasks.counts(job.key)
        depths = world.sql(
            f"SELECT held, count(*), min(visible_at) FROM messages WHERE queue LIKE 'run:{job.run.run_id}%' GROUP BY 1"
        )
        shown = [("held" if held else "waiting", count, round(at - world.clock.now(), 1)) for held, count, at in depths]
        parts.append(f"{job.kind} {job.state} {counts.ended} of {job.run.total} ended, messages {shown}")
    exports = [json.loads(row.body).get("state", "queued") for row in await world.exports()]
    return f"{parts}; exports {exports}"


async def _check_patience(world: World, since: float) -> None:
    """No task waits for a target that is down for longer than the patience of its job."""
    opened = {target: state for _, target, state in await list_breakers(world.system.coordinator, ACME)}
    for job in await world.jobs():
        shared = _shared_target(job)
        state = opened.get(shared)
        breaker = job.options.breaker
        if state is None or not breaker.enabled or job.state is not RunState.RUNNING:
            continue
        over = world.clock.now() - max(since, state.since + breaker.patience, job.run.created_at)
        # A job that came when faults were off has lost nothing.
        is_disturbed = world.disturbed and job.run.created_at < since
        slack = _PATIENCE_SLACK + (_STALL_AFTER_FAULTS if is_disturbed else 0.0)
        if job.options.rate_per_host is not None:
            # Tasks fail while the breaker is open, without a pass. It opens again after a probe, which needs one.
            # What is parked may come back while it is half-open: then another probe has to be waited for.
            slack += 2 / job.options.rate_per_host
        if over > slack:
            counts = await world.system.tasks.counts(job.key)
            raise Violation(
                f"patience: {job.run.total - counts.ended} of {job.run.total} tasks still wait, {over:.0f} s after the "
                f"job's patience of {breaker.patience:g} s for {shared} was over"
            )


def _shared_target(job: Job) -> str:
    """What all of a job's tasks depend on, or nothing."""
    options = job.options
    if options.upstream is not None:
        return f"upstream:{options.upstream}"
    return "" if options.gateway is None or options.gateway.pool else f"gateway:http://{GATEWAY_HOST}"

"""What must hold: cheap things after every step; at the end, that everything comes to its end and nothing is left."""

import asyncio
import json
from collections import Counter
from typing import Any

from conveyor.coordination.breaker_states import list_breakers
from conveyor.errors import ConveyorError
from conveyor.model import WORKERS, Job, RunKey
from conveyor.states import ENDED, RunState, TaskStatus
from tests.machine.nodes import Node
from tests.machine.targets import HOSTS, PLAIN, REFUSED, Asked
from tests.machine.world import World
from tests.support.make_jobs import ACME

# Lines of the log that nothing in this world accounts for.
_NEVER = {
    "fetcher hangs; killing it",
    "fetcher ended; restarting",
    "fetcher failed",
    "lane task failed",
    "executor failed",
    "long task failed inside Conveyor",
    "schedule failed with an internal error; it is retried",
    "message is not a chunk",
    "message is not one of Conveyor's",
    "counts had drifted",
}
# Not without a call that failed.
_NOT_BY_ITSELF = {"role tick failed", "outcomes not written; retrying", "ingest dead-lettered"}

# Seconds without any progress of anything, with nothing in the way: a retry, a breaker and a poll are shorter. Where a
# process died, or was not answered, what it had comes again when leases lapse; what the monitor had begun with a run
# that is past its deadline takes longest.
_STALL = 25.0
_STALL_AFTER_FAULTS = 80.0
_STALL_PAST_DEADLINE = 330.0
# What a target that is down for longer than a job's patience may take to be seen as that by its last task.
_PATIENCE_SLACK = 30.0
_MOST = 3000.0
# What several turns of the loop may take, and no attempt.
_TURN_SECONDS = 0.005
# Together a little more than the longest lease.
_SETTLE_LOOKS = 20
_SETTLE_SECONDS = 4.0


class Violation(AssertionError):
    """An invariant does not hold."""


def check_step(world: World) -> None:
    """After every step."""
    _check_log(world)
    for idle in world.idle_closed:
        if idle.quiet < idle.timeout:
            raise Violation(
                f"idle close: {idle.job_id} was closed as idle {idle.quiet:.3f} s after a batch was accepted, "
                f"its idle_timeout is {idle.timeout:g} s"
            )
    if world.far_ahead:
        raise Violation(f"reserved: {world.far_ahead[0]}: whoever comes meanwhile waits for them")
    if world.targets.over and not world.disturbed and not world.changed:
        raise Violation(f"limit: {world.targets.over[0]}")


async def check_at_work(world: World) -> None:
    """No order waits at a fetcher while its lane has a slot free; not for longer than a message takes."""
    if idle := _idle_lanes(world):
        await world.advance(_TURN_SECONDS)
        if still := idle & _idle_lanes(world):
            raise Violation(f"idle: orders wait at lanes {[number for _, number, _ in still]} whose slots are free")


def _idle_lanes(world: World) -> set[tuple[int, int, int]]:
    """Which they are, and how many attempts there were: while others begin, the loop may just not have come to it."""
    return {
        (id(child), number, len(world.targets.starts))
        for node in world.nodes
        for child in node.launcher.children
        for number, lane in child._lanes.items()
        if lane.waiting and len(lane.running) < lane.width
    }


def _check_log(world: World) -> None:
    injected = bool(world.faults.fired)
    for line in world.logs:
        event = line["event"]
        if event in _NEVER or (event in _NOT_BY_ITSELF and not injected):
            raise Violation(f"log: {_shown(line)}")
    world.logs.clear()
    for text in world.unhandled:
        if "as it was armed to" not in text:
            raise Violation(f"unhandled: {text}")


def _shown(line: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in line.items())[-1500:]


async def drain(world: World, *, down: bool) -> None:
    """With faults off, and with all targets up or with all of them down for good, everything ends."""
    world.faults.off()
    world.targets.down.clear()
    for host in HOSTS if down else ():
        world.targets.take_down(host, REFUSED)
    await asyncio.sleep(0)
    while await world.unschedule():
        pass
    await _let_go(world)
    since = world.clock.now()
    moved_at, seen = since, await _progress(world)
    while not await _all_ended(world):
        await world.advance(0.5)
        check_step(world)
        await check_at_work(world)
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
        state = opened.get(f"upstream:{job.options.upstream}")
        breaker = job.options.breaker
        if state is None or not breaker.enabled or job.state is not RunState.RUNNING:
            continue
        over = world.clock.now() - max(since, state.since + breaker.patience, job.run.created_at)
        slack = _PATIENCE_SLACK + (_STALL_AFTER_FAULTS if world.disturbed else 0.0)
        if job.options.rate_per_host is not None:
            # What a worker has in hand is looked at when its turn comes.
            slack += job.run.total / job.options.rate_per_host
        if over > slack:
            counts = await world.system.tasks.counts(job.key)
            raise Violation(
                f"patience: {job.run.total - counts.ended} of {job.run.total} tasks still wait, {over:.0f} s after the "
                f"job's patience of {breaker.patience:g} s for upstream {job.options.upstream} was over"
            )


async def check_ended(world: World) -> None:
    """Of everything that was promised."""
    jobs = {job.job_id: job for job in await world.jobs()}
    for pledge in world.pledges.values():
        job = jobs.get(pledge.job_id)
        if pledge.deleted:
            continue
        if job is None:
            raise Violation(f"lost: {pledge.job_id} was accepted and is gone")
    for job in jobs.values():
        await _check_job(world, job)
    for row in await world.exports():
        export = json.loads(row.body)
        if row.job_id in jobs and export.get("state") != "ready":
            raise Violation(f"export: {export.get('state')}: {export.get('error')}")


async def _check_job(world: World, job: Job) -> None:
    tasks = world.system.tasks
    pledge = world.pledges.get(job.job_id)
    ends: Counter[str] = Counter()
    for event in (await world.system.records.outbox.events(ACME, job.job_id, None, 10_000)).items:
        if event.event in ("run.completed", "run.failed", "run.cancelled"):
            ends[event.run_id] += 1
    for run in await world.system.records.jobs.runs(job.job_id):
        key = RunKey(job.tenant, job.job_id, run.run_id, job.task_shard_count)
        counts = await tasks.counts(key)
        name = f"{job.kind} run {run.number}, {run.state}"
        if ends[run.run_id] != 1:
            raise Violation(f"events: {name} has {ends[run.run_id]} terminal events")
        if counts != await tasks.recount(key):
            raise Violation(f"counts: {name}: kept {counts}, counted {await tasks.recount(key)}")
        if counts.ended != run.total:
            raise Violation(f"counts: {name}: {counts} of a total of {run.total}")
        rows = world.sql(
            f"SELECT count(*), sum(status = 0) FROM tasks JOIN task_runs USING (run_no) WHERE run_id = '{run.run_id}'"
        )
        if rows[0][0] != run.total or rows[0][1]:
            raise Violation(f"rows: {name}: {rows[0]} of a total of {run.total}")
        first = pledge is not None and run.number == 1 and run.state is RunState.COMPLETED
        if first and not pledge.tasks <= run.total <= pledge.tasks + pledge.maybe:
            raise Violation(f"total: {name}: {run.total}, and {pledge.tasks} to {pledge.tasks + pledge.maybe} accepted")
    await _check_tasks(world, job)


async def _check_tasks(world: World, job: Job) -> None:
    plain = job.state is RunState.COMPLETED and not world.targets.failed and not world.disturbed
    for task in await tasks_of(world, job):
        asked = Asked.of(json.loads(bytes(task.input)))
        # Others that hang may open the breaker of a host that is there.
        failed = task.status is not TaskStatus.SUCCEEDED and task.error_code not in ("target_down", "deadline")
        if plain and failed and asked.behaviour in PLAIN and job.options.timeout > 1:
            raise Violation(f"outcome: a task for {asked} {task.status.label}: {task.detail.error}")
        body = task.detail.body
        if body is not None and body.piece == 0:
            data = await world.system.blobs.get(body.key, max(body.offset, 0), body.length)
            if data is None or len(data) != body.length:
                raise Violation(f"body: of task {task.index} of {job.job_id}")


async def tasks_of(world: World, job: Job) -> list[Any]:
    total = max(1, job.run.total)
    return await world.system.tasks.at(job.key, range(total))


async def settle(world: World) -> None:
    """Everybody sees that all has ended, and what was deleted is removed: within a lease nothing is left."""
    for _ in range(_SETTLE_LOOKS):
        await world.advance(_SETTLE_SECONDS)
        check_step(world)
        try:
            await check_empty(world)
        except Violation as left:
            found = left
        else:
            return
    raise found


async def check_empty(world: World) -> None:
    """Nothing is left in queues, in the coordinator, or in memory."""
    for query, what in (
        ("SELECT queue, held, receives, count(*) FROM messages GROUP BY 1, 2, 3", "messages"),
        ("SELECT job_id FROM jobs WHERE deleted", "deleted jobs"),
        ("SELECT run_id FROM runs WHERE ended_at IS NOT NULL AND swept = 0", "runs that were not swept"),
        (f"SELECT name, holder FROM leases WHERE expires_at > {world.clock.now()}", "leases"),
        ("SELECT run_id FROM task_runs WHERE run_id NOT IN (SELECT run_id FROM runs)", "tasks without a run"),
    ):
        if left := world.sql(query):
            raise Violation(f"left: {what}: {left[:5]}")
    _check_coordinator(world)
    for node in world.nodes:
        if node.worker is not None:
            _check_worker(node)


def _check_coordinator(world: World) -> None:
    coordinator: Any = world.system.coordinator
    dead = {node.role.name for node in world.crashed}
    now = world.clock.monotonic()
    for semaphore, holders in coordinator._holders.items():
        live = {name: count for name, (count, until) in holders.items() if name not in dead and until > now}
        if semaphore != WORKERS and live:
            raise Violation(f"semaphore: {semaphore} is held: {live}")


def _check_worker(node: Node) -> None:
    worker: Any = node.worker
    recorder = worker._recorder
    assert node.fetchers is not None
    tables: dict[str, Any] = {
        "lanes": worker._lanes,
        "leaving": worker._leaving,
        "lost": worker._lost,
        "recorder waiting": recorder._waiting,
        "recorder flushes": recorder._flushes,
        "recorder count": recorder._count,
        "recorder bytes": recorder._bytes,
        "probes": {key: count for key, count in worker._breakers._probing.items() if count},
    }
    for number, member in enumerate(node.fetchers.members):
        tables[f"fetcher {number} sent"] = member._sent
        tables[f"fetcher {number} shares"] = {key: share.owed for key, share in member._shares.items() if share.owed}
    for number, child in enumerate(node.launcher.children):
        tables[f"child {number} lanes"] = child._lanes
    for name, table in tables.items():
        if table:
            raise Violation(f"memory: {name}: {str(table)[:300]}")

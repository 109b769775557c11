"""What must hold: cheap things after every step; at the end, that everything comes to its end and nothing is left."""

import json
from typing import Any

from conveyor.errors import EngineFailed
from conveyor.model import WORKERS, Job, JobKind, RunKey
from conveyor.process.executors.fetch.child import ChildLane
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.worker import Worker
from conveyor.read.results import read_body
from conveyor.recover.overdue_runs import OVERDUE
from conveyor.states import ReasonCode, RunState, TaskStatus
from tests.machine.nodes import Node
from tests.machine.targets import PLAIN, Asked
from tests.machine.world import World
from tests.support.make_jobs import ACME

# Lines of the log that nothing in this world accounts for.
_NEVER = {
    "fetcher hangs; killing it",
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
_NOT_BY_ITSELF = {
    "role tick failed",
    "item failed; the pass goes on",
    "another part of the pass failed",
    "outcomes not written; retrying",
    "ingest dead-lettered",
}
# Not without a fetcher that was killed.
_NOT_UNLESS_KILLED = {"fetcher ended; restarting"}

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
    if world.wrong_at_rest:
        raise Violation(world.wrong_at_rest[0])
    if world.targets.beside:
        raise Violation(f"beside: {world.targets.beside[0]}")
    if world.targets.over and not world.disturbed and not world.changed:
        raise Violation(f"limit: {world.targets.over[0]}")


def check_at_rest(world: World) -> None:
    """Whenever nobody has anything to do until the next timer: no order waits at a fetcher that has no slot of its
    lane, nor where a slot is free, and lanes know what they have."""
    world.wrong_at_rest += _idle_lanes(world) or _miscounted_lanes(world) or _misdealt_slots(world)


def _miscounted_lanes(world: World) -> list[str]:
    """What a worker's lanes have that does not add up: each slot of a target is in use by a task that is under way, and
    each reference of a leased chunk waits, is under way, or has an outcome to be written."""
    wrong = []
    for lane in [lane for worker in _workers(world) for lane in worker._lanes.values()]:
        under_way = lane._sent if isinstance(lane, RemoteLane) else lane.active
        slots = sum(target.running for target in lane._targets._targets.values())
        if slots > under_way:
            wrong.append(f"slots: {lane.job.run.run_id} uses {slots} of its targets for {under_way} tasks")
        grain = world.profile.grain if lane.job.kind is JobKind.PYTHON else 1
        chunks = [chunk for chunk in lane.chunks.values() if not chunk.lost]
        held = len(lane._waiting) + len(lane._targets) + len(lane._paced)
        known = held + grain * under_way + sum(chunk.unwritten for chunk in chunks)
        paced = sum(pace.lanes.users.get(lane._paced, 0) for pace in lane._paced._used)
        if paced > under_way:
            wrong.append(f"pace: {lane.job.run.run_id} has {paced} in flight for {under_way} tasks")
        if (left := sum(chunk.left for chunk in chunks)) > known:
            wrong.append(f"references: {lane.job.run.run_id} leases {left} and knows where {known} are")
    return wrong


def _misdealt_slots(world: World) -> list[str]:
    """Workers that run more attempts than they have slots, or leave slots unused that a lane was dealt."""
    wrong = []
    for node in _worker_nodes(world):
        if node.worker is None:
            continue
        dealer, slots = node.worker._dealer, node.system.settings.worker_concurrency
        lanes = dict.fromkeys((*dealer._used, *node.worker._lanes.values()))
        attempts = sum(lane.active for lane in lanes if not isinstance(lane, RemoteLane))
        attempts += sum(len(lane.running) for child in node.launcher.children for lane in child._lanes.values())
        if attempts > slots:
            wrong.append(f"slots: a worker runs {attempts} attempts in {slots} slots")
        in_use = sum(lane.slots_in_use for lane in lanes)
        if not attempts <= in_use <= dealer._in_use <= slots:
            wrong.append(f"slots: {attempts} attempts, {in_use} of {slots} slots in use, {dealer._in_use} counted")
        if dealer._owed and in_use < dealer._slots:
            wrong.append(f"slots: {in_use} of {dealer._slots} in use, and {len(dealer._owed)} lanes wait for one")
    return wrong


def _idle_lanes(world: World) -> list[str]:
    wrong = []
    for number, lane in _fetcher_lanes(world):
        if lane.waiting and not lane.width:
            wrong.append(f"idle: orders of lane {number} wait at a fetcher that has no slot of it")
        elif lane.waiting and len(lane.running) < lane.width:
            wrong.append(f"idle: orders wait at lane {number} whose slots are free")
    return wrong


def _fetcher_lanes(world: World) -> list[tuple[int, ChildLane]]:
    children = [child for node in _worker_nodes(world) for child in node.launcher.children]
    return [lane for child in children for lane in child._lanes.items()]


def _workers(world: World) -> list[Worker]:
    return [node.worker for node in _worker_nodes(world) if node.worker is not None]


def _worker_nodes(world: World) -> list[Node]:
    return [node for node in world.nodes if node.name == "worker" and not node.alive.dead]


def _check_log(world: World) -> None:
    injected = bool(world.faults.fired)
    for line in world.logs:
        event = line["event"]
        unaccounted = (event in _NOT_BY_ITSELF and not injected) or (event in _NOT_UNLESS_KILLED and not world.killed)
        if event in _NEVER or unaccounted:
            raise Violation(f"log: {_shown(line)}")
    world.logs.clear()
    for text in world.unhandled:
        if "as it was armed to" not in text:
            raise Violation(f"unhandled: {text}")


def _shown(line: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in line.items())[-1500:]


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
    ends: dict[str, list[str]] = {}
    for event in (await world.system.records.outbox.events(ACME, job.job_id, None, 10_000)).items:
        if event.event in ("run.completed", "run.failed", "run.cancelled"):
            ends.setdefault(event.run_id, []).append(event.event)
    for run in await world.system.records.jobs.runs(job.job_id):
        key = RunKey(job.tenant, job.job_id, run.run_id, job.task_shard_count)
        counts = await tasks.counts(key)
        name = f"{job.kind} run {run.number}, {run.state}"
        events = ends.get(run.run_id, [])
        # A rerun resumes an ingest that failed because calls did: then the run ends again.
        resumed = bool(world.faults.fired) and events.count("run.failed") >= len(events) - 1
        if len(events) != 1 and not (events and resumed):
            raise Violation(f"events: {name} has {len(events)} terminal events")
        if counts != await tasks.recount(key):
            raise Violation(f"counts: {name}: kept {counts}, counted {await tasks.recount(key)}")
        if run.reason_code == ReasonCode.INGEST_FAILED:
            # Its tasks wait for the rest of its list.
            continue
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
            try:
                await read_body(world.system.blobs, task)
            except EngineFailed:
                raise Violation(f"body: of task {task.index} of {job.job_id}") from None


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
    # A dead letter whose monitor was not answered is received with that of the next overdue run.
    left_over = OVERDUE if world.faults.fired else ""
    # A run whose ingest failed keeps what it has for when the ingest is resumed.
    resumable = "SELECT 'run:' || run_id FROM runs WHERE reason_code = 'ingest_failed'"
    for query, what in (
        (
            "SELECT queue, held, receives, count(*) FROM messages "
            f"WHERE queue != '{left_over}' AND substr(queue, 1, 34) NOT IN ({resumable}) GROUP BY 1, 2, 3",
            "messages",
        ),
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
        "leaving": worker._dropped._leaving,
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

"""What is run with one fault in it: each scenario is a few tasks and takes every path of one part of the system."""

import asyncio
import io
import json
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import msgspec

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.schedules import SCHEDULE, Schedules, ScheduleSpec, schedule_of
from conveyor.accept.spec import JobSpec, TasksSpec
from conveyor.accept.submit import Submit
from conveyor.egress.outbound import Outbound, Pairs, PostReply
from conveyor.egress.target_guard import TargetGuard
from conveyor.errors import JobEnded, NotFound
from conveyor.export.exports import Exports, ExportState
from conveyor.export.request import ExportCompression, ExportFormat, ExportSpec
from conveyor.model import PROGRESS, Backoff, Job, JobId, JobKind, ListFormat, Mode, Outcome, Source, TaskRef
from conveyor.notify.deliveries import DELIVERY, delivery_of
from conveyor.notify.webhooks import Webhooks, WebhookSpec
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.download.exchange import ExchangePlan
from conveyor.process.executors.download.long_tasks import LongTasks
from conveyor.process.executors.fetch.fetchers import Fetchers, LeasedReference, Port
from conveyor.process.task_progress import Track
from conveyor.states import TaskStatus
from tests.faults.one_fault import Fault, Injector
from tests.faults.one_fault_world import EMBEDDED, State, World, open_world
from tests.support.export_jobs import parts_of
from tests.support.make_jobs import ACME
from tests.support.receiver import Receiver
from tests.support.small_fleet import Recording, failure, success

Scenario = Callable[[World], Awaitable[None]]

SOON = Backoff(base=1.0, jitter=False)


def raw(*values: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(value)) for value in values]


def job_spec(*values: Any, **more: Any) -> JobSpec:
    given = {"kind": JobKind.PYTHON, "handler": "anything", "tasks": raw(*values), "backoff": SOON, **more}
    return JobSpec(**given)


async def submitted(world: World, spec: JobSpec) -> JobId:
    """The job, as a client submits it."""
    submit = Submit(world.system)
    accepted = await world.ask(f"job {spec.name}", lambda request: submit.submit(ACME, spec, request))
    return JobId(accepted.subject)


async def uneven(job: Job, ref: TaskRef) -> Outcome:
    """One task in five fails for good, one in five the first time only."""
    if ref.index % 5 == 3:
        return failure("result_not_json")
    if ref.index % 5 == 1 and ref.attempt == 1:
        return failure()
    return success(f"body of {ref.index}".encode())


async def staged(world: World) -> None:
    """A list with invalid lines, in two ranges of several batches; tasks that fail and tasks that are retried; packed
    bodies."""
    world.executor.act = uneven
    lines = [b'"in %02d"' % number for number in range(15)]
    for number in (6, 9, 14):
        lines[number] = b"{invalid"
    data = b"\n".join(lines) + b"\n"
    key = f"lists/{ACME}/list_1"
    await world.insist(lambda: world.system.blobs.put(key, data))
    source = Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL)
    spec, job_id = job_spec(chunk_size=4, name="staged"), JobId("job_" + "0" * 26)
    submit = Submit(world.system)
    await world.ask("job", lambda request: submit.submit_as(job_id, ACME, spec, source, request))
    world.start()
    await world.ended(job_id)


def host_of(ref: TaskRef) -> str:
    return ref.input.strip('"').removeprefix("http://").partition("/")[0]


async def limited(world: World) -> None:
    """Hosts with a rate and a slot each; two of them are down for a while, and their breakers open."""
    up_at = world.fleet.clock.now() + 6.0

    async def act(job: Job, ref: TaskRef) -> Outcome:
        await world.fleet.clock.sleep(0.5)
        down = host_of(ref) != "good.example" and world.fleet.clock.now() < up_at
        return failure("connect_failed") if down else success(b"here")

    executor = Recording(world.fleet.clock, act, target=host_of)
    hosts = ("good.example", "bad.example", "worse.example")
    inputs = [f"http://{hosts[number % 3]}/{number}" for number in range(9)]
    limits = {"rate_per_host": 2.0, "concurrency_per_host": 1, "concurrency": 4, "attempts": 10}
    spec = job_spec(*inputs, kind=JobKind.FETCH, handler=None, name="limited", chunk_size=3, **limits)
    job_id = await submitted(world, spec)
    world.start(executor)
    await world.ended(job_id)
    world.notes["at once"] = max(executor.most[host] for host in hosts)


async def opened(world: World) -> None:
    """An open job of two batches, over several shards, that is closed because nobody adds to it."""
    world.start()
    options = {"mode": Mode.OPEN, "idle_timeout": 10.0, "name": "open", "chunk_size": 2}
    job_id = await submitted(world, job_spec(**options))
    add = AddTasks(world.system)
    for number, batch in enumerate((TasksSpec(raw(1, 2, 3)), TasksSpec(raw(4, 5)))):
        job = await world.job(job_id)
        await world.ask(f"batch {number}", lambda request, job=job, batch=batch: add.add(job, batch, request))
    await world.ended(job_id)


async def controlled(world: World) -> None:
    """Pause and resume, a rerun of what failed, a job that is cancelled and one that is deleted while they run."""

    resumed = False

    async def act(job: Job, ref: TaskRef) -> Outcome:
        if job.name != "paused" or not resumed:
            await world.fleet.clock.sleep(_FOREVER)
        return await uneven(job, ref) if job.run.number == 1 else success(b"at last")

    world.executor.act = act
    world.start()
    control = Control(world.system)
    job_ids = [await submitted(world, job_spec(*range(4), name=name, chunk_size=2)) for name in _CONTROLLED]
    paused, cancelled, deleted = job_ids

    async def running() -> bool:
        return world.executor.running["all"] == 12

    await world.until(running, "all tasks run")
    await world.insist(lambda: _moved(world, paused, control.pause))
    await world.insist(lambda: _moved(world, cancelled, control.cancel))
    await world.insist(lambda: world.system.records.jobs.mark_deleted(ACME, deleted))

    async def stopped() -> bool:
        return world.executor.running["all"] == 0

    await world.until(stopped, "nothing runs any more")
    resumed = True
    # It may have gone on, and be completed, although the answer to the first request was an error.
    with suppress(JobEnded):
        await world.insist(lambda: _moved(world, paused, control.resume))
    await world.ended(paused)
    again, job = Rerun(world.system), await world.job(paused)
    await world.ask("rerun", lambda request: again.rerun(job, RerunSpec("failed"), request))
    await world.ended(paused)
    await world.ended(cancelled)


_CONTROLLED = ("paused", "cancelled", "deleted")
_FOREVER = 1e9


async def _moved(world: World, job_id: JobId, move: Callable[[Job], Awaitable[Job]]) -> Job:
    job = await world.system.records.jobs.job(ACME, job_id)
    assert job is not None
    return await move(job)


async def exported(world: World) -> None:
    """Exports of a job, in two formats; one of them is deleted."""
    world.executor.act = uneven
    world.start()
    job_id = await submitted(world, job_spec(*range(6), name="exported"))
    await world.ended(job_id)
    exports, job = Exports(world.system), await world.job(job_id)
    formats = (ExportFormat.ZIP, ExportFormat.JSONL, ExportFormat.ZIP)
    made = []
    for number, format in enumerate(formats):
        spec = ExportSpec(format=format, compression=ExportCompression.NONE)
        accepted = await world.ask(
            f"export {number}",
            lambda request, spec=spec: exports.create(job, spec, request),  # type: ignore[misc]
        )
        made.append(accepted.subject)
    behind = Exports(world.fleet.system)

    async def ready() -> bool:
        states = [(await behind.find(ACME, export_id)).export.state for export_id in made]
        return all(state in (ExportState.READY, ExportState.FAILED) for state in states)

    await world.until(ready, "the exports are ready")
    gone = made.pop()
    await world.insist(lambda: _deleted(exports, gone))
    for format, export_id in zip(formats, made, strict=False):
        (data,) = await parts_of(world.fleet.system, export_id)
        world.notes[format] = _unzipped(data) if format is ExportFormat.ZIP else _lines(data)


# What is another one in each run of the scenario.
_OWN = ("task_id", "elapsed", "attempts")


async def _deleted(exports: Exports, export_id: str) -> None:
    # It is gone already if the answer of the first try was lost.
    with suppress(NotFound):
        await exports.delete(ACME, export_id)


def _unzipped(data: bytes) -> State:
    archive = zipfile.ZipFile(io.BytesIO(data))
    return {
        name: _lines(archive.read(name)) if name == "manifest.jsonl" else archive.read(name)
        for name in archive.namelist()
    }


def _lines(data: bytes) -> list[Any]:
    """Of a manifest, without times and what follows from them."""
    lines = [json.loads(line) for line in data.splitlines()]
    return [
        {key: value for key, value in line.items() if not key.endswith("_at") and key not in _OWN} for line in lines
    ]


class CountedOutbound(Outbound):
    """While a request is under way, the clock stands."""

    threads: Any

    async def post(self, url: str, headers: Pairs, body: bytes, timeout: float) -> PostReply:
        self.threads.busy += 1
        try:
            return await super().post(url, headers, body, timeout)
        finally:
            self.threads.busy -= 1


async def told(world: World) -> None:
    """A schedule makes a job, and an endpoint hears of it."""

    def outbound() -> Outbound:
        made = CountedOutbound(TargetGuard(allow_private=True, clock=world.fleet.clock))
        made.threads = world.fleet._threads
        return made

    world.embedded._outbound = outbound  # type: ignore[method-assign]
    async with Receiver() as receiver:
        world.start()
        endpoint = WebhookSpec(receiver.url(), events=["job.accepted", "run.completed"])
        webhooks, schedules = Webhooks(world.system), Schedules(world.system)
        await world.ask("endpoint", lambda request: webhooks.create(ACME, endpoint, request))
        template = msgspec.Raw(b'{"kind": "python", "handler": "anything", "tasks": [1, 2]}')
        spec = ScheduleSpec("0 * * * *", template, name="told")
        schedule = await world.ask("schedule", lambda request: schedules.create(ACME, spec, request))

        async def fired() -> bool:
            row = await world.fleet.system.records.documents.document(SCHEDULE, ACME, schedule.subject)
            return row is not None and schedule_of(row).fired > 0

        await world.until(fired, "the schedule has fired")
        await world.insist(lambda: _removed(schedules, schedule.subject))
        (job,) = (await world.fleet.system.records.jobs.jobs(ACME, None, 100)).items
        await world.ended(job.job_id)
        await world.settled()

        async def delivered() -> bool:
            return not await world.fleet.system.records.documents.due_documents(
                DELIVERY, world.fleet.clock.now() + 1e6, 1
            )

        await world.until(delivered, "all is delivered")
        rows = (await world.fleet.system.records.documents.documents(DELIVERY, ACME, None, 100)).items
        world.notes["deliveries"] = Counter((delivery_of(row).event, delivery_of(row).standing) for row in rows)
        world.notes["told"] = Counter(event for _, event in {(told.id, told.event) for told in receiver.told})


async def _removed(schedules: Schedules, schedule_id: str) -> None:
    # It is gone already if the answer of the first try was lost.
    with suppress(NotFound):
        await schedules.remove(ACME, schedule_id)


class Pieces(LocalExecutor):
    """An executor of long tasks: each arrives in pieces, and its row says how many are there."""

    def __init__(self, world: World) -> None:
        self._world = world
        system = world.system
        guard = TargetGuard(allow_private=True, clock=system.clock)
        self._long = LongTasks(system.settings, system.clock, guard, system.records, system.blobs)

    def grain(self, job: Job) -> int:
        return 1

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref)

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        async def take(plan: ExchangePlan, track: Track) -> Outcome:
            for done in range(track.done, 3):
                await self._world.fleet.clock.sleep(2.0)
                await track.save(done + 1, 3)
            await track.remove()
            return Outcome(TaskStatus.SUCCEEDED, http_status=200, body=b"all of it")

        return [await self._long.attempt(job, ref, take) for ref in refs]

    async def close(self) -> None:
        """Nothing is held."""


async def long(world: World) -> None:
    """Three tasks that take long and say how far they are."""
    inputs = [f"http://files.example/{number}" for number in range(3)]
    spec = job_spec(*inputs, kind=JobKind.DOWNLOAD, handler=None, name="long", concurrency=2)
    job_id = await submitted(world, spec)
    world.start(Pieces(world))
    await world.ended(job_id)
    page = await world.fleet.system.records.documents.documents(PROGRESS, ACME, None, 10)
    world.notes["progress"] = len(page.items)


class NearFetchers(Fetchers):
    """Fetchers in this process. The first time that one is given work it goes down with it."""

    def __init__(self, world: World) -> None:
        super().__init__(msgspec.structs.replace(world.system.settings, fetchers=0), world.fleet.clock)
        self._clock = world.fleet.clock
        self._died = False
        self._out: dict[asyncio.Task[None], tuple[Port, LeasedReference]] = {}

    def capacity(self, port: Port) -> int:
        return 2 * port.width

    def start(self, port: Port, entries: Sequence[LeasedReference]) -> None:
        for one in entries:
            task = asyncio.create_task(self._fetch(port, one))
            self._out[task] = (port, one)
            task.add_done_callback(lambda task: self._out.pop(task, None))

    def drop(self, port: Port, everything: bool) -> None:
        """All that it has was begun."""
        for task, (whose, _) in list(self._out.items()):
            if everything and whose is port:
                task.cancel()

    async def close(self) -> None:
        for task in self._out:
            task.cancel()

    async def _fetch(self, port: Port, one: LeasedReference) -> None:
        if not self._died:
            self._died = True
            lost = [(task, ref) for task, (whose, ref) in self._out.items() if whose is port]
            for task, _ in lost:
                if task is not asyncio.current_task():
                    task.cancel()
            port.on_lost([ref for _, ref in lost])
            return
        await self._clock.sleep(1.0)
        port.on_outcomes([one], [Outcome(TaskStatus.SUCCEEDED, http_status=200, body=b"here")])


async def remote(world: World) -> None:
    """A job whose references go to fetchers, one of which dies: what it had comes again."""
    inputs = [f"http://{'one' if number % 2 else 'two'}.example/{number}" for number in range(6)]
    spec = job_spec(*inputs, kind=JobKind.FETCH, handler=None, name="remote", chunk_size=2, concurrency=4)
    job_id = await submitted(world, spec)
    world.start(NearFetchers(world))
    await world.ended(job_id)


async def remote_limited(world: World) -> None:
    """The same with a rate and slots for each host."""
    inputs = [f"http://{'one' if number % 2 else 'two'}.example/{number}" for number in range(6)]
    limits = {"rate_per_host": 2.0, "concurrency_per_host": 1, "concurrency": 4}
    spec = job_spec(*inputs, kind=JobKind.FETCH, handler=None, name="remote", chunk_size=2, **limits)
    job_id = await submitted(world, spec)
    world.start(NearFetchers(world))
    await world.ended(job_id)


SCENARIOS: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "staged": (staged, {"ingest_range_bytes": 104}),
    "limited": (limited, {"breaker_least": 2, "breaker_seconds": 3.0}),
    "opened": (opened, {"force_task_shards": True, "task_shard_count": 2}),
    "controlled": (controlled, {}),
    "exported": (exported, {"export_piece_bytes": 64 * 1024}),
    "told": (told, {}),
    "long": (long, {}),
    "remote": (remote, {}),
    "remote_limited": (remote_limited, {}),
}


async def outcome_of(name: str, injector: Injector, stack: str = EMBEDDED) -> State:
    """Run a scenario, and say all that it came to."""
    scenario, settings = SCENARIOS[name]
    async with open_world(injector, stack, **settings) as world:
        await scenario(world)
        await world.settled()
        state = await world.end_state()
        state["left"] = await world.removed()
    state["held"] = world.held()
    return state


async def failure_of(name: str, fault: Fault, right: State, stack: str = EMBEDDED) -> str | None:
    """What is wrong with a scenario in which one call failed; None if nothing is."""
    injector = Injector(fault)
    try:
        state = await outcome_of(name, injector, stack)
    except Exception as error:
        return f"{name}, {fault}: {type(error).__name__}: {error}"
    if (fault.kind[0], fault.kind[1]) == ("tasks", "note"):
        # Whether it was noted is not known, and it is better noted twice than not at all.
        right, state = _noted(right), _noted(state)
    wrong = list(differences(right, state))
    return f"{name}, {fault}: " + "; ".join(wrong) if wrong else None


def _noted(state: Any) -> Any:
    """The same state, with what was noted and not how often."""
    if not isinstance(state, dict):
        return state
    return {key: set(value) if key == "trail" else _noted(value) for key, value in state.items()}


def differences(right: Any, found: Any, path: str = "") -> Iterator[str]:
    if isinstance(right, dict) and isinstance(found, dict):
        for key in {**right, **found}:
            yield from differences(right.get(key), found.get(key), f"{path}/{key}")
    elif right != found:
        yield f"{path} is {found!r}, not {right!r}"

"""The world of one example: a system on SQLite, all roles on it, the targets of its tasks, clients that ask for things,
and a record of what they were promised."""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import AsyncExitStack
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import msgspec
from structlog.processors import format_exc_info
from structlog.testing import capture_logs

from conveyor.accept.add_tasks import AddTasks
from conveyor.accept.control import Control
from conveyor.accept.option_changes import change_options
from conveyor.accept.redrive import redrive_all
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.schedules import Schedules, ScheduleSpec
from conveyor.accept.spec import JobSpec, TasksSpec, decode_spec
from conveyor.accept.submit import Submit
from conveyor.coordination.breaker_states import reset_breakers
from conveyor.engines.records import Document
from conveyor.errors import ConveyorError, IdempotencyInFlight, Unavailable
from conveyor.export.exports import Exports
from conveyor.export.request import ExportSpec
from conveyor.jobs.dead_lettered_tasks import DeadLetterFilter
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.model import EXPORT, Job, JobId, ListFormat, Mode, Source
from conveyor.system import System, open_system
from tests.machine.loop import LoopClock, VirtualLoop, database_on_loop
from tests.machine.nodes import ROLES, Node, own_tasks
from tests.machine.profile import Profile
from tests.machine.seams import Alive, Faults, faulty
from tests.machine.targets import HOSTS, Launcher, Targets, url
from tests.support.make_jobs import ACME
from tests.support.places import quick_place

T = TypeVar("T")

# Seconds ahead for which passes may be reserved.
_FAR_AHEAD = 5.0


class Idle(NamedTuple):
    """An open job was closed because it was idle, and how long nothing had been added to it then."""

    job_id: JobId
    quiet: float
    timeout: float


class Pledge(msgspec.Struct):
    """What a client knows of a job: tasks that were accepted, and those of which it got no answer."""

    job_id: JobId
    kind: str
    tasks: int = 0
    maybe: int = 0
    deleted: bool = False


class World:
    """`run` drives the loop; everything else is what a client or an operator does."""

    def __init__(self, profile: Profile) -> None:
        self.loop = VirtualLoop()
        own_tasks(self.loop)
        self.unhandled: list[str] = []
        self.loop.set_exception_handler(self._unhandled)
        self.profile = profile
        self.clock = LoopClock(self.loop)
        self.targets = Targets(self.clock, profile.grain)
        self.targets.deaths += profile.deaths
        self.faults = Faults(profile.seed, profile.latency, profile.trouble, self._watch, self.meddle)
        self.nodes: list[Node] = []
        self.crashed: list[Node] = []
        self.launchers: list[Launcher] = []
        self.pledges: dict[JobId, Pledge] = {}
        # Jobs that took each other's place, by each of them.
        self.chains: dict[JobId, list[JobId]] = {}
        # Requests under a key that got no answer yet.
        self.unanswered: dict[str, Coroutine[Any, Any, Any]] = {}
        self.idle_closed: list[Idle] = []
        self.added_at: dict[str, float] = {}
        # Passes that were reserved for later than anybody can know to need them.
        self.far_ahead: list[str] = []
        # What lanes had wrong at a moment at which nobody had anything to do.
        self.wrong_at_rest: list[str] = []
        self.changed: Counter[str] = Counter()
        self._stack = AsyncExitStack()
        self.run(self._open())

    def run(self, doing: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(doing)

    async def _open(self) -> None:
        self._stack.enter_context(database_on_loop())
        self.logs: list[Any] = self._stack.enter_context(capture_logs(processors=[format_exc_info]))
        place = self._stack.enter_context(quick_place())
        settings = self.profile.settings(place)
        self.system: System = await self._stack.enter_async_context(open_system(settings, self.clock))
        self.client = faulty(self.system, self.faults, Alive())
        for name in [*ROLES, *["worker"] * (self.profile.capacity.workers - 1)]:
            self.start(name)

    def close(self) -> None:
        """Whatever is still there goes."""
        try:
            for node in self.nodes:
                self.run(node.crash())
            self.run(self._stack.aclose())
        finally:
            self.loop.close()

    def start(self, name: str) -> Node:
        node = Node(name, self.system, self.faults, self.targets, self.profile.grain)
        self.nodes.append(node)
        self.launchers.append(node.launcher)
        node.start()
        return node

    async def restart(self, name: str, *, crash: bool) -> None:
        """Stop or kill one role and start another in its place."""
        node = next(node for node in self.nodes if node.name == name)
        if crash:
            await node.crash()
        if crash or not await node.stop():
            self.crashed.append(node)
        self.nodes.remove(node)
        self.start(name)

    async def kill_fetcher(self, number: int) -> None:
        """Kill one of the processes that fetch for the first worker."""
        launcher = next(node for node in self.nodes if node.worker is not None).launcher
        if processes := launcher.living:
            processes[number % len(processes)].die()

    async def replace_dead(self) -> None:
        """Start others in the place of workers that died over an attempt."""
        for node in [node for node in self.nodes if node.alive.dead]:
            await node.crash()
            self.crashed.append(node)
            self.nodes.remove(node)
            self.start(node.name)

    @property
    def killed(self) -> bool:
        """Whether a fetcher died, of any worker that there ever was."""
        return any(process.has_died for launcher in self.launchers for process in launcher.processes)

    async def advance(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @property
    def disturbed(self) -> bool:
        """Whether anything failed that may hold something up until a lease lapses."""
        calls = self.faults.fired or self.faults.slowed or self.profile.latency.most > 0.1
        return bool(calls or self.crashed or self.killed)

    # What clients do. Each returns what came of it, or raises what the client is told.

    async def submit(
        self, spec: dict[str, Any], tasks: list[str], key: str | None, *, prefer_async: bool
    ) -> Job | None:
        asked = self._spec(spec, tasks)

        def send() -> Awaitable[Accepted]:
            request = _request("jobs", key, [spec, tasks])
            return Submit(self.client).submit(ACME, asked, request, prefer_async=prefer_async)

        accepted = await self._asking(key, send)
        return None if accepted is None else await self._pledged(JobId(accepted.subject), len(tasks))

    async def replace(self, job_id: JobId, spec: dict[str, Any], tasks: list[str]) -> Job | None:
        """Have a new job take the place of one, or of that which has taken its place."""
        chain = self.chains.setdefault(job_id, [job_id])
        old = (await self.job(chain[-1])).run.run_id
        made = await self.submit({**spec, "replaces": job_id}, tasks, None, prefer_async=False)
        if made is not None:
            chain.append(made.job_id)
            self.chains[made.job_id] = chain
            self.targets.before[made.run.run_id] = self.targets.before.get(old, frozenset()) | {old}
        return made

    async def stage(self, spec: dict[str, Any], tasks: list[str]) -> Job | None:
        data = "".join(f"{json.dumps(task)}\n" for task in tasks).encode()
        key = f"lists/{ACME}/{self.clock.new_id('list')}"
        await self.client.blobs.put(key, data)
        source = Source(key, len(data), sha256(data).hexdigest(), ListFormat.JSONL)
        job = await Submit(self.client).submit_source(ACME, self._spec(spec, []), source)
        return await self._pledged(job.job_id, len(tasks))

    async def open_job(self, spec: dict[str, Any]) -> Job | None:
        accepted = await Submit(self.client).submit(ACME, self._spec({**spec, "mode": "open"}, []))
        return await self._pledged(JobId(accepted.subject), 0)

    async def add(self, job_id: JobId, tasks: list[str], key: str | None, *, last: bool) -> None:
        job = await self.job(job_id)
        spec = TasksSpec([_raw(task) for task in tasks], last)

        async def send() -> Accepted:
            now = await self.job(job_id)
            return await AddTasks(self.client).add(now, spec, _request(f"jobs/{job_id}/tasks", key, [tasks, last]))

        pledge = self.pledges[job_id]
        pledge.maybe += len(tasks)
        try:
            accepted = await self._asking(key, send)
        except ConveyorError as refused:
            if not isinstance(refused, Unavailable):
                pledge.maybe -= len(tasks)
            raise
        if accepted is not None:
            pledge.maybe -= len(tasks)
            pledge.tasks += len(tasks)
        del job

    async def close_job(self, job_id: JobId) -> None:
        await AddTasks(self.client).close(await self.job(job_id))

    async def pause(self, job_id: JobId) -> None:
        await Control(self.client).pause(await self.job(job_id))

    async def resume(self, job_id: JobId) -> None:
        await Control(self.client).resume(await self.job(job_id))

    async def cancel(self, job_id: JobId) -> None:
        await Control(self.client).cancel(await self.job(job_id))

    async def delete(self, job_id: JobId) -> None:
        self.pledges[job_id].deleted = True
        await self.client.records.jobs.mark_deleted(ACME, job_id)

    async def change(self, job_id: JobId, options: dict[str, Any]) -> None:
        self.changed[job_id] += 1
        await change_options(self.client, await self.job(job_id), options)

    async def rerun(self, job_id: JobId, select: str, options: dict[str, Any]) -> None:
        self.changed[job_id] += 1
        await Rerun(self.client).rerun(
            await self.job(job_id), msgspec.convert({"select": select, "options": options}, RerunSpec)
        )

    async def redrive(self) -> None:
        self.changed["redriven"] += 1
        await redrive_all(self.client, ACME, DeadLetterFilter())

    async def reset_breakers(self) -> None:
        await reset_breakers(self.client.coordinator, self.clock, ACME)

    async def export(self, job_id: JobId, form: str) -> None:
        spec = msgspec.convert({"format": form, "partial": True}, ExportSpec)
        await Exports(self.client).create(await self.job(job_id), spec)

    async def schedule(self, spec: dict[str, Any], tasks: list[str]) -> None:
        job = json.dumps({**spec, "tasks": tasks}).encode()
        await Schedules(self.client).create(ACME, ScheduleSpec("* * * * *", msgspec.Raw(job)))

    async def unschedule(self) -> int:
        """Remove all schedules."""
        schedules = Schedules(self.client)
        rows = (await schedules.page(ACME, None, 100)).items
        for row in rows:
            await schedules.remove(ACME, row.id)
        return len(rows)

    async def meddle(self, job_id: JobId, choice: random.Random) -> None:
        """Do something to a job at the moment at which a role decides about it."""
        if job_id not in self.pledges:
            return
        try:
            match choice.choice(["add", "add", "pause", "resume", "cancel"]):
                case "pause":
                    await self.pause(job_id)
                case "resume":
                    await self.resume(job_id)
                case "cancel":
                    await self.cancel(job_id)
                case "add" if (await self.job(job_id)).mode is Mode.OPEN:
                    await self.add(job_id, [url(HOSTS[0], "quick", number) for number in range(2)], None, last=False)
        except ConveyorError:
            # It is as refused, and may fail, as what others ask for.
            return

    async def ask_again(self) -> None:
        """Clients that got no answer send their requests again."""
        waiting, self.unanswered = self.unanswered, {}
        for key, send in waiting.items():
            try:
                await send
            except ConveyorError as error:
                if isinstance(error, (Unavailable, IdempotencyInFlight)):
                    self.unanswered[key] = send
        del waiting

    # What is there.

    async def job(self, job_id: JobId) -> Job:
        found = await self.client.records.jobs.job(ACME, job_id)
        if found is None:
            raise ConveyorError("The job is gone.")
        return found

    async def jobs(self) -> list[Job]:
        return (await self.system.records.jobs.jobs(ACME, None, 1000)).items

    async def exports(self) -> list[Document]:
        return (await self.system.records.documents.documents(EXPORT, ACME, None, 1000)).items

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        records: Any = self.system.records
        return list(records.jobs._database._writer.execute(query))

    async def _asking(self, key: str | None, send: Any) -> Accepted | None:
        """Send a request; under a key, again and again while nobody answers."""
        for _ in range(100):
            try:
                return await send()
            except (Unavailable, IdempotencyInFlight):
                if key is None:
                    raise
                await asyncio.sleep(1.0)
        raise AssertionError(f"the request under {key} was never answered")

    async def _pledged(self, job_id: JobId, tasks: int) -> Job | None:
        job = await self.system.records.jobs.job(ACME, job_id)
        assert job is not None, f"{job_id} was accepted and is not there"
        self.pledges.setdefault(job_id, Pledge(job_id, job.kind, tasks))
        return job

    def _spec(self, spec: dict[str, Any], tasks: Iterable[str]) -> JobSpec:
        return decode_spec(json.dumps({**spec, "tasks": list(tasks)}).encode())

    def _watch(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if call == "coordinator.reserve":
            self._watch_passes(*args, wait=result)
        if call == "ingests.append_range" and result is not None:
            self.added_at[args[0]] = self.clock.now()
        if call == "ingests.seal" and result is True and args[2]:
            row = self.sql(f"SELECT options FROM jobs WHERE job_id = '{args[0]}'")
            timeout = json.loads(row[0][0]).get("idle_timeout", 3600.0) if row else 0.0
            quiet = self.clock.now() - self.added_at.get(args[0], 0.0)
            self.idle_closed.append(Idle(args[0], quiet, timeout))

    def _watch_passes(
        self, bucket: str, count: int, rate: float, burst: int, within: float = math.inf, *, wait: float
    ) -> None:
        last = wait + (count - 1) / rate
        if wait <= within and last > _FAR_AHEAD:
            self.far_ahead.append(f"{count} passes of {bucket} up to {last:.1f} s ahead")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def _request(route: str, key: str | None, what: Any) -> IdempotentRequest | None:
    return None if key is None else IdempotentRequest(route, key, sha256(json.dumps(what).encode()).hexdigest())

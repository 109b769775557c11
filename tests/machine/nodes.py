"""Nodes: one role each, as if it were a process of its own. It stops in good order, or dies: then nothing that it had
begun goes on, and nothing that it would still say is heard."""

import asyncio
import contextvars
from typing import Any

from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.errors import Unavailable
from conveyor.model import JobKind
from conveyor.process.executors import Executor
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.worker import Worker
from conveyor.service import Role, Service
from conveyor.system import System
from tests.machine.seams import Alive, Faults, faulty
from tests.machine.targets import Handlers, Launcher, Origin, Targets

_node: contextvars.ContextVar["Node | None"] = contextvars.ContextVar("node", default=None)

ROLES = (
    "worker",
    "ingester",
    "sweeper",
    "retention",
    "monitor",
    "exporter",
    "progress-notifier",
    "dispatcher",
    "deliverer",
    "scheduler",
    "sampler",
)


def own_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Have every task of the loop belong to the node in whose tasks it was made."""

    def factory(loop: asyncio.AbstractEventLoop, coro: Any, context: contextvars.Context | None = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
        node = _node.get() if context is None else context.get(_node)
        if node is not None:
            node.own(task)
        return task

    loop.set_task_factory(factory)


class Node:
    """`of` says what its process shares with nobody: for a worker, its executors."""

    def __init__(self, name: str, system: System, faults: Faults, targets: Targets, grain: int) -> None:
        self.name = name
        self.alive = Alive(name)
        self.launcher = Launcher(targets)
        # In the order in which they were made: that of a set differs from run to run.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._context = contextvars.copy_context()
        self._context.run(_node.set, self)
        self.system = faulty(system, faults, self.alive)
        self._executors: dict[JobKind, Executor] = {}
        if name == "worker":
            self._executors = self._make_executors(targets, grain)
        self.role = _role(name, Embedded(self.system, self._executors), self._executors)
        self._service = Service(self.role, system.clock)
        self._running: asyncio.Task[None] | None = None

    def own(self, task: "asyncio.Task[Any]") -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def start(self) -> None:
        if self.fetchers is not None:
            self._context.run(self.fetchers.open)
        loop = asyncio.get_running_loop()
        self._running = loop.create_task(self._service.run(), context=self._context)

    async def stop(self) -> bool:
        """In good order: it finishes its tick, closes, and gives back what it has. False if a call failed over that, or
        an attempt killed it: it then ends as it is."""
        self._service.stop()
        assert self._running is not None
        try:
            await self._running
            for executor in self._executors.values():
                await executor.close()
        except (Unavailable, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self.alive.dead:
                raise
            await self.crash()
            return False
        return True

    def die(self) -> None:
        """By itself, over an attempt: `crash` sees to the rest."""
        self.alive.dead = True
        for task in self.tasks:
            task.cancel()

    async def crash(self) -> None:
        """At once, wherever it is."""
        self.alive.dead = True
        while tasks := self.tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @property
    def tasks(self) -> list["asyncio.Task[Any]"]:
        return [task for task in self._tasks if not task.done()]

    @property
    def fetchers(self) -> Fetchers | None:
        found = self._executors.get(JobKind.FETCH)
        return found if isinstance(found, Fetchers) else None

    @property
    def worker(self) -> Worker | None:
        return self.role if isinstance(self.role, Worker) else None

    def _make_executors(self, targets: Targets, grain: int) -> dict[JobKind, Executor]:
        system, settings, clock = self.system, self.system.settings, self.system.clock
        guard = TargetGuard(allow_private=True, clock=clock)
        download = DownloadExecutor(settings, clock, guard, system.records, system.blobs)
        Origin(targets, clock).serve(download)
        return {
            JobKind.FETCH: Fetchers(settings, clock, self.launcher),
            JobKind.DOWNLOAD: download,
            JobKind.PYTHON: Handlers(targets, grain, self.die),
        }


def _role(name: str, embedded: Embedded, executors: dict[JobKind, Executor]) -> Role:
    for roles in embedded._roles(executors).values():
        for role in roles:
            if role.name.partition("_")[0] == name:
                return role
    raise AssertionError(f"there is no role {name}")

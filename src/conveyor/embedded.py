"""Embedded: the whole system in one process. `conveyor run` and `conveyor up` are this, with and without an API."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from conveyor.accept.spec import decode_spec
from conveyor.accept.submit import Submit
from conveyor.handlers import default as default_handlers
from conveyor.handlers import load_app
from conveyor.ingest.pipeline import Ingest
from conveyor.ingest.worker import Ingester
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, JobId, JobKind, TenantId
from conveyor.process.bodies import Bodies
from conveyor.process.executors import Executor
from conveyor.process.executors.fetch import FetchExecutor
from conveyor.process.executors.python import PythonExecutor
from conveyor.process.worker import Worker
from conveyor.recover.sweeper import Sweeper
from conveyor.service import Role, Service
from conveyor.stage.lists import list_pieces
from conveyor.system import System
from conveyor.targets import TargetGuard

# The writer of the database asks for the interpreter a few times for each commit; by default it would wait 5 ms for
# each turn while the loop is busy.
_SWITCH_SECONDS = 0.0005


class Embedded:
    """All background roles of a system, and what a command in the same process asks of it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        self.submit = Submit(
            settings=system.settings,
            clock=system.clock,
            records=system.records,
            tasks=system.tasks,
            queue=system.queue,
            whole=system.whole,
        )
        self._handlers = load_app(system.settings.app) if system.settings.app else default_handlers

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Every role works while the block runs; at its end each gives back what it holds."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        executors = self._executors()
        services = [Service(role, self.system.clock) for role in self._roles(executors)]
        tasks = [asyncio.create_task(service.run(), name=service.role.name) for service in services]
        try:
            yield
        finally:
            for service in services:
                service.stop()
            await asyncio.gather(*tasks)
            for executor in executors.values():
                await executor.close()
            sys.setswitchinterval(before)

    async def submit_list(self, paths: Sequence[str], spec: dict[str, object], tenant: TenantId) -> Job:
        """Stage the lists as one and make a job of them. Raises BadInput before anything is run."""
        given = decode_spec(msgspec.json.encode(spec))
        total = 0

        def count(more: int) -> None:
            nonlocal total
            total += more

        source = f"uploads/{tenant}/{self.system.clock.new_id('upload')}"
        await self.system.blobs.put_stream(source, _in_threads(list_pieces(paths, given.kind, count)))
        return await self.submit.submit_staged(tenant, given, source, total)

    async def unfinished(self, tenant: TenantId) -> Job | None:
        """The newest job of this tenant that has not ended."""
        jobs = [job for job in await self.system.records.active_jobs() if job.tenant == tenant]
        return jobs[-1] if jobs else None

    async def job(self, tenant: TenantId, job_id: JobId) -> Job:
        job = await self.system.records.job(tenant, job_id)
        assert job is not None
        return job

    def _executors(self) -> dict[JobKind, Executor]:
        settings, clock = self.system.settings, self.system.clock
        guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
        return {
            JobKind.FETCH: FetchExecutor(settings, clock, guard),
            JobKind.PYTHON: PythonExecutor(self._handlers, clock),
        }

    def _roles(self, executors: dict[JobKind, Executor]) -> list[Role]:
        system = self.system
        bodies = Bodies(system.blobs, system.clock)
        workers = [
            Worker(
                system.settings,
                system.clock,
                system.records,
                system.tasks,
                system.queue,
                system.coordinator,
                bodies,
                self.lifecycle,
                executors,
            )
            for _ in range(system.settings.workers)
        ]
        ingest = Ingest(
            system.records,
            system.tasks,
            system.queue,
            system.coordinator,
            system.blobs,
            self.lifecycle,
            system.clock,
        )
        sweeper = Sweeper(system.records, system.tasks, system.queue, self.lifecycle, system.clock)
        return [*workers, Ingester(ingest, system.clock.new_id("ingester")), sweeper]


async def _in_threads(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Read the list off the loop: a slow disk or pipe holds up nobody else."""
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece

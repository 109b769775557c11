"""Embedded: the whole system in one process. `conveyor run` and `conveyor up` are this, with and without an API."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from hashlib import sha256

import msgspec

from conveyor.accept.scheduler import Scheduler
from conveyor.accept.spec import decode_spec, spec_of
from conveyor.accept.submit import Submit
from conveyor.coordination.breaker import MAX_JITTER
from conveyor.coordination.buckets import ALL_BUCKETS, Buckets, LeasedBuckets
from conveyor.coordination.fail_open import FailOpen
from conveyor.coordination.ready_runs import RunRestorer
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.egress.ca_bundle import read_ca_bundle
from conveyor.egress.outbound import Outbound
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.queue import CONTROL, QueueName
from conveyor.errors import NotFound
from conveyor.export.exporter import Exporter
from conveyor.handlers import default as default_handlers
from conveyor.handlers import load_app
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.jobs import active_jobs
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.jobs.orphans import forget_note, note_submit
from conveyor.lifecycle import Lifecycle
from conveyor.lists.list_bytes import RemoteLists
from conveyor.lists.list_files import list_format, pieces_of
from conveyor.lists.url_lists import UrlLists
from conveyor.model import Job, JobId, JobKind, Source, TenantId
from conveyor.notify.callback_answers import StepAnswers
from conveyor.notify.callback_monitor import Callbacks
from conveyor.notify.deliverer import Deliverer
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.intake import Intake
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.process.body_store import BodyStore
from conveyor.process.executors import Executor
from conveyor.process.executors.download.download_executor import DownloadExecutor
from conveyor.process.executors.download.export_api_executor import ExportDownloadExecutor
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.executors.fetch.launch import Launch, launch_fetcher
from conveyor.process.executors.python.python_executor import PythonExecutor
from conveyor.process.worker import Worker
from conveyor.recover.monitor import monitor_of
from conveyor.recover.retention import Retention
from conveyor.recover.sampler import Sampler
from conveyor.recover.sweeper import Sweeper
from conveyor.service import Role, Service, stop_all
from conveyor.settings import export_places
from conveyor.system import System


class Embedded:
    """All background roles of a system, and its use by a command in the same process. `executors` replace the default
    ones, `launch` how fetchers are started."""

    def __init__(
        self,
        system: System,
        executors: Mapping[JobKind, Executor] | None = None,
        launch: Launch = launch_fetcher,
    ) -> None:
        self.system = system
        self._given = executors
        self._launch = launch
        self.lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        self.submit = Submit(system)
        self._deadline_time = TrustedTime(system.records.documents, system.clock, deadlines=True)
        self._opened: Mapping[JobKind, Executor] = {}
        self._services: Sequence[Service] = ()
        self._handlers = load_app(system.settings.app) if system.settings.app else default_handlers

    @asynccontextmanager
    async def running(self, only: Collection[str] | None = None, purges: bool = True) -> AsyncIterator[None]:
        """Run every role, or those of some commands, during the block; at its end each releases what it has in flight.
        Without `purges` the role that purges expired data does not run."""
        works = only is None or "work" in only
        executors = self._executors() if self._given is None and works else self._given or {}
        for executor in executors.values():
            executor.open()
        self._opened = executors
        chosen = [
            role
            for name, roles in self._roles(executors).items()
            if only is None or name in only
            for role in roles
            if purges or not isinstance(role, Retention)
        ]
        self._services = services = [Service(role, self.system.clock) for role in chosen]
        tasks = [asyncio.create_task(service.run(), name=service.role.name) for service in services]
        try:
            async with self._listening(chosen):
                yield
        finally:
            try:
                await stop_all(services, tasks)
            finally:
                for executor in executors.values():
                    await executor.close()

    @asynccontextmanager
    async def _listening(self, roles: Sequence[Role]) -> AsyncIterator[None]:
        """Wake workers when this process marks a run as ready; workers and ingesters when messages are sent, if the
        queue reports that."""
        workers = [role for role in roles if isinstance(role, Worker)]
        self.system.ready_marks.listeners += [worker.on_ready for worker in workers]
        if self.system.wakes is None:
            yield
            return
        ingesters = [role for role in roles if isinstance(role, Ingester)]

        def heard(queue: QueueName) -> None:
            for worker in workers:
                worker.on_message(queue)
            if queue == CONTROL:
                for ingester in ingesters:
                    ingester.wake()

        def offered(queue: QueueName, body: bytes) -> bool:
            return any(worker.on_offer(queue, body) for worker in workers)

        with nullcontext() if self.system.offers is None else self.system.offers(offered):
            async with self.system.wakes(heard):
                yield

    def failing_role(self) -> str | None:
        """The name of a role all of whose ticks have failed for CONVEYOR_UNHEALTHY_SECONDS; None if there is none."""
        limit = self.system.settings.unhealthy_seconds
        return next((each.role.name for each in self._services if each.failing_seconds() >= limit), None)

    async def until_ready(self) -> None:
        """Wait for the processes that work for this one. Not needed to submit: what is there waits for them."""
        for executor in self._opened.values():
            await executor.until_ready()

    async def submit_list(
        self,
        paths: Sequence[str],
        spec: dict[str, object],
        tenant: TenantId,
        progress: Callable[[int], None] = lambda _: None,
        *,
        url_column: str | None = None,
        like: Job | None = None,
        job_id: JobId | None = None,
    ) -> Job:
        """Stage the lists as one and create a job; `progress` gets the number of bytes staged so far. `url_column` is
        the column of a csv that has the URLs. With `like`, the job has the options of that job."""
        job_spec = decode_spec(msgspec.json.encode(spec)) if like is None else spec_of(like)
        system, job_id = self.system, job_id or JobId(self.system.clock.new_id("job"))
        note = await note_submit(system, tenant, job_id, is_repeated=True)
        key = f"lists/{tenant}/{job_id}/{system.clock.new_id('list')}"
        digest = sha256()
        urls = UrlLists(self._outbound(), system.settings.schedule_fetch_seconds)
        raw = pieces_of(paths, system.settings.max_list_bytes, job_spec.kind, url_column, urls)
        try:
            size = await system.blobs.put_stream(key, _hashed(raw, digest.update, progress))
        finally:
            await urls.close()
        # Several lists are joined into one of tasks, which has no columns.
        of_source = url_column if len(paths) == 1 else None
        source = Source(key, size, digest.hexdigest(), list_format(paths), url_column=of_source)
        job = await self.submit.submit_source(tenant, job_spec, source, job_id)
        await forget_note(system.records, note)
        return job

    async def unfinished(self, tenant: TenantId) -> Job | None:
        """The newest unfinished job of this tenant."""
        jobs = [job for job in await self.system.records.jobs.active_jobs() if job.tenant == tenant]
        return jobs[-1] if jobs else None

    async def job(self, tenant: TenantId, job_id: JobId) -> Job:
        job = await self.system.records.jobs.job(tenant, job_id)
        if job is None:
            raise NotFound("The job was deleted, or has expired.")
        return job

    def _executors(self) -> Mapping[JobKind, Executor]:
        settings, clock = self.system.settings, self.system.clock
        guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
        long = (settings, clock, guard, self.system.records, self.system.blobs)
        return {
            JobKind.FETCH: Fetchers(settings, clock, self._launch)
            if settings.fetchers
            else FetchExecutor(settings, clock, guard),
            JobKind.DOWNLOAD: DownloadExecutor(*long),
            JobKind.EXPORT_DOWNLOAD: ExportDownloadExecutor(*long),
            JobKind.PYTHON: PythonExecutor(
                self._handlers, settings, clock, self.system.records, sys.path, settings.app
            ),
        }

    def ingesters(self) -> list[Role]:
        """The roles that ingest lists."""
        system = self.system
        return [
            Ingester(self._ingest(), system.coordinator, system.clock.new_id("ingester"))
            for _ in range(system.settings.ingesters)
        ]

    def _ingest(self) -> IngestPipeline:
        """One for each ingester, which closes it."""
        system = self.system
        urls = UrlLists(self._outbound(), system.settings.schedule_fetch_seconds)
        return IngestPipeline(
            system.settings,
            system.clock,
            system.records,
            system.tasks,
            system.queue,
            system.blobs,
            self.lifecycle,
            RemoteLists(system.source_buckets, urls),
        )

    def exporters(self) -> list[Role]:
        """The roles that make exports."""
        system = self.system
        return [
            Exporter(
                system.records,
                system.tasks,
                system.blobs,
                system.coordinator,
                system.clock,
                system.settings.export_piece_bytes,
                export_places(system.settings),
                system.clock.new_id("exporter"),
            )
            for _ in range(system.settings.exporters)
        ]

    def notifiers(self, active: ActiveJobs | None = None, buckets: Buckets = ALL_BUCKETS) -> list[Role]:
        """The roles that report progress, dispatch the outbox, and deliver webhooks."""
        system = self.system
        settings, records, tasks, clock = system.settings, system.records, system.tasks, system.clock
        seconds = settings.failure_notice_seconds
        return [
            ProgressNotifier(records, tasks, FailOpen(system.coordinator, clock), clock, seconds, active, buckets),
            OutboxDispatcher(settings, records, tasks, clock, StepAnswers(system), buckets),
            Deliverer(settings, records, clock, system.signing_key, self._outbound(), system.event_targets, buckets),
        ]

    def housekeepers(self) -> list[Role]:
        """The roles of `conveyor sweep`. Processes that share engines split the work by buckets; the embedded engines
        have one process."""
        system = self.system
        leased = None if system.settings.coordinator is None else LeasedBuckets(system.coordinator, system.clock)
        buckets: Buckets = leased or ALL_BUCKETS
        active = ActiveJobs(system.records.jobs, system.clock, buckets, active_jobs.FRESH_SECONDS)
        restorer = RunRestorer(system.coordinator, system.clock)
        engines = (system.records, system.tasks, system.queue)
        lifetime = system.settings.max_lifetime_seconds
        hold = max(system.settings.lease_seconds, system.settings.breaker_longest + MAX_JITTER)
        return [
            *([] if leased is None else [leased]),
            Sweeper(
                *engines,
                self.lifecycle,
                system.clock,
                lifetime,
                active,
                buckets,
                restorer=restorer,
                max_hold=hold,
                trusted=self._deadline_time,
            ),
            Retention(
                *engines,
                system.coordinator,
                system.blobs,
                system.clock,
                buckets,
                TrustedTime(system.records.documents, system.clock),
            ),
            Sampler(system, active, buckets),
            *self.exporters(),
            *self.notifiers(active, buckets),
        ]

    def callbacks(self) -> list[Role]:
        """The role that sends heartbeats and answers to state machines, more often than the monitor does."""
        waiters = self.system.step_functions
        return [] if waiters is None else [Callbacks(self.system, waiters)]

    def scheduler(self) -> Role:
        """The role that fires schedules."""
        return Scheduler(self.system, self._outbound())

    def _outbound(self) -> Outbound:
        settings, clock = self.system.settings, self.system.clock
        guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
        return Outbound(guard, root_certificate=read_ca_bundle(settings.ca_bundle))

    def _roles(self, executors: Mapping[JobKind, Executor]) -> dict[str, list[Role]]:
        """The roles by the command that runs them."""
        system = self.system
        bodies = BodyStore(system.blobs, system.tasks, system.clock)
        runs_handlers = isinstance(executors.get(JobKind.PYTHON), PythonExecutor)
        handlers = self._handlers.names() if runs_handlers else None
        workers: list[Role] = [
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
                system.atomic_flush,
                handlers,
            )
            for _ in range(system.settings.workers)
        ]
        return {
            "work": workers,
            "ingest": self.ingesters(),
            "sweep": self.housekeepers(),
            "schedule": [self.scheduler()],
            "monitor": [monitor_of(system, trusted=self._deadline_time), *self.callbacks()],
            "intake": [Intake(system)] if system.inboxes else [],
        }


async def _hashed(
    pieces: AsyncIterator[bytes], update: Callable[[bytes], None], progress: Callable[[int], None]
) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        update(piece)
        size += len(piece)
        progress(size)
        yield piece

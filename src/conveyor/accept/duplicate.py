"""Duplicate: gets a job, accepts a new one with the same kind, options, receivers of events and list of tasks, and
returns the answer. Secrets in its options and tasks go along without being shown to anyone.

The list of the new job is the upload or the URL of the old one, or a copy of what was staged for the old one: its list,
or the batches of an open job, one after the other. A job that was accepted with its tasks has no list, and few tasks,
which are read from their rows. Tokens of state machines stay behind: each is valid for one job.
"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec

from conveyor.accept.default_pace import with_stored_pace
from conveyor.accept.option_changes import ALL, override_options
from conveyor.accept.sources import stage_copy
from conveyor.accept.spec import spec_of
from conveyor.accept.submit import Submit
from conveyor.engines.records import upload_of
from conveyor.errors import NoTasks
from conveyor.faults import crashpoint
from conveyor.jobs.event_names import MAX_NOTIFY, NOTIFY, Notify, notify_of
from conveyor.jobs.idempotency import Accepted, IdempotentRequest
from conveyor.model import Job, JobId, Mode, Source
from conveyor.system import System

_TASKS_PER_READ = 1000


class DuplicateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is different in the new job: its name, and some of its options."""

    name: str | msgspec.UnsetType | None = msgspec.UNSET
    options: dict[str, Any] = {}


class Duplicate:
    """Makes jobs of jobs."""

    def __init__(self, system: System, submit: Submit) -> None:
        self._system = system
        self._submit = submit

    async def duplicate(self, job: Job, spec: DuplicateSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Accept the new job, and answer as a submit does."""
        options = override_options(self._system.settings, job, spec.options, ALL)
        if "pace" not in spec.options:
            options = with_stored_pace(options, job.kind)
        same = spec_of(msgspec.structs.replace(job, options=options))
        name = job.name if spec.name is msgspec.UNSET else spec.name
        wanted = msgspec.structs.replace(same, name=name, notify=await self._receivers(job))
        if job.source is None and job.mode is Mode.CLOSED:
            wanted = msgspec.structs.replace(wanted, tasks=await self._tasks(job))
            return await self._submit.submit(job.tenant, wanted, request)
        return await self._submit.submit_list(job.tenant, wanted, partial(self._list_of, job), request)

    async def _receivers(self, job: Job) -> list[Notify]:
        page = await self._system.records.documents.documents(NOTIFY, job.tenant, None, MAX_NOTIFY, job.job_id)
        return [notify_of(row) for row in page.items]

    async def _tasks(self, job: Job) -> list[msgspec.Raw]:
        """The inputs of a job that was accepted with its tasks."""
        first = (await self._system.records.jobs.runs(job.job_id))[0]
        # Invalid tasks have an index and no row.
        count = first.total + first.invalid
        tasks: list[msgspec.Raw] = []
        for start in range(0, count, _TASKS_PER_READ):
            indexes = range(start, min(start + _TASKS_PER_READ, count))
            tasks += [task.input for task in await self._system.tasks.at(job.key_of(first), indexes)]
        return tasks

    async def _list_of(self, job: Job, job_id: JobId) -> Source:
        """The list of the new job."""
        source = job.source
        if source is None:
            return await self._copy(job, job_id, await self._batches(job))
        if source.remote is not None:
            # It is read as it is now, unless the client named a version.
            return source
        upload_id = upload_of(source.key)
        if upload_id is None:
            return await self._copy(job, job_id, [source])
        # Until the new job is written, which keeps it from then on.
        until = self._system.clock.now() + self._system.settings.upload_seconds
        await self._system.records.access.keep_upload(upload_id, until)
        return source

    async def _batches(self, job: Job) -> list[Source]:
        """What was added to an open job so far."""
        first = (await self._system.records.jobs.runs(job.job_id))[0]
        ranges = await self._system.records.ingests.ranges(first.run_id)
        batches = [each.source for each in ranges if isinstance(each.source, Source) and each.source.size]
        if not batches:
            raise NoTasks("The job has no tasks yet: there is nothing to duplicate.")
        return batches

    async def _copy(self, job: Job, job_id: JobId, sources: list[Source]) -> Source:
        crashpoint("duplicate.copy.before")
        copy = await stage_copy(self._system, job.tenant, job_id, self._pieces(sources), sources[0])
        crashpoint("duplicate.copy.after")
        return copy

    async def _pieces(self, sources: list[Source]) -> AsyncIterator[bytes]:
        for source in sources:
            async for piece in self._system.blobs.stream(source.key):
                yield piece

"""Rerun: gets a job whose latest run has ended and a choice among its tasks, makes a new run of the same job, and hands
it to ingest, which copies the chosen tasks. They keep their indexes; what the earlier runs came to stays readable.

Chosen is by the newest outcome of each task: one that failed in the first run and succeeded in the second is no failed
task any more. A job whose ingest was given up has nothing to choose from yet: its ingest goes on instead.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import structlog

from conveyor.accept.answer import answer
from conveyor.accept.option_changes import RERUN, change_options, overridden
from conveyor.accept.resume import request_ingest, resume_ingest
from conveyor.accept.submit import ACCEPTED
from conveyor.engines.records import IdempotencyClaim
from conveyor.errors import InvalidField, NotFound, NothingToRerun, RunNotEnded
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.deadlines import follow_deadline
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest, standing_answer
from conveyor.lists.inputs import MAX_LABEL
from conveyor.model import Job, Lineage, OutboxEvent, Run, RunId, resumable
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System

log = structlog.get_logger()

_STATUS = (100, 599)
_MAX_CODE = 200
# Codes that are looked over before a choice by code is called empty.
_CODES = 1000


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks that match all that is given."""

    # One of these; without it, those with an error code failed, and others may have ended anyhow.
    status: list[Literal["succeeded", "failed", "cancelled"]] = []
    error_code: str | None = None
    http_status: int | None = None
    tag: str | None = None


class RerunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tasks are run again, and options that differ from those that the job has."""

    select: Literal["failed", "all"] | Selection = "failed"
    options: dict[str, Any] = {}


class Rerun:
    """Makes further runs of jobs."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._requests = Idempotency(system.settings, system.clock, system.records)

    async def rerun(self, job: Job, spec: RerunSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Check, write, answer. Raises RunNotEnded, and NothingToRerun where that is known at once."""
        ticket = await self._requests.claim(job.tenant, request, self._system.clock.new_id("run"))
        if isinstance(ticket, Accepted):
            return ticket
        async with self._requests.carrying_out(ticket):
            lineage = lineage_of(job, spec)
            if resumable(job):
                return await self._resumed(job, spec, ticket)
            if job.state not in ENDED:
                raise RunNotEnded(state=job.state)
            await self._check_any(job, lineage)
            await Admission(self._system).admit(job.tenant, jobs=1)
            return await self._carry_out(job, spec, lineage, ticket)

    async def rerun_tasks(self, job: Job, indexes: Sequence[int]) -> None:
        """Start a run of these failed tasks, with the options that the job has. Raises RunNotEnded."""
        if job.state not in ENDED:
            raise RunNotEnded(state=job.state)
        await Admission(self._system).admit(job.tenant, jobs=1, tasks=len(indexes))
        lineage = Lineage(job.run.run_id, [TaskStatus.FAILED], indexes=indexes)
        await self._carry_out(job, RerunSpec(), lineage, Claim(self._system.clock.new_id("run"), None))

    async def _carry_out(self, job: Job, spec: RerunSpec, lineage: Lineage, ticket: Claim) -> Accepted:
        again = self._with_run(job, spec, lineage, RunId(ticket.subject))
        body = answer(again)
        row = ticket.answer(ACCEPTED, body, self._requests.keep_until)
        # Before the run: a row without one goes when it is due, a run without its row would never be looked at.
        await follow_deadline(self._system.records, again)
        crashpoint("rerun.add.before")
        added = await self._system.records.add_run(again, self._notice(again), row)
        crashpoint("rerun.add.after")
        if isinstance(added, IdempotencyClaim):
            assert row is not None
            return standing_answer(added, row.fingerprint)
        if not added:
            raise RunNotEnded("Another run of the job was begun meanwhile.")
        log.info("run added", tenant=job.tenant, job=job.job_id, run=again.run.run_id, number=again.run.number)
        try:
            await request_ingest(self._system, again)
        except Exception:
            # The run is accepted already: an error now would have the client ask for a second one.
            log.exception("ingest not asked for; the sweeper asks again", job=job.job_id)
        return Accepted(ACCEPTED, body, again.run.run_id)

    async def _resumed(self, job: Job, spec: RerunSpec, ticket: Claim) -> Accepted:
        """Not in one step with its answer: sent again after a crash in between, it is told that the run goes on."""
        if spec.options:
            job = await change_options(self._system, job, spec.options, RERUN)
        await resume_ingest(self._system, job)
        found = await self._system.records.job(job.tenant, job.job_id)
        if found is None:
            raise NotFound
        body = answer(found, await self._system.tasks.counts(job.key))
        row = ticket.answer(ACCEPTED, body, self._requests.keep_until)
        standing = None if row is None else await self._system.records.create_rows([], None, row)
        if row is not None and standing is not None:
            return standing_answer(standing, row.fingerprint)
        return Accepted(ACCEPTED, body, job.run.run_id)

    async def _check_any(self, job: Job, lineage: Lineage) -> None:
        """Refuse a choice of which the kept counts say that it is empty."""
        if list(lineage.statuses) != [TaskStatus.FAILED]:
            return
        for run in await self._system.records.runs(job.job_id):
            key = job.key_of(run)
            if (await self._system.tasks.counts(key)).failed == 0:
                continue
            codes = dict(await self._system.tasks.error_codes(key, _CODES)) if lineage.error_code is not None else {}
            if lineage.error_code is None or lineage.error_code in codes or len(codes) == _CODES:
                return
        raise NothingToRerun

    def _with_run(self, job: Job, spec: RerunSpec, lineage: Lineage, run_id: RunId) -> Job:
        now = self._system.clock.now()
        run = Run(
            run_id=run_id,
            number=job.run.number + 1,
            state=RunState.INGESTING,
            total=0,
            last_batch=False,
            created_at=now,
            sealed=False,
            touched_at=now,
            lineage=lineage,
        )
        options = overridden(job, spec.options, RERUN)
        return msgspec.structs.replace(job, run=run, state=run.state, reason=None, options=options)

    def _notice(self, job: Job) -> OutboxEvent:
        assert job.run.lineage is not None
        lineage = msgspec.structs.replace(job.run.lineage, overrides={})
        return OutboxEvent(
            notice_id=self._system.clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event="run.added",
            at=job.run.created_at,
            # What was overridden, and not with what: headers and gateways carry secrets.
            data={
                "number": job.run.number,
                "lineage": msgspec.to_builtins(lineage),
                "overrides": sorted(job.run.lineage.overrides),
            },
        )


def lineage_of(job: Job, spec: RerunSpec) -> Lineage:
    """What the new run is made of. Raises InvalidField."""
    parent, overrides = job.run.run_id, spec.options
    if spec.select == "all":
        return Lineage(parent, overrides=overrides)
    if spec.select == "failed":
        return Lineage(parent, [TaskStatus.FAILED], overrides=overrides)
    chosen = spec.select
    if chosen == Selection():
        raise InvalidField('`select` must be "failed", "all", or say which tasks.', field="select")
    _check_label("error_code", chosen.error_code, _MAX_CODE)
    _check_label("tag", chosen.tag, MAX_LABEL)
    if chosen.http_status is not None and not _STATUS[0] <= chosen.http_status <= _STATUS[1]:
        raise InvalidField("`select.http_status` must be between 100 and 599.", field="select.http_status")
    statuses = sorted({TaskStatus[label.upper()] for label in chosen.status})
    if not statuses and chosen.error_code is not None:
        statuses = [TaskStatus.FAILED]
    return Lineage(parent, statuses, chosen.error_code, chosen.http_status, chosen.tag, overrides=overrides)


def _check_label(name: str, text: str | None, most: int) -> None:
    if text is not None and not 0 < len(text) <= most:
        raise InvalidField(f"`select.{name}` must have 1 to {most} characters.", field=f"select.{name}")

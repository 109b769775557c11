"""Rerun: gets a job whose latest run has finished and a selection of its tasks, adds a run to the job, and hands it to
ingest, which copies the selected tasks. They keep their indexes; the results of earlier runs stay readable.

The selection is by the latest outcome of each task: one that failed in the first run and succeeded in the second has
succeeded, and one that a cancelled rerun did not finish has its earlier outcome. If the ingest of the job failed, a
rerun resumes it instead.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import structlog

from conveyor.accept.answer import answer
from conveyor.accept.option_changes import RERUN, change_options, override_options
from conveyor.accept.resume import resume_ingest
from conveyor.accept.submit import ACCEPTED
from conveyor.engines.records import IdempotencyClaim
from conveyor.engines.tasks import MAX_CODES
from conveyor.errors import InvalidField, NotFound, NothingToRerun, RunNotEnded
from conveyor.faults import crashpoint
from conveyor.jobs.admission import Admission
from conveyor.jobs.chunks import request_ingest
from conveyor.jobs.deadlines import write_deadline
from conveyor.jobs.idempotency import Accepted, Claim, Idempotency, IdempotentRequest
from conveyor.jobs.job_counts import job_counts
from conveyor.lists.inputs import MAX_LABEL
from conveyor.model import EXTRACT_FAILED, Job, JobKind, Lineage, OutboxEvent, Run, RunId, is_resumable
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System

log = structlog.get_logger()

_STATUS = (100, 599)
_MAX_CODE = 200
_MAX_HOST = 255
_MAX_INDEXES = 1000


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks that match all of these fields."""

    # One of these. Empty: failed tasks if an error code is given, else tasks of any status.
    status: list[Literal["succeeded", "failed", "cancelled"]] = []
    error_code: str | None = None
    http_status: int | None = None
    tag: str | None = None
    # The host of the URL in the input.
    host: str | None = None
    # These tasks, by their indexes; with `status` only.
    indexes: list[int] = []
    # Only tasks whose body is damaged or missing. The bodies of all others that match are read.
    damaged: bool = False


class RerunSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tasks to rerun, and options that replace those of the job."""

    # By default failed tasks; with `extract_only`, all that have a body to extract from; with `changed_only`, all.
    select: Literal["failed", "all"] | Selection | msgspec.UnsetType = msgspec.UNSET
    options: dict[str, Any] = {}
    # Call `extract` with the bodies that are stored, and make no request.
    extract_only: bool = False
    # Compare each page with the one that is stored: the task is unchanged if it is the same.
    changed_only: bool = False


class Rerun:
    """Adds runs to jobs."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._idempotency = Idempotency(system.settings, system.clock, system.records)

    async def rerun(self, job: Job, spec: RerunSpec, request: IdempotentRequest | None = None) -> Accepted:
        """Check the request, add the run, answer. Raises RunNotEnded, and NothingToRerun where the counts say so."""
        run_id = self._system.clock.new_id("run")
        return await self._idempotency.once(job.tenant, request, run_id, partial(self._carry_out, job, spec))

    async def rerun_tasks(self, job: Job, indexes: Sequence[int]) -> RunId:
        """Start a run of these failed tasks, with the options that the job has. Raises RunNotEnded."""
        return await self._redrive(job, Lineage(job.run.run_id, [TaskStatus.FAILED], indexes=indexes), len(indexes))

    async def rerun_dead_letters(self, job: Job, error_code: str | None) -> RunId:
        """Start a run of all dead-lettered tasks, or of those with an error code, however many. Raises RunNotEnded."""
        lineage = Lineage(job.run.run_id, [TaskStatus.FAILED], error_code, dead_lettered=True)
        return await self._redrive(job, lineage, 0)

    async def _redrive(self, job: Job, lineage: Lineage, count: int) -> RunId:
        if job.state not in ENDED:
            raise RunNotEnded(state=job.state)
        await Admission(self._system).admit(job.tenant, jobs=1, tasks=count)
        run_id = RunId(self._system.clock.new_id("run"))
        await self._add_run(job, RerunSpec(), lineage, Claim(run_id))
        return run_id

    async def _carry_out(self, job: Job, spec: RerunSpec, claim: Claim) -> Accepted:
        lineage = lineage_of(job, spec)
        if is_resumable(job):
            return await self._resume(job, spec, claim)
        if job.state not in ENDED:
            raise RunNotEnded(state=job.state)
        # An invalid option is refused whatever the results of the job are.
        override_options(self._system.settings, job, spec.options, RERUN)
        await self._check_any(job, lineage)
        await Admission(self._system).admit(job.tenant, jobs=1)
        return await self._add_run(job, spec, lineage, claim)

    async def _add_run(self, job: Job, spec: RerunSpec, lineage: Lineage, claim: Claim) -> Accepted:
        rerun = self._with_run(job, spec, lineage, RunId(claim.subject))
        whole = await job_counts(self._system.records, self._system.tasks, job, top_errors=0)
        reply = claim.answer(ACCEPTED, answer(rerun, whole=whole))
        # Before the run: a deadline without its run is removed when it is due, a run without its deadline has none.
        await write_deadline(self._system.records, rerun)
        crashpoint("rerun.add.before")
        added = await self._system.records.jobs.add_run(rerun, self._event(rerun), reply.row)
        crashpoint("rerun.add.after")
        if isinstance(added, IdempotencyClaim):
            return reply.unless_lost(added)
        if not added:
            raise RunNotEnded("Another run of the job was started, or its tasks were moved, meanwhile. Retry.")
        log.info("run added", tenant=job.tenant, job=job.job_id, run=rerun.run.run_id, number=rerun.run.number)
        try:
            await request_ingest(self._system.queue, rerun, self._system.clock)
        except Exception:
            # The run is accepted already: after an error the client would ask for a second one.
            log.exception("ingest not requested; the sweeper will request it", job=job.job_id)
        return reply.accepted

    async def _resume(self, job: Job, spec: RerunSpec, claim: Claim) -> Accepted:
        """Resume the failed ingest. The answer is a second step: a client that repeats the request after a crash in
        between is told that the run is in progress."""
        if spec.options:
            job = await change_options(self._system, job, spec.options, RERUN)
        await resume_ingest(self._system, job)
        resumed = await self._system.records.jobs.job(job.tenant, job.job_id)
        if resumed is None:
            raise NotFound
        whole = await job_counts(self._system.records, self._system.tasks, resumed, top_errors=0)
        body = answer(resumed, whole.run, whole)
        reply = claim.answer(ACCEPTED, body, subject=job.run.run_id)
        existing = (
            None if reply.row is None else await self._system.records.documents.create_documents([], None, reply.row)
        )
        return reply.unless_lost(existing)

    async def _check_any(self, job: Job, lineage: Lineage) -> None:
        """Raise NothingToRerun if the counts of the job say that no task matches."""
        if list(lineage.statuses) != [TaskStatus.FAILED]:
            return
        counted = await job_counts(self._system.records, self._system.tasks, job)
        codes = counted.codes
        if counted.counts.failed == 0 or (
            lineage.error_code is not None and lineage.error_code not in codes and len(codes) < MAX_CODES
        ):
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
        options = override_options(self._system.settings, job, spec.options, RERUN)
        return msgspec.structs.replace(job, run=run, state=run.state, reason=None, options=options, expires_at=None)

    def _event(self, job: Job) -> OutboxEvent:
        assert job.run.lineage is not None
        lineage = msgspec.structs.replace(job.run.lineage, overrides={})
        return OutboxEvent(
            notice_id=self._system.clock.new_id("evt"),
            tenant=job.tenant,
            job_id=job.job_id,
            run_id=job.run.run_id,
            event="run.added",
            at=job.run.created_at,
            # The names of the options alone: headers and gateways carry secrets.
            data={
                "number": job.run.number,
                "lineage": msgspec.to_builtins(lineage),
                "overrides": sorted(job.run.lineage.overrides),
            },
        )


def lineage_of(job: Job, spec: RerunSpec) -> Lineage:
    """Which tasks the new run has. Raises InvalidField."""
    made_so = Lineage(
        job.run.run_id, overrides=spec.options, extract_only=spec.extract_only, changed_only=spec.changed_only
    )
    if spec.extract_only:
        _check_extract(job, spec)
    if spec.changed_only:
        _check_changed_only(job, spec)
    if spec.select == "all" or (spec.select is msgspec.UNSET and (spec.extract_only or spec.changed_only)):
        return made_so
    if spec.select is msgspec.UNSET or spec.select == "failed":
        error_code = EXTRACT_FAILED if spec.extract_only else None
        return msgspec.structs.replace(made_so, statuses=[TaskStatus.FAILED], error_code=error_code)
    selection = spec.select
    if selection == Selection():
        raise InvalidField('`select` must be "failed", "all", or say which tasks.', field="select")
    _check_label("error_code", selection.error_code, _MAX_CODE)
    _check_label("tag", selection.tag, MAX_LABEL)
    if selection.http_status is not None and not _STATUS[0] <= selection.http_status <= _STATUS[1]:
        raise InvalidField("`select.http_status` must be between 100 and 599.", field="select.http_status")
    _check_label("host", selection.host, _MAX_HOST)
    _check_indexes(selection)
    statuses = sorted({TaskStatus[label.upper()] for label in selection.status})
    if not statuses and selection.error_code is not None:
        statuses = [TaskStatus.FAILED]
    return msgspec.structs.replace(
        made_so,
        statuses=statuses,
        error_code=selection.error_code,
        http_status=selection.http_status,
        tag=selection.tag,
        indexes=sorted(set(selection.indexes)),
        host=None if selection.host is None else selection.host.lower(),
        damaged=selection.damaged,
    )


def _check_changed_only(job: Job, spec: RerunSpec) -> None:
    if job.kind is not JobKind.FETCH:
        raise InvalidField(f"`changed_only` is for jobs of kind fetch; this is {job.kind}.", field="changed_only")
    if spec.extract_only:
        raise InvalidField("`extract_only` makes no request that could find a change. Drop one.", field="changed_only")
    if isinstance(spec.select, Selection) and spec.select.damaged:
        raise InvalidField(
            "`changed_only` cannot compare with damaged bodies. Rerun them without it.", field="changed_only"
        )


def _check_extract(job: Job, spec: RerunSpec) -> None:
    if not spec.options.get("extract", job.options.extract):
        raise InvalidField(
            "`extract_only` needs `extract`: the job has none. Name a registered function in `options`.",
            field="extract_only",
        )
    if isinstance(spec.select, Selection) and spec.select.damaged:
        raise InvalidField("`extract_only` cannot read damaged bodies. Rerun them with requests.", field="extract_only")


def _check_indexes(selection: Selection) -> None:
    if not selection.indexes:
        return
    if len(selection.indexes) > _MAX_INDEXES or min(selection.indexes) < 0 or max(selection.indexes) >= 1 << 53:
        raise InvalidField(
            f"`select.indexes` must be at most {_MAX_INDEXES} indexes of tasks. Use another condition for more.",
            field="select.indexes",
        )
    if selection != Selection(status=selection.status, indexes=selection.indexes):
        raise InvalidField(
            "`select.indexes` can be combined with `status` only. Drop it or the others.", field="select.indexes"
        )


def _check_label(name: str, text: str | None, max_length: int) -> None:
    if text is not None and not 0 < len(text) <= max_length:
        raise InvalidField(f"`select.{name}` must have 1 to {max_length} characters.", field=f"select.{name}")

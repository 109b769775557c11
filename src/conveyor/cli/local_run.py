"""Run a job in this process, for `conveyor run` and `conveyor demo`.

Opens the embedded system in the plan's data directory, submits the list or resumes the job that was accepted before,
waits until the job finishes or the user stops it, and writes the archive.

The data directory is removed once the archive is complete, or if no task ever ran. Otherwise it stays, with the mark of
an unfinished run: it has the results so far, and --resume continues from there.
"""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from conveyor.cli import run_directory as place
from conveyor.cli.bar_view import view_bytes, view_job
from conveyor.cli.connection import LOCAL_TENANT
from conveyor.cli.loop import Stopped
from conveyor.cli.run_files import Show, growing_output, write_invalid, write_output
from conveyor.cli.snapshot import Snapshot
from conveyor.cli.summary import RunReport
from conveyor.errors import BadInput, ConveyorError, ListRejected, ListTooSparse, ListUnreadable, NoTasks, NotFound
from conveyor.model import Job, JobId, TenantId, is_resumable
from conveyor.process.early_fetchers import EarlyFetchers
from conveyor.settings import Settings
from conveyor.states import ENDED, LIST_CODES, ReasonCode, RunState

if TYPE_CHECKING:
    from conveyor.cli.loop import Stop
    from conveyor.cli.run_files import GrowingOutput
    from conveyor.embedded import Embedded
    from conveyor.export.request import ExportSpec
    from conveyor.system import System

T = TypeVar("T")

_TENANT = TenantId(LOCAL_TENANT)
_POLL_SECONDS = 0.1
# Maximum number of expired jobs to search for the job of this run.
_MAX_EXPIRED = 1000


@dataclass(frozen=True)
class RunPlan:
    """What to run, and where to put the data and the archive."""

    lists: Sequence[str]
    spec: dict[str, Any]
    out: Path
    settings: Settings
    resume: bool
    # The data directory belongs to this run alone, and is removed once the archive is written.
    temporary: bool
    title: str
    # The column of a csv that has the URLs, if that is not `url`.
    url_column: str | None = None
    # The form of the output; None: a zip.
    output: "ExportSpec | None" = None
    # The output is a directory with a file for each body.
    is_directory: bool = False
    # Fetchers that are started already.
    fetchers: EarlyFetchers = field(default_factory=EarlyFetchers)


class ListNotAccepted(Exception):
    """The list was rejected: no task ran, and no data is left behind."""

    def __init__(self, error: BadInput) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass
class DirectoryOwnership:
    """Whether the data directory belongs to this run."""

    # This run created the directory, now or when it was first started.
    is_own: bool
    # This run has written its mark: there is something to resume.
    is_marked: bool = False


def run_here(plan: RunPlan, as_json: bool) -> int:
    """Run the plan, show progress, print a summary, and return the exit code."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import Stop, leave, run_async
    from conveyor.cli.output import print_error_lines, print_json
    from conveyor.cli.summary import print_summary
    from conveyor.telemetry.logs import configure_log

    configure_log(plan.settings.log_level, quiet=True, form=plan.settings.log_format)
    ownership = DirectoryOwnership(is_own=plan.resume or not plan.settings.data.exists())
    mark = _load_mark(plan)
    stop = Stop(
        lambda: complain("Stopping: waiting for tasks in flight to stop. Press Ctrl-C again to exit at once."),
        plan.settings.drain_seconds,
    )
    try:
        with progress_bar(plan.title) as show:
            report = run_async(_run_plan(plan, mark, ownership, show, stop))
    except Stopped:
        complain(f"Stopped. {_resume_hint(plan)}")
        leave(stop.exit_code)
    except ListNotAccepted as rejection:
        _discard_data(plan, ownership)
        print_error_lines(rejection.error)
        raise rejection.error from None
    except Exception:
        if ownership.is_marked:
            complain(_resume_hint(plan))
        raise
    if report.fault is None:
        _clean_up(plan, ownership)
    if as_json:
        print_json(report.as_json())
    else:
        print_summary(report)
    if report.fault is not None:
        print_error_lines(report.fault)
        if not isinstance(report.fault, NotFound):
            complain(f"{plan.out} is incomplete. {_resume_hint(plan, report.fault)}")
        raise report.fault
    return Snapshot.of(report.job).exit_code


def _resume_hint(plan: RunPlan, fault: ConveyorError | None = None) -> str:
    first = "Fix the list, then run" if isinstance(fault, ListUnreadable) else "Run"
    return f"The results so far are kept in {plan.settings.data}. {first} the same command with --resume to continue."


def _load_mark(plan: RunPlan) -> place.RunMark:
    """Make the mark of this run or, with --resume, read the existing one. Raises BadInput."""
    data = plan.settings.data
    existing = place.read_mark(data)
    if plan.resume:
        if existing is None:
            raise BadInput(f"No unfinished run in {data}. Run without --resume.")
        return existing
    if existing is not None:
        raise BadInput(
            f"{data} has an unfinished run of {', '.join(existing.lists)}. Pass --resume to continue it, or remove "
            "that directory to start over."
        )
    return place.RunMark(list(plan.lists), place.fingerprint(plan.lists), str(plan.out))


def _clean_up(plan: RunPlan, ownership: DirectoryOwnership) -> None:
    if plan.temporary and ownership.is_own:
        place.remove_data(plan.settings.data)
    else:
        place.remove_mark(plan.settings.data)


def _discard_data(plan: RunPlan, ownership: DirectoryOwnership) -> None:
    place.remove_mark(plan.settings.data)
    if ownership.is_own and (plan.temporary or not plan.resume) and plan.settings.data.exists():
        place.remove_data(plan.settings.data)


async def _run_plan(
    plan: RunPlan, mark: place.RunMark, ownership: DirectoryOwnership, show: Show, stop: "Stop"
) -> RunReport:
    from conveyor.cli.loop import freeze_loaded_objects
    from conveyor.embedded import Embedded
    from conveyor.process.executors.fetch.launch import launch_fetcher
    from conveyor.system import open_system

    stop.listen()
    async with open_system(plan.settings) as system:
        embedded = Embedded(system, launch=partial(launch_fetcher, start=plan.fetchers.take))
        started = system.clock.monotonic()
        mark = await _match_lists(system, plan, mark)
        # The directory is ours now, and no job is accepted yet: --resume works after any crash from here on.
        place.write_mark(plan.settings.data, mark)
        ownership.is_marked = True
        mark = await _run_until_stopped(stop.event, _take_over_results(embedded, plan, mark, show))
        if (expired := await _find_expired(system, mark)) is not None:
            status = await _read_status(system, expired)
            fault, before = _expired_error(plan, expired), Snapshot.of(status)
            async with growing_output(system, expired, plan.out, plan.output, plan.is_directory) as archive:
                return await _report(system, expired, plan, status, before, started, show, stop, fault, archive)
        async with AsyncExitStack() as stack:
            # No retention here: it would purge the results that the user comes back for.
            async with embedded.running(purges=False):
                freeze_loaded_objects()
                job = await _run_until_stopped(stop.event, _find_or_submit(embedded, plan, mark, show))
                before = Snapshot.of(await _read_status(system, job))
                archive = await stack.enter_async_context(
                    growing_output(system, job, plan.out, plan.output, plan.is_directory)
                )
                final = await _follow(system, embedded, job, show, stop.event)
            job = await embedded.job(_TENANT, job.job_id)
            bad_list = await _list_fault(system, job, Snapshot.of(final))
            if bad_list is not None:
                # Some tasks that were in progress have finished since.
                final = await _read_status(system, job)
                if Snapshot.of(final).is_untouched:
                    raise ListNotAccepted(bad_list) if isinstance(bad_list, BadInput) and not mark.before else bad_list
            return await _report(system, job, plan, final, before, started, show, stop, bad_list, archive)


async def _report(
    system: "System",
    job: Job,
    plan: RunPlan,
    final: dict[str, Any],
    before: Snapshot,
    started: float,
    show: Show,
    stop: "Stop",
    fault: ConveyorError | None,
    archive: "GrowingOutput | None" = None,
) -> RunReport:
    """Write the archive and the file of invalid lines, and make the report."""
    now = Snapshot.of(final)
    seconds = system.clock.monotonic() - started
    size = await _run_until_stopped(stop.event, write_output(system, job, plan.out, plan.output, final, show, archive))
    invalid_file = await write_invalid(system, job, plan.out) if now.invalid else None
    return RunReport(final, plan.out, size, seconds, now.done - before.done, invalid_file, fault)


async def _match_lists(system: "System", plan: RunPlan, mark: place.RunMark) -> place.RunMark:
    """Check that the lists are those of the mark, or replace a list of the run that was unreadable. Return the mark for
    them. Raises BadInput for any other lists."""
    if mark.job_id is None:
        # No job was accepted yet.
        if plan.resume and _differ(place.fingerprint(plan.lists), mark.sha256):
            raise _other_list_error(plan, mark)
        return mark
    digest = place.fingerprint(plan.lists)
    job = await system.records.jobs.job(_TENANT, JobId(mark.job_id))
    if job is None and mark.taken_over:
        # The job has expired; no list can change that.
        return mark
    at_fault = job is not None and _is_list_at_fault(job)
    if digest == mark.sha256 if digest is not None and mark.sha256 is not None else not at_fault:
        return mark
    if job is not None and not at_fault:
        raise _other_list_error(plan, mark)
    # From here on this is a run of the new list, which takes over the results so far.
    return msgspec.structs.replace(
        mark,
        lists=list(plan.lists),
        sha256=digest,
        job_id=system.clock.new_id("job"),
        before=[*mark.before, *([mark.job_id] if job is not None else [])],
        taken_over=False,
    )


def _differ(digest: str | None, other: str | None) -> bool:
    return digest is not None and other is not None and digest != other


def _other_list_error(plan: RunPlan, mark: place.RunMark) -> BadInput:
    return BadInput(
        f"The unfinished run in {plan.settings.data} is of another list ({', '.join(mark.lists)}), or that file has "
        "changed. Pass the same list, or remove that directory to start over."
    )


async def _take_over_results(embedded: "Embedded", plan: RunPlan, mark: place.RunMark, show: Show) -> place.RunMark:
    """Give the job of a repaired list the results of the earlier jobs."""
    from conveyor.cli.takeover import take_over

    if mark.taken_over or mark.job_id is None:
        return mark
    system, ids = embedded.system, [*mark.before, mark.job_id]
    *earlier, job = [await system.records.jobs.job(_TENANT, JobId(job_id)) for job_id in ids]
    earlier_jobs = [old for old in earlier if old is not None]
    if job is None and earlier_jobs:
        job = await _submit(embedded, plan, show, earlier_jobs[-1], JobId(mark.job_id))
    if job is not None:
        await take_over(system, earlier_jobs, job)
    mark = msgspec.structs.replace(mark, taken_over=True)
    place.write_mark(plan.settings.data, mark)
    return mark


async def _find_or_submit(embedded: "Embedded", plan: RunPlan, mark: place.RunMark, show: Show) -> Job:
    """Return the job that was accepted before, or submit a new one."""
    if mark.job_id is not None:
        return await _resume_ingest(embedded, await embedded.job(_TENANT, JobId(mark.job_id)))
    job = await embedded.unfinished(_TENANT) if plan.resume else None
    if job is None:
        try:
            job = await _submit(embedded, plan, show)
        except BadInput as error:
            raise ListNotAccepted(error) from None
    place.write_mark(plan.settings.data, msgspec.structs.replace(mark, job_id=job.job_id))
    return job


async def _submit(
    embedded: "Embedded", plan: RunPlan, show: Show, like: Job | None = None, job_id: JobId | None = None
) -> Job:
    total = place.size_of(plan.lists)

    def progress(size: int) -> None:
        show(view_bytes("staging", size, total))

    progress(0)
    return await embedded.submit_list(
        plan.lists, plan.spec, _TENANT, progress, url_column=plan.url_column, like=like, job_id=job_id
    )


async def _resume_ingest(embedded: "Embedded", job: Job) -> Job:
    """Resume the ingest of a job if it failed and can be resumed."""
    from conveyor.accept.resume import resume_ingest

    if not is_resumable(job):
        return job
    await resume_ingest(embedded.system, job)
    return await embedded.job(_TENANT, job.job_id)


async def _find_expired(system: "System", mark: place.RunMark) -> Job | None:
    """Return the job of the mark if it has expired, else None. Raises NotFound if the job was purged."""
    if mark.job_id is None or await system.records.jobs.job(_TENANT, JobId(mark.job_id)) is not None:
        return None
    for job in await system.records.jobs.purgeable_jobs(system.clock.now(), _MAX_EXPIRED):
        if job.job_id == mark.job_id:
            return job
    raise NotFound(f"The job of this run has expired and was purged. Remove {system.settings.data} to start over.")


def _expired_error(plan: RunPlan, job: Job) -> NotFound | None:
    """The error for an expired job. None if the job had finished and only its archive was missing."""
    if job.state in ENDED and not is_resumable(job):
        return None
    return NotFound(
        f"The job of this run has expired and cannot be resumed. {plan.out} has the results so far. Remove "
        f"{plan.settings.data} to start over."
    )


def _is_list_at_fault(job: Job) -> bool:
    """Whether the job failed because its list was unreadable or empty, so that another list may replace it."""
    return job.state is RunState.FAILED and job.run.reason_code in {*LIST_CODES, ReasonCode.NO_TASKS}


async def _list_fault(system: "System", job: Job, now: Snapshot) -> ConveyorError | None:
    """The error in the list, if the job failed because of its list."""
    from conveyor.lists.list_files import MAX_LINES_SHOWN
    from conveyor.read.invalid_lines import invalid_page

    if now.bad_list is None:
        return None
    if now.reason_code == ReasonCode.INGEST_FAILED:
        return ConveyorError(f"The ingest failed: {now.bad_list}.")
    lines = (await invalid_page(system.blobs, job, MAX_LINES_SHOWN, None)).items
    if now.reason_code == ReasonCode.NO_TASKS:
        return NoTasks(f"{now.bad_list[:1].upper()}{now.bad_list[1:]}.", lines=lines)
    if now.reason_code == ReasonCode.LIST_REJECTED:
        # The rest of the reason names some of the lines.
        head = now.bad_list.partition(":")[0]
        return ListRejected(f"{head}. Fix these lines, or pass --on-invalid skip to run the other lines.", lines=lines)
    return (ListTooSparse if now.reason_code == ReasonCode.LIST_TOO_SPARSE else ListUnreadable)(now.bad_list)


async def _follow(
    system: "System", embedded: "Embedded", job: Job, show: Show, stopped: asyncio.Event
) -> dict[str, Any]:
    """Show progress until the job finishes. Return its final status."""
    while True:
        status = await _read_status(system, await embedded.job(_TENANT, job.job_id))
        now = Snapshot.of(status)
        # An error in the list is reported once, when the command fails.
        if now.bad_list is None:
            show(view_job(now))
        if now.ended:
            return status
        if stopped.is_set():
            raise Stopped
        await _wait_for_first(stopped.wait(), system.clock.sleep(_POLL_SECONDS))


async def _read_status(system: "System", job: Job) -> dict[str, Any]:
    from conveyor.read.status import job_json

    return await job_json(system.records, system.tasks, system.coordinator, system.clock, job)


async def _run_until_stopped(stopped: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work. Raises Stopped if the user stops it first."""
    task = asyncio.ensure_future(work)
    await _wait_for_first(task, stopped.wait())
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        raise Stopped
    return task.result()


async def _wait_for_first(*work: Awaitable[Any]) -> None:
    """Wait until one of them is done, and cancel the others, except for futures, which belong to the caller."""
    tasks = {asyncio.ensure_future(awaitable) for awaitable in work}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks.difference(awaitable for awaitable in work if isinstance(awaitable, asyncio.Future)):
            task.cancel()

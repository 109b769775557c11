"""A run in this process: the belt of `conveyor run` and `conveyor demo`.

Gets a plan, opens the embedded system under the plan's data directory, accepts the list or goes on with the one that
was accepted before, waits until the job ended or the user stops it, and writes the archive.

The data directory is removed when the archive is whole, or when nothing was ever run. Whatever else happens, it stays,
with its mark: what was fetched is in there, and --resume goes on with it.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from conveyor.cli import run_directory as place
from conveyor.cli.bar_view import View, of_bytes, of_job
from conveyor.cli.connection import LOCAL_TENANT
from conveyor.cli.loop import Stopped
from conveyor.cli.snapshot import Snapshot
from conveyor.cli.summary import RunReport
from conveyor.errors import BadInput, ConveyorError, ListRejected, ListUnreadable, NoTasks, NotFound
from conveyor.model import Job, JobId, TenantId, resumable
from conveyor.settings import Settings
from conveyor.states import ENDED, LIST_CODES, ReasonCode, RunState

if TYPE_CHECKING:
    from conveyor.cli.loop import Stop
    from conveyor.embedded import Embedded
    from conveyor.system import System

T = TypeVar("T")
Show = Callable[[View], None]

_TENANT = TenantId(LOCAL_TENANT)
_LOOK_SECONDS = 0.1
# Lines of a list that is refused.
_LINES_SHOWN = 10
# Expired jobs that are looked through for this run's.
_HIDDEN = 1000


@dataclass(frozen=True)
class RunPlan:
    """What to run, and where everything goes."""

    lists: Sequence[str]
    spec: dict[str, Any]
    out: Path
    settings: Settings
    resume: bool
    # The data directory is this run's own: it goes when the archive is there.
    temporary: bool
    title: str


class Refused(Exception):
    """The list was not accepted: nothing was run, and nothing is left behind."""

    def __init__(self, error: BadInput) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass
class Hold:
    """What this process has of the data directory."""

    # It was not there before, or is left from this very run.
    own: bool
    # Its mark is this run's: there is something to come back for.
    marked: bool = False


def run_here(plan: RunPlan, as_json: bool) -> int:
    """Run the plan with a bar and a summary; the exit code."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import Stop, leave, run_async
    from conveyor.cli.output import print_json
    from conveyor.cli.summary import print_summary
    from conveyor.telemetry.logs import configure_log

    configure_log(plan.settings.log_level, quiet=True, form=plan.settings.log_format)
    hold = Hold(own=plan.resume or not plan.settings.data.exists())
    mark = _mark(plan)
    stop = Stop(lambda: complain("Stopping: giving back what is held. Ctrl-C again leaves at once."))
    try:
        with progress_bar(plan.title) as show:
            report = run_async(_carry_out(plan, mark, hold, show, stop))
    except Stopped:
        complain(f"Stopped. Everything that ended is kept in {plan.settings.data}; run again with --resume to go on.")
        leave(stop.exit_code)
    except Refused as refused:
        _forget(plan, hold)
        _print_lines(refused.error)
        raise refused.error from None
    except Exception:
        if hold.marked:
            complain(_kept(plan))
        raise
    if report.fault is None:
        _tidy(plan, hold)
    if as_json:
        print_json(report.as_json())
    else:
        print_summary(report)
    if report.fault is not None:
        _print_lines(report.fault)
        if not isinstance(report.fault, NotFound):
            complain(f"{plan.out} is incomplete. {_kept(plan, report.fault)}")
        raise report.fault
    return Snapshot.of(report.job).exit_code


def _kept(plan: RunPlan, fault: ConveyorError | None = None) -> str:
    mended = " and the whole list" if isinstance(fault, ListUnreadable) else ""
    return f"What was fetched is kept in {plan.settings.data}; run the same command with --resume{mended} to go on."


def _print_lines(error: ConveyorError) -> None:
    from conveyor.telemetry.redact import printable

    for line in error.details.get("lines", []):
        print(f"  line {line.line}: {printable(line.reason)}  {printable(line.text)}", file=sys.stderr)


def _mark(plan: RunPlan) -> place.RunMark:
    """The mark of this run: a new one, or with --resume the one that is there."""
    data = plan.settings.data
    found = place.read_mark(data)
    if plan.resume:
        if found is None:
            raise BadInput(f"There is nothing to resume in {data}. Run without --resume.")
        return found
    if found is not None:
        raise BadInput(
            f"{data} holds an unfinished run of {', '.join(found.lists)}. Add --resume to go on with it, or remove "
            "that directory to start over."
        )
    return place.RunMark(list(plan.lists), place.fingerprint(plan.lists), str(plan.out))


def _tidy(plan: RunPlan, hold: Hold) -> None:
    if plan.temporary and hold.own:
        place.remove_data(plan.settings.data)
    else:
        place.remove_mark(plan.settings.data)


def _forget(plan: RunPlan, hold: Hold) -> None:
    place.remove_mark(plan.settings.data)
    if hold.own and (plan.temporary or not plan.resume) and plan.settings.data.exists():
        place.remove_data(plan.settings.data)


async def _carry_out(plan: RunPlan, mark: place.RunMark, hold: Hold, show: Show, stop: "Stop") -> RunReport:
    from conveyor.cli.loop import keep_for_good
    from conveyor.embedded import Embedded
    from conveyor.system import open_system

    stop.listen()
    async with open_system(plan.settings) as system:
        embedded = Embedded(system)
        started = system.clock.monotonic()
        mark = await _for_these_lists(system, plan, mark)
        # Now that the directory is ours, and before anything is accepted: whatever happens then, --resume finds it.
        place.write_mark(plan.settings.data, mark)
        hold.marked = True
        mark = await _unless(stop.event, _taken_over(embedded, plan, mark, show))
        if (expired := await _expired(system, mark)) is not None:
            seen = await _look(system, expired)
            fault = _too_late(plan, expired)
            return await _report(system, expired, plan, seen, Snapshot.of(seen), started, show, stop, fault)
        # Retention has no business here: what it would remove is what the user comes back for.
        async with embedded.running(purges=False):
            keep_for_good()
            job = await _unless(stop.event, _job(embedded, plan, mark, show))
            before = Snapshot.of(await _look(system, job))
            ended = await _follow(system, embedded, job, show, stop.event)
        job = await embedded.job(_TENANT, job.job_id)
        bad_list = await _list_fault(system, job, Snapshot.of(ended))
        if bad_list is not None:
            # Of what was under way some has ended since.
            ended = await _look(system, job)
            if Snapshot.of(ended).is_untouched:
                raise Refused(bad_list) if isinstance(bad_list, BadInput) and not mark.before else bad_list
        return await _report(system, job, plan, ended, before, started, show, stop, bad_list)


async def _report(
    system: "System",
    job: Job,
    plan: RunPlan,
    ended: dict[str, Any],
    before: Snapshot,
    started: float,
    show: Show,
    stop: "Stop",
    fault: ConveyorError | None,
) -> RunReport:
    """Write what there is, and say what it came to."""
    now = Snapshot.of(ended)
    seconds = system.clock.monotonic() - started
    size = await _unless(stop.event, _export(system, job, plan.out, ended, show))
    left_out = await _write_invalid(system, job, plan.out) if now.invalid else None
    return RunReport(ended, plan.out, size, seconds, now.done - before.done, left_out, fault)


async def _for_these_lists(system: "System", plan: RunPlan, mark: place.RunMark) -> place.RunMark:
    """The mark for the lists that were given: those of the run, or others in place of a list that could not be read to
    its end. Raises BadInput for any others."""
    if mark.job_id is None:
        # Nothing was accepted yet.
        if plan.resume and _differ(place.fingerprint(plan.lists), mark.sha256):
            raise _of_others(plan, mark)
        return mark
    given = place.fingerprint(plan.lists)
    job = await system.records.job(_TENANT, JobId(mark.job_id))
    if job is None and mark.taken_over:
        # It has expired: no list can change that.
        return mark
    at_fault = job is not None and _is_list_at_fault(job)
    if given == mark.sha256 if given is not None and mark.sha256 is not None else not at_fault:
        return mark
    if job is not None and not at_fault:
        raise _of_others(plan, mark)
    # From here on it is a run of the new list, that has to take over what is there.
    return msgspec.structs.replace(
        mark,
        lists=list(plan.lists),
        sha256=given,
        job_id=system.clock.new_id("job"),
        before=[*mark.before, *([mark.job_id] if job is not None else [])],
        taken_over=False,
    )


def _differ(given: str | None, found: str | None) -> bool:
    return given is not None and found is not None and given != found


def _of_others(plan: RunPlan, mark: place.RunMark) -> BadInput:
    return BadInput(
        f"The unfinished run in {plan.settings.data} is of another list ({', '.join(mark.lists)}, or its content then)."
    )


async def _taken_over(embedded: "Embedded", plan: RunPlan, mark: place.RunMark, show: Show) -> place.RunMark:
    """Have the job of a mended list begin with the results of those before it."""
    from conveyor.cli.takeover import take_over

    if mark.taken_over or mark.job_id is None:
        return mark
    system, ids = embedded.system, [*mark.before, mark.job_id]
    *before, job = [await system.records.job(_TENANT, JobId(job_id)) for job_id in ids]
    olds = [old for old in before if old is not None]
    if job is None and olds:
        job = await _submit(embedded, plan, show, olds[-1], JobId(mark.job_id))
    if job is not None:
        await take_over(system, olds, job)
    taken = msgspec.structs.replace(mark, taken_over=True)
    place.write_mark(plan.settings.data, taken)
    return taken


async def _job(embedded: "Embedded", plan: RunPlan, mark: place.RunMark, show: Show) -> Job:
    """The job that was accepted before, or a new one."""
    if mark.job_id is not None:
        return await _again(embedded, await embedded.job(_TENANT, JobId(mark.job_id)))
    job = await embedded.unfinished(_TENANT) if plan.resume else None
    if job is None:
        try:
            job = await _submit(embedded, plan, show)
        except BadInput as error:
            raise Refused(error) from None
    place.write_mark(plan.settings.data, msgspec.structs.replace(mark, job_id=job.job_id))
    return job


async def _submit(
    embedded: "Embedded", plan: RunPlan, show: Show, like: Job | None = None, job_id: JobId | None = None
) -> Job:
    total = place.size_of(plan.lists)

    def progress(size: int) -> None:
        show(of_bytes("staging", size, total))

    progress(0)
    return await embedded.submit_list(plan.lists, plan.spec, _TENANT, progress, like=like, job_id=job_id)


async def _again(embedded: "Embedded", job: Job) -> Job:
    """A job whose ingest was given up goes on with it."""
    from conveyor.accept.resume import resume_ingest

    if not resumable(job):
        return job
    await resume_ingest(embedded.system, job)
    return await embedded.job(_TENANT, job.job_id)


async def _expired(system: "System", mark: place.RunMark) -> Job | None:
    """The job of the mark, if nobody can go on with it any more. Raises NotFound if nothing is left of it."""
    if mark.job_id is None or await system.records.job(_TENANT, JobId(mark.job_id)) is not None:
        return None
    for job in await system.records.hidden_jobs(system.clock.now(), _HIDDEN):
        if job.job_id == mark.job_id:
            return job
    raise NotFound(f"The job of this run has expired, and was purged. Remove {system.settings.data} to start over.")


def _too_late(plan: RunPlan, job: Job) -> NotFound | None:
    """None if it had ended, and only its archive was missing."""
    if job.state in ENDED and not resumable(job):
        return None
    return NotFound(
        f"The job of this run has expired: {plan.out} has what was fetched, and nothing can be added to it. Remove "
        f"{plan.settings.data} to start over."
    )


def _is_list_at_fault(job: Job) -> bool:
    """Whether another list may take its place: it could not be read to its end, or had nothing in it."""
    return job.state is RunState.FAILED and job.run.reason_code in {*LIST_CODES, ReasonCode.NO_TASKS}


async def _list_fault(system: "System", job: Job, now: Snapshot) -> ConveyorError | None:
    """What is wrong with the list, if that is what the job failed for."""
    from conveyor.read.invalid_lines import invalid_page

    if now.bad_list is None:
        return None
    if now.reason_code == ReasonCode.INGEST_FAILED:
        return ConveyorError(f"The list could not be ingested: {now.bad_list}.")
    lines = (await invalid_page(system.blobs, job, _LINES_SHOWN, None)).items
    if now.reason_code == ReasonCode.NO_TASKS:
        return NoTasks(f"{now.bad_list[:1].upper()}{now.bad_list[1:]}.", lines=lines)
    if now.reason_code == ReasonCode.LIST_REJECTED:
        # The rest of the reason names some of the lines.
        head = now.bad_list.partition(":")[0]
        return ListRejected(f"{head}. Add --on-invalid skip to run the others.", lines=lines)
    return ListUnreadable(now.bad_list)


async def _write_invalid(system: "System", job: Job, out: Path) -> Path:
    """The lines that were left out, beside the archive: nothing else tells of them once the data is removed."""
    from conveyor.read.invalid_lines import invalid_lines

    path = out.with_name(out.name + ".invalid.jsonl")
    with path.open("wb") as file:
        async for lines in invalid_lines(system.blobs, job):
            file.write(lines)
    return path


async def _follow(
    system: "System", embedded: "Embedded", job: Job, show: Show, stopped: asyncio.Event
) -> dict[str, Any]:
    """Show the job until it ended; its last JSON."""
    while True:
        seen = await _look(system, await embedded.job(_TENANT, job.job_id))
        now = Snapshot.of(seen)
        # What is wrong with a list is said as an error, and once.
        if now.bad_list is None:
            show(of_job(now))
        if now.ended:
            return seen
        if stopped.is_set():
            raise Stopped
        await _first(stopped.wait(), system.clock.sleep(_LOOK_SECONDS))


async def _look(system: "System", job: Job) -> dict[str, Any]:
    from conveyor.read.status import job_json

    return await job_json(system.records, system.tasks, system.coordinator, system.clock, job)


async def _export(system: "System", job: Job, out: Path, ended: dict[str, Any], show: Show) -> int:
    from conveyor.export.direct import ExportProgress, export_to_file

    def report(now: ExportProgress) -> None:
        share = min(now.tasks / max(job.run.total, 1), 1.0)
        show(of_job(replace(Snapshot.of(ended), note=f"writing the archive, {share:.0%}")))

    size = await export_to_file(system.tasks, system.blobs, job, out, report=report)
    show(of_job(Snapshot.of(ended)))
    return size


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives, unless the user stops it first."""
    task = asyncio.ensure_future(work)
    await _first(task, stopped.wait())
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        raise Stopped
    return task.result()


async def _first(*work: Awaitable[Any]) -> None:
    """Wait until one of them is done. Futures among them are the caller's; the rest ends here."""
    tasks = {asyncio.ensure_future(each) for each in work}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks.difference(each for each in work if isinstance(each, asyncio.Future)):
            task.cancel()

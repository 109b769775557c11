"""A run in this process: the belt of `conveyor run` and `conveyor demo`.

Gets a plan, opens the embedded system under the plan's data directory, accepts the list or goes on with the one that
was accepted before, waits until the job ended or the user stops it, and writes the archive.
"""

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from conveyor.cli import place
from conveyor.cli.connection import LOCAL_TENANT
from conveyor.cli.loop import Stopped
from conveyor.cli.snapshot import Snapshot
from conveyor.cli.summary import Report
from conveyor.cli.view import View, of_bytes, of_job
from conveyor.errors import BadInput, ConveyorError, ListRejected, ListUnreadable, NoTasks
from conveyor.model import INGEST_FAILED, Job, JobId, OnInvalid, TenantId, resumable
from conveyor.settings import Settings

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
# At the end of a reason that is not the list's fault.
_TRIED = re.compile(r"\(tried \d+ times\)$")


@dataclass(frozen=True)
class Plan:
    """What to run, and where everything goes."""

    lists: Sequence[str]
    spec: dict[str, Any]
    out: Path
    settings: Settings
    resume: bool
    # The data directory is this run's own: it goes when the archive is there.
    temporary: bool
    title: str


def run_here(plan: Plan, as_json: bool) -> int:
    """Run the plan with a bar and a summary; the exit code."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.guard import complain
    from conveyor.cli.logs import configure_log
    from conveyor.cli.loop import Stop, leave, run_async
    from conveyor.cli.output import print_json, printable
    from conveyor.cli.summary import print_summary

    configure_log(plan.settings.log_level, quiet=True, form=plan.settings.log_format)
    new = not plan.settings.data.exists()
    mark = _mark(plan)
    stop = Stop(lambda: complain("Stopping: giving back what is held. Ctrl-C again leaves at once."))
    try:
        with progress_bar(plan.title) as show:
            report = run_async(_carry_out(plan, mark, show, stop))
    except Stopped:
        complain(f"Stopped. Everything that ended is kept in {plan.settings.data}; run again with --resume to go on.")
        leave(stop.exit_code)
    except BadInput as error:
        # The list was not accepted: leave nothing behind.
        _forget(plan, new)
        for line in error.details.get("lines", []):
            print(f"  line {line.line}: {printable(line.reason)}  {printable(line.text)}", file=sys.stderr)
        raise
    _tidy(plan)
    if as_json:
        print_json(report.as_json())
    else:
        print_summary(report)
    return Snapshot.of(report.job).exit_code


def _mark(plan: Plan) -> place.Mark:
    """The mark of this run: a new one, or with --resume the one that is there."""
    data = plan.settings.data
    found = place.read_mark(data)
    if plan.resume:
        return _found_again(plan, found)
    if found is not None:
        raise BadInput(
            f"{data} holds an unfinished run of {', '.join(found.lists)}. Add --resume to go on with it, or remove "
            "that directory to start over."
        )
    return place.Mark(list(plan.lists), place.fingerprint(plan.lists), str(plan.out))


def _found_again(plan: Plan, found: place.Mark | None) -> place.Mark:
    if found is None:
        raise BadInput(f"There is nothing to resume in {plan.settings.data}. Run without --resume.")
    given = place.fingerprint(plan.lists)
    if given is not None and found.sha256 is not None and given != found.sha256:
        raise BadInput(
            f"The unfinished run in {plan.settings.data} is of another list ({', '.join(found.lists)}, or its "
            "content then)."
        )
    return found


def _tidy(plan: Plan) -> None:
    if plan.temporary:
        place.remove_data(plan.settings.data)
    else:
        place.remove_mark(plan.settings.data)


def _forget(plan: Plan, new: bool) -> None:
    place.remove_mark(plan.settings.data)
    if new and plan.settings.data.exists():
        place.remove_data(plan.settings.data)


async def _carry_out(plan: Plan, mark: place.Mark, show: Show, stop: "Stop") -> Report:
    from conveyor.cli.loop import keep_for_good
    from conveyor.embedded import Embedded
    from conveyor.system import open_system

    stop.listen()
    async with open_system(plan.settings) as system:
        # Now that the directory is ours, and before anything is accepted: whatever happens then, --resume finds it.
        place.write_mark(plan.settings.data, mark)
        embedded = Embedded(system)
        started = system.clock.monotonic()
        async with embedded.running():
            keep_for_good()
            job = await _unless(stop.event, _job(embedded, plan, mark, show))
            before = Snapshot.of(await _look(system, job))
            ended = await _follow(system, embedded, job, show, stop.event)
            job = await embedded.job(_TENANT, job.job_id)
        seconds = system.clock.monotonic() - started
        await _check_list(system, job, Snapshot.of(ended))
        size = await _unless(stop.event, _export(system, job, plan.out, ended, show))
        left_out = await _write_invalid(system, job, plan.out) if Snapshot.of(ended).invalid else None
        return Report(ended, plan.out, size, seconds, Snapshot.of(ended).done - before.done, left_out)


async def _job(embedded: "Embedded", plan: Plan, mark: place.Mark, show: Show) -> Job:
    """The job that was accepted before, or a new one."""
    if mark.job_id is not None:
        return await _again(embedded, await embedded.job(_TENANT, JobId(mark.job_id)))
    job = await embedded.unfinished(_TENANT) if plan.resume else None
    if job is None:
        total = place.size_of(plan.lists)
        show(of_bytes("staging", 0, total))
        job = await embedded.submit_list(
            plan.lists, plan.spec, _TENANT, lambda size: show(of_bytes("staging", size, total))
        )
    place.write_mark(plan.settings.data, msgspec.structs.replace(mark, job_id=job.job_id))
    return job


async def _again(embedded: "Embedded", job: Job) -> Job:
    """A job whose ingest was given up goes on with it."""
    from conveyor.accept.resume import resume_ingest

    if not resumable(job):
        return job
    await resume_ingest(embedded.system, job)
    return await embedded.job(_TENANT, job.job_id)


async def _check_list(system: "System", job: Job, now: Snapshot) -> None:
    """Raise what is wrong with the list, if that is what the job failed for."""
    from conveyor.serve.invalid import invalid_page

    if now.bad_list is None or now.reason is None:
        return
    if _TRIED.search(now.bad_list):
        raise ConveyorError(f"The list could not be ingested: {now.bad_list}. Run again with --resume to go on.")
    lines = (await invalid_page(system.blobs, job, _LINES_SHOWN, None)).items
    if not now.reason.startswith(INGEST_FAILED):
        raise NoTasks(f"{now.bad_list[:1].upper()}{now.bad_list[1:]}.", lines=lines)
    if lines and job.options.on_invalid is OnInvalid.REJECT:
        # The rest of the reason names some of the lines.
        head = now.bad_list.partition(":")[0]
        raise ListRejected(f"{head}. Add --on-invalid skip to run the others.", lines=lines)
    raise ListUnreadable(now.bad_list)


async def _write_invalid(system: "System", job: Job, out: Path) -> Path:
    """The lines that were left out, beside the archive: nothing else tells of them once the data is removed."""
    from conveyor.serve.invalid import invalid_lines

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
    from conveyor.serve.progress import job_json

    return await job_json(system.records, system.tasks, system.coordinator, system.clock, job)


async def _export(system: "System", job: Job, out: Path, ended: dict[str, Any], show: Show) -> int:
    from conveyor.serve.export import ExportProgress, export_to_file

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

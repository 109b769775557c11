"""`conveyor move-tasks`: move the tasks of jobs to another task engine."""

from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli import EXIT_ERROR
from conveyor.cli.shared_options import Data
from conveyor.errors import InvalidSetting
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.bar_view import View
    from conveyor.recover.task_mover import MovedJob, MoveTotals

_WAIT_SECONDS = 5.0
_SHOWN = 20

To = Annotated[str, typer.Option("--to", metavar="URL", help="The task engine to move to: postgres://….")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Move the jobs that are finished now, and do not wait for the others.")
]
Clean = Annotated[
    bool, typer.Option("--clean", help="Delete the rows that moved jobs left on the engines that they came from.")
]


def move_tasks(to: To, no_wait: NoWait = False, clean: Clean = False, data: Data = None) -> None:
    """Move the tasks of finished jobs to Postgres, and wait for unfinished jobs to finish.

    Copies each job, compares the counts of each run on both engines, and then switches the job. Stop it at any time:
    the next call resumes.
    """
    from conveyor.cli.loop import run_async
    from conveyor.telemetry.logs import configure_log

    if not to.startswith(("postgres://", "postgresql://")):
        raise InvalidSetting("--to must be postgres://…. Jobs can be moved to Postgres only.")
    settings = Settings.load(data=data)
    configure_log(settings.log_level, form=settings.log_format)
    raise typer.Exit(run_async(_move(settings, to, no_wait, clean)))


async def _move(settings: Settings, to: str, no_wait: bool, clean: bool) -> int:
    import msgspec

    from conveyor.cli import formatting as text
    from conveyor.cli.bar import progress_bar
    from conveyor.recover.task_mover import TaskMover
    from conveyor.system import open_system

    others = " ".join([*(settings.other_tasks or "").split(), to])
    async with open_system(msgspec.structs.replace(settings, other_tasks=others)) as system:
        target = system.task_stores[to]
        with progress_bar("Cleaning" if clean else "Moving tasks") as show:
            mover = TaskMover(system, target, lambda totals: show(_view(totals)), _print_moved)
            if clean:
                totals = await mover.clean()
                print(f"Deleted {text.count(totals.deleted)} rows of moved jobs.")
                return _print_left(totals, system.task_store == target)
            totals = await mover.move()
            # Unfinished jobs drain only if new jobs go elsewhere and another process runs them.
            waits = not no_wait and system.task_store == target and settings.records is not None
            while waits and totals.unfinished:
                await system.clock.sleep(_WAIT_SECONDS)
                totals = await mover.move()
        print(f"Moved {text.count(totals.jobs)} jobs to {target}.")
        return _print_left(totals, system.task_store == target)


def _view(totals: "MoveTotals") -> "View":
    from conveyor.cli import formatting as text
    from conveyor.cli.bar_view import View

    done = f"{text.count(totals.jobs)} of {text.count(totals.jobs_total)} jobs, {text.count(totals.tasks)} tasks"
    tail = f"{text.count(len(totals.unfinished))} unfinished" if totals.unfinished else ""
    problems = f"{text.count(len(totals.blocked))} blocked" if totals.blocked else ""
    return View("", totals.tasks, totals.tasks_total or None, done, problems, tail=tail)


def _print_moved(job: "MovedJob") -> None:
    from conveyor.cli import formatting as text

    counts = [run.counts for run in job.runs]
    by_status = {
        "succeeded": sum(each.succeeded for each in counts),
        "failed": sum(each.failed for each in counts),
        "cancelled": sum(each.cancelled for each in counts),
    }
    parts = [f"{text.count(number)} {status}" for status, number in by_status.items() if number]
    rows, events = sum(run.rows for run in job.runs), sum(run.events for run in job.runs)
    shown = f" ({', '.join(parts)})" if parts else ""
    print(f"{job.job_id}  runs {len(job.runs)}, tasks {text.count(rows)}{shown}, events {text.count(events)}: verified")


def _print_left(totals: "MoveTotals", is_configured: bool) -> int:
    """Say which jobs are left, and what to do about them."""
    left = {**totals.unfinished, **totals.blocked}
    for job_id, why in list(left.items())[:_SHOWN]:
        print(f"{job_id}  not moved: {why}")
    if len(left) > _SHOWN:
        print(f"… and {len(left) - _SHOWN} more.")
    if totals.unfinished and not is_configured:
        print("New jobs still go to the old engine. Set CONVEYOR_TASKS to the new one, then move again.")
    elif totals.unfinished:
        print("Unfinished jobs run to their end where they are. Move again when they have finished.")
    return EXIT_ERROR if left else 0

"""The job's view of a task: its latest outcome over all runs of the job.

The newest run in which the task succeeded or failed has it. A run in which the task is pending or cancelled hides no
earlier outcome. A task without an outcome is cancelled if any run cancelled it, else pending. The first run has every
task; a rerun has those that it selected.
"""

from collections.abc import Sequence

from conveyor.engines.tasks import Tasks
from conveyor.model import EXTRACT_FAILED, OUTCOMES, RunKey, Task
from conveyor.states import TaskStatus

# What a task without an outcome is shown as: a higher rank wins, and of equals the newer run.
_RANKS = {TaskStatus.PENDING: 0, TaskStatus.CANCELLED: 1, TaskStatus.SUCCEEDED: 2, TaskStatus.FAILED: 2}


def hides(newer: Task, older: Task) -> bool:
    """Whether the task of a newer run takes the place of the one of an older run."""
    return _RANKS[newer.status] >= _RANKS[older.status]


def is_extractable(task: Task) -> bool:
    """Whether the task has a stored body that its target gave for an answer."""
    return task.detail.body is not None and (task.status is TaskStatus.SUCCEEDED or task.error_code == EXTRACT_FAILED)


async def latest_outcomes(tasks: Tasks, runs: Sequence[RunKey], first_run: Sequence[Task]) -> list[Task]:
    """The job's view of these tasks of the first run. `runs` are all runs of the job, oldest first."""
    left = {task.index for task in first_run}
    shown: dict[int, Task] = {}
    for run in reversed(runs[1:]):
        if not left:
            break
        for task in await tasks.at(run, sorted(left)):
            newer = shown.get(task.index)
            if newer is None or not hides(newer, task):
                shown[task.index] = task
            if task.status in OUTCOMES:
                left.discard(task.index)
    return [_of_both(shown.get(task.index), task) for task in first_run]


def _of_both(newer: Task | None, first: Task) -> Task:
    return first if newer is None or not hides(newer, first) else newer


async def only_latest(tasks: Tasks, is_first: bool, later: Sequence[RunKey], of_run: Sequence[Task]) -> list[Task]:
    """Those of the tasks of one run that are the job's view of them, where `later` are the runs after it. Over all runs
    each task occurs once."""
    left = {task.index: task for task in of_run if is_first or task.status in OUTCOMES}
    for run in later:
        if left:
            for task in await tasks.at(run, sorted(left)):
                if task.status in OUTCOMES:
                    del left[task.index]
    return [task for task in of_run if task.index in left]

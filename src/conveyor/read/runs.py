"""Runs of a job: choose those that a request names, and find the run that has a task."""

import re

import msgspec

from conveyor.engines.records import Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import InvalidField, NotFound
from conveyor.model import Job, Run, RunKey, Task, TaskId, is_task_id

LATEST = "latest"
LATEST_PER_TASK = "latest-per-task"

_RUN_ID = re.compile(r"run_[0-9a-z]{26}")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)


async def chosen_runs(records: Records, job: Job, which: str | None) -> list[RunKey]:
    """The runs that `which` names, oldest first: all for the latest outcome of each task, which is the default, the
    latest, or one by its id or number. Raises NotFound and InvalidField."""
    if which == LATEST or (job.run.number == 1 and which in (None, LATEST_PER_TASK)):
        return [job.key]
    if which is None or which == LATEST_PER_TASK:
        # Without runs that were added since the job was read.
        return [job.key_of(run) for run in await records.jobs.runs(job.job_id) if run.number <= job.run.number]
    if not _RUN_ID.fullmatch(which) and not _NUMBER.fullmatch(which):
        raise InvalidField(
            f"`run` must be the id or the number of a run, `{LATEST}` or `{LATEST_PER_TASK}`.", field="run"
        )
    named = [run for run in await records.jobs.runs(job.job_id) if which in (run.run_id, str(run.number))]
    if not named:
        raise NotFound("The job has no such run.")
    return [job.key_of(named[0])]


async def chosen_run(records: Records, job: Job, which: str) -> Run:
    """The run that `which` names by its id or number, or as the latest. Raises NotFound and InvalidField."""
    if which == LATEST_PER_TASK:
        raise InvalidField(f"`run` must be one run: its id or number, or `{LATEST}`.", field="run")
    [key] = await chosen_runs(records, job, which)
    run = job.run if key == job.key else await records.jobs.run(job.job_id, key.run_id)
    if run is None:
        raise NotFound("The job has no such run.")
    return run


async def with_first_run(records: Records, job: Job) -> Job:
    """The job with its first run, whose ingest read the list."""
    if job.run.number == 1:
        return job
    runs = await records.jobs.runs(job.job_id)
    return msgspec.structs.replace(job, run=runs[0]) if runs else job


async def locate_task(records: Records, tasks: Tasks, job: Job, task_id: str) -> tuple[RunKey, Task]:
    """A task of any run of the job, and the key of that run; the latest run first. Raises NotFound."""
    if is_task_id(task_id):
        older = await records.jobs.runs(job.job_id) if job.run.number > 1 else []
        for key in [job.key, *(job.key_of(run) for run in reversed(older[:-1]))]:
            task = await tasks.task(key, TaskId(task_id))
            if task is not None:
                return key, task
    raise NotFound

"""Checks the tasks of a request, and turns them into the tasks of a run. One invalid task refuses all of them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.errors import InvalidTasks, NoTasks, TooManyTasks
from conveyor.lists.inputs import compact_json, task_problem
from conveyor.model import JobKind, TaskSeed

MAX_ERRORS = 100


def seeds_of(kind: JobKind, tasks: Sequence[msgspec.Raw], max_tasks: int) -> list[TaskSeed]:
    """The tasks of a request, in order. Raises NoTasks, TooManyTasks and InvalidTasks."""
    _check_number(len(tasks), max_tasks)
    seeds: list[TaskSeed] = []
    errors: list[dict[str, Any]] = []
    total = 0
    for index, task in enumerate(tasks):
        raw = bytes(task)
        wrong = task_problem(kind, raw)
        if wrong is None:
            seeds.append(TaskSeed(index, compact_json(raw)))
            continue
        total += 1
        if len(errors) < MAX_ERRORS:
            errors.append({"index": index, "code": wrong.code, "message": wrong.message})
    if total:
        raise InvalidTasks(_summary(total, errors[0]), errors=errors, total=total)
    return seeds


def _check_number(number: int, max_tasks: int) -> None:
    if number == 0:
        raise NoTasks
    if number > max_tasks:
        raise TooManyTasks(
            f"The request has {number} tasks; the maximum is {max_tasks}. Upload the list (POST /v1/uploads), "
            "or use `conveyor submit` or `conveyor run` with a file.",
            limit=max_tasks,
            total=number,
        )


def _summary(total: int, first: dict[str, Any]) -> str:
    tasks = "1 task is" if total == 1 else f"{total} tasks are"
    return f"{tasks} not valid, the first at index {first['index']}: {first['message']}. Nothing was written."

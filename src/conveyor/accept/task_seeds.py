"""Checks the tasks of a request, and turns them into the tasks of a run. Invalid ones are skipped, as the invalid lines
of a list are, unless the job has `on_invalid: reject`, or no task is left of a new one."""

from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor.errors import InvalidTasks, NoTasks, TooManyTasks
from conveyor.lists.inputs import MAX_INPUT_BYTES, InputProblem, compact_json, task_problem
from conveyor.lists.reader import InvalidListLine, invalid_line
from conveyor.lists.small_list import CheckedList
from conveyor.model import JobKind, OnInvalid, TaskSeed

MAX_ERRORS = 100
# Of an invalid task, what is staged: enough for the ingest to see that it is too large.
_STAGED_BYTES = MAX_INPUT_BYTES + 8
_LINE_BREAKS_TO_BLANKS = bytes.maketrans(b"\r\n", b"  ")


def check_tasks(
    kind: JobKind,
    tasks: Sequence[msgspec.Raw],
    max_tasks: int,
    on_invalid: OnInvalid = OnInvalid.SKIP,
    *,
    is_batch: bool = False,
) -> CheckedList:
    """The tasks of a request, in order, and those that are invalid. Of a batch for an open job, all may be. Raises
    NoTasks, TooManyTasks and InvalidTasks."""
    _check_number(len(tasks), max_tasks)
    seeds: list[TaskSeed] = []
    wrong: list[tuple[int, InputProblem]] = []
    for index, task in enumerate(tasks):
        raw = bytes(task)
        problem = task_problem(kind, raw)
        if problem is None:
            seeds.append(TaskSeed(index, compact_json(raw)))
        else:
            wrong.append((index, problem))
    is_refused = on_invalid is OnInvalid.REJECT or not (seeds or is_batch)
    if wrong and is_refused:
        raise _refusal(wrong, is_all=not seeds)
    return CheckedList(seeds, [_skipped(index, tasks, problem) for index, problem in wrong], len(tasks))


def encode_list(tasks: Sequence[msgspec.Raw], checked: CheckedList) -> bytes:
    """The tasks of a request as a list to be staged, with the invalid ones: the ingest skips and counts them."""
    if not checked.invalid:
        return "".join([f"{seed.input}\n" for seed in checked.seeds]).encode()
    lines = [_one_line(bytes(task)) for task in tasks]
    for seed in checked.seeds:
        lines[seed.index] = seed.input.encode()
    return b"\n".join([*lines, b""])


def _one_line(raw: bytes) -> bytes:
    cut = raw[:_STAGED_BYTES].translate(_LINE_BREAKS_TO_BLANKS)
    return cut if len(cut) == len(raw) else cut.decode(errors="ignore").encode()


def _skipped(index: int, tasks: Sequence[msgspec.Raw], problem: InputProblem) -> InvalidListLine:
    return invalid_line(index + 1, bytes(tasks[index]), problem.message)


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


def _refusal(wrong: Sequence[tuple[int, InputProblem]], *, is_all: bool) -> InvalidTasks:
    errors: list[dict[str, Any]] = [
        {"index": index, "code": problem.code, "message": problem.message} for index, problem in wrong[:MAX_ERRORS]
    ]
    total = len(wrong)
    tasks = "No task is valid" if is_all else "1 task is not valid" if total == 1 else f"{total} tasks are not valid"
    why = "" if is_all else ", and the job has `on_invalid: reject`"
    first = f"the first at index {errors[0]['index']}: {errors[0]['message']}"
    return InvalidTasks(f"{tasks}{why}, {first}. Nothing was written.", errors=errors, total=total)

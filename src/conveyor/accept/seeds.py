"""From the tasks of a request to the tasks of a run: each checked, each error with its index, or none written."""

import re
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from conveyor.accept.spec import JobSpec
from conveyor.errors import BadInput, InvalidField, InvalidTasks, NoTasks, TooManyTasks
from conveyor.inputs import parse_fetch_input, problem
from conveyor.model import InputJson, JobKind, TaskSeed
from conveyor.targets import BadUrl, check_url

MAX_INPUT_BYTES = 256 * 1024
# Far below the depth at which a decoder gives up, wherever a worker stands when it decodes.
MAX_DEPTH = 64
MAX_ERRORS = 100

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# One step down or up, as signed bytes.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_LINE_BREAKS = re.compile(rb"[\r\n]")


class Wrong(NamedTuple):
    """Why a task is not valid; `code` is stable."""

    code: str
    message: str


def seeds_of(spec: JobSpec, most: int) -> list[TaskSeed]:
    """The tasks of the spec in order, or NoTasks, TooManyTasks, InvalidTasks."""
    _check_number(len(spec.tasks), most)
    seeds: list[TaskSeed] = []
    errors: list[dict[str, Any]] = []
    total = 0
    for index, task in enumerate(spec.tasks):
        raw = bytes(task)
        wrong = wrong_task(spec.kind, raw)
        if wrong is None:
            seeds.append(TaskSeed(index, _one_line(raw)))
            continue
        total += 1
        if len(errors) < MAX_ERRORS:
            errors.append({"index": index, "code": wrong.code, "message": wrong.message})
    if total:
        raise InvalidTasks(_summary(total, errors[0]), errors=errors, total=total)
    return seeds


def wrong_task(kind: JobKind, raw: bytes) -> Wrong | None:
    """What is wrong with one task, or None."""
    if len(raw) > MAX_INPUT_BYTES:
        return Wrong("too_large", f"the input has {len(raw)} bytes, at most {MAX_INPUT_BYTES} are taken")
    if _too_deep(raw):
        return Wrong("too_deep", f"the input is nested more than {MAX_DEPTH} deep")
    return _wrong_fetch(raw) if kind is JobKind.FETCH else _wrong_value(raw)


def _wrong_fetch(raw: bytes) -> Wrong | None:
    try:
        given = parse_fetch_input(raw)
    except BadInput as error:
        return Wrong(error.code, error.message)
    message = problem(given)
    if message is None:
        return None
    return Wrong(BadUrl.code if check_url(given.url) else InvalidField.code, message)


def _wrong_value(raw: bytes) -> Wrong | None:
    """Any JSON value, as long as Python can hold it: syntax was seen to already, the size of numbers was not."""
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        return Wrong(InvalidField.code, str(error))
    return None


def _check_number(number: int, most: int) -> None:
    if number == 0:
        raise NoTasks
    if number > most:
        raise TooManyTasks(
            f"The request has {number} tasks; at most {most} may come in one. Send the list in several jobs, or use "
            "`conveyor run`.",
            limit=most,
            total=number,
        )


def _one_line(raw: bytes) -> InputJson:
    """A line break outside a string is only layout, and a manifest has one line for each task."""
    return InputJson((msgspec.json.format(raw, indent=-1) if _LINE_BREAKS.search(raw) else raw).decode())


def _too_deep(raw: bytes) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    steps = _STRING.sub(b"", raw).translate(_STEPS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH


def _summary(total: int, first: dict[str, Any]) -> str:
    tasks = "1 task is" if total == 1 else f"{total} tasks are"
    return f"{tasks} not valid, the first at index {first['index']}: {first['message']}. Nothing was written."

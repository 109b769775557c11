"""Handlers: how they are registered and found, and what comes of calling them."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.handlers import AppUnloadable, Handlers, InvalidHandler, load_app
from conveyor.handlers import default as default_handlers
from conveyor.model import InputJson, Job, Outcome, TaskRef
from conveyor.process.executors.python import MAX_GRAIN, PythonExecutor
from conveyor.states import TaskStatus
from tests.jobs import make_job

handlers = Handlers()
release = threading.Event()
calls: list[Any] = []


@handlers.task("double")
def double(value: int) -> int:
    return value * 2


@handlers.task("double-async")
async def double_async(value: int) -> int:
    await asyncio.sleep(0)
    return value * 2


@handlers.task("whole")
def whole(value: Any) -> Any:
    return {"got": value, "none": None}


@handlers.task("raises")
def raises(value: str) -> None:
    raise LookupError(value)


@handlers.task("raises-async")
async def raises_async(value: str) -> None:
    raise LookupError(value)


@handlers.task("exits")
def exits(_: Any) -> None:
    sys.exit("stop everything")


@handlers.task("exits-async")
async def exits_async(_: Any) -> None:
    sys.exit("stop everything")


@handlers.task("cancels-itself")
async def cancels_itself(_: Any) -> None:
    raise asyncio.CancelledError


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@handlers.task("unspeakable")
def unspeakable(_: Any) -> None:
    raise Unspeakable


@handlers.task("not-json")
def not_json(_: Any) -> object:
    return object()


@handlers.task("sticks-on-2")
def sticks_on_2(value: int) -> int:
    calls.append(value)
    if value == 2:
        release.wait(30)
    return value


@handlers.task("sticks-async")
async def sticks_async(_: Any) -> None:
    await asyncio.Event().wait()


@handlers.task("times-out-by-itself")
async def times_out_by_itself(_: Any) -> None:
    raise TimeoutError("mine")


@pytest.fixture
async def executor() -> AsyncIterator[PythonExecutor]:
    made = PythonExecutor(handlers, SystemClock(), threads=4)
    yield made
    await made.close()


def job_for(handler: str | None, **options: Any) -> Job:
    return make_job(SystemClock(), handler=handler, **options)


def refs(*inputs: str) -> list[TaskRef]:
    return [TaskRef(index, InputJson(text)) for index, text in enumerate(inputs)]


async def one(executor: PythonExecutor, handler: str, text: str = "1", **options: Any) -> Outcome:
    (outcome,) = await executor.attempt(job_for(handler, **options), refs(text))
    return outcome


@pytest.mark.parametrize("handler", ["double", "double-async"])
async def test_each_input_becomes_a_result_in_order(executor: PythonExecutor, handler: str) -> None:
    outcomes = await executor.attempt(job_for(handler), refs("1", "2", "30"))
    assert [outcome.body for outcome in outcomes] == [b"2", b"4", b"60"]
    assert {outcome.status for outcome in outcomes} == {TaskStatus.SUCCEEDED}
    assert {outcome.content_type for outcome in outcomes} == {"application/json"}
    assert all(outcome.elapsed >= 0 for outcome in outcomes)


@pytest.mark.parametrize("text", ["null", '"a"', "[1,2.5]", '{"a":{"b":[]}}', "true"])
async def test_any_json_value_is_an_input(executor: PythonExecutor, text: str) -> None:
    assert (await one(executor, "whole", text)).body == b'{"got":%s,"none":null}' % text.encode()


@pytest.mark.parametrize("handler", ["raises", "raises-async"])
async def test_an_exception_is_an_outcome_without_its_traceback(executor: PythonExecutor, handler: str) -> None:
    error = (await one(executor, handler, f'"{"x" * 1000}"')).error
    assert error is not None
    assert error.code == "handler_raised"
    assert error.message.startswith("LookupError: xxx")
    assert len(error.message) <= 500
    assert "Traceback" not in error.message


@pytest.mark.parametrize(
    ("handler", "code", "part"),
    [
        ("exits", "handler_raised", "SystemExit"),
        ("exits-async", "handler_raised", "SystemExit"),
        ("cancels-itself", "handler_raised", "CancelledError"),
        ("unspeakable", "handler_raised", "Unspeakable"),
        ("not-json", "result_not_json", "object"),
        ("times-out-by-itself", "handler_raised", "TimeoutError: mine"),
    ],
)
async def test_whatever_a_handler_does_is_its_outcome(
    executor: PythonExecutor, handler: str, code: str, part: str
) -> None:
    outcome = await one(executor, handler)
    assert outcome.status is TaskStatus.FAILED
    assert outcome.error is not None
    assert outcome.error.code == code
    assert part in outcome.error.message
    assert (await one(executor, "double", "4")).body == b"8"


async def test_a_handler_that_nobody_registered_is_named(executor: PythonExecutor) -> None:
    outcomes = await executor.attempt(job_for("dubble"), refs("1", "2"))
    errors = [outcome.error for outcome in outcomes]
    assert [error.code for error in errors if error] == ["handler_missing"] * 2
    assert errors[0] is not None
    assert "'dubble'" in errors[0].message
    assert "double" in errors[0].message
    (outcome,) = await executor.attempt(job_for(None), refs("1"))
    assert outcome.error is not None
    assert "names no handler" in outcome.error.message


async def test_a_call_that_is_stuck_costs_its_own_task_only(executor: PythonExecutor) -> None:
    calls.clear()
    release.clear()
    try:
        outcomes = await executor.attempt(job_for("sticks-on-2", timeout=0.1), refs("1", "2", "3", "4"))
    finally:
        release.set()
    assert [outcome.status for outcome in outcomes] == [
        TaskStatus.SUCCEEDED,
        TaskStatus.FAILED,
        TaskStatus.SUCCEEDED,
        TaskStatus.SUCCEEDED,
    ]
    assert outcomes[1].error is not None
    assert outcomes[1].error.code == "timeout"
    assert calls == [1, 2, 3, 4]


async def test_stuck_threads_do_not_use_up_the_slots(executor: PythonExecutor) -> None:
    release.clear()
    try:
        stuck = await asyncio.gather(*(one(executor, "sticks-on-2", "2", timeout=0.05) for _ in range(10)))
        assert (await one(executor, "double", "4")).body == b"8"
    finally:
        release.set()
    assert {outcome.error.code for outcome in stuck if outcome.error} == {"timeout"}


async def test_an_async_handler_has_the_timeout_of_the_job(executor: PythonExecutor) -> None:
    error = (await one(executor, "sticks-async", timeout=0.02)).error
    assert error is not None
    assert error.code == "timeout"


async def test_stopping_the_worker_is_not_an_outcome(executor: PythonExecutor) -> None:
    attempt = asyncio.create_task(one(executor, "sticks-async"))
    await asyncio.sleep(0)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt


@pytest.mark.parametrize("handler", ["double", "double-async"])
async def test_quick_handlers_are_given_more_at_once(executor: PythonExecutor, handler: str) -> None:
    job = job_for(handler)
    assert executor.grain(job) == 1
    for _ in range(40):
        await executor.attempt(job, refs(*["1"] * executor.grain(job)))
    assert 1 < executor.grain(job) <= MAX_GRAIN
    assert executor.target(refs("1")[0]) is None


async def test_slow_handlers_are_given_less(executor: PythonExecutor) -> None:
    slow = Handlers()
    clock = Ticking()
    executor = PythonExecutor(slow, clock)

    @slow.task("takes")
    def takes(seconds: float) -> None:
        clock.seconds += seconds

    job = job_for("takes", timeout=30.0)
    for seconds, grain in [("0.001", 2), ("0.001", 4), ("0.006", 4), ("0.06", 2), ("0.06", 1), ("0.06", 1)]:
        await executor.attempt(job, refs(seconds, *["0"] * (executor.grain(job) - 1)))
        assert executor.grain(job) == grain
    await executor.close()


class Ticking(SystemClock):
    """Moves only when a handler says that it took time."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


async def test_one_quick_task_of_a_larger_grain_says_nothing(executor: PythonExecutor) -> None:
    job = job_for("double")
    await executor.attempt(job, refs("1"))
    for _ in range(5):
        await executor.attempt(job, refs("1"))
    assert executor.grain(job) == 2


def test_a_name_belongs_to_one_function() -> None:
    mine = Handlers()
    mine.task("one")(double)
    mine.task("one")(double)
    with pytest.raises(InvalidHandler, match="two functions"):
        mine.task("one")(whole)
    assert mine.names() == ["one"]


@pytest.mark.parametrize("name", ["", "a" * 201, "line\nend", double])
def test_a_task_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidHandler, match="needs a name"):
        Handlers().task(name)


def test_an_object_with_an_async_call_is_async() -> None:
    class Model:
        async def __call__(self, value: Any) -> Any:
            return value

    mine = Handlers()
    mine.task("model")(Model())
    handler = mine.find("model")
    assert handler is not None
    assert handler.is_async


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_an_app_is_found_in_the_current_directory(app: Path) -> None:
    (app / "app_plain.py").write_text(
        'from conveyor.handlers import task\n\n@task("app-plain")\ndef run(value):\n    return value\n'
    )
    assert load_app("app_plain") is default_handlers
    assert default_handlers.find("app-plain") is not None


def test_an_app_may_have_its_own_handlers(app: Path) -> None:
    (app / "app_own.py").write_text("from conveyor.handlers import Handlers\n\nmine = Handlers()\nother = 1\n")
    assert load_app("app_own:mine").names() == []
    for name in ("other", "missing"):
        with pytest.raises(AppUnloadable, match=name):
            load_app(f"app_own:{name}")


def test_an_app_that_can_not_be_loaded_is_explained(app: Path) -> None:
    (app / "app_broken.py").write_text("1 / 0\n")
    (app / "app_needs.py").write_text("import a_module_that_is_not_there\n")
    for spec, part in [
        ("app_missing", "there is no module 'app_missing'"),
        ("app_missing.inner", "there is no module 'app_missing.inner'"),
        ("app_broken", "ZeroDivisionError"),
        ("app_needs", "a_module_that_is_not_there"),
        ("", "importing"),
        ("..", "importing"),
    ]:
        with pytest.raises(AppUnloadable, match=part.replace(".", r"\.")):
            load_app(spec)

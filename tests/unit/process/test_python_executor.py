"""Handlers: how they are registered and found, and what comes of calling them, in processes of their own and inside the
worker."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.handlers import AppUnloadable, Context, Handlers, InvalidHandler, load_app
from conveyor.handlers import default as default_handlers
from conveyor.model import PROGRESS, InputJson, Job, Outcome, TaskProgress, TaskRef, progress_id
from conveyor.process.executors.python import python_executor
from conveyor.process.executors.python.handler_calls import BatchDone, PageCall, SentPage, outcome_of, raised
from conveyor.process.executors.python.in_process import InProcessHandlers
from conveyor.process.executors.python.python_executor import MAX_FIRST_GRAIN, MAX_GRAIN, PythonExecutor
from conveyor.process.outcomes import detail_json
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System
from tests.support.handlers_app import Exiting, Unspeakable, double, handlers, whole
from tests.support.make_jobs import make_job
from tests.support.parsers_app import parsers
from tests.support.places import quick_place

APP = "tests.support.handlers_app:handlers"


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load({}, data=place, handler_processes=1, handler_threads=4)


@pytest.fixture(autouse=True)
def _long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a batch runs to its end."""
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", 60.0)


@pytest.fixture(params=["children", "inside"])
async def executor(request: pytest.FixtureRequest, system: System) -> AsyncIterator[PythonExecutor]:
    made = executor_on(system, handler_processes=1 if request.param == "children" else 0)
    yield made
    await made.close()


def executor_on(system: System, app: str | None = APP, found: Handlers = handlers, **changed: Any) -> PythonExecutor:
    settings = Settings.load({}, data=system.settings.data, handler_threads=4, **changed)
    return PythonExecutor(found, settings, system.clock, system.records, sys.path, app)


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


async def test_any_json_value_is_an_input(executor: PythonExecutor) -> None:
    for text in ["null", '"a"', "[1,2.5]", '{"a":{"b":[]}}', "true", '"\u00e9"']:
        assert (await one(executor, "whole", text)).body == b'{"got":%s,"none":null}' % text.encode()


@pytest.mark.parametrize("handler", ["raises", "raises-async"])
async def test_an_exception_is_an_outcome_without_its_traceback(executor: PythonExecutor, handler: str) -> None:
    error = (await one(executor, handler, f'"{"x" * 1000}"')).error
    assert error is not None
    assert error.code == "handler_raised"
    assert error.message.startswith("LookupError: xxx")
    assert len(error.message) <= 500
    assert "Traceback" not in error.message


async def test_whatever_a_handler_does_is_its_outcome(executor: PythonExecutor) -> None:
    for handler, code, part in [
        ("exits", "handler_raised", "SystemExit"),
        ("exits-async", "handler_raised", "SystemExit"),
        ("cancels-itself", "handler_raised", "CancelledError"),
        ("unspeakable", "handler_raised", "Unspeakable"),
        ("not-json", "result_not_json", "object"),
        ("times-out-by-itself", "handler_raised", "TimeoutError: mine"),
    ]:
        outcome = await one(executor, handler)
        assert outcome.status is TaskStatus.FAILED
        assert outcome.error is not None
        assert outcome.error.code == code
        assert part in outcome.error.message
        assert (await one(executor, "double", "4")).body == b"8"


@pytest.mark.parametrize("handler", ["misbehaves", "misbehaves-async"])
async def test_any_text_of_a_handler_passes(executor: PythonExecutor, handler: str) -> None:
    """All in one batch, between two calls that are as they should be."""
    ways = {
        "raises a surrogate": ("handler_raised", "LookupError: before \\ud800 behind"),
        "raises much": ("handler_raised", "LookupError: \\udc80\\udc80"),
        "raises what can not be shown": ("handler_raised", "KeyError: (no readable text"),
        "exits in its text": ("handler_raised", "Exiting: "),
        "raises what is no Exception": ("handler_raised", "Apart: apart"),
        "returns a surrogate": ("result_not_json", "ud800"),
        "returns what can not be shown": ("result_not_json", "Hidden"),
    }
    texts = [f'"{text}"' for text in ("first", *ways, "last")]
    async with asyncio.timeout(20):
        first, *odd, last = await executor.attempt(job_for(handler, timeout=10), refs(*texts))
    assert (first.body, last.body) == (b'"first"', b'"last"')
    for outcome, (code, part) in zip(odd, ways.values(), strict=True):
        assert outcome.error is not None
        assert (outcome.error.code, part in outcome.error.message) == (code, True), outcome.error
        assert len(outcome.error.message) <= 500
        # As it is written: see Recorder.
        assert detail_json(outcome).encode()


async def test_odd_things_that_a_call_says_of_its_progress_are_kept(executor: PythonExecutor, system: System) -> None:
    job = job_for("says-odd-things")
    async with asyncio.timeout(20):
        (outcome,) = await executor.attempt(job, refs("1"))
    assert outcome.body == b'"done"'
    row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
    assert row is not None
    progress = msgspec.json.decode(row.body, type=TaskProgress)
    assert (progress.done, progress.total) == (2**63 - 1, 2**63 - 1)
    assert progress.note is not None
    assert progress.note.startswith("note \\ud800x")
    assert len(progress.note) == 200


def test_a_result_that_says_anything_can_be_sent_and_written() -> None:
    for error in (LookupError("\ud800"), Exiting(), Unspeakable(), KeyError("\udfff" * 1000)):
        result = raised(error)
        assert len(result.message) <= 500
        try:
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(BatchDone(1, [result])), type=BatchDone)
            written = detail_json(outcome_of(result))
        except UnicodeError as problem:
            raise AssertionError(f"{result.message!a} can not be passed on") from problem
        assert sent.results == [result]
        assert written


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


async def test_a_call_that_is_stuck_costs_its_own_task_only(executor: PythonExecutor, tmp_path: Path) -> None:
    inputs = [f'{{"number":{n},"seconds":{2 if n == 2 else 0},"place":"{tmp_path}"}}' for n in (1, 2, 3, 4)]
    outcomes = await executor.attempt(job_for("naps", timeout=0.3), refs(*inputs))
    assert [outcome.body or (outcome.error and outcome.error.code) for outcome in outcomes] == [
        b"1",
        "timeout",
        b"3",
        b"4",
    ]
    began = sorted(path.name.split("-")[1] for path in tmp_path.glob("began-*"))
    assert began == ["1", "2", "3", "4"]


async def test_stuck_threads_do_not_use_up_the_slots(executor: PythonExecutor) -> None:
    job = job_for("naps", timeout=0.2)
    text = '{"number":1,"seconds":1.5}'
    stuck = await asyncio.gather(*(executor.attempt(job, refs(text)) for _ in range(10)))
    assert {outcome.error.code for (outcome,) in stuck if outcome.error} == {"timeout"}
    assert len(stuck) == 10
    assert (await one(executor, "double", "4")).body == b"8"


async def test_an_async_handler_has_the_timeout_of_the_job(executor: PythonExecutor) -> None:
    error = (await one(executor, "naps-async", '{"number":1,"seconds":60}', timeout=0.1)).error
    assert error is not None
    assert error.code == "timeout"


@pytest.mark.parametrize("handler", ["double", "double-async"])
async def test_quick_handlers_are_given_more_at_once(executor: PythonExecutor, handler: str) -> None:
    job = job_for(handler)
    assert executor.grain(job) == 1
    for _ in range(40):
        await executor.attempt(job, refs(*["1"] * executor.grain(job)))
    assert 1 < executor.grain(job) <= MAX_GRAIN
    assert executor.target(refs("1")[0]) is None


@pytest.mark.parametrize("handler", ["naps", "naps-async"])
async def test_a_batch_of_slow_calls_leaves_the_others_to_the_lane(
    executor: PythonExecutor, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", 0.005)
    inputs = refs(*(f'{{"number":{n},"seconds":0.02}}' for n in range(4)))
    (outcome,) = await executor.attempt(job_for(handler), inputs)
    assert outcome.body == b"0"


@pytest.mark.parametrize("handler", ["double", "double-async"])
async def test_a_batch_of_slow_pages_is_continued_to_its_end(
    executor: PythonExecutor, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    # However quick it is, each batch is cut after its first call.
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", -1.0)
    monkeypatch.setattr(executor, "grain", lambda job: 3)
    calls = [PageCall(index, InputJson(str(index))) for index in range(5)]
    results = await executor.extract(job_for(None, extract=handler), calls)
    assert [result.body for result in results] == [b"0", b"2", b"4", b"6", b"8"]


async def test_an_empty_page_may_be_the_first(system: System) -> None:
    made = executor_on(system, found=parsers, handler_processes=0)
    pages = [SentPage(memoryview(body), len(body), None, 200, "{}") for body in (b"", b"<h1>a</h1>", b"")]
    calls = [PageCall(index, InputJson('"http://site.test/"'), page=page) for index, page in enumerate(pages)]
    assert [result.code for result in await made.extract(job_for(None, extract="nothing"), calls)] == [None] * 3
    await made.close()


async def test_after_a_death_a_batch_runs_to_its_end(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", 0.0)
    made = executor_on(system, handler_processes=1)
    inputs = [f'{{"number":{n},"place":"{tmp_path}","times":{int(n == 0)}}}' for n in range(3)]
    assert [outcome.body for outcome in await made.attempt(job_for("kills"), refs(*inputs))] == [b"0", b"1", b"2"]
    await made.close()


async def test_a_job_begins_with_what_was_right_for_other_jobs_of_the_handler(executor: PythonExecutor) -> None:
    before = job_for("double")
    for _ in range(10):
        executor._adapt(before, executor.grain(before), 0.001)
    assert executor.grain(before) == MAX_GRAIN
    assert executor.grain(job_for("double")) == MAX_FIRST_GRAIN
    assert executor.grain(job_for("double-async")) == 1
    slow = job_for("double")
    executor._adapt(slow, 1, 100.0)
    assert (executor.grain(slow), executor.grain(job_for("double")), executor.grain(before)) == (1, 1, MAX_GRAIN)


async def test_slow_handlers_are_given_less(executor: PythonExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", 0.05)
    job = job_for("double")
    for seconds, grain in [(0.004, 2), (0.0045, 4), (0.006, 4), (0.06, 2), (0.06, 1), (0.06, 1)]:
        executor._adapt(job, executor.grain(job), seconds)
        assert executor.grain(job) == grain


async def test_one_quick_task_of_a_larger_grain_says_nothing(executor: PythonExecutor) -> None:
    job = job_for("double")
    for _ in range(6):
        executor._adapt(job, 1, 0.004)
    assert executor.grain(job) == 2


async def test_a_batch_grows_to_what_its_calls_have_time_for(executor: PythonExecutor) -> None:
    job = job_for("double")
    for seconds, grain in [(0.0, 16), (0.004, 40), (0.001, MAX_GRAIN)]:
        executor._adapt(job, executor.grain(job), seconds)
        assert executor.grain(job) == grain


@pytest.mark.parametrize("handler", ["tells", "tells-async"])
async def test_a_context_is_given_to_those_that_ask(executor: PythonExecutor, handler: str) -> None:
    job = job_for(handler)
    (outcome,) = await executor.attempt(job, [TaskRef(7, InputJson('{"steps":2}'), 3)])
    assert outcome.body is not None, outcome.error
    assert outcome.body.decode() == (f'{{"job":"{job.job_id}","run":"{job.run.run_id}","index":7,"attempt":3}}')
    assert executor.grain(job) == 1


async def test_functions_of_the_main_script_run_inside(system: System) -> None:
    mine = Handlers()

    def shout(value: str) -> str:
        return value.upper()

    shout.__module__ = "__main__"
    mine.task("shout")(shout)
    made = executor_on(system, app=None, found=mine)
    assert isinstance(made._inside, InProcessHandlers)
    assert (await one(made, "shout", '"a"')).body == b'"A"'
    await made.close()


def test_a_name_belongs_to_one_function() -> None:
    mine = Handlers()
    mine.task("one")(double)
    mine.task("one")(double)
    with pytest.raises(InvalidHandler, match="two functions"):
        mine.task("one")(whole)
    assert mine.names() == ["one"]
    assert mine.modules() == ["tests.support.handlers_app"]


@pytest.mark.parametrize("name", ["", "a" * 201, "line\nend", double])
def test_a_task_needs_a_name(name: Any) -> None:
    with pytest.raises(InvalidHandler, match="invalid handler name"):
        Handlers().task(name)


def test_an_object_with_an_async_call_is_async() -> None:
    class Model:
        async def __call__(self, value: Any, context: Context) -> Any:
            return value

    mine = Handlers()
    mine.task("model")(Model())
    mine.task("builtin")(len)
    handler = mine.find("model")
    assert handler is not None
    assert (handler.is_async, handler.wants_context) == (True, True)
    builtin = mine.find("builtin")
    assert builtin is not None
    assert (builtin.is_async, builtin.wants_context) == (False, False)


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
        ("app_missing", "module 'app_missing' not found"),
        ("app_missing.inner", "module 'app_missing.inner' not found"),
        ("app_broken", "ZeroDivisionError"),
        ("app_needs", "a_module_that_is_not_there"),
        ("", "importing"),
        ("..", "importing"),
    ]:
        with pytest.raises(AppUnloadable, match=part.replace(".", r"\.")):
            load_app(spec)

"""Handlers that crash, hang, leak and block, in processes of their own: each costs its own task; the worker lives."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.accept.spec import decode_spec
from conveyor.clock import SystemClock
from conveyor.embedded import Embedded
from conveyor.engines.records import Document
from conveyor.model import PROGRESS, InputJson, Job, JobId, Outcome, Task, TaskProgress, TaskRef, progress_id
from conveyor.process.executors.python import python_executor
from conveyor.process.executors.python.python_executor import PythonExecutor
from conveyor.process.task_progress import Superseded
from conveyor.read.results import read_body
from conveyor.settings import Settings
from conveyor.states import ENDED, RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.dead_letters import dead_letters
from tests.support.handlers_app import handlers
from tests.support.make_jobs import ACME, make_job
from tests.support.places import quick_place
from tests.support.working import until

APP = "tests.support.handlers_app:handlers"


@pytest.fixture
def settings() -> Any:
    with quick_place() as place:
        yield Settings.load(
            {}, data=place / "data", app=APP, fetchers=0, handler_threads=4, lease_seconds=0.6, flush_seconds=0.01
        )


@pytest.fixture
async def executor(system: System) -> AsyncIterator[PythonExecutor]:
    made = executor_on(system)
    yield made
    await made.close()


def executor_on(system: System, app: str = APP, **changed: Any) -> PythonExecutor:
    settings = msgspec.structs.replace(system.settings, **changed)
    return PythonExecutor(handlers, settings, system.clock, system.records, sys.path, app)


def job_for(handler: str, **options: Any) -> Job:
    return make_job(SystemClock(), handler=handler, **options)


@pytest.fixture(autouse=True)
def _long_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, a batch runs to its end."""
    monkeypatch.setattr(python_executor, "BATCH_SECONDS", 60.0)


def refs(*inputs: Any) -> list[TaskRef]:
    return [TaskRef(index, InputJson(msgspec.json.encode(value).decode())) for index, value in enumerate(inputs)]


def told(outcomes: list[Outcome]) -> list[Any]:
    return [outcome.error.code if outcome.error else msgspec.json.decode(outcome.body or b"") for outcome in outcomes]


def noted(place: Path, what: str) -> Counter[int]:
    return Counter(int(path.name.split("-")[1]) for path in place.glob(f"{what}-*"))


async def seen(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  (seen from outside)
            await asyncio.sleep(0.01)


async def ran(system: System, handler: str, inputs: list[Any], **options: Any) -> tuple[Job, list[Task]]:
    """Run a job of these inputs to its end."""
    embedded = Embedded(system)
    spec = {"kind": "python", "handler": handler, "tasks": inputs, **options}
    accepted = await embedded.submit.submit(ACME, decode_spec(msgspec.json.encode(spec)))
    async with embedded.running():
        job = await until(lambda: embedded.job(ACME, JobId(accepted.subject)), lambda found: found.state in ENDED)
    return job, await system.tasks.at(job.key, range(len(inputs)))


class TestProcesses:
    async def test_handlers_run_elsewhere_and_see_no_settings(
        self, executor: PythonExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CONVEYOR_SIGNING_KEY", "x" * 40)
        (who,) = told(await executor.attempt(job_for("who"), refs(None)))
        assert who["pid"] != os.getpid()
        assert who["parent"] == os.getpid()
        assert who["settings"] == []
        assert who["main"].endswith("handler_process.py")

    async def test_what_they_print_is_not_data(
        self, executor: PythonExecutor, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert told(await executor.attempt(job_for("prints"), refs("hello there"))) == ["hello there"]
        await executor.close()
        out, err = capfd.readouterr()
        assert "hello there" not in out
        assert "hello there" in err

    async def test_none_is_started_before_there_is_something_to_call(self, executor: PythonExecutor) -> None:
        assert executor._children is not None
        assert not executor._children._all

    async def test_many_at_once_share_the_processes(self, executor: PythonExecutor) -> None:
        job = job_for("who")
        found = await asyncio.gather(*(executor.attempt(job, refs(*[None] * 5)) for _ in range(50)))
        pids = {who["pid"] for outcomes in found for who in told(outcomes)}
        assert 1 <= len(pids) <= executor._settings.handler_processes

    async def test_they_end_with_the_executor(self, executor: PythonExecutor) -> None:
        (who,) = told(await executor.attempt(job_for("who"), refs(None)))
        await executor.close()
        with pytest.raises(ProcessLookupError):
            os.kill(who["pid"], 0)

    @pytest.mark.parametrize("handler", ["who", "holds-the-interpreter"])
    async def test_they_end_with_the_worker_however_it_ends(self, handler: str, tmp_path: Path) -> None:
        code = (
            "import asyncio, sys, os\n"
            "from tests.flow.test_python_isolation import *\n"
            "async def main(place):\n"
            "    async with open_system(Settings.load({}, data=Path(place) / 'data')) as system:\n"
            "        made = executor_on(system)\n"
            "        (who,) = told(await made.attempt(job_for('who'), refs(None)))\n"
            "        print(who['pid'], flush=True)\n"
            f"        await made.attempt(job_for({handler!r}, timeout=60), refs(dict(number=1, seconds=60)))\n"
            "        await asyncio.sleep(60)\n"
            "asyncio.run(main(sys.argv[1]))\n"
        )
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        child = int(await asyncio.to_thread(process.stdout.readline))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        await seen(lambda: not Path(f"/proc/{child}/stat").exists() or _is_zombie(child))

    async def test_an_app_that_kills_its_process_is_a_failure_that_may_pass(
        self, system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "deadly_app.py").write_text("import os, sys\nif 'pytest' not in sys.modules: os._exit(9)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        made = executor_on(system, app="deadly_app")
        (outcome,) = await made.attempt(job_for("double"), refs(1))
        assert outcome.error is not None
        assert outcome.error.code == "process_failed"
        assert "exit code 9" in outcome.error.message
        await made.close()

    async def test_an_app_that_can_not_be_loaded_there_is_explained(self, system: System) -> None:
        made = executor_on(system, app="tests.no_such_app")
        (outcome,) = await made.attempt(job_for("double"), refs(1))
        assert outcome.error is not None
        assert (outcome.error.code, "tests.no_such_app" in outcome.error.message) == ("process_failed", True)
        await made.close()


class TestDeath:
    async def test_a_call_that_kills_is_made_alone_and_the_others_as_if_nothing_was(
        self, executor: PythonExecutor, tmp_path: Path
    ) -> None:
        inputs = [{"number": n, "place": str(tmp_path), "times": 99 if n == 3 else 0} for n in range(6)]
        outcomes = await executor.attempt(job_for("kills"), refs(*inputs))
        assert told(outcomes) == [0, 1, 2, "worker_lost", 4, 5]
        assert outcomes[3].error is not None
        assert outcomes[3].error.message == ("The process was lost 3 times while it ran this task, at last by SIGKILL.")
        began = noted(tmp_path, "began")
        assert began[3] == 3
        assert began[4] == began[5] == 1, "what had not begun is begun once"
        assert max(began[n] for n in (0, 1, 2)) == 2, "what had ended unheard is made again"

    @pytest.mark.parametrize("times", [1, 2])
    async def test_one_that_kills_less_often_comes_to_its_end(
        self, executor: PythonExecutor, tmp_path: Path, times: int
    ) -> None:
        value = {"number": 1, "place": str(tmp_path), "times": times, "signal": "SIGSEGV"}
        assert told(await executor.attempt(job_for("kills"), refs(value))) == [1]
        assert noted(tmp_path, "began")[1] == times + 1

    async def test_those_beside_it_lose_one_start_and_no_more(self, system: System, tmp_path: Path) -> None:
        made = executor_on(system, handler_processes=1)
        beside = [
            made.attempt(job_for("kills"), refs({"number": n, "place": str(tmp_path), "seconds": 0.4}))
            for n in range(1, 4)
        ]
        killer = made.attempt(job_for("kills"), refs({"number": 0, "place": str(tmp_path), "times": 99}))
        innocent = [asyncio.create_task(each) for each in beside]
        await seen(lambda: len(noted(tmp_path, "began")) == 3)
        assert told(await killer) == ["worker_lost"]
        assert [told(await each) for each in innocent] == [[1], [2], [3]]
        began = noted(tmp_path, "began")
        assert began == {0: 3, 1: 2, 2: 2, 3: 2}
        await made.close()

    async def test_a_process_that_leaves_another_behind_is_dead_all_the_same(
        self, executor: PythonExecutor, tmp_path: Path
    ) -> None:
        value = {"number": 1, "place": str(tmp_path)}
        assert told(await executor.attempt(job_for("forks-and-dies"), refs(value))) == [1]
        assert noted(tmp_path, "began")[1] == 2

    async def test_leaving_is_dying(self, executor: PythonExecutor) -> None:
        (outcome,) = await executor.attempt(job_for("quits"), refs(1))
        assert outcome.error is not None
        assert outcome.error.message.endswith("with exit code 3.")

    async def test_it_is_dead_lettered_with_the_reason_and_the_rest_of_its_chunk_succeeds(
        self, system: System, tmp_path: Path
    ) -> None:
        inputs = [{"number": n, "place": str(tmp_path), "times": 99 if n == 7 else 0} for n in range(40)]
        job, tasks = await ran(system, "kills", inputs, attempts=3)
        assert job.state is RunState.COMPLETED
        assert [task.index for task in tasks if task.status is not TaskStatus.SUCCEEDED] == [7]
        reason = "The process was lost 3 times while it ran this task, at last by SIGKILL."
        assert tasks[7].error_code == "worker_lost"
        assert tasks[7].detail.error is not None
        assert tasks[7].detail.error.message == reason
        assert [letter["reason"] for letter in await dead_letters(system, job.tenant)] == [reason]
        assert noted(tmp_path, "began")[7] == 3
        events = (await system.tasks.events(job.key, tasks[7].task_id, None, 10)).items
        assert [event.event for event in events] == ["task.dead_lettered"]


class TestTime:
    @pytest.mark.parametrize("handler", ["naps", "blocks-the-loop", "holds-the-interpreter"])
    async def test_whatever_is_stuck_is_replaced(self, system: System, handler: str) -> None:
        made = executor_on(system, handler_processes=1)
        (before,) = told(await made.attempt(job_for("who"), refs(None)))
        stuck = await made.attempt(job_for(handler, timeout=0.3), refs(*({"number": n, "seconds": 60} for n in (1,))))
        assert told(stuck) == ["timeout"]
        (after,) = told(await made.attempt(job_for("who"), refs(None)))
        assert after["pid"] != before["pid"]
        await seen(lambda: not Path(f"/proc/{before['pid']}").exists())
        await made.close()

    async def test_those_beside_it_go_on(self, system: System) -> None:
        """A process with a call that is stuck has its other calls end before it is killed."""
        made = executor_on(system, handler_processes=1)
        beside = asyncio.create_task(made.attempt(job_for("naps"), refs({"number": 7, "seconds": 1.5})))
        stuck = asyncio.create_task(made.attempt(job_for("naps", timeout=0.3), refs({"number": 1, "seconds": 60})))
        assert told(await stuck) == ["timeout"]
        assert not beside.done()
        assert told(await beside) == [7]
        await made.close()

    @pytest.mark.parametrize("handler", ["naps", "blocks-the-loop", "holds-the-interpreter"])
    async def test_leases_are_renewed_whatever_handlers_do(self, system: System, handler: str, tmp_path: Path) -> None:
        """Several times the lease, in a handler that lets nothing else run where it is."""
        inputs = [{"number": n, "place": str(tmp_path), "seconds": 2.0} for n in range(2)]
        _, tasks = await ran(system, handler, inputs, chunk_size=1, timeout=30)
        assert [task.status for task in tasks] == [TaskStatus.SUCCEEDED] * 2
        assert noted(tmp_path, "began") == {0: 1, 1: 1}


class TestWear:
    async def test_a_process_is_replaced_after_so_many_calls(self, system: System) -> None:
        made = executor_on(system, handler_processes=1, handler_calls=10)
        job = job_for("who")
        pids = [told(await made.attempt(job, refs(None)))[0]["pid"] for _ in range(35)]
        assert [len(list(group)) for group in _runs(pids)] == [10, 10, 10, 5]
        await made.close()

    async def test_a_process_is_replaced_when_it_has_too_much(self, system: System) -> None:
        made = executor_on(system, handler_processes=1, handler_mib=150)
        job = job_for("leaks")
        pids = []
        for _ in range(6):
            pids += told(await made.attempt(job, refs(40)))
            # Its memory is looked at now and then, not after every call.
            await asyncio.sleep(0.15)
        assert len(set(pids)) > 1
        await made.close()


class TestContext:
    async def test_progress_is_kept_in_a_row(self, system: System) -> None:
        made = executor_on(system, progress_seconds=0.01)
        job = job_for("tells")
        (outcome,) = await made.attempt(job, refs({"steps": 3, "seconds": 0.6}))
        assert outcome.status is TaskStatus.SUCCEEDED
        row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
        assert row is not None
        progress = msgspec.json.decode(row.body, type=TaskProgress)
        assert (progress.done, progress.total, progress.note) == (3, 3, "step 3")
        assert row.due_at is not None
        await made.close()

    async def test_a_call_that_says_nothing_has_no_row(self, executor: PythonExecutor, system: System) -> None:
        job = job_for("tells")
        await executor.attempt(job, refs({"steps": 0}))
        row = await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0))
        assert row is not None, "a heartbeat is a word too"
        job = job_for("double")
        await executor.attempt(job, refs(1))
        assert await system.records.documents.document(PROGRESS, job.tenant, progress_id(job.run.run_id, 0)) is None

    @pytest.mark.parametrize("handler", ["until-cancelled", "until-cancelled-async"])
    async def test_a_call_hears_that_it_is_not_wanted(
        self, executor: PythonExecutor, handler: str, tmp_path: Path
    ) -> None:
        value = {"number": 1, "place": str(tmp_path)}
        attempt = asyncio.create_task(executor.attempt(job_for(handler), refs(value)))
        await seen(lambda: noted(tmp_path, "began"))
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        await seen(lambda: noted(tmp_path, "cancelled"))
        assert told(await executor.attempt(job_for("double"), refs(4))) == [8]

    async def test_who_begins_later_has_it(self, system: System, tmp_path: Path) -> None:
        made = executor_on(system, progress_seconds=0.01)
        job = job_for("until-cancelled")
        value = {"number": 1, "place": str(tmp_path)}
        first = asyncio.create_task(made.attempt(job, refs(value)))
        name = progress_id(job.run.run_id, 0)

        async def take_over() -> Document | None:
            """As the attempt does that the monitor starts when this one seems stuck. This one may write in between."""
            row = await system.records.documents.document(PROGRESS, job.tenant, name)
            return None if row is None else await system.records.documents.replace_document(row)

        assert await until(take_over, lambda taken: taken is not None)
        with pytest.raises(Superseded):
            await first
        await seen(lambda: noted(tmp_path, "cancelled"))
        await made.close()

    async def test_cancelling_a_job_reaches_its_calls(self, system: System, tmp_path: Path) -> None:
        embedded = Embedded(system)
        spec = {"kind": "python", "handler": "until-cancelled", "tasks": [{"number": 1, "place": str(tmp_path)}]}
        accepted = await embedded.submit.submit(ACME, decode_spec(msgspec.json.encode({**spec, "timeout": 60})))
        async with embedded.running():
            await seen(lambda: noted(tmp_path, "began"))
            job = await embedded.job(ACME, JobId(accepted.subject))
            assert await system.records.jobs.move_run(
                job.job_id, job.run.run_id, {RunState.RUNNING}, RunState.CANCELLED, None, None
            )
            await seen(lambda: noted(tmp_path, "cancelled"))


async def test_a_job_from_submit_to_results(system: System) -> None:
    job, tasks = await ran(system, "double-async", list(range(1000)), chunk_size=50)
    assert job.state is RunState.COMPLETED
    bodies = [msgspec.json.decode(await read_body(system.blobs, task)) for task in tasks]
    assert bodies == [2 * number for number in range(1000)]


def _runs(values: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    for value in values:
        if groups and groups[-1][-1] == value:
            groups[-1].append(value)
        else:
            groups.append([value])
    return groups


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


assert open_system  # for the code that a test runs in another process

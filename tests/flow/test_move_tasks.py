"""Several task engines: a job is read where its tasks are, or the answer says that they are elsewhere; and jobs move
from SQLite, DynamoDB and another Postgres to Postgres, whatever dies on the way."""

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.rerun import Rerun, RerunSpec
from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.api.server import serve
from conveyor.engines.queue import CONTROL, Depth, run_queue
from conveyor.engines.tasks import TaskEvent, TaskFilter
from conveyor.errors import RunNotEnded, TasksElsewhere
from conveyor.ingest.ingester import Ingester
from conveyor.ingest.pipeline import IngestPipeline
from conveyor.jobs.chunks import encode
from conveyor.jobs.dead_lettered_tasks import write_run_document
from conveyor.lifecycle import Lifecycle
from conveyor.model import Chunk, Counts, InputJson, Job, JobId, JobKind, RunKey, Task, TaskEnd, TaskRef, TaskSeed
from conveyor.recover.retention import Retention
from conveyor.recover.sampler import Sampler
from conveyor.recover.sweeper import Sweeper
from conveyor.recover.task_mover import MoveTotals, TaskMover
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, migrate, open_system
from conveyor.telemetry import metrics
from tests.servers import dynamodb, postgres
from tests.support.api import Api, client, new_key
from tests.support.clocks import JumpingClock
from tests.support.export_jobs import asked, exporter, parts_of
from tests.support.make_jobs import ACME
from tests.support.working import all_items, until, working

pytestmark = [pytest.mark.server, pytest.mark.timeout(240)]

POINTS = (
    "move.record.before",
    "move.record.after",
    "move.rows.before",
    "move.rows.between",
    "move.rows.after",
    "move.events.before",
    "move.events.after",
    "move.switch.before",
    "move.switch.after",
)


class Crashed(BaseException):
    """The process died here."""


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.arm(None)


@pytest.fixture(params=["sqlite", "dynamodb", "postgres"])
async def old(request: pytest.FixtureRequest, tmp_path: Path, clock: JumpingClock) -> Settings:
    """A system whose records and tasks are on one engine."""
    urls: dict[str, Any] = {}
    if request.param == "dynamodb":
        urls = {name: dynamodb.url_for(tmp_path / "old") for name in ("records", "tasks")}
    elif request.param == "postgres":
        urls = {name: postgres.url_of(tmp_path / "old") for name in ("records", "tasks", "queue")}
    made = Settings.load({}, data=tmp_path / "data", sync_task_limit=30, task_shard_count=4, **urls)
    await migrate(made, clock)
    return made


@pytest.fixture
def to(tmp_path: Path) -> str:
    return postgres.url_of(tmp_path / "new")


@pytest.fixture
async def only_new(old: Settings, to: str, clock: JumpingClock) -> Settings:
    """The same system with the other task engine, and nothing said about the first."""
    made = msgspec.structs.replace(old, tasks=to)
    await migrate(made, clock)
    return made


@pytest.fixture
def both(only_new: Settings, old: Settings) -> Settings:
    return msgspec.structs.replace(only_new, other_tasks=old.tasks or "embedded")


async def submit(system: System, count: int, **spec: Any) -> Job:
    tasks = [msgspec.Raw(json.dumps(f"input {number}").encode()) for number in range(count)]
    asked = JobSpec(kind=JobKind.PYTHON, handler="anything", tasks=tasks, **spec)
    accepted = await Submit(system).submit(ACME, asked)
    await ingest(system)
    return await read(system, JobId(accepted.subject))


async def read(system: System, job_id: JobId) -> Job:
    found = await system.records.jobs.job(ACME, job_id)
    assert found is not None
    return found


def lifecycle_of(system: System) -> Lifecycle:
    return Lifecycle(system.records, system.tasks, system.clock)


async def ingest(system: System) -> None:
    pipeline = IngestPipeline(
        system.settings,
        system.clock,
        system.records,
        system.tasks,
        system.queue,
        system.blobs,
        lifecycle_of(system),
    )
    ingester = Ingester(pipeline, system.coordinator, "ingester")
    while await ingester.tick() == 0.0:
        pass


async def sweep(system: System) -> None:
    sweeper = Sweeper(system.records, system.tasks, system.queue, lifecycle_of(system), system.clock)
    for _ in range(3):
        await sweeper.run_once()


async def finish(system: System, job: Job) -> Job:
    """Finish the job's latest run: every fourth task fails, after two failed attempts."""
    pending = [task for task in await rows(system, job.key) if task.status is TaskStatus.PENDING]
    now = system.clock.now()
    ends = []
    for task in pending:
        failed = task.index % 4 == 0
        status = TaskStatus.FAILED if failed else TaskStatus.SUCCEEDED
        code = f"http_{500 + task.index % 3}" if failed else None
        detail = json.dumps({"content_type": "text/plain", "elapsed": 0.25})
        ends.append(TaskEnd(task.index, status, 2 if failed else 1, 500 if failed else 200, code, detail, now))
    events = [TaskEvent(end.index, now + n, "task.retried", f'{{"n":{n}}}') for end in ends[:9] for n in range(2)]
    await system.tasks.note(job.key, events)
    finished = await system.tasks.finish(job.key, ends)
    await lifecycle_of(system).settle(await read(system, job.job_id), finished.counts)
    await sweep(system)
    return await read(system, job.job_id)


async def rows(system: System, key: RunKey) -> list[Task]:
    found: list[Task] = []
    for shard in range(max(1, key.shard_count)):
        after = None
        while page := await system.tasks.page(key, shard, after, 1000, TaskFilter()):
            found += page
            after = page[-1].task_id
    return sorted(found, key=lambda task: task.index)


async def contents(system: System, job_id: JobId) -> Any:
    """All that a reader can see of a job's tasks, run by run."""
    job = await read(system, job_id)
    seen = []
    for run in await system.records.jobs.runs(job_id):
        key = job.key_of(run)
        events = (await system.tasks.events(key, None, None, 10_000)).items
        shown = sorted((event.index, event.at, event.event, str(event.data)) for event in events)
        counts = await system.tasks.counts(key)
        assert counts == await system.tasks.recount(key)
        replaced = await system.tasks.replaced(key)
        seen.append((await rows(system, key), counts, await system.tasks.error_codes(key, 10), replaced, shown))
    return seen


async def fill(system: System) -> dict[JobId, Any]:
    """Finished jobs of all forms: small, large, with a rerun, cancelled, without a record."""
    small = await finish(system, await submit(system, 10))
    large = await finish(system, await submit(system, 120))
    assert large.task_shard_count == (4 if system.sharded else 1)
    await Rerun(system).rerun(small, RerunSpec(select="failed"))
    await ingest(system)
    await finish(system, await read(system, small.job_id))
    cancelled = await submit(system, 5)
    await system.tasks.finish(cancelled.key, [TaskEnd(1, TaskStatus.SUCCEEDED, 1, 200, None, "{}", 1.5)])
    await lifecycle_of(system).move(cancelled, RunState.CANCELLED, None, await system.tasks.counts(cancelled.key))
    await sweep(system)
    unrecorded = await finish(system, await submit(dataclasses.replace(system, task_store=""), 3))
    assert (small.task_store, unrecorded.task_store) == (system.task_store, "")
    made = (small.job_id, large.job_id, cancelled.job_id, unrecorded.job_id)
    return {job_id: await contents(system, job_id) for job_id in made}


async def move(settings: Settings, to: str, clock: JumpingClock) -> MoveTotals:
    async with open_system(settings, clock) as system:
        return await TaskMover(system, system.task_stores[to]).move()


async def test_a_job_whose_tasks_are_elsewhere_is_an_error_that_says_so(
    old: Settings, only_new: Settings, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 50))
        unfinished = await submit(system, 4)
    async with open_system(only_new, clock) as system:
        assert await system.records.jobs.active_jobs() == []
        with pytest.raises(TasksElsewhere, match=f"{job.task_store}.*CONVEYOR_OTHER_TASKS"):
            await system.tasks.counts(job.key)
        async with serving(system) as api:
            for path in ("", "/results", "/statistics", "/events", "?verify=true"):
                answer = await api.get(f"/v1/jobs/{job.job_id}{path}")
                if path == "/events":
                    # The job's own events are records.
                    assert answer.status == 200
                    continue
                assert (answer.status, answer.json["code"]) == (409, "tasks_elsewhere"), path
                assert "CONVEYOR_OTHER_TASKS" in answer.json["detail"]
            made = await api.post(f"/v1/jobs/{job.job_id}/rerun", {"select": "failed"})
            assert (made.status, made.json["code"]) == (409, "tasks_elsewhere")
            here = await api.submit({"tasks": ["a"], "kind": "python", "handler": "anything"})
            listed = {each["id"]: each for each in (await api.get("/v1/jobs")).json["items"]}
        for job_id in (job.job_id, unfinished.job_id):
            assert listed[job_id]["reason_code"] == "tasks_elsewhere"
            assert set(listed[job_id]["run"]["counts"].values()) == {0}
        assert listed[here.json["id"]]["run"]["counts"]["pending"] == 1


async def test_dead_letters_of_a_job_elsewhere_do_not_hide_the_others(
    old: Settings, only_new: Settings, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        there = await with_dead_letter(system)
        queue = run_queue(there.run.run_id)
        await system.queue.send(queue, [encode(Chunk(there.key, [TaskRef(0, InputJson("1"))]))])
        [delivery] = await system.queue.receive(queue, 1, 60)
        await system.queue.dead_letter(queue, [delivery.receipt], "given up")
    async with open_system(only_new, clock) as system:
        here = await with_dead_letter(system)
        await Sampler(system).tick()
        assert metrics.DEAD_LETTERS.series[()] == 2, "the message, and the task that is here"
        async with serving(system) as api:
            message, task = await all_items(api, "/v1/dead-letters")
            assert (message["job_id"], message["redrive"]) == (there.job_id, "none")
            where = f"Nothing: the tasks of the job are in the task engine {there.task_store}, not open here."
            assert message["redrive_effect"] == where
            assert task["id"] == f"{here.job_id}:1:0"
            ids = [message["id"], f"{there.job_id}:1:0"]
            answer = await api.post("/v1/dead-letters/redrive", {"ids": ids})
            assert (answer.status, answer.json["redriven"], answer.json["skipped"]) == (200, 0, 2)
            answer = await api.post("/v1/dead-letters/redrive", {"all": True})
            assert (answer.status, answer.json["redriven"], answer.json["skipped"]) == (200, 1, 1)
            assert [run["job_id"] for run in answer.json["runs"]] == [here.job_id]
    async with open_system(old, clock) as system, serving(system) as api:
        assert f"{there.job_id}:1:0" in {letter["id"] for letter in await all_items(api, "/v1/dead-letters")}


async def with_dead_letter(system: System) -> Job:
    """A finished job of one task, which is dead-lettered."""
    job = await submit(system, 1)
    now = system.clock.now()
    await write_run_document(system.records.documents, job, now)
    end = TaskEnd(0, TaskStatus.FAILED, 3, None, "timeout", '{"dead_lettered":true}', now)
    finished = await system.tasks.finish(job.key, [end])
    await lifecycle_of(system).settle(job, finished.counts)
    await sweep(system)
    return await read(system, job.job_id)


async def test_a_message_of_a_finished_run_elsewhere_waits_for_its_engine(
    old: Settings, only_new: Settings, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 4))
        await Rerun(system).rerun(job, RerunSpec(select="all"))
        rerun = await read(system, job.job_id)
        await lifecycle_of(system).move(rerun, RunState.CANCELLED, None, Counts())
    async with open_system(only_new, clock) as system:
        await ingest(system)
        depth = await system.queue.depth(CONTROL)
        assert (depth.ready, depth.held, depth.delayed) == (0, 0, 1), "it was released, for later"
    clock.advance(10)
    async with open_system(old, clock) as system:
        await ingest(system)
        assert await system.queue.depth(CONTROL) == Depth(0, 0, 0)


@dataclasses.dataclass
class serving:
    """The API of a system."""

    system: System

    async def __aenter__(self) -> Api:
        self._stop = asyncio.Event()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self.system, "127.0.0.1", 0, self._stop, url.set_result))
        self._http = client()
        return Api(await url, self.system, await new_key(self.system, ACME), await self._http.__aenter__())

    async def __aexit__(self, *_: object) -> None:
        await self._http.__aexit__(None, None, None)
        self._stop.set()
        await self._task


async def test_with_both_open_old_jobs_go_on_where_they_are_and_new_ones_go_to_the_new(
    old: Settings, both: Settings, only_new: Settings, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        done = await finish(system, await submit(system, 6))
        going = await submit(system, 40)
        before = await contents(system, done.job_id)
        unrecorded = await submit(dataclasses.replace(system, task_store=""), 2)
    async with open_system(both, clock) as system:
        assert await contents(system, done.job_id) == before
        active = {job.job_id: job for job in await system.records.jobs.active_jobs()}
        assert active[unrecorded.job_id].task_store == active[going.job_id].task_store == done.task_store
        await finish(system, await read(system, going.job_id))
        await finish(system, await read(system, unrecorded.job_id))
        new = await finish(system, await submit(system, 3))
        assert new.task_store == system.task_store != done.task_store
    async with open_system(only_new, clock) as system:
        assert len(await rows(system, new.key)) == 3
    async with open_system(old, clock) as system:
        assert (await system.tasks.recount(going.key)).ended == 40
        assert (await system.tasks.recount(unrecorded.key)).ended == 2


async def test_finished_jobs_move_and_unfinished_ones_once_they_have_finished(
    old: Settings, both: Settings, only_new: Settings, to: str, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        expected = await fill(system)
        going = await submit(system, 40)
    totals = await move(both, to, clock)
    assert (totals.jobs, totals.blocked) == (4, {})
    assert totals.unfinished == {going.job_id: "running"}
    async with open_system(both, clock) as system:
        # A moved job is rerun where it is now.
        (first, *_) = expected
        await Rerun(system).rerun(await read(system, first), RerunSpec(select="all"))
        await ingest(system)
        await finish(system, await read(system, first))
        await finish(system, await read(system, going.job_id))
        expected[going.job_id] = await contents(system, going.job_id)
        expected[first] = await contents(system, first)
        assert len(expected[first]) == 3
    assert (await move(both, to, clock)).jobs == 1
    again = await move(both, to, clock)
    assert (again.jobs, again.unfinished, again.blocked) == (0, {}, {})
    async with open_system(only_new, clock) as system:
        for job_id, seen in expected.items():
            assert await contents(system, job_id) == seen


@pytest.mark.parametrize("point", POINTS)
async def test_a_move_that_dies_anywhere_resumes(
    old: Settings, both: Settings, only_new: Settings, to: str, clock: JumpingClock, point: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("conveyor.recover.task_mover._ROWS", 7)
    async with open_system(old, clock) as system:
        expected = await fill(system)
    for nth in (1, 3):
        passed = itertools.count(1)

        def die(name: str, passed: Iterator[int] = passed, nth: int = nth) -> None:
            if name == point and next(passed) == nth:
                raise Crashed

        faults.arm(die)
        try:
            await move(both, to, clock)
        except Crashed:
            pass
        else:
            assert nth > 1 and "record" in point, "the point was not passed"
        faults.arm(None)
        async with open_system(both, clock) as system:
            for job_id, seen in expected.items():
                assert await contents(system, job_id) == seen
    await move(both, to, clock)
    async with open_system(only_new, clock) as system:
        for job_id, seen in expected.items():
            assert await contents(system, job_id) == seen


async def test_a_rerun_during_the_copy_keeps_the_job_where_it_is(
    old: Settings, both: Settings, to: str, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 8))
    async with open_system(both, clock) as system:
        mover = TaskMover(system, system.task_stores[to])
        switch = system.records.jobs.switch_task_store

        async def rerun_first(*given: Any) -> bool:
            await Rerun(system).rerun(job, RerunSpec(select="failed"))
            return await switch(*given)

        mover._jobs = _With(system.records.jobs, switch_task_store=rerun_first)
        totals = await mover.move()
        assert totals.jobs == 0
        assert list(totals.unfinished) == [job.job_id]
        await ingest(system)
        rerun = await finish(system, await read(system, job.job_id))
        assert (rerun.task_store, rerun.run.total) == (job.task_store, 2)
        # And a rerun that read the job before it was moved is refused, instead of written to the old engine.
        assert (await TaskMover(system, system.task_stores[to]).move()).jobs == 1
        with pytest.raises(RunNotEnded):
            await Rerun(system).rerun(rerun, RerunSpec(select="all"))


class _With:
    """An object with some methods replaced."""

    def __init__(self, inner: Any, **replaced: Callable[..., Any]) -> None:
        self._inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def test_a_working_fleet_loses_and_repeats_nothing_during_a_move(
    old: Settings, both: Settings, only_new: Settings, to: str, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        before = [await submit(system, 20), await submit(system, 90)]
    async with open_system(both, clock) as system, working(system) as fleet:
        mover = TaskMover(system, system.task_stores[to])
        during: list[Job] = []

        async def moved() -> bool:
            if len(during) < 5:
                during.append(await submit(system, 10 + 15 * len(during)))
                if len(during) == 4:
                    # One of the first jobs, which may be on either engine by now, or on its way.
                    with suppress(RunNotEnded):
                        await Rerun(system).rerun(await read(system, before[0].job_id), RerunSpec(select="all"))
            totals = await mover.move()
            assert totals.blocked == {}
            active = await system.records.jobs.active_jobs()
            return len(during) == 5 and not totals.unfinished and not active

        await until(moved)
        assert set(fleet.ran.values()) == {1}
    async with open_system(only_new, clock) as system:
        runs = 0
        sizes = [20, 90, *(10 + 15 * number for number in range(5))]
        for job, size in zip((*before, *during), sizes, strict=True):
            found = await read(system, job.job_id)
            for run in await system.records.jobs.runs(job.job_id):
                runs += run.total
                assert await system.tasks.recount(found.key_of(run)) == Counts(succeeded=size)
                assert await system.tasks.counts(found.key_of(run)) == Counts(succeeded=size)
        assert runs == len(fleet.ran)


@pytest.mark.parametrize("slices", [1, 2, 4])
async def test_an_export_in_progress_goes_on_from_the_other_engine(
    old: Settings, both: Settings, to: str, clock: JumpingClock, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.export.exporter._SLICE_SECONDS", 0.0)
    monkeypatch.setattr("conveyor.read.walk.ROWS", 10)
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 60))
        export_id = await asked(system, job, format="jsonl")
        for _ in range(slices):
            await exporter(system).tick()
    assert (await move(both, to, clock)).jobs == 1
    async with open_system(both, clock) as system:
        await TaskMover(system, system.task_stores[to]).clean()
        for _ in range(100):
            clock.advance(1)
            if await exporter(system).tick() != 0.0:
                break
        [data] = await parts_of(system, export_id)
        assert [json.loads(line)["index"] for line in data.splitlines()] == list(range(60))


async def test_a_copy_that_differs_is_not_switched(old: Settings, both: Settings, to: str, clock: JumpingClock) -> None:
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 8))
        before = await contents(system, job.job_id)
    async with open_system(both, clock) as system:
        target: Any = system.tasks.engine(system.task_stores[to])  # type: ignore[attr-defined]
        mover = TaskMover(system, system.task_stores[to])
        await target.put(job.key, [TaskSeed(99, InputJson('"extra"'))])
        totals = await mover.move()
        assert totals.jobs == 0
        assert "9 tasks (6 succeeded" in totals.blocked[job.job_id]
        assert (await read(system, job.job_id)).task_store == job.task_store
        assert await contents(system, job.job_id) == before


@pytest.mark.parametrize("point", ["move.clean.before", "move.clean.between", "move.clean.after"])
async def test_clean_deletes_what_moved_jobs_left_and_nothing_else(
    old: Settings, both: Settings, only_new: Settings, to: str, clock: JumpingClock, point: str
) -> None:
    async with open_system(old, clock) as system:
        expected = await fill(system)
        going = await submit(system, 5)
        old_store = system.task_store
    await move(both, to, clock)
    async with open_system(both, clock) as system:
        source: Any = system.tasks.engine(old_store)  # type: ignore[attr-defined]

        def die(name: str) -> None:
            if name == point:
                raise Crashed

        faults.arm(die)
        with pytest.raises(Crashed):
            await TaskMover(system, system.task_stores[to]).clean()
        faults.arm(None)
        totals = await TaskMover(system, system.task_stores[to]).clean()
        assert totals.blocked == {}
        for job_id in expected:
            job = await read(system, job_id)
            for run in await system.records.jobs.runs(job_id):
                assert await source.counts(job.key_of(run)) == Counts()
                assert await source.delete(job.key_of(run), 10) == 0
        assert len(await rows(system, going.key)) == 5
    async with open_system(only_new, clock) as system:
        for job_id, seen in expected.items():
            assert await contents(system, job_id) == seen


async def test_retention_deletes_a_moved_job_on_both_engines(
    old: Settings, both: Settings, to: str, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        job = await finish(system, await submit(system, 8))
    await move(both, to, clock)
    async with open_system(both, clock) as system:
        await system.records.jobs.mark_deleted(ACME, job.job_id)
        clock.advance(3600)
        retention = Retention(
            system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock
        )
        for _ in range(5):
            await retention.run_once()
        for store in (job.task_store, system.task_store):
            engine: Any = system.tasks.engine(store)  # type: ignore[attr-defined]
            assert await engine.page(job.key, 0, None, 10, TaskFilter()) == []


async def command(settings: Settings, *arguments: str, crash_at: str = "") -> tuple[int, str]:
    environ = {f"CONVEYOR_{name.upper()}": getattr(settings, name) or "" for name in ("records", "tasks", "queue")}
    environ |= {"CONVEYOR_DATA": str(settings.data), "CONVEYOR_OTHER_TASKS": settings.other_tasks or ""}
    environ |= {"CONVEYOR_CRASH_AT": crash_at} if crash_at else {}
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).with_name("conveyor")),
        "move-tasks",
        *arguments,
        env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_the_command_resumes_after_kill_and_says_what_is_left(
    old: Settings, both: Settings, only_new: Settings, to: str, clock: JumpingClock
) -> None:
    async with open_system(old, clock) as system:
        expected = await fill(system)
        going = await submit(system, 5)
    code, said = await command(both, "--to", to, "--no-wait", crash_at="move.rows.between:2")
    assert code == -signal.SIGKILL, said
    # With the settings from before the change, too: then it does not wait.
    code, said = await command(old, "--to", to)
    assert code == 1, said
    assert said.count(": verified") in (3, 4)
    assert f"{going.job_id}  not moved: running" in said
    assert "Set CONVEYOR_TASKS" in said
    async with open_system(both, clock) as system:
        await finish(system, await read(system, going.job_id))
        expected[going.job_id] = await contents(system, going.job_id)
    code, said = await command(both, "--to", to)
    assert (code, said.count(": verified")) == (0, 1), said
    assert "tasks 5 (3 succeeded, 2 failed), events 10: verified" in said
    code, said = await command(both, "--to", to, "--clean")
    assert code == 0 and "Deleted" in said, said
    async with open_system(only_new, clock) as system:
        for job_id, seen in expected.items():
            assert await contents(system, job_id) == seen
    code, said = await command(both, "--to", "dynamodb://eu-west-1/x")
    assert code == 2 and "--to must be postgres://" in said

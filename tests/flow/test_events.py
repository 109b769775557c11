"""Events: the same in the audit trail, in the stream and in webhooks; told once, in order, to whoever comes back."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from conveyor.api.server import serve
from conveyor.engines.tasks import TaskEvent
from conveyor.jobs.active_jobs import ActiveJobs
from conveyor.jobs.event_names import EVENTS
from conveyor.jobs.progress_events import REPORTED, ProgressEvents
from conveyor.lifecycle import Lifecycle
from conveyor.model import Job, JobId, Outcome, TaskError, TaskRef, task_id
from conveyor.notify import progress_notifier
from conveyor.notify.dispatcher import OutboxDispatcher
from conveyor.notify.progress_notifier import ProgressNotifier
from conveyor.read import job_stream as stream
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.api import Api, client, new_key
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME, end, make_job, make_notice, seeds
from tests.support.working import PATIENCE, Echo, all_items, ended, until, working

URL = "http://target.example/"


class Frame(NamedTuple):
    """One event of a stream; a comment has only its text."""

    event: str
    data: Any
    id: str | None = None


class Follower:
    """A client of a stream."""

    def __init__(self, frames: AsyncIterator[Frame]) -> None:
        self._frames = frames
        self.seen: list[Frame] = []

    async def take(self, right: Callable[[Frame], bool]) -> Frame:
        """Read on to a frame that is right."""
        async with asyncio.timeout(PATIENCE):
            async for frame in self._frames:
                self.seen.append(frame)
                if right(frame):
                    return frame
        raise AssertionError(f"the stream ended; seen: {self.seen}")

    async def rest(self) -> list[Frame]:
        """Read on to the end; all that was seen."""
        async with asyncio.timeout(PATIENCE):
            async for frame in self._frames:
                self.seen.append(frame)
        return self.seen

    @property
    def events(self) -> list[str]:
        return [frame.event for frame in self.seen if frame.id]

    @property
    def ids(self) -> list[str]:
        return [frame.id for frame in self.seen if frame.id]


@asynccontextmanager
async def following(api: Api, job_id: str, last_id: str | None = None) -> AsyncIterator[Follower]:
    headers = {"authorization": f"Bearer {api.key}", **({"last-event-id": last_id} if last_id else {})}
    builder = api._client.get(f"{api.url}/v1/jobs/{job_id}/stream").headers(headers)
    # Without it, the client gathers some of the answer before it hands it on.
    async with builder.streamed_read_buffer_limit(0).build_streamed() as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        yield Follower(_frames(response.body_reader))


async def _frames(reader: Any) -> AsyncIterator[Frame]:
    text = ""
    while (piece := await reader.read_chunk()) is not None:
        text += bytes(piece).decode()
        while "\n\n" in text:
            block, _, text = text.partition("\n\n")
            yield _frame(block)
    assert text == ""


def _frame(block: str) -> Frame:
    fields: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(": ")
        assert name not in fields
        fields[name] = value
    if "data" not in fields:
        return Frame("retry" if "retry" in fields else "comment", block)
    return Frame(fields["event"], json.loads(fields["data"]), fields.get("id"))


def is_event(name: str) -> Callable[[Frame], bool]:
    return lambda frame: frame.event == name


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LOOK_SECONDS", 0.05)
    # Where it is wanted it is told to look: a slow machine would have it tell of quarters anywhere.
    monkeypatch.setattr(progress_notifier, "_EVERY", 3600.0)


class Fickle(Echo):
    """Some tasks fail: once, or for good."""

    async def attempt(self, job: Job, refs: Any) -> list[Outcome]:
        outcomes = await super().attempt(job, refs)
        return [self._of(ref, outcome) for ref, outcome in zip(refs, outcomes, strict=True)]

    def _of(self, ref: TaskRef, outcome: Outcome) -> Outcome:
        for_good, once = ref.index % 5 == 3, ref.index % 5 == 1 and ref.attempt == 1
        if not for_good and not once:
            return outcome
        return Outcome(TaskStatus.FAILED, error=TaskError("handler_raised" if once else "http_404", "no"))


async def submitted(api: Api, number: int = 10, **spec: Any) -> str:
    answer = await api.submit({"tasks": [URL] * number, "backoff": {"base": 0.01}, **spec})
    assert answer.status in (201, 202), answer.body
    job_id: str = answer.json["id"]
    return job_id


async def stored(system: System, job_id: str) -> Job:
    job = await system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


class TestTrail:
    async def test_what_happened_to_one_task_in_order(self, server: Api, system: System) -> None:
        async with working(system, Fickle()):
            job_id = await submitted(server)
            await ended(server, job_id)
        run_id = (await stored(system, job_id)).run.run_id
        for index, happened in (
            (0, ["task.succeeded"]),
            (1, ["task.retried", "task.succeeded"]),
            (3, ["task.failed"]),
        ):
            path = f"/v1/jobs/{job_id}/events?task={task_id(run_id, index)}"
            for limit in (1, 2, 100):
                found = await all_items(server, path, limit)
                assert [each["event"] for each in found] == happened
                assert [each["at"] for each in found] == sorted(each["at"] for each in found)
                assert {each["index"] for each in found} == {index}
                assert {each["id"] for each in found} == {None}
        retried, succeeded = await all_items(server, f"/v1/jobs/{job_id}/events?task={task_id(run_id, 1)}")
        assert retried["data"]["attempt"] == 1
        assert retried["data"]["error"]["code"] == "handler_raised"
        assert succeeded["data"] == {"attempt": 2, "http_status": 200}

    async def test_one_that_failed_unnoted_and_one_that_was_cancelled(
        self, server: Api, system: System, clock: JumpingClock
    ) -> None:
        job = await stored(system, await submitted(server, 3))
        await system.tasks.note(job.key, [TaskEvent(1, clock.now(), "task.retried", '{"attempt": 1}')])
        ends = [end(0, TaskStatus.FAILED, code="timeout"), end(1, TaskStatus.CANCELLED, attempts=1)]
        await system.tasks.finish(job.key, ends)
        for index, happened in ((0, ["task.failed"]), (1, ["task.retried", "task.cancelled"]), (2, [])):
            path = f"/v1/jobs/{job.job_id}/events?task={task_id(job.run.run_id, index)}"
            assert [each["event"] for each in await all_items(server, path, 1)] == happened

    async def test_every_event_of_a_job_has_its_id(self, server: Api, system: System) -> None:
        async with working(system):
            job_id = await submitted(server)
            await ended(server, job_id)
        found = await all_items(server, f"/v1/jobs/{job_id}/events", 1)
        assert [each["event"] for each in found] == ["job.accepted", "run.completed"]
        assert all(each["id"].startswith("evt_") for each in found)
        assert len({each["id"] for each in found}) == 2


class TestStream:
    async def test_it_shows_a_job_from_beginning_to_end(self, server: Api, system: System) -> None:
        echo = Echo()
        echo.gate.clear()
        async with working(system, echo):
            job_id = await submitted(server, 1200)
            async with following(server, job_id) as follower:
                await follower.take(is_event("job.ingested"))
                echo.gate.set()
                seen = await follower.rest()
        assert seen[0].event == "retry"
        told = [event for event in follower.events if event != "run.progress"]
        assert told == ["job.accepted", "job.ingested", "run.completed"]
        events = await all_items(server, f"/v1/jobs/{job_id}/events")
        assert [frame.data for frame in seen if frame.id] == events
        assert follower.ids == [event["id"] for event in events]
        progress = [frame.data for frame in seen if frame.event == "progress"]
        assert all(before != after for before, after in itertools.pairwise(progress))
        assert progress[-1] == {
            "job_id": job_id,
            "run_id": events[-1]["run_id"],
            "state": "completed",
            "reason": None,
            "reason_code": None,
            "waiting": None,
            "total": 1200,
            "counts": {"succeeded": 1200, "failed": 0, "cancelled": 0, "unchanged": 0},
            "job": {"total": 1200, "counts": {"succeeded": 1200, "failed": 0, "cancelled": 0, "unchanged": 0}},
        }
        assert all(frame.id is None for frame in seen if frame.event == "progress")

    async def test_who_comes_back_misses_nothing_and_sees_nothing_twice(self, server: Api, system: System) -> None:
        job = await stored(system, await submitted(server))
        ids = []
        async with following(server, job.job_id) as follower:
            ids.append((await follower.take(is_event("job.accepted"))).id)
        for number in range(250):
            await system.records.documents.create_documents(
                [], make_notice(system.clock, job, "run.progress", number=number)
            )
        async with following(server, job.job_id, ids[-1]) as follower:
            last = await follower.take(lambda frame: frame.id is not None and frame.data["data"].get("number") == 120)
            assert [frame.data["data"]["number"] for frame in follower.seen if frame.id] == list(range(121))
        async with following(server, job.job_id, last.id) as follower:
            lifecycle = Lifecycle(system.records, system.tasks, system.clock)
            await lifecycle.move(job, RunState.CANCELLED, "enough", await system.tasks.counts(job.key))
            await follower.rest()
            assert follower.events == ["run.progress"] * 129 + ["run.cancelled"]
        async with following(server, job.job_id, "evt_of_somebody_else") as follower:
            await follower.rest()
            assert len(follower.events) == 252
        over = await server.get(f"/v1/jobs/{job.job_id}/stream", headers={"last-event-id": follower.ids[-1]})
        assert (over.status, over.body) == (204, b"")

    async def test_after_the_end_it_shows_all_and_ends(self, server: Api, system: System) -> None:
        async with working(system):
            job_id = await submitted(server)
            await ended(server, job_id)
        async with following(server, job_id) as follower:
            await follower.rest()
        assert follower.events == ["job.accepted", "run.completed"]

    async def test_while_nothing_happens_it_says_that_it_is_there(
        self, server: Api, system: System, clock: JumpingClock
    ) -> None:
        job_id = await submitted(server)
        async with following(server, job_id) as follower:
            await follower.take(is_event("job.accepted"))
            for _ in range(3):
                clock.advance(stream.KEEP_ALIVE_SECONDS)
                await follower.take(is_event("comment"))
        assert [frame.event for frame in follower.seen].count("progress") == 1

    async def test_progress_comes_once_a_second_at_most(
        self, server: Api, system: System, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert stream.__dict__["LOOK_SECONDS"] != 1.0
        monkeypatch.undo()
        assert stream.LOOK_SECONDS == 1.0
        job = await stored(system, await submitted(server, 50))
        async with following(server, job.job_id) as follower:
            await follower.take(is_event("progress"))
            for index in range(20):
                await system.tasks.finish(job.key, [end(index)])
            await follower.take(is_event("progress"))
        counts = [frame.data["counts"]["succeeded"] for frame in follower.seen if frame.event == "progress"]
        assert counts == [0, 20]

    async def test_it_ends_when_the_job_is_deleted(self, server: Api, system: System) -> None:
        job_id = await submitted(server)
        async with following(server, job_id) as follower:
            await follower.take(is_event("job.accepted"))
            assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
            await follower.rest()
        assert (await server.get(f"/v1/jobs/{job_id}/stream")).status == 404

    async def test_a_tenant_has_so_many_at_once(self, settings: Settings, clock: JumpingClock) -> None:
        few = Settings.load({}, data=settings.data, max_streams=2)
        async with open_system(few, clock) as system, served(system) as server:
            other = await server.as_tenant("other")
            theirs = (await other.submit({"tasks": [URL]})).json["id"]
            job_id = await submitted(server)
            async with following(server, job_id), following(server, job_id):
                refused = await server.get(f"/v1/jobs/{job_id}/stream")
                assert (refused.status, refused.json["code"]) == (429, "too_many_streams")
                assert refused.headers["retry-after"] == "1"
                async with following(other, theirs):
                    pass
            # Their places are free again once they are gone.
            await until(lambda: server.get(f"/v1/jobs/{job_id}/events"))

            async def again() -> int:
                try:
                    async with following(server, job_id) as follower:
                        await follower.take(is_event("job.accepted"))
                    return 200
                except AssertionError:
                    return 429

            await until(again, lambda status: status == 200)

    async def test_it_goes_on_over_a_restart(self, system: System) -> None:
        async with served(system) as server:
            job_id = await submitted(server)
            async with following(server, job_id) as follower:
                last = await follower.take(is_event("job.accepted"))
                # Stopping does not wait for those who listen.
                stopping = asyncio.create_task(server.stop())  # type: ignore[attr-defined]
                await follower.rest()
                await asyncio.wait_for(stopping, 5)
        async with served(system) as server, working(system), following(server, job_id, last.id) as follower:
            await follower.rest()
        assert follower.events == ["run.completed"]


class Served(Api):
    """An API that a test can stop."""

    async def stop(self) -> None:
        self.stopped.set()
        await self.running

    stopped: asyncio.Event
    running: "asyncio.Task[None]"


@asynccontextmanager
async def served(system: System) -> AsyncIterator[Served]:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(system, "127.0.0.1", 0, stop, url.set_result))
    await asyncio.wait({running, url}, return_when=asyncio.FIRST_COMPLETED)
    async with client() as http:
        api = Served(url.result(), system, await new_key(system, "acme"), http)
        api.stopped, api.running = stop, running
        yield api
        await api.stop()


class TestMilestones:
    async def started(self, system: System, total: int = 100) -> Job:
        job = make_job(system.clock, total=total)
        await system.tasks.put(job.key, seeds(total))
        await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
        return job

    async def told(self, system: System, job: Job) -> list[tuple[str, dict[str, Any]]]:
        page = await system.records.outbox.events(job.tenant, job.job_id, None, 1000)
        return [(event.event, event.data) for event in page.items][1:]

    def notifier(self, system: System, seconds: float = 60.0) -> ProgressNotifier:
        return ProgressNotifier(system.records, system.tasks, system.coordinator, system.clock, seconds)

    async def test_quarters_are_told_once_whoever_looks(self, system: System) -> None:
        job = await self.started(system)
        notifiers = [self.notifier(system) for _ in range(3)]
        for done in range(0, 100, 5):
            await system.tasks.finish(job.key, [end(index) for index in range(done, done + 5)])
            await asyncio.gather(*(each.run_once() for each in notifiers))
            # One that starts anew knows nothing of what was told.
            await self.notifier(system).run_once()
        found = await self.told(system, job)
        assert [(event, data["percent"]) for event, data in found] == [
            ("run.progress", 25),
            ("run.progress", 50),
            ("run.progress", 75),
        ]
        assert [data["counts"]["succeeded"] for _, data in found] == [25, 50, 75]

    async def test_quarters_that_were_passed_at_once_are_one(self, system: System) -> None:
        job = await self.started(system)
        await system.tasks.finish(job.key, [end(index) for index in range(80)])
        await self.notifier(system).run_once()
        assert [data["percent"] for _, data in await self.told(system, job)] == [75]

    async def test_there_are_none_of_a_run_that_has_finished(self, system: System) -> None:
        """It was active when the active jobs were read."""
        job = await self.started(system)
        active = ActiveJobs(system.records.jobs, system.clock, fresh_seconds=60.0)
        assert len(await active.read()) == 1
        finished = await system.tasks.finish(job.key, [end(index) for index in range(100)])
        lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        assert await lifecycle.settle(job, finished.counts) is RunState.COMPLETED
        clock, coordinator = system.clock, system.coordinator
        await ProgressNotifier(system.records, system.tasks, coordinator, clock, 60.0, active).run_once()
        assert [event for event, _ in await self.told(system, job)] == ["run.completed"]
        assert await system.records.documents.document(REPORTED, ACME, job.run.run_id) is None, "nothing is left over"

    async def test_there_are_none_before_the_total_is_final(self, system: System) -> None:
        job = make_job(system.clock, total=0, latched=False, state=RunState.INGESTING)
        await system.tasks.put(job.key, seeds(10))
        await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
        await system.tasks.finish(job.key, [end(index) for index in range(10)])
        await self.notifier(system).run_once()
        assert await self.told(system, job) == []

    async def test_failures_are_told_in_batches(self, system: System, clock: JumpingClock) -> None:
        job = await self.started(system)

        async def fail(*indexes: int, code: str = "timeout") -> None:
            await system.tasks.finish(job.key, [end(index, TaskStatus.FAILED, code=code) for index in indexes])
            await asyncio.gather(*(self.notifier(system).run_once() for _ in range(2)))

        await fail(0)
        await fail(1, 2)
        await fail(3, code="http_404")
        clock.advance(61)
        await fail(4)
        found = await self.told(system, job)
        assert [(event, data["failed"], data["counts"]["failed"]) for event, data in found] == [
            ("tasks.failed", 1, 1),
            ("tasks.failed", 4, 5),
        ]
        assert found[1][1]["top_errors"] == [{"code": "timeout", "count": 4}, {"code": "http_404", "count": 1}]

    async def test_the_end_of_a_run_tells_of_those_that_are_left(
        self, server: Api, system: System, settings: Settings
    ) -> None:
        async with working(system, Fickle()):
            job_id = await submitted(server, 50)
            await ended(server, job_id)
            await until(lambda: system.records.outbox.undispatched(10), lambda left: left == [])
        found = await self.told(system, await stored(system, job_id))
        batches = [data["failed"] for event, data in found if event == "tasks.failed"]
        assert sum(batches) == 10
        # Told again, as after a crash before the mark, it finds nothing more to say.
        notifier = OutboxDispatcher(settings, system.records, system.tasks, system.clock)
        page = await system.records.outbox.events(ACME, JobId(job_id), None, 100)
        last = next(event for event in page.items if event.event == "run.completed")
        job = await stored(system, job_id)
        notice = msgspec.structs.replace(make_notice(system.clock, job, "run.completed"), data=last.data)
        await notifier._report_last_failures(notice)
        assert await self.told(system, job) == found

    async def test_that_a_list_is_ingested_is_told_once_and_before_anything_follows(self, system: System) -> None:
        job = make_job(system.clock, total=0, latched=False, state=RunState.INGESTING)
        await system.tasks.put(job.key, seeds(3))
        await system.records.jobs.create_job(job, make_notice(system.clock, job), None)
        await system.tasks.finish(job.key, [end(index) for index in range(3)])
        lifecycles = [Lifecycle(system.records, system.tasks, system.clock) for _ in range(4)]
        milestones = ProgressEvents(system.records, system.clock)
        # Beside them somebody tells of failures in the same row.
        counts = await system.tasks.counts(job.key)
        await asyncio.gather(
            *(each.latch(job, 3, 1) for each in lifecycles), milestones.report_failures(job.key, counts, [], {})
        )
        assert await self.told(system, job) == [
            ("job.ingested", {"total": 3, "invalid": 1}),
            (
                "run.completed",
                {
                    "counts": {"succeeded": 3, "failed": 0, "cancelled": 0, "unchanged": 0},
                    "job": {"total": 3, "counts": {"succeeded": 3, "failed": 0, "cancelled": 0, "unchanged": 0}},
                    "reason": None,
                    "reason_code": None,
                },
            ),
        ]


def test_every_event_is_one_that_can_be_asked_for_and_is_described() -> None:
    """Whoever writes a notice of a new kind names it where endpoints are checked, and in SPEC.md."""
    root = Path(__file__).parents[2]
    written: set[str] = set()
    for path in (root / "src/conveyor").rglob("*.py"):
        if path.name != "notices.py":
            code = re.sub(r"crashpoint\([^)]*\)", "", path.read_text())
            written |= set(re.findall(r'"((?:job|run|tasks|export)\.(?:\w+ed|progress|ready|overdue))"', code))
    assert written == EVENTS
    described = (root / "SPEC.md").read_text().partition("\n## 4.")[2].partition("\n## 5.")[0]
    assert {event for event in EVENTS if f"`{event}`" not in described} == set()

"""Cancel, pause, resume, live changes and deletion over HTTP: one write each, and soon true everywhere."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.accept.control import Control
from conveyor.accept.option_changes import change_options
from conveyor.api.schemas.job_shapes import JobShape
from conveyor.engines.queue import CONTROL, run_queue
from conveyor.lifecycle import Lifecycle
from conveyor.model import Counts, Job, JobId, TaskRef, TenantId
from conveyor.recover import sweeper as sweeper_module
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.recover.sweeper import Sweeper
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock, ManualClock
from tests.support.make_jobs import end, make_run, seeds
from tests.support.small_fleet import Recording, open_fleet, succeed, success
from tests.support.stored_rows import rows
from tests.support.working import Flaky, all_items, ended, until, working

ACME = TenantId("acme")
URLS = [f"http://example.com/{number}" for number in range(5000)]


async def move(api: Api, job_id: str, how: str) -> Answer:
    return await api.post(f"/v1/jobs/{job_id}/{how}")


async def moved(api: Api, job_id: str, how: str) -> dict[str, Any]:
    answer = await move(api, job_id, how)
    assert answer.status == 200, answer.body
    msgspec.convert(answer.json, JobShape)
    shown: dict[str, Any] = answer.json
    return shown


async def patch(api: Api, job_id: str, **changes: Any) -> Answer:
    return await api.request("PATCH", f"/v1/jobs/{job_id}", body=msgspec.json.encode(changes))


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def held(api: Api, job_id: str) -> int:
    return await api.system.coordinator.permits_in_use(f"run:{(await job_of(api, job_id)).run.run_id}")


async def submit(api: Api, count: int, **spec: Any) -> str:
    job_id: str = (await api.submit({"tasks": URLS[:count], **spec})).json["id"]
    return job_id


async def events(api: Api, job_id: str) -> list[str]:
    return [item["event"] for item in await all_items(api, f"/v1/jobs/{job_id}/events")]


class TestCancel:
    async def test_nothing_more_of_it_starts(self, server: Api) -> None:
        async with working(server.system) as echo:
            echo.gate.clear()
            job_id = await submit(server, 900, concurrency=10)
            await until(lambda: held(server, job_id))
            shown = await moved(server, job_id, "cancel")
            assert (shown["state"], shown["reason"]) == ("cancelled", "cancelled on request")
            await until(lambda: held(server, job_id), lambda number: number == 0)
            echo.gate.set()
            counts = await until(lambda: counted(server, job_id), lambda found: found.ended == 900)
            await until(lambda: server.system.records.jobs.unswept_jobs(10), lambda unswept: not unswept)
        assert counts == Counts(cancelled=900)
        assert echo.ran == {}
        done = (await server.get(f"/v1/jobs/{job_id}")).json
        assert done["run"]["counts"] == {
            "pending": 0,
            "running": 0,
            "succeeded": 0,
            "failed": 0,
            "cancelled": 900,
            "unchanged": 0,
        }
        assert (await server.get(f"/v1/jobs/{job_id}?verify=true")).json["verify"]["drift"] == 0
        depth = await server.system.queue.depth(run_queue((await job_of(server, job_id)).run.run_id))
        assert (depth.ready, depth.held, depth.delayed) == (0, 0, 0)
        assert await server.system.records.jobs.unswept_jobs(10) == []
        assert await events(server, job_id) == ["job.accepted", "run.cancelled"]

    async def test_how_much_is_still_to_be_swept(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sweeper_module, "_ROWS", 100)
        job_id = await submit(server, 250)
        await moved(server, job_id, "cancel")
        system = server.system
        lifecycle = Lifecycle(system.records, system.tasks, system.clock)
        sweeper = Sweeper(system.records, system.tasks, system.queue, lifecycle, system.clock)
        seen = []
        while await system.records.jobs.unswept_jobs(1):
            await sweeper.run_once()
            # Past what readers share.
            system.clock.advance(1)  # type: ignore[attr-defined]
            counts = (await server.get(f"/v1/jobs/{job_id}")).json["run"]["counts"]
            seen.append((counts["pending"], counts["cancelled"]))
        assert seen == [(150, 100), (50, 200), (0, 250), (0, 250)]

    async def test_while_its_list_is_read(self, server: Api) -> None:
        put, wait, there = server.system.tasks.put, asyncio.Event(), asyncio.Event()

        async def slow(run: Any, given: Any) -> None:
            await put(run, given)
            there.set()
            await wait.wait()

        server.system.tasks.put = slow  # type: ignore[method-assign]
        data = "".join(f"{url}\n" for url in 4 * URLS).encode()
        job_id = (await server.submit({"source": {"upload_id": await server.upload(data)}})).json["id"]
        async with working(server.system) as echo:
            echo.gate.clear()
            await there.wait()
            await moved(server, job_id, "cancel")
            wait.set()
            await until(lambda: server.system.records.jobs.unswept_jobs(1), lambda found: not found)
            await until(lambda: held(server, job_id), lambda number: number == 0)
            echo.gate.set()
            server.system.clock.advance(100)  # type: ignore[attr-defined]
            await until(lambda: server.system.queue.depth(CONTROL), lambda depth: depth.ready + depth.held == 0)
        job = await job_of(server, job_id)
        counts = await server.system.tasks.recount(job.key)
        assert (job.state, job.run.last_batch) == (RunState.CANCELLED, False)
        assert 0 < counts.cancelled == counts.ended == job.run.total < 4 * len(URLS)

    async def test_again_changes_nothing(self, server: Api) -> None:
        job_id = await submit(server, 3)
        first = await moved(server, job_id, "cancel")
        second = await moved(server, job_id, "cancel")
        assert first["run"] == second["run"]
        assert await events(server, job_id) == ["job.accepted", "run.cancelled"]

    @pytest.mark.parametrize("how", ["cancel", "pause", "resume"])
    async def test_what_has_ended_is_not_moved(self, server: Api, how: str) -> None:
        async with working(server.system):
            job_id = await submit(server, 3)
            await ended(server, job_id)
        answer = await move(server, job_id, how)
        assert (answer.status, answer.json["code"], answer.json["state"]) == (409, "job_ended", "completed")
        cancelled = await submit(server, 3)
        await moved(server, cancelled, "cancel")
        if how != "cancel":
            assert (await move(server, cancelled, how)).json["code"] == "job_ended"

    async def test_many_at_once_tell_of_it_once(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 3))
        control = Control(server.system)
        found = await asyncio.gather(*(control.cancel(job) for _ in range(20)))
        assert {each.state for each in found} == {RunState.CANCELLED}
        assert await events(server, job.job_id) == ["job.accepted", "run.cancelled"]

    @pytest.mark.parametrize("how", ["cancel", "pause", "resume"])
    async def test_its_body(self, server: Api, how: str) -> None:
        job_id = await submit(server, 1)
        for body, code in (({"now": True}, "unknown_field"), ([], "invalid_field"), (b"{", "malformed_json")):
            answer = await server.post(f"/v1/jobs/{job_id}/{how}", body)
            assert (answer.status, answer.json["code"]) == (400, code)
        assert (await server.post(f"/v1/jobs/{job_id}/{how}", {})).status == 200


async def counted(api: Api, job_id: str) -> Counts:
    return await api.system.tasks.counts((await job_of(api, job_id)).key)


class TestPause:
    async def test_it_rests_and_goes_on(self, server: Api) -> None:
        async with working(server.system) as echo:
            echo.gate.clear()
            job_id = await submit(server, 600, concurrency=10)
            await until(lambda: held(server, job_id))
            shown = await moved(server, job_id, "pause")
            assert (shown["state"], shown["eta"], shown["waiting"]["code"]) == ("paused", None, "paused")
            assert (await moved(server, job_id, "pause"))["state"] == "paused"
            await until(lambda: held(server, job_id), lambda number: number == 0)
            echo.gate.set()
            await asyncio.sleep(0.5)
            assert await counted(server, job_id) == Counts()
            shown = await moved(server, job_id, "resume")
            assert (shown["state"], shown["reason"], shown["waiting"]) == ("running", None, None)
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["counts"]["succeeded"]) == ("completed", 600)
        moves = [event for event in await events(server, job_id) if event != "run.progress"]
        assert moves == ["job.accepted", "run.paused", "run.resumed", "run.completed"]
        assert max(echo.ran.values()) == 1

    async def test_resuming_what_is_not_paused_changes_nothing(self, server: Api) -> None:
        job_id = await submit(server, 3)
        assert (await moved(server, job_id, "resume"))["state"] == "running"
        assert await events(server, job_id) == ["job.accepted"]

    async def test_a_paused_job_can_be_cancelled(self, server: Api) -> None:
        job_id = await submit(server, 3)
        await moved(server, job_id, "pause")
        assert (await moved(server, job_id, "cancel"))["state"] == "cancelled"

    async def test_an_ingest_goes_on_at_once(self, server: Api) -> None:
        """Its messages were let go of; nobody waits for the sweeper to find that out."""
        data = "".join(f"{url}\n" for url in URLS).encode()
        job_id = (await server.submit({"source": {"upload_id": await server.upload(data)}})).json["id"]
        await moved(server, job_id, "pause")
        async with working(server.system):
            await until(lambda: server.system.queue.depth(CONTROL), lambda depth: depth.ready + depth.held == 0)
            shown = await moved(server, job_id, "resume")
            assert shown["state"] == "ingesting"
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["counts"]["succeeded"]) == ("completed", 5000)

    async def test_one_whose_tasks_all_ended_meanwhile_completes(self, server: Api) -> None:
        """The last outcome was written in the moment of the pause: nobody else would look."""
        job = await job_of(server, await submit(server, 3))
        await moved(server, job.job_id, "pause")
        await server.system.tasks.finish(job.key, [end(index) for index in range(3)])
        assert (await moved(server, job.job_id, "resume"))["state"] == "completed"


class TestChanges:
    async def test_they_are_shown_and_kept(self, server: Api) -> None:
        job_id = await submit(server, 3, concurrency=4, rate_per_host=2, headers={"X-A": "sesame"})
        answer = await patch(server, job_id, concurrency=9, rate_per_host=None, failure_threshold={"failed": 5})
        assert answer.status == 200, answer.body
        msgspec.convert(answer.json, JobShape)
        assert answer.json["options"]["concurrency"] == 9
        assert "rate_per_host" not in answer.json["options"]
        assert answer.json["options"]["failure_threshold"]["failed"] == 5
        assert answer.json["options"]["headers"] == {"X-A": "[hidden]"}
        job = await job_of(server, job_id)
        assert (job.options.headers, job.version) == ({"X-A": "sesame"}, 2)
        found = await all_items(server, f"/v1/jobs/{job_id}/events")
        assert found[-1]["event"] == "job.changed"
        assert found[-1]["data"] == {"changed": ["concurrency", "failure_threshold", "rate_per_host"]}
        assert (await patch(server, job_id, concurrency=9)).status == 200
        assert (await job_of(server, job_id)).version == 2, "what is so already is not written"
        assert (await patch(server, job_id)).status == 200

    @pytest.mark.parametrize(
        ("changes", "code", "field"),
        [
            ({"concurrency": 0}, "invalid_field", "concurrency"),
            ({"rate_per_host": 0}, "invalid_field", "rate_per_host"),
            ({"concurrency": None}, "invalid_field", "concurrency"),
            ({"failure_threshold": {}}, "invalid_field", "failure_threshold"),
            ({"chunk_size": 5}, "invalid_field", "chunk_size"),
            ({"retention_days": 0}, "invalid_field", "retention_days"),
            ({"max_lifetime": 0}, "invalid_field", "max_lifetime"),
            ({"handler": "x"}, "invalid_field", "handler"),
            ({"name": "x"}, "unknown_field", "name"),
            ({"state": "paused"}, "unknown_field", "state"),
        ],
        ids=str,
    )
    async def test_they_are_checked(self, server: Api, changes: dict[str, Any], code: str, field: str) -> None:
        job_id = await submit(server, 1)
        answer = await patch(server, job_id, **changes)
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, code, field)
        assert (await job_of(server, job_id)).version == 1

    async def test_bodies_that_are_none(self, server: Api) -> None:
        job_id = await submit(server, 1)
        for body, status in ((b"[]", 400), (b"{", 400), (b"", 400), (b'"x"', 400)):
            assert (await server.request("PATCH", f"/v1/jobs/{job_id}", body=body)).status == status
        sent = await server.request("PATCH", f"/v1/jobs/{job_id}", body=b"{}", headers={"content-type": "text/plain"})
        assert sent.status == 415

    async def test_changes_of_others_stay(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 1))
        changes = [{"concurrency": 7}, {"priority": 3}, {"attempts": 9}, {"timeout": 12.0}]
        await asyncio.gather(*(change_options(server.system, job, each) for each in changes))
        options = (await job_of(server, job.job_id)).options
        assert (options.concurrency, options.priority, options.attempts, options.timeout) == (7, 3, 9, 12.0)

    async def test_what_has_ended_is_not_changed(self, server: Api) -> None:
        job_id = await submit(server, 1)
        await moved(server, job_id, "cancel")
        for changes in ({"concurrency": 3}, {"concurrency": 3, "retention_days": 2}):
            answer = await patch(server, job_id, **changes)
            assert (answer.status, answer.json["code"]) == (409, "job_ended")


class TestLive:
    """Workers that are under way follow."""

    async def test_concurrency(self) -> None:
        async with open_fleet() as fleet:
            running, most = 0, 0

            async def slow(job: Job, ref: TaskRef) -> Any:
                nonlocal running, most
                running += 1
                most = max(most, running)
                await fleet.clock.sleep(1.0)
                running -= 1
                return success()

            fleet.executor.act = slow
            job = await fleet.submit(1000, concurrency=2, chunk_size=10)
            fleet.start(fleet.worker())
            await fleet.until(lambda: running == 2)
            await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency": 20})
            await fleet.until(lambda: running == 20, within=5)
            await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency": 3})
            await fleet.passing(3)
            most = 0
            await fleet.passing(5)
            assert most == 3

    async def test_a_rate_that_is_raised(self) -> None:
        """What stood in line at the old rate does not go on standing there."""
        async with open_fleet() as fleet:
            executor = Recording(fleet.clock, succeed, target=lambda ref: "slow")
            job = await fleet.submit(400, rate_per_host=0.1, concurrency=10)
            fleet.start(fleet.worker(executor))
            await fleet.passing(30)
            assert 3 <= len(executor.starts) <= 5
            await change_options(fleet.system, await fleet.job(job.job_id), {"rate_per_host": 100})
            began = fleet.clock.now()
            await fleet.ended(job, within=60)
            assert 3 <= fleet.clock.now() - began <= 8
            await fleet.check(job)

    async def test_a_rate_that_is_lowered_and_lifted(self) -> None:
        async with open_fleet() as fleet:
            executor = Recording(fleet.clock, succeed, target=lambda ref: "slow")
            job = await fleet.submit(3000, rate_per_host=50, concurrency=10)
            fleet.start(fleet.worker(executor))
            await fleet.passing(4)
            await change_options(fleet.system, await fleet.job(job.job_id), {"rate_per_host": 1})
            await fleet.passing(1)
            started = len(executor.starts)
            await fleet.passing(20)
            assert len(executor.starts) - started <= 22
            await change_options(fleet.system, await fleet.job(job.job_id), {"rate_per_host": None})
            await fleet.ended(job, within=30)
            await fleet.check(job)

    async def test_another_option_does_not_let_the_rate_slip(self) -> None:
        async with open_fleet() as fleet:
            executor = Recording(fleet.clock, succeed, target=lambda ref: "slow")
            job = await fleet.submit(500, rate_per_host=2, concurrency=10)
            fleet.start(fleet.worker(executor))
            await fleet.passing(5)
            for attempts in range(5, 10):
                await change_options(fleet.system, await fleet.job(job.job_id), {"attempts": attempts})
                await fleet.passing(2)
            started = len(executor.starts)
            await fleet.passing(20)
            assert 38 <= len(executor.starts) - started <= 42

    async def test_slots_of_a_host(self) -> None:
        async with open_fleet() as fleet:

            async def slow(job: Job, ref: TaskRef) -> Any:
                await fleet.clock.sleep(0.5)
                return success()

            executor = Recording(fleet.clock, slow, target=lambda ref: "host")
            job = await fleet.submit(300, concurrency=20)
            worker = fleet.worker(executor)
            fleet.start(worker)
            await fleet.until(lambda: executor.running["host"] == 20)
            await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency_per_host": 3})
            await fleet.passing(3)
            executor.most.clear()
            await fleet.passing(3)
            assert executor.most["host"] == 3
            await change_options(fleet.system, await fleet.job(job.job_id), {"concurrency_per_host": None})
            await fleet.until(lambda: executor.running["host"] == 20, within=5)
            await fleet.ended(job)
            (lane,) = worker._lanes.values() if worker._lanes else [None]
            assert lane is None or not lane._targets.is_limited

    async def test_the_failure_threshold(self) -> None:
        async with open_fleet() as fleet:

            async def fail_slowly(job: Job, ref: TaskRef) -> Any:
                from tests.support.small_fleet import failure

                await fleet.clock.sleep(0.2)
                return failure("result_not_json")

            fleet.executor.act = fail_slowly
            job = await fleet.submit(1000, concurrency=5, attempts=1)
            for role in (fleet.worker(), fleet.sweeper):
                fleet.start(role)
            await fleet.until(lambda: len(fleet.executor.starts) > 30)
            await change_options(fleet.system, await fleet.job(job.job_id), {"failure_threshold": {"failed": 10}})
            (done,) = await fleet.ended(job, within=10)
            assert done.state is RunState.FAILED
            assert "failure threshold" in (done.reason or "")


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


def files(system: System) -> list[str]:
    root = system.settings.data / "blobs"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class TestDelete:
    @pytest.fixture(params=[1, 4], ids=["one shard", "four shards"])
    def settings(self, request: pytest.FixtureRequest, settings: Settings) -> Settings:
        return Settings.load(
            {},
            data=settings.data,
            sync_task_limit=1,
            force_task_shards=request.param > 1,
            task_shard_count=request.param,
        )

    async def _with_reruns(self, server: Api) -> str:
        """A job of three runs, the last of which is under way."""
        async with working(server.system, Flaky(lambda job, index: 503 if index % 7 == 0 else None)) as echo:
            job_id = await submit(server, 300, attempts=1, result_layout="object")
            await ended(server, job_id)
            assert (await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "failed"})).status == 202
            await ended(server, job_id)
            echo.gate.clear()
            assert (await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "all"})).status == 202
            await until(lambda: job_of(server, job_id), lambda job: job.run.last_batch)
            echo.gate.set()
        return job_id

    async def test_nothing_is_left_of_a_job_with_reruns(self, server: Api, clock: JumpingClock) -> None:
        job_id = await self._with_reruns(server)
        assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
        for path in ("", "/results", "/results?run=1", "/results?run=latest-per-task", "/events"):
            assert (await server.get(f"/v1/jobs/{job_id}{path}")).status == 404
        for how in ("cancel", "pause", "resume", "rerun"):
            assert (await move(server, job_id, how)).status == 404
        assert (await patch(server, job_id, concurrency=3)).status == 404
        clock.advance(SETTLE_SECONDS + 1)
        while await retention(server.system).run_once() != Removed():
            pass
        assert await rows(server.system) == {}
        assert files(server.system) == []

    async def test_it_goes_on_where_it_was_broken_off(
        self, server: Api, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from conveyor.recover import retention as module

        monkeypatch.setattr(module, "_ROWS", 70)
        monkeypatch.setattr(module, "_BLOBS", 50)
        job_id = await self._with_reruns(server)
        assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
        clock.advance(SETTLE_SECONDS + 1)
        steps = 0
        # A role of its own for each step: nothing is kept between them.
        while (removed := await retention(server.system).run_once()) != Removed():
            assert removed.tasks <= 70
            steps += 1
        assert steps > 9
        assert await rows(server.system) == {}
        assert files(server.system) == []

    async def test_what_runs_of_a_rerun_stops(self, server: Api, clock: JumpingClock) -> None:
        async with working(server.system, Flaky(lambda job, index: 503)) as echo:
            job_id = await submit(server, 100, attempts=1)
            await ended(server, job_id)
            echo.gate.clear()
            ran = sum(echo.ran.values())
            await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "all"})
            await until(lambda: held(server, job_id))
            run = (await job_of(server, job_id)).run.run_id
            assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
            await until(lambda: server.system.coordinator.permits_in_use(f"run:{run}"), lambda number: number == 0)
            echo.gate.set()
            clock.advance(SETTLE_SECONDS + 1)
            await until(lambda: rows(server.system), lambda left: not left)
        assert sum(echo.ran.values()) == ran
        assert files(server.system) == []


class TestSweep:
    """What a cancelled run leaves pending is found without walking over what was swept before."""

    async def test_steps_over_what_was_swept(self, system: System) -> None:
        clock = ManualClock()
        run = make_run(clock)
        await system.tasks.put(run, seeds(1000))
        await system.tasks.finish(run, [end(index) for index in range(0, 1000, 2)])
        database: Any = system.tasks._database  # type: ignore[attr-defined]
        asked: list[int] = []
        ask = database.rows

        async def watched(query: str, values: dict[str, Any]) -> Any:
            if "start" in values:
                asked.append(values["start"])
            return await ask(query, values)

        database.rows = watched
        moved = []
        while step := await system.tasks.cancel_pending(run, 100, 1.0):
            moved.append(step)
        assert moved == [100] * 5
        # Once more from the beginning before it says that nothing is left.
        assert asked == [0, 200, 400, 600, 800, 1000, 0]
        assert await system.tasks.counts(run) == await system.tasks.recount(run) == Counts(500, 0, 500)

    async def test_what_is_written_behind_it_is_found(self, system: System) -> None:
        run = make_run(ManualClock())
        await system.tasks.put(run, seeds(50, start=50))
        assert await system.tasks.cancel_pending(run, 30, 1.0) == 30
        await system.tasks.put(run, seeds(10))
        assert await system.tasks.cancel_pending(run, 30, 1.0) == 20
        assert await system.tasks.cancel_pending(run, 30, 1.0) == 10
        assert await system.tasks.cancel_pending(run, 30, 1.0) == 0

    async def test_what_ends_meanwhile_does_not_end_the_sweep(self, system: System) -> None:
        run = make_run(ManualClock())
        await system.tasks.put(run, seeds(50))
        database: Any = system.tasks._database  # type: ignore[attr-defined]
        ask, first = database.rows, True

        async def overtaken(query: str, values: dict[str, Any]) -> Any:
            nonlocal first
            found = await ask(query, values)
            if "start" in values and first:
                first = False
                await system.tasks.finish(run, [end(index) for index in range(10)])
            return found

        database.rows = overtaken
        assert await system.tasks.cancel_pending(run, 10, 1.0) == 10
        assert await system.tasks.counts(run) == Counts(10, 0, 10)

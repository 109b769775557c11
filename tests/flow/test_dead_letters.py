"""Dead letters over HTTP: they are listed, each says what redrive does with it, and redrive does that."""

from typing import Any

import msgspec
import pytest

from conveyor.api.schemas.dead_letter_shapes import DeadLettersPage
from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.jobs.chunks import encode
from conveyor.lifecycle import Lifecycle
from conveyor.model import Chunk, IngestJob, IngestRange, InputJson, Job, JobId, RunId, TaskEnd, TaskRef, TenantId
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.working import Echo, all_items, ended, until, working

ACME = TenantId("acme")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, ingest_range_bytes=200, sync_list_bytes=0)


def text(count: int) -> bytes:
    return b"".join(b"http://example.com/%d\n" % number for number in range(count))


async def dead_letter(api: Api, body: bytes, queue: str = CONTROL, reason: str = "given up") -> None:
    await api.system.queue.send(queue, [Outgoing(body)])  # type: ignore[arg-type]
    [delivery] = await api.system.queue.receive(queue, 1, 60)  # type: ignore[arg-type]
    await api.system.queue.dead_letter(queue, [delivery.receipt], reason)  # type: ignore[arg-type]


async def letters(api: Api) -> list[dict[str, Any]]:
    return await all_items(api, "/v1/dead-letters")


async def redrive(api: Api, *ids: str) -> tuple[int, int]:
    answer = await api.post("/v1/dead-letters/redrive", {"ids": list(ids)})
    assert answer.status == 200, answer.body
    return answer.json["redriven"], answer.json["skipped"]


async def upload_job(api: Api, data: bytes) -> str:
    answer = await api.submit({"source": {"upload_id": await api.upload(data)}})
    job_id: str = answer.json["id"]
    return job_id


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def without_list(api: Api, data: bytes) -> tuple[str, str]:
    """A job whose list is gone; its id and the list's key."""
    job_id = await upload_job(api, data)
    source = (await job_of(api, job_id)).source
    assert source is not None
    await api.system.blobs.delete([source.key])
    return job_id, source.key


class TestListing:
    async def test_the_shape_of_a_letter(self, server: Api, clock: JumpingClock) -> None:
        async with working(server.system):
            job_id, _ = await without_list(server, text(3))
            done = await ended(server, job_id)
            page = await until(lambda: server.get("/v1/dead-letters"), lambda answer: answer.json["items"])
        msgspec.convert(page.json, DeadLettersPage)
        [letter] = page.json["items"]
        assert (letter["job_id"], letter["run_id"], letter["queue"]) == (job_id, done["run"]["id"], "control")
        assert letter["reason"] == done["reason"]
        assert (done["reason_code"], done["run"]["reason_code"]) == ("list_missing", "list_missing")
        assert letter["at"].endswith("Z")
        assert page.json["next_cursor"] is None

    async def test_a_letter_of_tasks(self, server: Api) -> None:
        job = await job_of(server, (await server.submit({"tasks": ["http://example.com/"]})).json["id"])
        queue = run_queue(job.run.run_id)
        await server.system.queue.drop(queue)
        await dead_letter(server, encode(Chunk(job.key, [TaskRef(0, InputJson('"secret input"'))])).body, queue)
        [letter] = await letters(server)
        assert (letter["queue"], letter["job_id"], letter["run_id"]) == ("run", job.job_id, job.run.run_id)
        assert "secret" not in str(letter)

    @pytest.mark.parametrize("limit", [1, 2, 3, 100])
    async def test_pages_pass_over_the_letters_of_others(self, server: Api, limit: int) -> None:
        mine = []
        for number in range(30):
            tenant = "acme" if number % 7 == 3 else "other"
            message = IngestJob(TenantId(tenant), JobId(f"job_{number}"), RunId("run_1"))
            await dead_letter(server, msgspec.json.encode(message))
            if tenant == "acme":
                mine.append(f"job_{number}")
        items = await all_items(server, "/v1/dead-letters", limit)
        assert [item["job_id"] for item in items] == mine

    async def test_a_letter_that_nobody_can_read_is_nobodys(self, server: Api) -> None:
        for body in (b"", b"{}", b'{"op": "new"}', b"\xff"):
            await dead_letter(server, body)
            await dead_letter(server, body, "run:run_1")
        assert await letters(server) == []
        ids = [str(number) for number in range(1, 20)]
        assert await redrive(server, *ids) == (0, len(ids))


class TestRedrive:
    async def test_an_ingest_goes_on_once_it_is_mended(self, server: Api) -> None:
        async with working(server.system):
            job_id, key = await without_list(server, text(50))
            await ended(server, job_id)
            [letter] = await until(lambda: letters(server))
            assert await redrive(server, letter["id"]) == (1, 0)
            await until(lambda: letters(server), lambda found: found and found[0]["id"] != letter["id"])
            assert (await ended(server, job_id))["state"] == "failed"
            [letter] = await letters(server)
            await server.system.blobs.put(key, text(50))
            assert await redrive(server, letter["id"]) == (1, 0)
            done = await ended(server, job_id)
        assert (done["state"], done["run"]["total"], done["reason"]) == ("completed", 50, None)
        assert await letters(server) == []

    async def test_several_ranges_of_one_list(self, server: Api, clock: JumpingClock) -> None:
        """Two of many ranges were given up; both letters go back and the list is whole."""
        put, failing = server.system.tasks.put, True

        async def fails(run: Any, seeds: Any) -> None:
            if failing and any(seed.index in {20, 70} for seed in seeds):
                raise RuntimeError("the store is down")
            await put(run, seeds)

        server.system.tasks.put = fails  # type: ignore[method-assign]
        job_id = await upload_job(server, text(100))

        async def look() -> list[dict[str, Any]]:
            clock.advance(5)
            return await letters(server)

        async with working(server.system):
            found = await until(look)
            assert {letter["job_id"] for letter in found} == {job_id}
            failing = False
            given = [letter["id"] for letter in await letters(server)]
            assert await redrive(server, *given) == (len(given), 0)

            async def state() -> dict[str, Any]:
                clock.advance(5)
                shown: dict[str, Any] = (await server.get(f"/v1/jobs/{job_id}")).json
                return shown

            done = await until(state, lambda job: job["state"] in {"completed", "failed"})
        assert (done["state"], done["run"]["total"]) == ("completed", 100)

    async def test_a_letter_of_a_run_that_goes_on_already(self, server: Api) -> None:
        """Resumed by hand meanwhile: the letter does no harm."""
        job_id = await upload_job(server, text(10))
        job = await job_of(server, job_id)
        await bury_ingest(server, job)
        [letter] = await letters(server)
        assert await redrive(server, letter["id"]) == (1, 0)
        async with working(server.system):
            assert (await ended(server, job_id))["run"]["total"] == 10

    async def test_letters_whose_work_has_ended_are_skipped(self, server: Api) -> None:
        async with working(server.system):
            job_id = await upload_job(server, text(3))
            await ended(server, job_id)
        job = await job_of(server, job_id)
        await dead_letter(server, msgspec.json.encode(IngestRange(ACME, job.job_id, job.run.run_id, 0)))
        await dead_letter(server, encode(Chunk(job.key, [TaskRef(0, InputJson("1"))])).body, run_queue(job.run.run_id))
        await dead_letter(server, msgspec.json.encode(IngestJob(ACME, job.job_id, RunId("run_before"))))
        await dead_letter(server, msgspec.json.encode(IngestJob(ACME, JobId("job_gone"), RunId("run_gone"))))
        ids = [letter["id"] for letter in await letters(server)]
        assert await redrive(server, *ids) == (0, 4)
        assert len(await letters(server)) == 4
        assert (await server.get(f"/v1/jobs/{job_id}")).json["state"] == "completed"

    async def test_a_task_that_has_not_ended_goes_back(self, server: Api) -> None:
        job_id = (await server.submit({"tasks": ["http://example.com/a", "http://example.com/b"]})).json["id"]
        job = await job_of(server, job_id)
        queue = run_queue(job.run.run_id)
        await server.system.queue.drop(queue)
        for index in (0, 1):
            await dead_letter(
                server, encode(Chunk(job.key, [TaskRef(index, InputJson('"http://example.com/"'))])).body, queue
            )
        end = TaskEnd(1, TaskStatus.FAILED, 4, None, "worker_lost", "{}", 1.0)
        await server.system.tasks.finish(job.key, [end])
        ids = [letter["id"] for letter in await letters(server)]
        assert await redrive(server, *ids) == (1, 1)
        async with working(server.system) as echo:
            done = await ended(server, job_id)
        assert (done["run"]["counts"]["succeeded"], done["run"]["counts"]["failed"]) == (1, 1)
        assert [index for _, index in echo.ran] == [0]

    async def test_a_dead_lettered_task_is_rerun(self, server: Api) -> None:
        """It has failed and its run is complete: redrive starts a run of this task alone."""
        job = await with_dead_lettered(server, 1)
        [letter] = await letters(server)
        assert (letter["redrive"], letter["redrive_effect"]) == ("rerun_task", "Starts a rerun of the task.")
        assert await redrive(server, letter["id"]) == (1, 0)
        assert await letters(server) == []
        async with working(server.system) as echo:
            done = await ended(server, job.job_id)
        assert (done["state"], done["run"]["number"], done["run"]["total"]) == ("completed", 2, 1)
        assert done["run"]["lineage"]["indexes"] == [1]
        assert [index for _, index in echo.ran] == [1]
        shown = await all_items(server, f"/v1/jobs/{job.job_id}/results?run=latest-per-task")
        assert {task["index"]: task["status"] for task in shown} == dict.fromkeys(range(4), "succeeded")

    async def test_several_tasks_of_a_job_are_one_rerun(self, server: Api) -> None:
        job = await with_dead_lettered(server, 0, 2, 3)
        ids = [letter["id"] for letter in await letters(server)]
        assert await redrive(server, ids[0], ids[2], "999") == (2, 1)
        async with working(server.system) as echo:
            done = await ended(server, job.job_id)
        assert (done["run"]["number"], done["run"]["counts"]["succeeded"]) == (2, 2)
        assert sorted(index for _, index in echo.ran) == [0, 3]
        # The third letter is of an earlier run now, and its task has still failed.
        [letter] = await letters(server)
        assert (letter["id"], letter["redrive"]) == (ids[1], "rerun_task")
        assert await redrive(server, letter["id"]) == (1, 0)
        async with working(server.system) as echo:
            done = await ended(server, job.job_id)
        assert (done["run"]["number"], [index for _, index in echo.ran]) == (3, [2])

    async def test_while_a_run_is_in_progress_it_is_a_conflict(self, server: Api) -> None:
        job = await with_dead_lettered(server, 1, latest_ended=False)
        [letter] = await letters(server)
        assert letter["redrive_effect"] == "Starts a rerun of the task once the run in progress has finished."
        answer = await server.post("/v1/dead-letters/redrive", {"ids": [letter["id"]]})
        assert (answer.status, answer.json["code"], answer.json["job_id"]) == (409, "run_not_ended", job.job_id)
        assert [found["id"] for found in await letters(server)] == [letter["id"]]

    async def test_a_redrive_that_stopped_after_the_rerun_is_not_repeated(
        self, server: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = await with_dead_lettered(server, 1)
        [letter] = await letters(server)

        async def crash(_: Any) -> int:
            raise RuntimeError("the queue is down")

        with monkeypatch.context() as patch:
            patch.setattr(server.system.queue, "discard", crash)
            assert (await server.post("/v1/dead-letters/redrive", {"ids": [letter["id"]]})).status == 500
        assert (await server.post("/v1/dead-letters/redrive", {"ids": [letter["id"]]})).status == 409
        assert (await job_of(server, job.job_id)).run.number == 2
        async with working(server.system):
            done = await ended(server, job.job_id)
        assert (done["run"]["number"], done["run"]["counts"]["succeeded"]) == (2, 1)
        [letter] = await letters(server)
        assert (letter["redrive"], letter["redrive_effect"]) == ("none", "Nothing: none of its tasks is failed now.")
        assert await redrive(server, letter["id"]) == (0, 1)

    async def test_a_cancelled_rerun_hides_no_failure(self, server: Api) -> None:
        job = await with_dead_lettered(server, 1)
        before = await letters(server)
        assert (before[0]["redrive"], before[0]["error_code"]) == ("rerun_task", "worker_lost")
        assert (await server.post(f"/v1/jobs/{job.job_id}/rerun", {"select": "failed"})).status == 202
        echo = Echo()
        echo.gate.clear()
        async with working(server.system, echo):
            [letter] = await until(lambda: letters(server), lambda found: found[0]["redrive"] == "none")
            assert letter["redrive_effect"] == "Nothing: none of its tasks is failed now."
            assert (await server.post(f"/v1/jobs/{job.job_id}/cancel")).status < 300
            await ended(server, job.job_id)
            rerun = await job_of(server, job.job_id)
            await until(lambda: server.system.tasks.counts(rerun.key), lambda counts: counts.cancelled == 1)
        assert await letters(server) == before
        assert await redrive(server, before[0]["id"]) == (1, 0)
        async with working(server.system) as echo:
            assert (await ended(server, job.job_id))["run"]["number"] == 3
        assert [index for _, index in echo.ran] == [1]

    async def test_a_task_of_a_rerun_that_has_not_ended_goes_back(self, server: Api) -> None:
        """Its earlier failure does not count while the rerun is in progress."""
        job = await with_dead_lettered(server, 1)
        [old] = await letters(server)
        assert (await server.post(f"/v1/jobs/{job.job_id}/rerun", {"select": "failed"})).status == 202
        echo = Echo()
        echo.gate.clear()
        async with working(server.system, echo):
            await until(lambda: letters(server), lambda found: found[0]["redrive"] == "none")
        rerun = await job_of(server, job.job_id)
        queue = run_queue(rerun.run.run_id)
        await server.system.queue.drop(queue)
        await dead_letter(server, encode(Chunk(rerun.key, [TaskRef(1, InputJson('"x"'))])).body, queue)
        assert {letter["id"]: letter["redrive"] for letter in await letters(server)}.pop(old["id"]) == "none"
        [letter] = [each for each in await letters(server) if each["id"] != old["id"]]
        assert letter["redrive"] == "requeue"
        assert await redrive(server, letter["id"]) == (1, 0)

    async def test_each_letter_goes_once(self, server: Api) -> None:
        job = await job_of(server, await upload_job(server, text(3)))
        await bury_ingest(server, job)
        [letter] = await letters(server)
        assert await redrive(server, letter["id"], letter["id"], "999", "nonsense", "", "-1", "9" * 40) == (1, 5)
        assert await redrive(server, letter["id"]) == (0, 1)

    @pytest.mark.parametrize(
        ("body", "code"),
        [
            ({}, "invalid_field"),
            ({"ids": []}, "invalid_field"),
            ({"ids": ["1"] * 1001}, "invalid_field"),
            ({"ids": [1]}, "invalid_field"),
            ({"ids": "1"}, "invalid_field"),
            ({"ids": ["1"], "tenant": "other"}, "unknown_field"),
            (b"", "malformed_json"),
        ],
        ids=lambda value: str(value)[:30],
    )
    async def test_what_is_not_taken(self, server: Api, body: Any, code: str) -> None:
        answer = await server.post("/v1/dead-letters/redrive", body)
        assert (answer.status, answer.json["code"]) == (400, code)


async def with_dead_lettered(api: Api, *indexes: int, latest_ended: bool = True) -> Job:
    """A job of four tasks, of which these are dead-lettered: failed, each with its letter."""
    answer = await api.submit({"tasks": [f"http://example.com/{number}" for number in range(4)], "chunk_size": 1})
    job = await job_of(api, answer.json["id"])
    queue = run_queue(job.run.run_id)
    await api.system.queue.drop(queue)
    ends = []
    for index in range(4):
        if index in indexes:
            await dead_letter(api, encode(Chunk(job.key, [TaskRef(index, InputJson("1"))], alone=True)).body, queue)
            ends.append(TaskEnd(index, TaskStatus.FAILED, 4, None, "worker_lost", "{}", 1.0))
        elif latest_ended:
            ends.append(TaskEnd(index, TaskStatus.SUCCEEDED, 1, 200, None, "{}", 1.0))
    finished = await api.system.tasks.finish(job.key, ends)
    await Lifecycle(api.system.records, api.system.tasks, api.system.clock).settle(job, finished.counts)
    return await job_of(api, job.job_id)


async def bury_ingest(api: Api, job: Job) -> None:
    """Give up the message that stands in the control queue for this job."""
    [delivery] = await api.system.queue.receive(CONTROL, 10, 60)
    await api.system.queue.dead_letter(CONTROL, [delivery.receipt], "given up")
    assert job.run.run_id.encode() in delivery.body

"""`on_exhausted: dead_letter`: a task without retries left is failed and a dead letter; it is redriven by id, by error
code, by job, or with all others. Redrive starts a rerun."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from conveyor.accept import redrive as redrive_module
from conveyor.api.schemas.dead_letter_shapes import DeadLettersPage
from conveyor.jobs.dead_lettered_tasks import DEAD_LETTERS
from conveyor.model import Job, TenantId
from conveyor.recover.sampler import Sampler
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.telemetry import metrics
from tests.support.api import Api
from tests.support.clocks import JumpingClock
from tests.support.working import Flaky, all_items, ended, until, working

QUICK: dict[str, Any] = {"attempts": 2, "backoff": {"base": 0, "jitter": False}}
PARKED: dict[str, Any] = {**QUICK, "on_exhausted": "dead_letter"}


@pytest.fixture(params=[1, 3], ids=["whole", "sharded"])
def settings(settings: Settings, request: pytest.FixtureRequest) -> Settings:
    """Small jobs have one shard, and the others here three."""
    if request.param == 1:
        return settings
    return Settings.load(
        {}, data=settings.data, sync_task_limit=1, task_shard_count=request.param, force_task_shards=True
    )


def wrong(job: Job, index: int) -> int | str | None:
    """In the first run, of ten tasks: two 503, one timeout, one 404."""
    if job.run.number > 1:
        return None
    return {1: 503, 4: 503, 5: "timeout", 7: 404}.get(index % 10)


def always(job: Job, index: int) -> int | str | None:
    return {1: 503, 4: 503, 5: "timeout", 7: 404}.get(index % 10)


async def submit(api: Api, count: int = 10, **options: Any) -> str:
    spec = {"tasks": [f"http://example.com/{n}" for n in range(count)], **PARKED, **options}
    answer = await api.submit(spec)
    assert answer.status < 300, answer.body
    job_id: str = answer.json["id"]
    return job_id


async def run_once(api: Api, fails: Callable[[Job, int], int | str | None] = wrong, **options: Any) -> dict[str, Any]:
    async with working(api.system, Flaky(fails)):
        return await ended(api, await submit(api, **options))


async def letters(api: Api, query: str = "", limit: int = 1000) -> list[dict[str, Any]]:
    return await all_items(api, f"/v1/dead-letters{query}", limit)


async def redrive(api: Api, **body: Any) -> dict[str, Any]:
    answer = await api.post("/v1/dead-letters/redrive", body)
    assert answer.status == 200, answer.body
    shown: dict[str, Any] = answer.json
    return shown


async def statuses(api: Api, job_id: str) -> dict[int, str]:
    items = await all_items(api, f"/v1/jobs/{job_id}/results?run=latest-per-task")
    return {item["index"]: item["status"] for item in items if item["status"] != "succeeded"}


async def named_runs(api: Api) -> list[str]:
    """The runs that may have dead-lettered tasks."""
    page = await api.system.records.documents.documents(DEAD_LETTERS, TenantId("acme"), None, 100)
    return [document.id for document in page.items]


class TestParking:
    async def test_a_task_without_retries_left_is_failed_and_a_dead_letter(self, server: Api) -> None:
        job = await run_once(server)
        assert (job["state"], job["run"]["counts"]["failed"]) == ("completed", 4)
        page = await server.get("/v1/dead-letters")
        msgspec.convert(page.json, DeadLettersPage)
        found = {letter["index"]: letter for letter in page.json["items"]}
        assert {index: letter["error_code"] for index, letter in found.items()} == {
            1: "http_503",
            4: "http_503",
            5: "timeout",
        }, "a 404 is not retried, so it has no retries to exhaust"
        letter = found[4]
        assert letter["id"] == f"{job['id']}:1:4"
        assert (letter["job_id"], letter["run_id"], letter["attempts"]) == (job["id"], job["run"]["id"], 2)
        assert (letter["reason"], letter["redrive"]) == ("as it was told", "rerun_task")
        shown = (await server.get(f"/v1/jobs/{job['id']}/tasks/{letter['task_id']}")).json
        assert (shown["status"], shown["dead_lettered"], shown["error"]["code"]) == ("failed", True, "http_503")
        events = await all_items(server, f"/v1/jobs/{job['id']}/events?task={letter['task_id']}")
        assert [event["event"] for event in events] == ["task.retried", "task.dead_lettered"]
        assert events[-1]["data"]["error"]["code"] == "http_503"

    async def test_by_default_it_only_fails(self, server: Api) -> None:
        job = await run_once(server, on_exhausted="fail")
        assert job["run"]["counts"]["failed"] == 4
        assert await letters(server) == []
        items = await all_items(server, f"/v1/jobs/{job['id']}/results?status=failed")
        assert {item["dead_lettered"] for item in items} == {False}

    async def test_one_attempt_is_enough(self, server: Api) -> None:
        await run_once(server, attempts=1)
        assert sorted(letter["index"] for letter in await letters(server)) == [1, 4, 5]

    async def test_what_the_job_retries_decides(self, server: Api) -> None:
        await run_once(server, retry_statuses=[404], retry_errors=[])
        assert [letter["index"] for letter in await letters(server)] == [7]

    async def test_a_task_past_its_deadline_has_no_retries_left(self, server: Api, clock: JumpingClock) -> None:
        await run_once(server, task_deadline=1, backoff={"base": 5, "jitter": False})
        assert {letter["index"]: letter["error_code"] for letter in await letters(server)} == dict.fromkeys(
            [1, 4, 5], "deadline"
        )

    async def test_the_option_can_be_changed_while_the_job_runs(self, server: Api) -> None:
        job_id = await submit(server, on_exhausted="fail")
        change = b'{"on_exhausted": "dead_letter"}'
        assert (await server.request("PATCH", f"/v1/jobs/{job_id}", body=change)).status == 200
        async with working(server.system, Flaky(wrong)):
            await ended(server, job_id)
        assert len(await letters(server)) == 3

    async def test_metrics_and_the_sampler(self, server: Api, clock: JumpingClock) -> None:
        before = sum(metrics.DEAD_LETTERED.series.values())
        await run_once(server)
        assert sum(metrics.DEAD_LETTERED.series.values()) - before == 3
        clock.advance(100)
        await Sampler(server.system).tick()
        assert metrics.DEAD_LETTERS.series[()] == 3
        assert metrics.QUEUE_AGE_SECONDS.series["dead_letters",] >= 100

    @pytest.mark.parametrize("value", ["park", "", None, True])
    async def test_other_values_are_refused(self, server: Api, value: Any) -> None:
        answer = await server.submit({"tasks": ["http://example.com/"], "on_exhausted": value})
        assert (answer.status, answer.json["code"], answer.json["field"]) == (400, "invalid_field", "on_exhausted")


class TestListing:
    @pytest.mark.parametrize("limit", [1, 2, 1000])
    async def test_pages_over_several_jobs(self, server: Api, limit: int) -> None:
        first = await run_once(server)
        second = await run_once(server, count=20)
        found = await letters(server, limit=limit)
        assert sorted(letter["id"] for letter in found) == sorted(
            [f"{first['id']}:1:{n}" for n in (1, 4, 5)] + [f"{second['id']}:1:{n}" for n in (1, 4, 5, 11, 14, 15)]
        )
        of_job = await letters(server, f"?job_id={first['id']}", limit)
        assert {letter["job_id"] for letter in of_job} == {first["id"]}
        assert len(of_job) == 3
        by_code = await letters(server, "?error_code=timeout", limit)
        assert sorted(letter["index"] for letter in by_code) == [5, 5, 15]

    async def test_they_go_with_their_job(self, server: Api) -> None:
        job = await run_once(server)
        assert (await server.request("DELETE", f"/v1/jobs/{job['id']}")).status == 204
        assert await letters(server) == []

    async def test_an_unknown_job_is_not_found(self, server: Api) -> None:
        unknown = "job_" + "0" * 26
        assert (await server.get(f"/v1/dead-letters?job_id={unknown}")).status == 404
        assert (await server.post("/v1/dead-letters/redrive", {"job_id": unknown})).status == 404

    @pytest.mark.parametrize("cursor", ["task:", "task:x", "task:W", "task:WyJydW5feCIsMCwieCJd", "task:" + "x" * 500])
    async def test_bad_cursors(self, server: Api, cursor: str) -> None:
        answer = await server.get(f"/v1/dead-letters?cursor={cursor}")
        assert (answer.status, answer.json["code"]) == (400, "bad_cursor")


class TestRedrive:
    async def test_by_id(self, server: Api) -> None:
        job = await run_once(server)
        chosen = f"{job['id']}:1:4"
        unknown = [f"{job['id']}:1:7", f"{job['id']}:9:4", f"{job['id']}:1:99", "job_x:1:1", f"{job['id']}:1:"]
        done = await redrive(server, ids=[chosen, *unknown])
        assert (done["redriven"], done["skipped"]) == (1, len(unknown))
        async with working(server.system, Flaky(wrong)) as executor:
            again = await ended(server, job["id"])
        assert done["runs"] == [{"job_id": job["id"], "run_id": again["run"]["id"], "dead_letters": 1}]
        assert (again["run"]["number"], again["run"]["lineage"]["indexes"]) == (2, [4])
        assert [index for _, index in executor.ran] == [4]
        assert await statuses(server, job["id"]) == {1: "failed", 5: "failed", 7: "failed"}
        assert sorted(letter["index"] for letter in await letters(server)) == [1, 5]
        assert (await redrive(server, ids=[chosen]))["redriven"] == 0, "it was redriven already"

    @pytest.mark.parametrize("bound", [0, 1000], ids=["selected", "named"])
    async def test_by_error_code(self, server: Api, monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", bound)
        job = await run_once(server)
        other = await run_once(server)
        dry = await redrive(server, error_code="http_503", dry_run=True)
        assert [run["run_id"] for run in dry["runs"]] == [None, None]
        done = await redrive(server, error_code="http_503")
        assert (done["redriven"], done["skipped"]) == (4, 0)
        assert {**dry, "runs": []} == {**done, "runs": []}, "a dry run foretells it, and changes nothing"
        assert sorted(run["dead_letters"] for run in dry["runs"]) == [2, 2]
        blocked = await redrive(server, job_id=job["id"], dry_run=True)
        assert (blocked["redriven"], blocked["skipped"], blocked["blocked"]) == (0, 3, 3)
        assert {run["job_id"] for run in done["runs"]} == {job["id"], other["id"]}
        async with working(server.system, Flaky(wrong)) as executor:
            await ended(server, job["id"])
            await ended(server, other["id"])
        assert sorted(index for _, index in executor.ran) == [1, 1, 4, 4]
        assert [letter["index"] for letter in await letters(server)] == [5, 5]

    @pytest.mark.parametrize("bound", [0, 1000], ids=["selected", "named"])
    async def test_all(self, server: Api, monkeypatch: pytest.MonkeyPatch, bound: int) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", bound)
        job = await run_once(server, count=40)
        await run_once(server, on_exhausted="fail")
        done = await redrive(server, all=True)
        assert (done["redriven"], done["skipped"], len(done["runs"])) == (12, 0, 1)
        async with working(server.system, Flaky(wrong)):
            again = await ended(server, job["id"])
        assert (again["run"]["number"], again["run"]["total"]) == (2, 12)
        assert again["run"]["lineage"]["dead_lettered"] is (bound == 0)
        assert set(await statuses(server, job["id"])) == {7, 17, 27, 37}
        assert await letters(server) == []
        none = {"redriven": 0, "skipped": 0, "runs": [], "requeued": 0, "blocked": 0}
        assert await redrive(server, all=True) == none
        assert (await server.get(f"/v1/jobs/{job['id']}")).json["run"]["number"] == 2

    @pytest.mark.parametrize("bound", [0, 1000], ids=["selected", "named"])
    async def test_a_redrive_that_is_cancelled_loses_none(
        self, server: Api, monkeypatch: pytest.MonkeyPatch, bound: int
    ) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", bound)
        job = await run_once(server)
        before = await letters(server)
        assert (await redrive(server, all=True))["redriven"] == 3
        executor = Flaky(wrong)
        executor.gate.clear()
        async with working(server.system, executor):
            await until(lambda: letters(server), lambda found: not found)
            await Sampler(server.system).tick()
            assert metrics.DEAD_LETTERS.series[()] == 0, "their outcomes are still to come"
            assert (await server.post(f"/v1/jobs/{job['id']}/cancel")).status < 300
            assert (await ended(server, job["id"]))["state"] == "cancelled"
            assert await letters(server) == before
        await Sampler(server.system).tick()
        assert metrics.DEAD_LETTERS.series[()] == 3
        assert await statuses(server, job["id"]) == dict.fromkeys([1, 4, 5, 7], "failed")
        assert (await redrive(server, ids=[before[0]["id"]]))["redriven"] == 1
        async with working(server.system, Flaky(wrong)):
            await ended(server, job["id"])
        assert (await redrive(server, all=True))["redriven"] == 2
        async with working(server.system, Flaky(wrong)):
            assert (await ended(server, job["id"]))["run"]["number"] == 4
        assert await letters(server) == []
        assert await statuses(server, job["id"]) == {7: "failed"}

    @pytest.mark.parametrize("bound", [0, 1000], ids=["selected", "named"])
    async def test_a_run_is_forgotten_once_none_is_left(
        self, server: Api, monkeypatch: pytest.MonkeyPatch, bound: int
    ) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", bound)
        job = await run_once(server)
        assert await named_runs(server) == [job["run"]["id"]]
        await redrive(server, error_code="timeout")
        async with working(server.system, Flaky(wrong)):
            await ended(server, job["id"])
        await Sampler(server.system).tick()
        assert await named_runs(server) == [job["run"]["id"]], "two are left"
        await redrive(server, all=True)
        await Sampler(server.system).tick()
        assert await named_runs(server) == [job["run"]["id"]], "the rerun may be cancelled"
        async with working(server.system, Flaky(wrong)):
            await ended(server, job["id"])
        await Sampler(server.system).tick()
        assert await named_runs(server) == []

    async def test_a_run_with_more_than_the_sampler_reads_is_forgotten_too(
        self, server: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", 0)
        await run_once(server)
        job_id = (await redrive(server, all=True))["runs"][0]["job_id"]
        async with working(server.system, Flaky(wrong)):
            await ended(server, job_id)

        async def scan(*_: Any) -> Any:
            raise AssertionError("the rerun took them all, so there is nothing to read")

        monkeypatch.setattr(server.system.tasks, "scan", scan)
        await Sampler(server.system).tick()
        assert await named_runs(server) == []

    async def test_of_one_job(self, server: Api) -> None:
        job = await run_once(server)
        other = await run_once(server)
        assert (await redrive(server, job_id=job["id"]))["redriven"] == 3
        assert (await redrive(server, job_id=other["id"], error_code="timeout"))["redriven"] == 1

    async def test_what_fails_again_is_a_dead_letter_again(self, server: Api) -> None:
        job = await run_once(server)
        for number in (2, 3):
            assert (await redrive(server, all=True))["redriven"] == 3
            async with working(server.system, Flaky(always)):
                assert (await ended(server, job["id"]))["run"]["number"] == number
            assert sorted(letter["id"] for letter in await letters(server)) == [
                f"{job['id']}:{number}:{index}" for index in (1, 4, 5)
            ]

    async def test_a_rerun_by_hand_takes_them_too(self, server: Api) -> None:
        job = await run_once(server)
        assert (await server.post(f"/v1/jobs/{job['id']}/rerun", {"select": "failed"})).status == 202
        async with working(server.system, Flaky(wrong)):
            await ended(server, job["id"])
        assert await letters(server) == []

    async def test_while_a_run_is_in_progress_it_is_a_conflict(self, server: Api) -> None:
        executor = Flaky(lambda job, index: 503 if index == 0 else None)
        async with working(server.system, executor):
            job_id = (await server.submit({"mode": "open", **PARKED})).json["id"]
            await server.post(f"/v1/jobs/{job_id}/tasks", {"tasks": ["http://example.com/"]})
            (letter,) = await until(lambda: letters(server))
            assert letter["redrive_effect"] == "Starts a rerun of the task once the run in progress has finished."
            for body in ({"all": True}, {"error_code": "http_503"}, {"job_id": job_id}, {"ids": [letter["id"]]}):
                answer = await server.post("/v1/dead-letters/redrive", body)
                assert (answer.status, answer.json["code"], answer.json["job_id"]) == (409, "run_not_ended", job_id)
            await server.post(f"/v1/jobs/{job_id}/close")
            await ended(server, job_id)
        assert (await redrive(server, all=True))["redriven"] == 1

    async def test_more_than_are_counted_are_all_redriven(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redrive_module, "_MAX_INDEXES", 1)
        monkeypatch.setattr(redrive_module, "MAX_COUNTED", 2)
        monkeypatch.setattr(redrive_module, "_PAGE", 2)
        job = await run_once(server, count=20)
        assert (await redrive(server, all=True))["redriven"] == 2
        async with working(server.system, Flaky(wrong)):
            assert (await ended(server, job["id"]))["run"]["total"] == 6

    @pytest.mark.parametrize(
        "body",
        [{}, {"all": False}, {"ids": ["1"], "all": True}, {"ids": ["1"], "error_code": "timeout"}, {"error_code": ""}],
        ids=str,
    )
    async def test_what_is_not_taken(self, server: Api, body: Any) -> None:
        answer = await server.post("/v1/dead-letters/redrive", body)
        assert (answer.status, answer.json["code"]) == (400, "invalid_field")

    async def test_another_tenant_neither_sees_nor_redrives_them(self, server: Api) -> None:
        job = await run_once(server)
        stranger = await server.as_tenant("other")
        assert await letters(stranger) == []
        for body in ({"ids": [f"{job['id']}:1:4"]}, {"all": True}, {"error_code": "http_503"}):
            answer = await stranger.post("/v1/dead-letters/redrive", body)
            assert (answer.status, answer.json["redriven"]) == (200, 0)
        assert (await stranger.post("/v1/dead-letters/redrive", {"job_id": job["id"]})).status == 404
        assert len(await letters(server)) == 3


async def test_the_mark_is_part_of_the_row(server: Api) -> None:
    """It is written in one step with the failure, so that no crash separates them."""
    job_id = (await run_once(server))["id"]
    page = await server.system.records.jobs.jobs("acme", None, 10)  # type: ignore[arg-type]
    (job,) = [each for each in page.items if each.job_id == job_id]
    tasks = await server.system.tasks.at(job.key, [1, 4, 5, 7])
    assert [(task.status, task.detail.dead_lettered) for task in tasks] == [
        (TaskStatus.FAILED, index != 7) for index in (1, 4, 5, 7)
    ]

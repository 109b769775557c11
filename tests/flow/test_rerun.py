"""Reruns: some or all tasks of a job once more, as a run of its own beside the earlier ones."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.answer import AcceptedView
from conveyor.accept.rerun import Rerun, RerunSpec, Selection
from conveyor.api.schemas.job_shapes import JobShape, JobsPage
from conveyor.api.schemas.task_shapes import TaskSearchPage
from conveyor.engines.queue import CONTROL
from conveyor.errors import ConveyorError
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.jobs.job_counts import job_counts
from conveyor.lists import reader as lists
from conveyor.model import Counts, Job, JobId, RunKey, TaskRef, TenantId, task_id
from conveyor.process import worker
from conveyor.read import run_comparison
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from tests.faults.hits import ALL_HITS
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock
from tests.support.small_fleet import Fleet, failure, open_fleet, success
from tests.support.working import Flaky, all_items, ended, until, working

ACME = TenantId("acme")
FIRST, SECOND, THIRD = 1, 2, 3


@pytest.fixture(params=[1, 4], ids=["one shard", "four shards"])
def settings(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Written in the request, or ingested over shards."""
    return Settings.load(
        {},
        data=settings.data,
        sync_task_limit=1 if request.param > 1 else 10_000,
        sync_list_bytes=0,
        force_task_shards=request.param > 1,
        task_shard_count=request.param,
    )


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "BATCH", 7)


def inputs(count: int) -> list[Any]:
    """Every third has a tag."""
    urls = [f"http://example.com/{number}" for number in range(count)]
    return [{"url": url, "tag": "third"} if number % 3 == 0 else url for number, url in enumerate(urls)]


async def submit(api: Api, count: int, **spec: Any) -> str:
    answer = await api.submit({"tasks": inputs(count), "attempts": 1, "chunk_size": 10, **spec})
    assert answer.status in (201, 202), answer.body
    job_id: str = answer.json["id"]
    return job_id


async def rerun(api: Api, job_id: str, select: Any = "failed", **options: Any) -> Answer:
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"select": select, "options": options})
    assert answer.status == 202, answer.body
    return answer


async def again(api: Api, job_id: str, select: Any = "failed", **options: Any) -> dict[str, Any]:
    """Run once more, to the end."""
    await rerun(api, job_id, select, **options)
    return await ended(api, job_id)


async def results(api: Api, job_id: str, query: str = "", limit: int = 1000) -> dict[int, dict[str, Any]]:
    """By index; each is there once."""
    items = await all_items(api, f"/v1/jobs/{job_id}/results{query}", limit)
    found = {item["index"]: item for item in items}
    assert len(found) == len(items)
    return found


def without_links(items: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Links to bodies are signed anew for each answer."""
    return {item["index"]: {**item, "body_url": item["body_url"] is not None} for item in items}


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


def every(step: int, wrong: int | str = 503) -> Callable[[Job, int], int | str | None]:
    """In the first run every so many fail."""
    return lambda job, index: wrong if job.run.number == FIRST and index % step == 0 else None


async def test_what_failed_is_run_again(server: Api) -> None:
    async with working(server.system, Flaky(every(5))) as echo:
        job_id = await submit(server, 100)
        first = await ended(server, job_id)
        assert first["run"]["counts"] == {
            "pending": 0,
            "running": 0,
            "succeeded": 80,
            "failed": 20,
            "cancelled": 0,
            "unchanged": 0,
        }
        answer = await rerun(server, job_id)
        accepted = msgspec.json.decode(answer.body, type=AcceptedView)
        assert (accepted.id, accepted.state, accepted.run.number, accepted.run.state) == (
            job_id,
            "ingesting",
            2,
            "ingesting",
        )
        assert answer.headers["location"] == f"/v1/jobs/{job_id}"
        done = await ended(server, job_id)
        msgspec.convert(done, JobShape)
    assert (done["state"], done["run"]["id"], done["run"]["number"]) == ("completed", accepted.run.id, 2)
    assert done["run"]["counts"] == {
        "pending": 0,
        "running": 0,
        "succeeded": 20,
        "failed": 0,
        "cancelled": 0,
        "unchanged": 0,
    }
    assert done["ingest"]["tasks"] == 20
    failed = set(range(0, 100, 5))
    second = await results(server, job_id, "?run=latest")
    assert set(second) == failed
    for index, item in second.items():
        assert item["task_id"] == task_id(accepted.run.id, index)
        assert (item["status"], item["input"]) == ("succeeded", inputs(100)[index])
    assert {index for (run, index), _ in echo.ran.items() if run == accepted.run.id} == failed
    assert all(times == 1 for times in echo.ran.values())


async def test_a_rerun_replaces_outcomes_of_a_later_run_alone(server: Api) -> None:
    """No task of the first run is selected: the first range of the ingest is empty."""
    async with working(server.system, Flaky(lambda job, index: 503 if job.run.number == FIRST or index % 2 else None)):
        job_id = await submit(server, 10)
        assert (await ended(server, job_id))["counts"]["failed"] == 10
        await again(server, job_id)
        done = await again(server, job_id, {"http_status": 200})
    assert (done["run"]["number"], done["run"]["counts"]["succeeded"]) == (3, 5)
    assert done["counts"] == {"pending": 0, "running": 0, "succeeded": 5, "failed": 5, "cancelled": 0, "unchanged": 0}


async def test_what_the_earlier_run_came_to_stays_readable(server: Api) -> None:
    async with working(server.system, Flaky(every(4))):
        job_id = await submit(server, 40)
        before = (await ended(server, job_id))["run"]
        old = await results(server, job_id)
        await again(server, job_id)
    for which in (before["id"], "1"):
        again_read = await results(server, job_id, f"?run={which}", 7)
        assert without_links(again_read.values()) == without_links(old.values())
    one = next(item for item in old.values() if item["status"] == "succeeded")
    shown = await server.get(f"/v1/jobs/{job_id}/tasks/{one['task_id']}")
    assert without_links([shown.json]) == without_links([one])
    body = await server.get(one["body_url"])
    assert (body.status, body.headers["etag"]) == (200, f'"{one["sha256"]}"')
    bad = next(item for item in old.values() if item["status"] == "failed")
    events = (await server.get(f"/v1/jobs/{job_id}/events?task={bad['task_id']}")).json["items"]
    assert {event["run_id"] for event in events} == {before["id"]}


@pytest.mark.parametrize("limit", [1, 6, 1000])
async def test_latest_per_task_has_the_latest_result_of_each(server: Api, limit: int) -> None:
    def fails(job: Job, index: int) -> str | None:
        stubborn = index % 10 == 0 and job.run.number < THIRD
        return "timeout" if stubborn or (index % 5 == 0 and job.run.number == FIRST) else None

    async with working(server.system, Flaky(fails)):
        job_id = await submit(server, 60)
        await ended(server, job_id)
        await again(server, job_id)
        latest = await results(server, job_id, "?run=latest-per-task", limit)
        assert {index for index, item in latest.items() if item["status"] == "failed"} == set(range(0, 60, 10))
        await again(server, job_id)
    runs = [run["id"] for run in reversed((await server.get(f"/v1/jobs/{job_id}")).json["runs"])]
    latest = await results(server, job_id, "?run=latest-per-task", limit)
    assert sorted(latest) == list(range(60))
    assert {item["status"] for item in latest.values()} == {"succeeded"}
    for index, item in latest.items():
        newest = 2 if index % 10 == 0 else 1 if index % 5 == 0 else 0
        assert item["task_id"] == task_id(runs[newest], index)
    order = [item["index"] for item in await all_items(server, f"/v1/jobs/{job_id}/results?run=1", limit)]
    assert list(latest) == order, "the order of the first run"


async def test_latest_per_task_is_filtered_by_the_latest_result(server: Api) -> None:
    async with working(server.system, Flaky(every(5))):
        job_id = await submit(server, 60)
        await ended(server, job_id)
        await again(server, job_id, {"tag": "third", "status": ["failed"]})
    failed = set(range(0, 60, 5)) - set(range(0, 60, 15))
    for query, wanted in (
        ("&status=failed", failed),
        ("&error_code=http_503", failed),
        ("&http_status=503", failed),
        ("&http_status=200", set(range(60)) - failed),
        ("&tag=third", set(range(0, 60, 3))),
        ("&tag=third&status=failed", set()),
        ("&tag=fourth", set()),
    ):
        for limit in (4, 1000):
            assert set(await results(server, job_id, f"?run=latest-per-task{query}", limit)) == wanted, query


async def test_chosen_is_by_the_newest_outcome(server: Api) -> None:
    """One that failed in the first run and was run again since counts as it came out then; one that was not run again
    still counts as failed."""
    wrong = {0: "timeout", 1: "dns_failed", 2: "timeout", 3: "dns_failed"}
    mended: set[int] = set()
    flaky = Flaky(lambda job, index: None if index in mended else wrong.get(index))
    async with working(server.system, flaky):
        job_id = await submit(server, 30)
        await ended(server, job_id)
        mended |= {0}
        done = await again(server, job_id, {"error_code": "timeout"})
        assert set(await results(server, job_id, "?run=latest")) == {0, 2}
        assert (done["run"]["total"], done["run"]["counts"]["failed"]) == (2, 1)
        mended |= {1}
        await again(server, job_id)
        assert set(await results(server, job_id, "?run=latest")) == {1, 2, 3}
        await again(server, job_id, {"error_code": "timeout"})
        assert set(await results(server, job_id, "?run=latest")) == {2}
        mended |= {2, 3}
        await again(server, job_id)
        assert set(await results(server, job_id, "?run=latest")) == {2, 3}
        answer = await server.post(f"/v1/jobs/{job_id}/rerun", {"select": {"error_code": "bad_url"}})
        assert (answer.status, answer.json["code"]) == (409, "nothing_to_rerun")
        # The counts are those of the latest outcomes: all of it was mended since.
        answer = await server.post(f"/v1/jobs/{job_id}/rerun")
        assert (answer.status, answer.json["code"]) == (409, "nothing_to_rerun")
        # An option that does not exist is named first: it is why nothing matched, if it was meant as a selection.
        answer = await server.post(f"/v1/jobs/{job_id}/rerun", {"options": {"select": "all"}})
        assert (answer.status, answer.json["code"]) == (400, "unknown_field")
        # All means all, whatever the last run had.
        done = await again(server, job_id, "all")
        assert (done["run"]["total"], done["run"]["number"]) == (30, 6)
    assert set(await results(server, job_id, "?run=latest")) == set(range(30))
    assert len(await results(server, job_id, "?run=latest-per-task&status=succeeded")) == 30


async def test_two_runs_are_compared(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_comparison, "_ROWS", 4)
    wrong = {1: range(0, 30, 3), 2: range(0, 30, 2)}
    async with working(server.system, Flaky(lambda job, index: 503 if index in wrong[job.run.number] else None)):
        job_id = await submit(server, 30)
        await ended(server, job_id)
        await again(server, job_id, "all")
    for change, expected in {
        "fixed": [3, 9, 15, 21, 27],
        "newly_failed": [index for index in range(0, 30, 2) if index % 3],
        "still_failed": [0, 6, 12, 18, 24],
    }.items():
        found = await all_items(server, f"/v1/jobs/{job_id}/comparison?with=1&change={change}")
        assert [item["index"] for item in found] == expected
        assert {item["status"] for item in found} == {"succeeded" if change == "fixed" else "failed"}
        first = (await server.get(f"/v1/jobs/{job_id}/comparison?with=1&run=2&limit=2&change={change}")).json
        msgspec.convert(first, TaskSearchPage)
        assert [item["index"] for item in first["items"]] == expected[:2]
    for query, status in {
        "with=1&change=x": 400,
        "with=7&change=fixed": 404,
        "with=latest-per-task&change=fixed": 400,
    }.items():
        assert (await server.get(f"/v1/jobs/{job_id}/comparison?{query}")).status == status


@pytest.mark.parametrize(
    ("select", "wanted"),
    [
        ("failed", range(0, 60, 4)),
        ("all", range(60)),
        ({"status": ["failed"]}, range(0, 60, 4)),
        ({"status": ["succeeded"]}, [index for index in range(60) if index % 4]),
        ({"status": ["succeeded", "failed"]}, range(60)),
        ({"error_code": "http_503"}, range(0, 60, 4)),
        ({"error_code": "http_503", "tag": "third"}, range(0, 60, 12)),
        ({"http_status": 503}, range(0, 60, 4)),
        ({"http_status": 200}, [index for index in range(60) if index % 4]),
        ({"tag": "third"}, range(0, 60, 3)),
        ({"tag": "nobody's"}, []),
        ({"host": "EXAMPLE.com", "status": ["failed"]}, range(0, 60, 4)),
        ({"host": "example.org"}, []),
        ({"indexes": [7, 4, 7, 59, 1000]}, [4, 7, 59]),
        ({"indexes": [4, 5, 8], "status": ["failed"]}, [4, 8]),
        ({"http_status": 404, "status": ["failed"]}, []),
    ],
    ids=str,
)
async def test_what_can_be_chosen(server: Api, select: Any, wanted: Any) -> None:
    async with working(server.system, Flaky(every(4))):
        job_id = await submit(server, 60)
        await ended(server, job_id)
        done = await again(server, job_id, select)
    assert set(await results(server, job_id, "?run=latest")) == set(wanted)
    assert (done["state"], done["run"]["total"], done["run"]["counts"]["succeeded"]) == (
        "completed",
        len(wanted),
        len(wanted),
    )


async def test_what_is_damaged_is_run_again(server: Api) -> None:
    async with working(server.system, Flaky(every(5))) as echo:
        job_id = await submit(server, 40, result_layout="object")
        await ended(server, job_id)
        await again(server, job_id)
        damaged = {}
        for index in (1, 5, 20, 39):
            [task] = await server.system.tasks.at((await latest_key(server, job_id, index)), [index])
            assert task.detail.body is not None and task.detail.body.inline is None
            damaged[index] = server.system.settings.data / "blobs" / task.detail.body.key
        for index, path in damaged.items():
            if index % 2:
                path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
            else:
                path.unlink()
        done = await again(server, job_id, {"damaged": True})
        assert done["run"]["lineage"]["damaged"] is True
        ran = [index for run, index in echo.ran if run == done["run"]["id"]]
        assert sorted(ran) == sorted(damaged)
        for item in (await results(server, job_id)).values():
            assert (await server.get(item["body_url"], auth=False)).status == 200
        done = await again(server, job_id, {"damaged": True, "status": ["succeeded"]})
        assert done["run"]["total"] == 0, "the newest body counts"


async def latest_key(api: Api, job_id: str, index: int) -> RunKey:
    """The run with the latest outcome of a task, after a rerun of the failed ones."""
    job = await job_of(api, job_id)
    runs = await api.system.records.jobs.runs(JobId(job_id))
    return job.key if index % 5 == 0 else job.key_of(runs[0])


async def test_what_was_cancelled_is_run_again_swept_or_not(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_DRAIN_SECONDS", 0.0)
    async with working(server.system) as echo:
        echo.gate.clear()
        job_id = await submit(server, 50)
        await until(lambda: job_of(server, job_id), lambda job: job.run.last_batch)
    # With nobody at work, nobody sweeps.
    cancelled = await server.post(f"/v1/jobs/{job_id}/cancel")
    assert (cancelled.json["state"], cancelled.json["run"]["counts"]["pending"]) == ("cancelled", 50)
    await rerun(server, job_id, {"status": ["cancelled"]})
    async with working(server.system):
        done = await ended(server, job_id)
        assert (done["run"]["number"], done["run"]["total"]) == (2, 50)
        assert done["runs"][1]["counts"]["cancelled"] == 50
        assert (await again(server, job_id, {"status": ["cancelled"]}))["run"]["total"] == 0
    latest = await results(server, job_id, "?run=latest-per-task")
    assert {item["status"] for item in latest.values()} == {"succeeded"}


async def test_its_lineage_is_shown(server: Api) -> None:
    async with working(server.system, Flaky(every(5))):
        job_id = await submit(server, 20)
        first = await ended(server, job_id)
        headers, gateway = {"X-Key": "sesame"}, {"url": "http://user:sesame@example.com/{url}"}
        second = await again(server, job_id, {"error_code": "http_503"}, attempts=7, headers=headers, gateway=gateway)
        third = await again(server, job_id, "all")
    assert first["run"]["lineage"] is None
    assert second["run"]["lineage"] == {
        "parent": first["run"]["id"],
        "status": ["failed"],
        "error_code": "http_503",
        "http_status": None,
        "tag": None,
        "indexes": [],
        "dead_lettered": False,
        "damaged": False,
        "extract_only": False,
        "changed_only": False,
        "host": None,
        "options": {"attempts": 7, "headers": {"X-Key": "[hidden]"}, "gateway": {"url": "[hidden]"}},
    }
    assert [run["number"] for run in third["runs"]] == [3, 2, 1]
    assert third["runs"][0] == third["run"]
    assert third["runs"][1] == second["run"]
    assert third["runs"][2] == first["run"]
    assert third["run"]["lineage"]["parent"] == second["run"]["id"]
    listed = (await server.get("/v1/jobs")).json
    msgspec.convert(listed, JobsPage)
    assert listed["items"][0]["run"] == third["run"]
    events = await all_items(server, f"/v1/jobs/{job_id}/events")
    added = [event for event in events if event["event"] == "run.added"]
    assert [event["data"]["number"] for event in added] == [2, 3]
    assert added[0]["data"]["overrides"] == ["attempts", "gateway", "headers"]
    assert "sesame" not in str([third, listed, events])


class TestOptions:
    async def test_they_override_those_of_the_job(self, server: Api) -> None:
        async with working(server.system, Flaky(lambda job, _: 503 if job.options.concurrency == 3 else None)):
            job_id = await submit(server, 30, concurrency=3)
            await ended(server, job_id)
            done = await again(server, job_id, concurrency=5, rate_per_host=1000, backoff={"base": 0.5})
        assert done["run"]["counts"]["succeeded"] == 30
        kept = {"attempts": 1, "chunk_size": 10, "concurrency": 5, "pace": "auto", "rate_per_host": 1000}
        assert done["options"].pop("backoff")["base"] == 0.5
        assert done["options"] == kept
        async with working(server.system):
            done = await again(server, job_id, "all", rate_per_host=None)
        kept.pop("rate_per_host")
        assert done["options"].pop("backoff")["base"] == 0.5
        assert done["options"] == kept, "they stay for the runs that follow, and null is none"

    WRONG: ClassVar[list[tuple[dict[str, Any], str, str]]] = [
        ({"concurrency": 0}, "invalid_field", "concurrency"),
        ({"concurrency": "many"}, "invalid_field", "concurrency"),
        ({"concurrency": None}, "invalid_field", "concurrency"),
        ({"backoff": {"base": -1}}, "invalid_field", "backoff.base"),
        ({"backoff": {"speed": 1}}, "unknown_field", "backoff.speed"),
        ({"gateway": {"url": "nonsense"}}, "invalid_field", "gateway"),
        ({"handler": "mine"}, "invalid_field", "handler"),
        ({"retention_days": 366}, "invalid_field", "retention_days"),
        ({"on_invalid": "skip"}, "invalid_field", "on_invalid"),
        ({"tasks": []}, "unknown_field", "tasks"),
        ({"kind": "python"}, "unknown_field", "kind"),
        ({"x" * 500: 1}, "unknown_field", "x" * 100),
    ]

    async def test_they_are_checked_as_at_submit(self, server: Api) -> None:
        async with working(server.system, Flaky(every(2))):
            job_id = await submit(server, 5)
            await ended(server, job_id)
        for options, code, field in self.WRONG:
            answer = await server.post(f"/v1/jobs/{job_id}/rerun", {"options": options})
            assert (answer.status, answer.json["code"], answer.json["field"]) == (400, code, field), options
        assert len((await server.get(f"/v1/jobs/{job_id}")).json["runs"]) == 1


class TestRefusals:
    async def test_not_before_the_run_has_ended(self, server: Api) -> None:
        async with working(server.system, Flaky(every(2))) as echo:
            echo.gate.clear()
            job_id = await submit(server, 20)
            for path in ("", "/pause"):
                if path:
                    assert (await server.post(f"/v1/jobs/{job_id}{path}")).status == 200
                answer = await server.post(f"/v1/jobs/{job_id}/rerun")
                assert (answer.status, answer.json["code"]) == (409, "run_not_ended")
            await server.post(f"/v1/jobs/{job_id}/resume")
            echo.gate.set()
            await ended(server, job_id)
            echo.gate.clear()
            await rerun(server, job_id)
            answer = await server.post(f"/v1/jobs/{job_id}/rerun")
            assert (answer.status, answer.json["code"]) == (409, "run_not_ended")
            assert answer.json["state"] in ("ingesting", "running")
            echo.gate.set()
            await ended(server, job_id)

    async def test_there_is_nothing_to_run_again(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit(server, 5)
            await ended(server, job_id)
            for body in (None, {}, {"select": "failed"}, {"select": {"error_code": "timeout"}}):
                answer = await server.post(f"/v1/jobs/{job_id}/rerun", body)
                assert (answer.status, answer.json["code"]) == (409, "nothing_to_rerun")

    BODIES: ClassVar[list[tuple[Any, int, str]]] = [
        ({"select": "some"}, 400, "invalid_field"),
        ({"select": {}}, 400, "invalid_field"),
        ({"select": None}, 400, "invalid_field"),
        ({"select": {"status": ["pending"]}}, 400, "invalid_field"),
        ({"select": {"status": "failed"}}, 400, "invalid_field"),
        ({"select": {"http_status": 42}}, 400, "invalid_field"),
        ({"select": {"tag": ""}}, 400, "invalid_field"),
        ({"select": {"tag": "x" * 2000}}, 400, "invalid_field"),
        ({"select": {"error_code": "x" * 201}}, 400, "invalid_field"),
        ({"select": {"name": "x"}}, 400, "unknown_field"),
        ({"run": 1}, 400, "unknown_field"),
        ([], 400, "invalid_field"),
        (b"{", 400, "malformed_json"),
    ]

    async def test_its_body(self, server: Api) -> None:
        async with working(server.system, Flaky(every(2))):
            job_id = await submit(server, 3)
            await ended(server, job_id)
        for body, status, code in self.BODIES:
            answer = await server.post(f"/v1/jobs/{job_id}/rerun", body)
            assert (answer.status, answer.json["code"]) == (status, code), body
        text = await server.request(
            "POST", f"/v1/jobs/{job_id}/rerun", body=b"x", headers={"content-type": "text/plain"}
        )
        assert text.status == 415

    async def test_an_open_job_takes_no_more_while_it_is_run_again(self, server: Api, clock: JumpingClock) -> None:
        async with working(server.system, Flaky(every(2))):
            job_id = (await server.submit({"mode": "open", "attempts": 1, "idle_timeout": 30})).json["id"]
            await server.post(f"/v1/jobs/{job_id}/tasks", {"tasks": inputs(20), "last_batch": True})
            await ended(server, job_id)
        await rerun(server, job_id)
        for path, body in (("tasks", {"tasks": inputs(1)}), ("close", None)):
            answer = await server.post(f"/v1/jobs/{job_id}/{path}", body)
            assert (answer.status, answer.json["code"]) == (409, "job_closed")
        # Nothing was added for longer than an open job waits: that is no reason to close this run.
        clock.advance(60)
        async with working(server.system):
            done = await ended(server, job_id)
        assert (done["state"], done["reason"], done["run"]["total"]) == ("completed", None, 10)


class TestIdempotency:
    async def test_the_same_request_makes_one_run(self, server: Api) -> None:
        async with working(server.system, Flaky(every(2))):
            job_id = await submit(server, 20)
            await ended(server, job_id)
            send = lambda body: server.post(  # noqa: E731
                f"/v1/jobs/{job_id}/rerun", body, headers={"idempotency-key": "once"}
            )
            first = await send({"select": "failed"})
            assert (first.status, "idempotency-replayed" in first.headers) == (202, False)
            await ended(server, job_id)
            replay = await send({"select": "failed"})
            assert (replay.status, replay.body, replay.headers["idempotency-replayed"]) == (202, first.body, "true")
            other = await send({"select": "all"})
            assert (other.status, other.json["code"]) == (409, "idempotency_key_reused")
            assert len((await server.get(f"/v1/jobs/{job_id}")).json["runs"]) == 2

    async def test_many_at_once(self, server: Api) -> None:
        async with working(server.system, Flaky(every(2))):
            job_id = await submit(server, 20)
            await ended(server, job_id)
            job = await job_of(server, job_id)
            made = Rerun(server.system)

            async def ask(key: str | None) -> object:
                try:
                    request = None if key is None else IdempotentRequest("rerun", key, "print")
                    return (await made.rerun(job, RerunSpec(), request)).subject
                except ConveyorError as error:
                    return error.code

            told = await asyncio.gather(*(ask("same" if number % 2 else None) for number in range(20)))
            refused = {"run_not_ended", "idempotency_key_in_flight"}
            assert len(set(told) - refused) == 1
            await ended(server, job_id)
        assert [run.number for run in await server.system.records.jobs.runs(job.job_id)] == [1, 2]

    async def test_a_refused_one_leaves_its_key_free(self, server: Api) -> None:
        headers = {"idempotency-key": "once"}
        async with working(server.system, Flaky(every(2))) as echo:
            echo.gate.clear()
            job_id = await submit(server, 6)
            answer = await server.post(f"/v1/jobs/{job_id}/rerun", {}, headers=headers)
            assert answer.status == 409
            echo.gate.set()
            await ended(server, job_id)
            assert (await server.post(f"/v1/jobs/{job_id}/rerun", {}, headers=headers)).status == 202
            await ended(server, job_id)

    async def test_a_failed_ingest_is_resumed_under_a_key(self, server: Api) -> None:
        data = b"".join(b"http://example.com/%d\n" % number for number in range(30))
        upload_id = await server.upload(data)
        job_id = (await server.submit({"source": {"upload_id": upload_id}, "attempts": 1})).json["id"]
        source = (await job_of(server, job_id)).source
        assert source is not None
        await server.system.blobs.delete([source.key])
        headers = {"idempotency-key": "once"}
        async with working(server.system):
            assert (await ended(server, job_id))["state"] == "failed"
            await server.system.blobs.put(source.key, data)
            body = {"options": {"attempts": 3}}
            first = await server.post(f"/v1/jobs/{job_id}/rerun", body, headers=headers)
            assert (first.status, first.json["run"]["number"]) == (202, 1), first.body
            done = await ended(server, job_id)
            replay = await server.post(f"/v1/jobs/{job_id}/rerun", body, headers=headers)
        assert (replay.status, replay.body) == (202, first.body)
        assert (done["state"], done["run"]["total"], done["options"]["attempts"]) == ("completed", 30, 3)


class Crash(Exception):
    """Stands for the end of a process."""


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


@pytest.fixture(params=[1, 3], ids=["one shard", "three shards"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with open_fleet(force_task_shards=request.param > 1, task_shard_count=request.param) as opened:
        yield opened


POINTS = (
    "rerun.add.before",
    "rerun.add.after",
    "ingest.split.before",
    "ingest.split.after",
    "ingest.put.after",
    "ingest.enqueue.after",
    "ingest.checkpoint.after",
    "ingest.done.after",
    "lifecycle.total.before",
    "lifecycle.latch.before",
    "lifecycle.latch.after",
    "ingester.ack.before",
)
# Those that one rerun passes several times.
OFTEN = ("ingest.put.after", "ingest.enqueue.after", "ingest.checkpoint.after")


def crash_cases() -> list[tuple[int, str, int, str]]:
    """Shards, point, hit and selection: each point once with each number of shards, the others in turn, unless all are
    asked for."""
    shards, hits, selects = (1, 3), (1, 3), ("failed", "all")
    if ALL_HITS:
        return list(itertools.product(shards, POINTS, hits, selects))
    return [
        (count, point, hits[(number // 2 + turn) % 2] if point in OFTEN else 1, selects[(number + turn) % 2])
        for turn, count in enumerate(shards)
        for number, point in enumerate(POINTS)
    ]


@pytest.mark.usefixtures("disarmed")
class TestCrashes:
    async def _first_run(self, fleet: Fleet) -> Job:
        async def act(job: Job, ref: TaskRef) -> Any:
            return failure("result_not_json") if job.run.number == FIRST and ref.index % 3 == 0 else success(b"body")

        fleet.executor.act = act
        job = await fleet.stage([f'{{"n": {number}}}' for number in range(100)], attempts=1, chunk_size=5)
        for role in (fleet.ingester("first"), fleet.sweeper, fleet.worker()):
            fleet.start(role)
        (done,) = await fleet.ended(job)
        assert done.state is RunState.COMPLETED
        return done

    @pytest.mark.parametrize(("fleet", "point", "nth", "select"), crash_cases(), indirect=["fleet"])
    async def test_it_converges(self, fleet: Fleet, point: str, nth: int, select: Any) -> None:
        """Whoever is at it dies there, the nth time; others go on."""
        job = await self._first_run(fleet)
        left = nth

        def die(name: str) -> None:
            nonlocal left
            left -= name == point
            if name == point and left == 0:
                raise Crash

        made, request = Rerun(fleet.system), IdempotentRequest("rerun", "once", "print")
        faults.arm(die)
        try:
            answer = await made.rerun(job, RerunSpec(select), request)
        except Crash:
            # As a client does that has no answer: the same again, once the claim has lapsed.
            await fleet.passing(fleet.system.settings.idempotency_lease_seconds + 1)
            answer = await made.rerun(job, RerunSpec(select), request)
        (done,) = await fleet.ended(job, within=3000)
        faults.arm(None)
        assert left <= 0 or (nth > 1 and point not in OFTEN), "the point was not passed"
        assert (done.run.number, done.run.run_id, done.state) == (2, answer.subject, RunState.COMPLETED)
        wanted = range(0, 100, 3) if select == "failed" else range(100)
        tasks = await fleet.tasks(done)
        assert sorted(tasks) == list(wanted)
        assert done.run.total == len(wanted)
        counts = await fleet.counts(done)
        assert counts == await fleet.system.tasks.recount(done.key)
        assert counts.succeeded == len(wanted)
        whole = await job_counts(fleet.system.records, fleet.system.tasks, done)
        assert (whole.total, whole.counts, whole.codes) == (100, Counts(100), {})
        ended_events = [event for event in await fleet.notices(done) if event == "run.completed"]
        assert len(ended_events) == 2
        await fleet.passing(5)
        depth = await fleet.system.queue.depth(CONTROL)
        assert depth.ready + depth.delayed == 0
        first = RunKey(job.tenant, job.job_id, job.run.run_id, job.task_shard_count)
        assert (await fleet.system.tasks.counts(first)).failed == 34

    async def test_a_rerun_that_is_cancelled_on_its_way(self, fleet: Fleet) -> None:
        """It ends with what was copied of it, and the next one takes from what came out last."""
        job = await self._first_run(fleet)
        left = 3

        def die(name: str) -> None:
            nonlocal left
            left -= name == "ingest.checkpoint.after"
            if left <= 0:
                faults.arm(None)
                raise Crash

        faults.arm(die)
        await Rerun(fleet.system).rerun(job, RerunSpec("all"))
        await fleet.until(lambda: left == 0)
        running = await fleet.job(job.job_id)
        await fleet.lifecycle.move(running, RunState.CANCELLED, "enough", await fleet.counts(running))
        await fleet.passing(200)
        cancelled = await fleet.job(job.job_id)
        tasks = await fleet.tasks(cancelled)
        assert 0 < len(tasks) < 100
        assert cancelled.run.total == len(tasks)
        assert TaskStatus.PENDING not in {task.status for task in tasks.values()}
        never = {index for index, task in tasks.items() if task.status is TaskStatus.CANCELLED}
        failed = {index for index in range(0, 100, 3) if index not in tasks or index in never}
        await Rerun(fleet.system).rerun(cancelled, RerunSpec(Selection(status=["failed", "cancelled"])))
        (done,) = await fleet.ended(job)
        assert set(await fleet.tasks(done)) == failed, "a cancelled task has the outcome that it had before"
        whole = await job_counts(fleet.system.records, fleet.system.tasks, done)
        assert (whole.total, whole.counts) == (100, Counts(100))

    async def test_a_paused_rerun_goes_on(self, fleet: Fleet) -> None:
        from conveyor.accept.control import Control

        job = await self._first_run(fleet)
        await Rerun(fleet.system).rerun(job, RerunSpec("all"))
        control = Control(fleet.system)
        assert (await control.pause(await fleet.job(job.job_id))).state is RunState.PAUSED
        await fleet.passing(100)
        assert (await fleet.job(job.job_id)).state is RunState.PAUSED
        await control.resume(await fleet.job(job.job_id))
        (done,) = await fleet.ended(job)
        assert (done.state, done.run.total) == (RunState.COMPLETED, 100)


async def test_pages_are_small(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task set is never in memory: it is read and written a page at a time."""
    tasks = server.system.tasks
    put, sizes = tasks.put, []

    async def counted(run: RunKey, seeds: Any) -> None:
        sizes.append(len(seeds))
        await put(run, seeds)

    async with working(server.system, Flaky(every(1))):
        job_id = await submit(server, 200)
        await ended(server, job_id)
        monkeypatch.setattr(tasks, "put", counted)
        await again(server, job_id)
    assert max(sizes) <= 7
    assert sum(sizes) == 200

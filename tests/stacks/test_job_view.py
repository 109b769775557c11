"""After a rerun a job is its whole self, on every stack: the latest outcome of each task over all runs is shown
everywhere, counts are those of the rows, and one run can be chosen."""

import io
import json
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from conveyor.embedded import Embedded
from conveyor.jobs.job_counts import job_counts
from conveyor.model import Counts, Job, JobId, JobKind, TenantId
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import Api, client
from tests.support.working import Flaky, all_items, ended, until

pytestmark = pytest.mark.timeout(300)

COUNT = 60
_RANKS = {"pending": 0, "cancelled": 1, "succeeded": 2, "failed": 2}


# Stacks, and in how many shards the tasks of a run are: one where rows are in one database, and several.
SHAPES = [("embedded", 1), ("embedded", 4), ("postgres", 1), ("aws", 4), ("mixture", 4)]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def shape(request: pytest.FixtureRequest) -> tuple[str, int]:
    found: tuple[str, int] = request.param
    return found


@pytest.fixture
def stack(shape: tuple[str, int]) -> str:
    return shape[0]


@pytest.fixture
def settings(shape: tuple[str, int], settings: Settings) -> Settings:
    shards = shape[1]
    return msgspec.structs.replace(
        settings,
        sync_task_limit=1 if shards > 1 else 10_000,
        force_task_shards=shards > 1,
        task_shard_count=shards,
    )


@pytest.fixture
def flaky() -> Flaky:
    return Flaky(lambda job, index: None)


@pytest.fixture
async def embedded(system: System, flaky: Flaky) -> AsyncIterator[Embedded]:
    """All roles at work, with tasks that do as the test says."""
    made = Embedded(system, dict.fromkeys(JobKind, flaky))
    async with made.running():
        yield made


def by_run(*wrong: Callable[[int], int | str | None]) -> Callable[[Job, int], int | str | None]:
    """What becomes of a task, for each run in turn."""
    return lambda job, index: wrong[job.run.number - 1](index)


async def rerun(api: Api, job_id: str, select: Any) -> None:
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"select": select})
    assert answer.status == 202, answer.body
    shown = answer.json
    assert (shown["view"], shown["total"]) == ("latest-per-task", COUNT), "the answer is of the whole job"
    assert sum(shown["counts"].values()) == COUNT


async def stored(system: System, job_id: str) -> Job:
    job = await system.records.jobs.job(TenantId("acme"), JobId(job_id))
    assert job is not None
    return job


async def expected_view(api: Api, job_id: str, number: int) -> dict[int, dict[str, Any]]:
    """What the rows of all runs say."""
    view: dict[int, dict[str, Any]] = {}
    for run in range(1, number + 1):
        for item in await all_items(api, f"/v1/jobs/{job_id}/results?run={run}"):
            before = view.get(item["index"])
            if before is None or _RANKS[item["status"]] >= _RANKS[before["status"]]:
                view[item["index"]] = item
    return view


def ids(items: Any) -> list[tuple[int, str, str]]:
    return sorted((item["index"], item["task_id"], item["status"]) for item in items)


async def check(api: Api, job_id: str) -> dict[str, Any]:
    """Everything that shows the job shows the same."""
    job = (await api.get(f"/v1/jobs/{job_id}?verify=true")).json
    path = f"/v1/jobs/{job_id}"
    number = job["run"]["number"]
    view = await expected_view(api, job_id, number)
    assert len(view) == COUNT
    statuses = Counter(item["status"] for item in view.values())
    codes = Counter(item["error"]["code"] for item in view.values() if item["status"] == "failed")

    assert job["verify"]["drift"] == 0
    assert (job["view"], job["total"]) == ("latest-per-task", COUNT)
    counts = {"running": 0, **{status: statuses[status] for status in _RANKS}}
    assert {**job["counts"], "running": 0} == {**counts, "unchanged": 0}
    assert {error["code"]: error["count"] for error in job["top_errors"]} == codes
    listed = next(item for item in (await api.get("/v1/jobs")).json["items"] if item["id"] == job_id)
    assert (listed["total"], listed["counts"], listed["view"]) == (job["total"], job["counts"], job["view"])
    statistics = (await api.get(f"{path}/statistics")).json
    assert {error["code"]: error["count"] for error in statistics["errors"]} == codes
    assert (statistics["run_id"], statistics["view"]) == (job["run"]["id"], "latest-per-task")

    # In pages, and whole.
    assert ids(await all_items(api, f"{path}/results", 7)) == ids(view.values())
    for status in _RANKS:
        for limit in (19, 1000):
            found = await all_items(api, f"{path}/results?status={status}", limit)
            assert ids(found) == ids(item for item in view.values() if item["status"] == status), status
    for code in {*codes, "http_503"}:
        found = await all_items(api, f"{path}/results?error_code={code}", 7)
        assert ids(found) == ids(item for item in view.values() if (item["error"] or {}).get("code") == code)
    for http in (200, 503):
        found = await all_items(api, f"{path}/results?http_status={http}", 19)
        assert ids(found) == ids(item for item in view.values() if item["http_status"] == http)
    tagged = [item for item in view.values() if isinstance(item["input"], dict)]
    assert ids(await all_items(api, f"{path}/results?tag=third", 7)) == ids(tagged)
    found = await all_items(api, f"{path}/results?tag=third&status=succeeded", 7)
    assert ids(found) == ids(item for item in tagged if item["status"] == "succeeded")
    for limit in (7, 1000):
        hits = await all_items(api, f"{path}/search?text=example.com/1", limit)
        assert ids(hits) == ids(item for item in view.values() if "example.com/1" in json.dumps(item["input"]))
    for query in ("", "?status=failed"):
        lines = await api.get(f"{path}/results{query}", headers={"accept": "application/x-ndjson"})
        found = [json.loads(line) for line in lines.body.splitlines()]
        assert ids(found) == ids(item for item in view.values() if not query or item["status"] == "failed")
    (named, *_) = (await api.get(f"{path}/search?text=7")).json["items"]
    assert (named["index"], named["task_id"]) == (7, view[7]["task_id"])
    return job


async def check_exports(api: Api, job_id: str, number: int) -> None:
    view = await expected_view(api, job_id, number)
    archive = await api.get(f"/v1/jobs/{job_id}/export?partial=true")
    with zipfile.ZipFile(io.BytesIO(archive.body)) as opened:
        lines = [json.loads(line) for line in opened.read("manifest.jsonl").splitlines()]
    assert [line["index"] for line in lines] == sorted(view), "in the order of the list"
    assert ids(lines) == ids(view.values())
    for select in ({}, {"status": "failed"}, {"run": "1"}):
        made = await api.post(f"/v1/jobs/{job_id}/exports", {"format": "jsonl", "select": select, "partial": True})
        assert made.status == 202, made.body
        path = f"/v1/exports/{made.json['id']}"
        export = await until(lambda path=path: shown(api, path), lambda export: export["state"] == "ready")
        url = export["parts"][0]["url"]
        async with client() as http:
            request = http.get(url if "://" in url else api.url + url)
            headers = {} if "://" in url else {"authorization": f"Bearer {api.key}"}
            data = bytes(await (await request.headers(headers).build().send()).bytes())
        rows = [json.loads(line) for line in data.splitlines()]
        of_run = {item["index"]: item for item in await all_items(api, f"/v1/jobs/{job_id}/results?run=1")}
        wanted = of_run if "run" in select else view
        assert ids(rows) == ids(item for item in wanted.values() if select.get("status") in (None, item["status"])), (
            select
        )


async def shown(api: Api, path: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.get(path)).json
    return found


async def events_of(api: Api, job_id: str, name: str) -> list[dict[str, Any]]:
    return [event["data"] for event in await all_items(api, f"/v1/jobs/{job_id}/events") if event["event"] == name]


async def submitted(api: Api) -> str:
    urls = [f"http://example.com/{number}" for number in range(COUNT)]
    tasks: list[Any] = [{"url": url, "tag": "third"} if at % 3 == 0 else url for at, url in enumerate(urls)]
    answer = await api.submit({"tasks": tasks, "attempts": 1, "chunk_size": 10})
    assert answer.status in (201, 202), answer.body
    job_id: str = answer.json["id"]
    return job_id


async def test_the_job_is_its_whole_self(api: Api, system: System, flaky: Flaky) -> None:
    flaky.fails = by_run(
        lambda index: 503 if index % 4 == 0 else None,
        lambda index: "timeout" if index % 8 == 0 else None,
        lambda index: 503 if index in (1, 3) else None,
        lambda index: "timeout" if index == 5 else None,
    )
    job_id = await submitted(api)
    await ended(api, job_id)
    await check(api, job_id)
    first = await expected_view(api, job_id, 1)

    await rerun(api, job_id, "failed")
    await ended(api, job_id)
    job = await check(api, job_id)
    assert (job["run"]["total"], job["run"]["counts"]["succeeded"]) == (15, 7)
    assert job["counts"] == {"pending": 0, "running": 0, "succeeded": 52, "failed": 8, "cancelled": 0, "unchanged": 0}
    await check_exports(api, job_id, 2)

    await rerun(api, job_id, {"tag": "third"})
    await ended(api, job_id)
    await check(api, job_id)

    await rerun(api, job_id, "all")
    await ended(api, job_id)
    job = await check(api, job_id)
    assert job["counts"] == {"pending": 0, "running": 0, "succeeded": 59, "failed": 1, "cancelled": 0, "unchanged": 0}

    # One run is chosen, everywhere.
    one = await shown(api, f"/v1/jobs/{job_id}?run=1")
    assert (one["view"], one["total"], one["run"]["number"]) == (job["runs"][-1]["id"], COUNT, 4)
    assert (one["counts"]["failed"], one["top_errors"]) == (15, [{"code": "http_503", "count": 15}])
    assert ids(await all_items(api, f"/v1/jobs/{job_id}/results?run=1")) == ids(first.values())
    assert len(await all_items(api, f"/v1/jobs/{job_id}/results?run=2")) == 15
    two = await shown(api, f"/v1/jobs/{job_id}/statistics?run=2")
    assert (two["view"], two["errors"]) == (job["runs"][2]["id"], [{"code": "timeout", "count": 8}])
    assert (await api.get(f"/v1/jobs/{job_id}?run=9")).status == 404
    assert (await api.get(f"/v1/jobs/{job_id}?run=x")).status == 400

    # Events have the counts of the run, and those of the job.
    completed = await events_of(api, job_id, "run.completed")
    assert [event["counts"]["failed"] for event in completed] == [15, 8, 1, 1]
    assert [event["job"]["counts"]["failed"] for event in completed] == [15, 8, 6, 1]
    assert {event["job"]["total"] for event in completed} == {COUNT}


async def test_a_cancelled_rerun_hides_nothing(api: Api, system: System, flaky: Flaky) -> None:
    flaky.fails = by_run(lambda index: 503 if index % 4 == 0 else None, *[lambda index: None] * 5)
    job_id = await submitted(api)
    await ended(api, job_id)
    before = (await shown(api, f"/v1/jobs/{job_id}"))["counts"]

    flaky.gate.clear()
    await rerun(api, job_id, "all")
    await until(lambda: stored(system, job_id), lambda job: job.run.last_batch)
    # Nothing of it is finished: the job has the outcomes that it had.
    job = await check(api, job_id)
    assert (job["state"], job["counts"]) == ("running", before)
    assert (job["run"]["total"], sum(job["run"]["counts"][state] for state in ("pending", "running"))) == (COUNT, COUNT)
    await check_exports(api, job_id, 2)
    cancelled = await api.post(f"/v1/jobs/{job_id}/cancel")
    assert cancelled.json["counts"] == before
    await until(lambda: rows_of(system, job_id), lambda counts: counts.cancelled == COUNT)
    flaky.gate.set()
    job = await check(api, job_id)
    assert (job["state"], job["counts"]) == ("cancelled", before)
    (event,) = await events_of(api, job_id, "run.cancelled")
    assert event["job"]["counts"] == {name: before[name] for name in ("succeeded", "failed", "cancelled", "unchanged")}

    # What failed before it can be rerun.
    failed = {item["index"] for item in await all_items(api, f"/v1/jobs/{job_id}/results?status=failed")}
    await rerun(api, job_id, "failed")
    job = await ended(api, job_id)
    assert job["run"]["total"] == len(failed)
    job = await check(api, job_id)
    assert job["counts"]["succeeded"] == COUNT


async def test_tasks_that_were_never_run(api: Api, system: System, flaky: Flaky) -> None:
    """A first run that was cancelled: its tasks are cancelled until a rerun has run them."""
    flaky.fails = by_run(lambda index: None, lambda index: "timeout" if index < 10 else None, lambda index: None)
    flaky.gate.clear()
    job_id = await submitted(api)
    await until(lambda: stored(system, job_id), lambda job: job.run.last_batch)
    await api.post(f"/v1/jobs/{job_id}/cancel")
    await until(lambda: rows_of(system, job_id), lambda counts: counts.ended == COUNT)
    await check(api, job_id)
    await rerun(api, job_id, {"status": ["cancelled"]})
    await until(lambda: stored(system, job_id), lambda job: job.run.last_batch)
    assert (await check(api, job_id))["counts"]["cancelled"] > 0
    flaky.gate.set()
    await ended(api, job_id)
    job = await check(api, job_id)
    assert (job["counts"]["succeeded"], job["counts"]["failed"]) == (50, 10)


async def rows_of(system: System, job_id: str) -> Counts:
    job = await stored(system, job_id)
    return await system.tasks.counts(job.key)


async def test_a_rerun_from_before_priors_were_kept(api: Api, system: System, flaky: Flaky) -> None:
    """Its selection says what it replaced."""
    flaky.fails = by_run(lambda index: 503 if index % 4 == 0 else None, lambda index: 503 if index == 8 else None)
    job_id = await submitted(api)
    await ended(api, job_id)
    await rerun(api, job_id, "failed")
    await ended(api, job_id)
    job = await stored(system, job_id)
    counted = await job_counts(system.records, system.tasks, job)
    assert (counted.counts, counted.codes) == (Counts(59, 1), {"http_503": 1})

    class Forgetful:
        """Tasks of a version that counted no replaced outcomes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(system.tasks, name)

        async def replaced(self, run: Any) -> Any:
            return type(await system.tasks.replaced(run))()

    old: Any = Forgetful()
    assert (await job_counts(system.records, old, job)).counts == Counts(59, 1)

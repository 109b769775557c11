"""Fetch, then extract: a function turns each body into rows, in the attempt that fetched it."""

import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from conveyor.client import AsyncClient
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import Api, serving
from tests.support.clocks import JumpingClock
from tests.support.installations import verified
from tests.support.places import quick_place
from tests.support.product_site import ProductSite
from tests.support.working import all_items, ended

APP = "tests.support.parsers_app:parsers"


@pytest.fixture
async def site() -> AsyncIterator[ProductSite]:
    async with ProductSite() as made:
        yield made


@pytest.fixture(params=[0, 1], ids=["in the worker", "by a fetcher"])
async def api(request: pytest.FixtureRequest) -> AsyncIterator[Api]:
    """A server with all roles, which fetches in its own process or in a fetcher."""
    with quick_place() as place:
        settings = Settings.load(
            {},
            data=place / "data",
            app=APP,
            fetchers=request.param,
            handler_processes=1,
            flush_seconds=0.01,
            allow_private_targets=True,
        )
        async with open_system(settings, JumpingClock()) as system, serving(system) as api, Embedded(system).running():
            yield api


async def ran(api: Api, site: ProductSite, extract: str, count: int = 8, **spec: Any) -> str:
    tasks = [{"url": site.url(number), "id": f"p{number}"} for number in range(count)]
    answer = await api.submit({"tasks": tasks, "extract": extract, "attempts": 2, **spec})
    assert answer.status == 201, answer.body
    job_id: str = answer.json["id"]
    await ended(api, job_id)
    return job_id


async def results(api: Api, job_id: str) -> list[dict[str, Any]]:
    return sorted(await all_items(api, f"/v1/jobs/{job_id}/results"), key=lambda item: int(item["index"]))


async def test_a_function_makes_a_row_of_each_page(api: Api, site: ProductSite) -> None:
    job_id = await ran(api, site, "product")
    for number, item in enumerate(await results(api, job_id)):
        assert item["status"] == "succeeded"
        assert item["extracted"] == {
            "title": f"Product {number}",
            "price": 100 * number,
            "url": site.url(number),
            "status": 200,
            "id": f"p{number}",
        }
        assert item["size"] == len(site.page(number))
    last = f"/v1/jobs/{job_id}/tasks/{item['task_id']}"
    assert (await api.get(last)).json["extracted"] == item["extracted"]
    assert (await api.get(f"{last}/body")).body == site.page(number)
    assert (await api.get(f"{last}/extracted")).json == item["extracted"]
    linked = await api.get(item["extracted_url"], auth=False)
    assert (linked.status, linked.json) == (200, item["extracted"])
    # The link to one is no link to the other.
    assert (await api.get(item["extracted_url"].replace("/extracted/", "/bodies/"), auth=False)).status == 403
    assert (await api.get(item["body_url"], auth=False)).body == site.page(number)


async def test_long_results_lists_and_nothing(api: Api, site: ProductSite) -> None:
    long = await results(api, await ran(api, site, "long", 3))
    assert [item["extracted"] for item in long] == [None] * 3
    for number, item in enumerate(long):
        body = (await api.get(item["extracted_url"], auth=False)).body
        assert json.loads(body) == {"text": site.page(number).decode() * 400}
    lists = await results(api, await ran(api, site, "offers", 4))
    assert [len(item["extracted"]) for item in lists] == [0, 1, 2, 0]
    none = await results(api, await ran(api, site, "nothing", 2))
    assert [(item["status"], item["extracted"], item["extracted_url"]) for item in none] == [
        ("succeeded", None, None)
    ] * 2


async def test_bodies_need_not_be_kept(api: Api, site: ProductSite) -> None:
    job_id = await ran(api, site, "fussy", keep_bodies=False)
    items = await results(api, job_id)
    assert [item["size"] is None for item in items] == [item["status"] == "succeeded" for item in items]
    # The body that could not be read is there to be looked at.
    assert (items[3]["error"]["code"], items[3]["size"]) == ("extract_failed", len(site.page(3)))
    assert items[4]["extracted"]["title"] == "Product 4"
    assert items[4]["content_type"] == "text/html; charset=utf-8"


async def test_a_failed_extraction_is_an_error_of_its_own(api: Api, site: ProductSite) -> None:
    items = await results(api, await ran(api, site, "fussy", 5))
    error = items[3]["error"]
    assert (error["code"], error["message"]) == ("extract_failed", "LookupError: no price")
    assert (items[3]["http_status"], items[3]["attempts"]) == (200, 1)
    assert (await api.get(items[3]["body_url"], auth=False)).body == site.page(3)
    assert site.requests[3] == 1
    (item,) = await results(api, await ran(api, site, "wrong", 1))
    assert item["error"]["code"] == "extract_failed"
    assert "return a dict" in item["error"]["message"]
    # That any handler is accepted, as before the worker told its own, may hold for a second.
    cast(JumpingClock, api.system.clock).advance(1)
    refused = await api.submit({"tasks": [site.url(1)], "extract": "unknown"})
    assert (refused.status, refused.json["code"]) == (400, "unknown_handler")


async def test_a_parser_that_hangs_or_kills_its_process_costs_its_own_task(api: Api, site: ProductSite) -> None:
    items = await results(api, await ran(api, site, "troubled", 5, timeout=2.0))
    assert [item["status"] for item in items] == ["succeeded", "failed", "failed", "succeeded", "succeeded"]
    assert "longer than 2 seconds" in items[1]["error"]["message"]
    assert "lost" in items[2]["error"]["message"]
    assert {items[1]["error"]["code"], items[2]["error"]["code"]} == {"extract_failed"}


async def test_a_failed_extraction_is_repeated_without_a_request(api: Api, site: ProductSite) -> None:
    job_id = await ran(api, site, "fussy", 14)
    asked = site.requests.total()
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"options": {"extract": "product"}})
    assert answer.status == 202, answer.body
    job = await ended(api, job_id)
    assert (job["run"]["total"], job["counts"]["succeeded"], site.requests.total()) == (2, 14, asked)
    items = await results(api, job_id)
    assert [item["extracted"]["title"] for item in items] == [f"Product {number}" for number in range(14)]
    # Its body is the one of the first run.
    assert (items[3]["size"], items[3]["http_status"]) == (len(site.page(3)), 200)
    assert (await api.get(items[3]["body_url"], auth=False)).body == site.page(3)
    assert not (await verified(api.system)).by_kind


async def test_a_rerun_fetches_what_was_not_fetched(api: Api, site: ProductSite) -> None:
    site.broken.add(5)
    job_id = await ran(api, site, "fussy", 8, attempts=1)
    site.broken.clear()
    asked = site.requests.copy()
    await api.post(f"/v1/jobs/{job_id}/rerun", {"options": {"extract": "product"}})
    await ended(api, job_id)
    assert site.requests - asked == {5: 1}
    assert {item["status"] for item in await results(api, job_id)} == {"succeeded"}


async def test_extract_only_makes_no_request(api: Api, site: ProductSite) -> None:
    site.broken.add(5)
    job_id = await ran(api, site, "fussy", 8, attempts=1, rate_per_host=1000.0, upstream="shop")
    asked = site.requests.total()
    async with AsyncClient(api.url, api.key) as client:
        job = await client.job(job_id)
        await job.rerun(extract_only=True, extract="offers")
        await job.wait()
        assert (job.data["run"]["total"], job.data["run"]["counts"]["succeeded"]) == (7, 7)
        assert job.data["run"]["lineage"]["extract_only"] is True
        items = [item for item in await results(api, job_id) if item["index"] != 5]
        assert [len(item["extracted"]) for item in items] == [number % 3 for number in range(8) if number != 5]
        # Once more, of those that fail now.
        await job.rerun(extract_only=True, extract="fussy")
        await job.wait()
        await job.rerun(extract_only=True, failed=True, extract="product")
        await job.wait()
        assert (job.data["run"]["total"], job.data["counts"]["succeeded"]) == (1, 7)
    assert site.requests.total() == asked
    assert not (await verified(api.system)).by_kind


async def test_extract_only_needs_a_function(api: Api, site: ProductSite) -> None:
    tasks = [site.url(1)]
    job_id = (await api.submit({"tasks": tasks})).json["id"]
    await ended(api, job_id)
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"extract_only": True})
    assert (answer.status, answer.json["field"]) == (400, "extract_only")
    # A job that had none can get one.
    assert (
        await api.post(f"/v1/jobs/{job_id}/rerun", {"extract_only": True, "options": {"extract": "product"}})
    ).status == 202
    await ended(api, job_id)
    assert [item["extracted"]["title"] for item in await results(api, job_id)] == ["Product 1"]


async def test_all_is_verified_and_deleted(api: Api, site: ProductSite) -> None:
    job_id = await ran(api, site, "long", 3)
    assert not (await verified(api.system)).by_kind
    items = await results(api, job_id)
    async with AsyncClient(api.url, api.key) as client:
        job = await client.job(job_id)
        assert (await job.extracted(items[0]["task_id"]))["text"].startswith("<html>")
    assert (await api.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
    assert (await api.get(items[0]["extracted_url"], auth=False)).status == 404


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"kind": "python", "handler": "product", "extract": "product"}, "extract"),
        ({"extract": "two words"}, "extract"),
        ({"extract": ""}, "extract"),
        ({"keep_bodies": False}, "keep_bodies"),
        ({"kind": "download", "extract": "product", "keep_bodies": False}, "keep_bodies"),
    ],
)
async def test_what_makes_no_sense_is_refused(server: Api, spec: dict[str, Any], field: str) -> None:
    answer = await server.submit({"tasks": ["https://example.com/"], **spec})
    assert (answer.status, answer.json["field"]) == (400, field)

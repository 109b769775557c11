"""Only what changed: a rerun that asks for pages that are not the stored ones."""

import io
import json
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from conveyor.client import AsyncClient
from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import Api, serving
from tests.support.installations import verified
from tests.support.places import quick_place
from tests.support.product_site import ProductSite
from tests.support.working import all_items, ended

APP = "tests.support.parsers_app:parsers"
COUNT = 12


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
        async with open_system(settings) as system, serving(system) as api, Embedded(system).running():
            yield api


async def ran(api: Api, site: ProductSite, **spec: Any) -> str:
    answer = await api.submit({"tasks": [site.url(number) for number in range(COUNT)], "attempts": 1, **spec})
    assert answer.status == 201, answer.body
    job_id: str = answer.json["id"]
    await ended(api, job_id)
    return job_id


async def compared(api: Api, job_id: str, **spec: Any) -> dict[str, Any]:
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"changed_only": True, **spec})
    assert answer.status == 202, answer.body
    return await ended(api, job_id)


async def results(api: Api, job_id: str, run: str = "latest-per-task") -> list[dict[str, Any]]:
    items = await all_items(api, f"/v1/jobs/{job_id}/results?run={run}")
    return sorted(items, key=lambda item: int(item["index"]))


def unchanged(items: list[dict[str, Any]]) -> list[int]:
    return [item["index"] for item in items if item["unchanged"]]


async def test_unchanged_pages_are_neither_sent_nor_stored_again(api: Api, site: ProductSite) -> None:
    site.plain = {3, 4}
    site.moved = {5}
    job_id = await ran(api, site)
    first = await results(api, job_id)
    site.versions.update([1, 3])
    site.broken = {2}
    job = await compared(api, job_id)
    assert site.conditional.total() == COUNT - 2, "pages without a validator are compared by their bytes"
    assert site.conditional[5] == 0, "the ETag goes to the URL that gave it"
    assert site.conditional[1005] == 1
    counts = {"pending": 0, "running": 0, "succeeded": 11, "failed": 1, "cancelled": 0, "unchanged": 9}
    assert (job["counts"], job["run"]["counts"], job["run"]["total"]) == (counts, counts, COUNT)
    items = await results(api, job_id)
    assert unchanged(items) == [0, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [items[number]["http_status"] for number in range(6)] == [304, 200, 500, 200, 200, 304]
    for before, after in zip(first, items, strict=True):
        number = after["index"]
        page = site.page(1005 if number == 5 else number)
        if after["status"] == "succeeded":
            assert (after["error"], after["size"], after["content_type"]) == (None, len(page), before["content_type"])
            assert (await api.get(after["body_url"], auth=False)).body == page
            assert ["x-version", str(site.versions[number])] in [[*pair] for pair in after["headers"]]
        if after["unchanged"]:
            assert (after["sha256"], after["final_url"]) == (before["sha256"], before["final_url"])
    # Those that failed and those that changed are compared with what they had last.
    site.broken, site.versions[0] = set(), 1
    job = await compared(api, job_id)
    assert (job["counts"]["succeeded"], job["counts"]["unchanged"]) == (12, 10)
    assert unchanged(await results(api, job_id)) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    # A rerun that compares nothing leaves its tasks without the mark.
    await api.post(f"/v1/jobs/{job_id}/rerun", {"select": {"indexes": [6, 7]}})
    job = await ended(api, job_id)
    assert (job["counts"]["unchanged"], job["run"]["counts"]["unchanged"]) == (8, 0)
    assert not (await verified(api.system)).by_kind


async def test_a_task_without_a_stored_page_is_fetched(api: Api, site: ProductSite) -> None:
    site.broken = {1, 2}
    job_id = await ran(api, site)
    site.broken = {2}
    job = await compared(api, job_id, select="failed")
    assert (job["run"]["total"], job["counts"]["unchanged"], job["counts"]["succeeded"]) == (2, 0, 11)
    assert site.conditional.total() == 0
    assert unchanged(await results(api, job_id)) == []


async def test_a_condition_of_the_user_is_left_alone(api: Api, site: ProductSite) -> None:
    """A 304 that answers to it is an error, as in the first run."""
    job_id = await ran(api, site, headers={"If-None-Match": '"0-0"'})
    job = await compared(api, job_id)
    assert (job["counts"]["succeeded"], job["counts"]["failed"], job["counts"]["unchanged"]) == (11, 1, 11)
    first, second, *_ = await results(api, job_id)
    assert (first["error"]["code"], second["http_status"], second["unchanged"]) == ("http_304", 200, True)


async def test_what_was_extracted_is_kept(api: Api, site: ProductSite) -> None:
    for keep_bodies in (True, False):
        site.versions.clear()
        job_id = await ran(api, site, extract="product", keep_bodies=keep_bodies)
        before = await results(api, job_id)
        site.versions[1] = 7
        job = await compared(api, job_id)
        assert (job["counts"]["succeeded"], job["counts"]["unchanged"]) == (12, 11)
        after = await results(api, job_id)
        assert after[1]["extracted"]["price"] == 107
        for number in (0, *range(2, COUNT)):
            # Its status is part of what the function returned: it was not called with a 304.
            assert after[number]["extracted"] == before[number]["extracted"]
            assert (after[number]["size"] is not None) == keep_bodies


async def test_another_function_is_called_with_the_stored_pages(api: Api, site: ProductSite) -> None:
    job_id = await ran(api, site, extract="product")
    job = await compared(api, job_id, options={"extract": "offers"})
    assert (job["counts"]["unchanged"], site.conditional.total()) == (12, 12)
    extracted = [item["extracted"] for item in await results(api, job_id)]
    assert [len(rows) for rows in extracted] == [number % 3 for number in range(COUNT)]
    # The next one has what it needs, and where no body is stored there is nothing to compare with.
    await compared(api, job_id)
    assert [item["extracted"] for item in await results(api, job_id)] == extracted
    bare = await ran(api, site, extract="product", keep_bodies=False)
    asked = site.conditional.total()
    job = await compared(api, bare, options={"extract": "offers"})
    assert (job["counts"]["unchanged"], job["counts"]["succeeded"], site.conditional.total()) == (0, 12, asked)


async def test_differences_are_exported(api: Api, site: ProductSite, tmp_path: Path) -> None:
    job_id = await ran(api, site)
    site.versions.update([1, 3])
    site.broken = {2}
    async with AsyncClient(api.url, api.key) as client:
        job = await client.job(job_id)
        await job.rerun(changed_only=True)
        await job.wait()
        assert (job.unchanged, job.succeeded) == (9, 11)
        assert "9 unchanged" in job.summary()
        await job.export(tmp_path / "diff.zip", changed=True)
        await job.export(tmp_path / "diff.jsonl", changed=True)
        await job.export(tmp_path / "all.csv")
        await job.export(tmp_path / "all.parquet")
        await job.export(tmp_path / "first.csv", run=1)
    with zipfile.ZipFile(io.BytesIO((tmp_path / "diff.zip").read_bytes())) as archive:
        lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [archive.read(line["file"]) for line in lines] == [site.page(1), site.page(3)]
    assert [json.loads(line)["index"] for line in (tmp_path / "diff.jsonl").read_text().splitlines()] == [1, 3]
    header, *rows = (tmp_path / "all.csv").read_text().splitlines()
    assert header.split(",")[-1] == "unchanged"
    assert [row.rpartition(",")[2] for row in rows] == ["true", "false", "false", "false", *["true"] * 8]
    table = pq.read_table(tmp_path / "all.parquet")
    assert table["unchanged"].to_pylist() == [True, False, False, False, *[True] * 8]
    assert "unchanged" not in (tmp_path / "first.csv").read_text()
    refused = await api.post(f"/v1/jobs/{job_id}/exports", {"select": {"changed": True, "status": "failed"}})
    assert (refused.status, refused.json["code"]) == (400, "invalid_field")


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"extract_only": True, "options": {"extract": "product"}}, "request"),
        ({"select": {"damaged": True}}, "damaged"),
    ],
)
async def test_what_cannot_be_compared_is_refused(api: Api, site: ProductSite, spec: dict[str, Any], word: str) -> None:
    job_id = await ran(api, site)
    answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"changed_only": True, **spec})
    assert (answer.status, answer.json["code"]) == (400, "invalid_field")
    assert word in answer.json["detail"]


async def test_only_fetches_are_compared(api: Api, site: ProductSite) -> None:
    submitted = await api.submit({"kind": "download", "tasks": [site.url(1)]})
    await ended(api, submitted.json["id"])
    answer = await api.post(f"/v1/jobs/{submitted.json['id']}/rerun", {"changed_only": True})
    assert (answer.status, answer.json["code"]) == (400, "invalid_field")


async def compared_with(api: Api, base: str, tasks: Sequence[Any], **spec: Any) -> tuple[str, dict[str, Any]]:
    answer = await api.submit({"tasks": tasks, "attempts": 1, "changed_from": base, **spec})
    assert answer.status == 201, answer.body
    return answer.json["id"], await ended(api, answer.json["id"])


async def test_a_job_compares_with_an_earlier_one_whose_list_was_another(api: Api, site: ProductSite) -> None:
    base = await ran(api, site, extract="product")
    site.versions[1] = 1
    new = site.url(50)
    urls = [new, *(site.url(number) for number in reversed(range(COUNT)))]
    tasks = [*urls[:3], *({"url": url, "tag": "a label is no part of the request"} for url in urls[3:])]
    job_id, job = await compared_with(api, base, tasks, extract="product")
    assert (job["counts"]["succeeded"], job["counts"]["unchanged"]) == (13, 11)
    assert (site.conditional.total(), site.conditional[50]) == (12, 0)
    # Nothing of the earlier job is left, and all of this one is.
    assert (await api.request("DELETE", f"/v1/jobs/{base}")).status == 204
    await api.system.blobs.delete_prefix(f"results/acme/{base}", 1000)
    items = await results(api, job_id)
    for item, url in zip(items, urls, strict=True):
        number = int(url.rpartition("/")[2])
        assert item["unchanged"] == (number not in {1, 50})
        assert (await api.get(item["body_url"], auth=False)).body == site.page(number)
        assert (item["extracted"]["title"], item["extracted"]["status"]) == (f"Product {number}", 200)
    assert not (await verified(api.system, job_id)).by_kind
    # The next one compares with this one; without a job to compare with, all is fetched.
    _, job = await compared_with(api, job_id, urls, extract="product")
    assert job["counts"]["unchanged"] == 13
    _, job = await compared_with(api, base, urls, extract="product")
    assert (job["counts"]["unchanged"], job["counts"]["succeeded"]) == (0, 13)


async def test_a_page_that_cannot_be_copied_is_fetched(api: Api, site: ProductSite) -> None:
    base = await ran(api, site, result_layout="object")
    await api.system.blobs.delete_prefix(f"results/acme/{base}", 1000)
    job_id, job = await compared_with(api, base, [site.url(number) for number in range(COUNT)])
    assert (job["counts"]["succeeded"], job["counts"]["unchanged"]) == (12, 0)
    assert (site.conditional.total(), site.requests.total()) == (12, 36)
    assert {item["attempts"] for item in await results(api, job_id)} == {1}
    assert not (await verified(api.system, job_id)).by_kind


async def test_another_function_gets_copies(api: Api, site: ProductSite) -> None:
    base = await ran(api, site, extract="product")
    job_id, job = await compared_with(api, base, [site.url(number) for number in range(COUNT)], extract="offers")
    assert job["counts"]["unchanged"] == 12
    assert [len(item["extracted"]) for item in await results(api, job_id)] == [number % 3 for number in range(COUNT)]

"""Fetch, then extract, on every stack: rows and bodies beside each other, extracted again without a request."""

import asyncio
from typing import Any

import pytest

from conveyor.system import System
from tests.stacks.test_flows import ended, results
from tests.support.api import Api
from tests.support.installations import verified
from tests.support.product_site import ProductSite

pytestmark = pytest.mark.timeout(300)
COUNT = 40


async def test_extracted_and_extracted_again(api: Api, system: System) -> None:
    async with ProductSite() as shop:
        tasks = [shop.url(number) for number in range(COUNT)]
        fetch = (await api.submit({"tasks": tasks, "extract": "tests.fussy", "chunk_size": 7})).json["id"]
        download = (await api.submit({"kind": "download", "tasks": tasks[:3], "extract": "tests.product"})).json["id"]
        jobs = await asyncio.gather(ended(api, fetch), ended(api, download))
        assert [(job["counts"]["succeeded"], job["counts"]["failed"]) for job in jobs] == [(36, 4), (3, 0)]
        asked = shop.requests.total()
        for change in ({}, {"extract_only": True}):
            answer = await api.post(f"/v1/jobs/{fetch}/rerun", {"options": {"extract": "tests.product"}, **change})
            assert answer.status == 202, answer.body
            assert (await ended(api, fetch))["counts"]["succeeded"] == COUNT
        assert shop.requests.total() == asked
    for job_id, count in ((fetch, COUNT), (download, 3)):
        items: list[Any] = sorted(await results(api, job_id), key=lambda item: int(item["index"]))
        assert [item["extracted"]["title"] for item in items] == [f"Product {number}" for number in range(count)]
        assert (await api.get(items[1]["extracted_url"], auth=False)).json == items[1]["extracted"]
        assert (await api.get(f"/v1/jobs/{job_id}/tasks/{items[1]['task_id']}/body")).body == shop.page(1)
    assert not (await verified(system, fetch)).by_kind

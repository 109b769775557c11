"""Only what changed, on every stack: counted, listed and exported as such."""

from typing import Any

import pytest

from conveyor.system import System
from tests.stacks.test_flows import ended, results
from tests.support.api import Api
from tests.support.installations import verified
from tests.support.product_site import ProductSite

pytestmark = pytest.mark.timeout(300)
COUNT = 40


async def test_unchanged_pages_count_as_such(api: Api, system: System) -> None:
    async with ProductSite() as shop:
        shop.plain = {4, 5}
        tasks = [shop.url(number) for number in range(COUNT)]
        job_id = (await api.submit({"tasks": tasks, "extract": "tests.product", "chunk_size": 7})).json["id"]
        await ended(api, job_id)
        for changed in ([1, 5], [1]):
            shop.versions.update(changed)
            answer = await api.post(f"/v1/jobs/{job_id}/rerun", {"changed_only": True})
            assert answer.status == 202, answer.body
            job = await ended(api, job_id)
            unchanged = COUNT - len(changed)
            assert (job["counts"]["succeeded"], job["counts"]["unchanged"]) == (COUNT, unchanged)
            assert job["run"]["counts"]["unchanged"] == unchanged
            items: list[Any] = await results(api, job_id)
            assert sorted(item["index"] for item in items if not item["unchanged"]) == changed
            assert all(item["extracted"]["title"] == f"Product {item['index']}" for item in items)
        assert (await api.get(f"/v1/jobs/{job_id}?verify=true")).json["verify"]["drift"] == 0
        checked = {item["index"]: item for item in items}[7]
        assert (await api.get(f"/v1/jobs/{job_id}/tasks/{checked['task_id']}/body")).body == shop.page(7)
    assert not (await verified(system, job_id)).by_kind

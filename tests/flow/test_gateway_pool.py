"""A job whose requests go through a pool of gateways: real proxies, one of them down."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from conveyor.embedded import Embedded
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import Api, serving
from tests.support.places import quick_place
from tests.support.target_site import Site
from tests.support.working import all_items, ended

HOSTS = 12


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    with quick_place() as place:
        settings = Settings.load(
            {}, data=place / "data", fetchers=1, flush_seconds=0.01, allow_private_targets=True, breaker_least=4
        )
        async with open_system(settings) as system, serving(system) as api, Embedded(system).running():
            yield api


async def ran(api: Api, urls: list[str], **spec: object) -> Counter[str]:
    answer = await api.submit({"tasks": urls, "backoff": {"base": 0.05, "cap": 0.1}, **spec})
    assert answer.status == 201, answer.body
    job_id = answer.json["id"]
    await ended(api, job_id)
    return Counter(item["status"] for item in await all_items(api, f"/v1/jobs/{job_id}/results"))


async def test_what_goes_through_a_pool(api: Api) -> None:
    """By weight, past a gateway that is down, and each host through the same gateway if the job says so."""
    urls = [f"http://host{number % HOSTS}.example/ok?{number}" for number in range(120)]
    async with Site() as first, Site() as second:
        async with Site() as gone:
            gone_url = f"http://u:p@127.0.0.1:{gone.port}"
        first_url, second_url = (f"http://u:p@127.0.0.1:{site.port}" for site in (first, second))
        members = [{"proxy": first_url, "weight": 3}, {"proxy": second_url}]
        assert await ran(api, urls, gateway={"pool": members}) == {"succeeded": 120}
        assert (len(first.seen), len(second.seen)) == (90, 30)
        for site in (first, second):
            site.seen.clear()

        pool = [*members, {"proxy": gone_url, "weight": 4}]
        # Tasks that meet the dead one are retried; once its breaker is open nobody does.
        assert await ran(api, urls, gateway={"pool": pool}, attempts=10, concurrency=4) == {"succeeded": 120}
        opened = (await api.get("/v1/breakers")).json["items"]
        assert [each["target"] for each in opened] in ([f"gateway:http://127.0.0.1:{gone.port}"], [])
        for site in (first, second):
            site.seen.clear()

        assert await ran(api, urls, gateway={"pool": members, "sticky": "host"}) == {"succeeded": 120}
        hosts = [{line.target.split("/")[2] for line in site.seen} for site in (first, second)]
        assert len(hosts[0] | hosts[1]) == HOSTS
        assert not hosts[0] & hosts[1], "a host stays with its gateway"

        downloads = [f"http://host{number}.example/ok" for number in range(4)]
        for site in (first, second):
            site.seen.clear()
        members[0]["weight"] = 1
        assert await ran(api, downloads, gateway={"pool": members}, kind="download") == {"succeeded": 4}
        assert (len(first.seen), len(second.seen)) == (2, 2)

"""The pace of jobs that name none: `auto`, unless something else says how many requests their hosts get."""

from typing import Any

import msgspec
import pytest

from conveyor.accept import submit
from conveyor.settings import Settings
from tests.support.api import Api, new_server

URLS = ["http://example.com/a"]
PROXY = {"proxy": "http://proxy.example:8080"}
AGREED: list[dict[str, Any]] = [{"rate_per_host": 2}, {"concurrency_per_host": 3}, {"gateway": PROXY}]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, allow_private_targets=True)


async def pace_of(api: Api, job: str) -> str | None:
    options: dict[str, Any] = (await api.get(f"/v1/jobs/{job}")).json["options"]
    return options.get("pace")


async def submitted(api: Api, **fields: Any) -> str:
    answer = await api.submit({"tasks": URLS, **fields})
    return str(answer.json["id"])


@pytest.mark.parametrize("kind", ["fetch", "download"])
async def test_jobs_that_fetch_find_their_pace(server: Api, kind: str) -> None:
    assert await pace_of(server, await submitted(server, kind=kind)) == "auto"
    assert await pace_of(server, await submitted(server, kind=kind, pace=None)) == "auto"
    assert await pace_of(server, await submitted(server, kind=kind, pace="fixed")) == "fixed"


async def test_other_kinds_have_none(server: Api) -> None:
    job = await submitted(server, kind="python", handler="double", tasks=[1])
    assert await pace_of(server, job) is None


@pytest.mark.parametrize("agreed", AGREED, ids=lambda agreed: next(iter(agreed)))
async def test_a_limit_or_a_gateway_is_what_the_user_wants(server: Api, agreed: dict[str, Any]) -> None:
    assert await pace_of(server, await submitted(server, **agreed)) is None
    assert await pace_of(server, await submitted(server, **agreed, pace="auto")) == "auto"


async def test_the_operators_gateway_counts() -> None:
    async with new_server(gateway="http://proxy.example:8080") as server:
        assert await pace_of(server, await submitted(server)) is None


async def test_null_asks_for_the_default(server: Api) -> None:
    job = await submitted(server, pace="fixed", mode="open", tasks=[])
    for changes, pace in (({"concurrency": 9}, "fixed"), ({"pace": None}, "auto"), ({"pace": "fixed"}, "fixed")):
        assert (await server.request("PATCH", f"/v1/jobs/{job}", body=msgspec.json.encode(changes))).status == 200
        assert await pace_of(server, job) == pace
    limited = await submitted(server, rate_per_host=2, mode="open", tasks=[])
    await server.request("PATCH", f"/v1/jobs/{limited}", body=b'{"pace": null}')
    assert await pace_of(server, limited) is None


async def test_jobs_of_earlier_versions_stay_fixed(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored without a pace. So do their reruns, and what is made of them."""
    monkeypatch.setattr(submit, "with_default_pace", lambda options, kind, settings: options)
    job = await submitted(server, mode="open", tasks=[])
    monkeypatch.undo()
    await server.post(f"/v1/jobs/{job}/tasks", {"tasks": URLS})
    await server.request("PATCH", f"/v1/jobs/{job}", body=b'{"concurrency": 9}')
    assert await pace_of(server, job) is None
    copy = (await server.post(f"/v1/jobs/{job}/duplicate")).json["id"]
    assert await pace_of(server, copy) == "fixed"
    new = (await server.post(f"/v1/jobs/{job}/duplicate", {"options": {"pace": None}})).json["id"]
    assert await pace_of(server, new) == "auto"
    assert await pace_of(server, (await server.post(f"/v1/jobs/{new}/duplicate")).json["id"]) == "auto"

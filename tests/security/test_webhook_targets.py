"""Webhooks and lists of schedules: what the API refuses when it is named, and what is stored and said of a refusal. The
table of vectors and paths is test_egress_table.py."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote

import pytest

from conveyor.accept.schedules import ListSource
from conveyor.accept.sources import Sources
from conveyor.clock import SystemClock
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.target_guard import TargetGuard
from conveyor.errors import BadInput, SourceUnavailable
from conveyor.model import JobId
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.addresses import EVIL_NAMES, LOOPBACK_HOSTS, PRIVATE_HOSTS
from tests.support.api import Api
from tests.support.egress_vectors import PUBLIC, Ports, public, vectors
from tests.support.make_jobs import ACME
from tests.support.target_site import Canary, Site

REFUSALS = {"target_refused", "bad_url", "bad_redirect"}


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    """As it is by default: private targets are closed."""
    return Settings.load({}, data=tmp_path / "data")


async def names(host: str, port: int) -> Sequence[str]:
    return EVIL_NAMES.get(host, [PUBLIC])


def guarded() -> Outbound:
    return Outbound(TargetGuard(allow_private=False, clock=SystemClock(), resolver=names, policy=public))


@pytest.fixture
async def canaries() -> AsyncIterator[tuple[Canary, Canary]]:
    async with Canary("127.0.0.1") as four, Canary("::1") as six:
        yield four, six
        assert [four.connections, six.connections] == [0, 0]


@pytest.fixture
def ports(canaries: tuple[Canary, Canary]) -> Ports:
    return canaries[0].port, canaries[1].port


async def refused(outbound: Outbound, url: str) -> str:
    try:
        status, *_ = await outbound.post(url, [], b"{}", 5.0)
    except OutboundFailed as failed:
        return failed.code
    return f"reached: {status}"


async def test_what_is_local_by_its_look_is_refused_when_it_is_named(server: Api, ports: Ports) -> None:
    for url in [f"http://{host}:{ports[0]}/" for host in [*LOOPBACK_HOSTS, *PRIVATE_HOSTS]]:
        for path, body in (
            ("/v1/webhooks", {"url": url}),
            ("/v1/jobs", {"tasks": ["http://target.example/"], "notify": [{"type": "webhook", "url": url}]}),
            ("/v1/schedules", {"cron": "0 0 * * *", "job": {"source": {"url": url}}}),
        ):
            answer = await server.post(path, body)
            assert answer.status == 400, (path, url)
            assert answer.json["code"] in {"target_refused", "invalid_field"}
    for path in ("/v1/webhooks", "/v1/jobs", "/v1/schedules"):
        assert (await server.get(path)).json["items"] == []


async def test_by_the_url_of_a_schedule_and_its_redirects(system: System, ports: Ports) -> None:
    outbound = guarded()
    sources = Sources(system, outbound)
    async with Site(PUBLIC) as site:
        for _, url in vectors(ports)[::25]:
            for asked in (url, site.url(f"/redirect?to={quote(url)}", "hop.example")):
                with pytest.raises((BadInput, SourceUnavailable)):
                    await sources.stage(ACME, JobId("job_1"), ListSource(url=asked))
        source = await sources.stage(ACME, JobId("job_1"), ListSource(url=site.url("/ok", "far.example")))
        assert await system.blobs.get(source.key) == b"ok"
    listed = [info.key async for info in system.blobs.listing("lists/")]
    assert listed == [source.key]
    await outbound.close()


async def test_headers_of_a_schedule_do_not_follow_to_another_origin(system: System) -> None:
    outbound = guarded()
    async with Site(PUBLIC) as site, Site(PUBLIC) as other:
        there = other.url("/echo", "other.example")
        source = ListSource(url=site.url(f"/redirect?to={quote(there)}", "far.example"), headers={"x-token": "secret"})
        staged = await Sources(system, outbound).stage(ACME, JobId("job_1"), source)
        said = json.loads(await system.blobs.get(staged.key) or b"")
        assert "x-token" not in said["headers"]
        assert site.seen[0].headers["x-token"] == "secret"
    await outbound.close()


async def test_a_failure_says_nothing_of_the_url(system: System) -> None:
    outbound = guarded()
    for url in ("http://127.0.0.1/admin?token=hunter2", "https://localhost/hunter2", "http://x:1/hunter2"):
        with pytest.raises(OutboundFailed) as caught:
            await outbound.post(url, [], b"", 5.0)
        assert "hunter2" not in caught.value.message
    await outbound.close()


async def test_the_canaries_would_have_been_reached() -> None:
    """The control: with private targets allowed, the same request does come through."""
    outbound = Outbound(TargetGuard(allow_private=True, clock=SystemClock()))
    async with Canary("127.0.0.1") as canary:
        assert await refused(outbound, f"http://127.0.0.1:{canary.port}/") == "reached: 200"
        assert canary.connections == 1
    await outbound.close()

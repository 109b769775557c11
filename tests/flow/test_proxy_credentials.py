"""Proxies of each kind, with and without the credentials that they want: HTTP, CONNECT and SOCKS behave alike."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.errors import InvalidSetting
from conveyor.model import Gateway, InputJson, JobKind, Outcome, RobotsMode, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from tests.flow.test_cli import Cli, manifest
from tests.flow.test_fetch import NAMES, PUBLIC, public
from tests.support.make_jobs import make_job
from tests.support.socks_proxy import SocksProxy
from tests.support.target_site import AUTHORITY, Listener, Site, answer, read_request

LOGIN = ("us@er", "hunter2:/")
# As it stands in a URL.
WRITTEN = "us%40er:hunter2%3A%2F"
# As it stands in a header.
BASIC = "Basic dXNAZXI6aHVudGVyMjov"


class LockedProxy(Site):
    """An HTTP proxy that wants credentials for everything."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        self.seen.append(request)
        if request.headers.get("proxy-authorization") != BASIC:
            answer(writer, b"who are you?", 407, proxy_authenticate="Basic")
        elif request.method == "CONNECT":
            await self.tunnel(reader, writer)
        else:
            answer(writer, b"through the proxy")
        await writer.drain()


@asynccontextmanager
async def fetching(*, guarded: bool = False, **settings: Any) -> AsyncIterator[FetchExecutor]:
    clock = SystemClock()
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return NAMES.get(host, [])

    guard = TargetGuard(allow_private=not guarded, clock=clock, resolver=resolve, policy=public)
    made = FetchExecutor(Settings(**settings), clock, guard, root_certificate=AUTHORITY)
    try:
        yield made
    finally:
        await made.close()
    # The proxy resolves the names of targets.
    assert not any(host.startswith("far.") for host in asked)


def through(proxy: Listener, **settings: Any) -> AbstractAsyncContextManager[FetchExecutor]:
    scheme = "socks5h" if isinstance(proxy, SocksProxy) else "http"
    return fetching(gateway=f"{scheme}://127.0.0.1:{proxy.port}", **settings)


async def attempt(executor: FetchExecutor, url: str, **options: Any) -> Outcome:
    job = make_job(SystemClock(), kind=JobKind.FETCH, **options)
    (outcome,) = await executor.attempt(job, [TaskRef(0, InputJson(json.dumps(url)))])
    return outcome


def code(outcome: Outcome) -> str | None:
    return outcome.error.code if outcome.error else None


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        yield made


@pytest.fixture
async def secure() -> AsyncIterator[Site]:
    async with Site(tls=True) as made:
        yield made


class TestCredentials:
    @pytest.fixture(params=["http", "connect", "socks5h", "socks5h and TLS"])
    async def way(self, request: pytest.FixtureRequest, site: Site, secure: Site) -> AsyncIterator[tuple[str, str]]:
        """The address of a proxy without its scheme, the scheme, and a URL to fetch through it."""
        if request.param.startswith("socks5h"):
            async with SocksProxy({"far.example": site.port, "site.example": secure.port}, login=LOGIN) as socks:
                url = "https://site.example/ok" if "TLS" in request.param else "http://far.example/ok"
                yield f"socks5h://{{}}127.0.0.1:{socks.port}", url
        else:
            async with LockedProxy(tunnel_to=secure.port) as proxy:
                url = "https://site.example/ok" if request.param == "connect" else "http://far.example/ok"
                yield f"http://{{}}127.0.0.1:{proxy.port}", url

    async def test_they_stand_in_the_url(self, way: tuple[str, str]) -> None:
        proxy, url = way
        async with fetching(gateway=proxy.format(f"{WRITTEN}@")) as executor:
            assert code(await attempt(executor, url)) is None
        async with fetching() as executor:
            gateway = Gateway(proxy=proxy.format(f"{WRITTEN}@"))
            assert code(await attempt(executor, url, gateway=gateway)) is None

    @pytest.mark.parametrize("given", ["", "us%40er:wrong@"])
    async def test_without_them_the_gateway_fails_and_says_what_it_wants(
        self, way: tuple[str, str], given: str
    ) -> None:
        proxy, url = way
        async with fetching(gateway=proxy.format(given)) as executor:
            outcome = await attempt(executor, url)
        assert outcome.error is not None
        assert outcome.error.code == "gateway_failed"
        assert "put user:password@ before the host in its URL" in outcome.error.message
        assert "wrong" not in str(outcome)

    async def test_a_header_has_them(self, secure: Site) -> None:
        async with LockedProxy(tunnel_to=secure.port) as proxy, fetching() as executor:
            gateway = Gateway(proxy=f"http://127.0.0.1:{proxy.port}", headers={"Proxy-Authorization": BASIC})
            for url in ("http://far.example/", "https://site.example/ok"):
                assert code(await attempt(executor, url, gateway=gateway)) is None
            assert "proxy-authorization" not in secure.seen[0].headers

    async def test_robots_are_not_taken_for_missing(self) -> None:
        async with LockedProxy() as proxy, fetching(gateway=f"http://127.0.0.1:{proxy.port}") as executor:
            outcome = await attempt(executor, "http://far.example/", robots=RobotsMode.OBEY)
            assert code(outcome) == "gateway_failed"
            assert [seen.target for seen in proxy.seen] == ["http://far.example/robots.txt"]

    async def test_a_407_of_the_target_is_the_targets(self, site: Site, secure: Site) -> None:
        async with fetching() as executor:
            assert code(await attempt(executor, site.url("/status/407"))) == "http_407"
        async with Site(tunnel_to=secure.port) as proxy, through(proxy) as executor:
            assert code(await attempt(executor, "https://site.example/status/407")) == "http_407"
        async with SocksProxy({"far.example": site.port}) as socks, through(socks) as executor:
            assert code(await attempt(executor, "http://far.example/status/407")) == "http_407"


class TestSocks:
    async def test_the_proxy_gets_names_not_addresses(self, site: Site, secure: Site) -> None:
        ports = {"far.example": site.port, "site.example": secure.port, "wrong.example": secure.port}
        async with SocksProxy(ports) as socks, fetching(gateway=f"socks5h://127.0.0.1:{socks.port}") as executor:
            assert (await attempt(executor, "http://far.example/ok")).body == b"ok"
            assert (await attempt(executor, "https://site.example:8443/ok")).body == b"ok"
            assert code(await attempt(executor, "https://wrong.example/ok")) == "tls_failed"
            assert socks.asked == [("far.example", 80), ("site.example", 8443), ("wrong.example", 443)]

    @pytest.mark.parametrize(
        "url",
        [
            "http://127.0.0.1/",
            "http://0x7f.1/",
            "http://[::1]/",
            "http://localhost/",
            "http://db/",
            "http://169.254.169.254/",
        ],
    )
    async def test_local_targets_are_refused_behind_it(self, url: str, site: Site) -> None:
        async with SocksProxy({"far.example": site.port}) as socks, through(socks, guarded=True) as executor:
            assert code(await attempt(executor, url)) == "target_refused"
            redirect = f"http://far.example/redirect?to={url}"
            assert code(await attempt(executor, redirect)) == "target_refused"
            assert socks.asked == [("far.example", 80)]

    async def test_one_of_the_job_is_guarded_and_pinned(self) -> None:
        async with (
            Site(PUBLIC) as site,
            SocksProxy({"far.example": site.port}, PUBLIC) as socks,
            SocksProxy({"far.example": site.port}) as private,
            fetching(guarded=True) as executor,
        ):
            for host in ("gate.example", "GATE.example", PUBLIC):
                gateway = Gateway(proxy=f"socks5h://{host}:{socks.port}")
                assert code(await attempt(executor, "http://far.example/ok", gateway=gateway)) is None
            for host in ("127.0.0.1", "127.1", "0x7f000001", "%31%32%37.0.0.1", "evil.example", "EVIL.example"):
                gateway = Gateway(proxy=f"socks5h://{host}:{private.port}")
                outcome = await attempt(executor, "http://far.example/ok", gateway=gateway)
                assert code(outcome) == "target_refused", host
            assert private.connections == 0

    @pytest.mark.parametrize(
        ("reply", "blamed"),
        [(1, "gateway_failed"), (2, "gateway_failed"), (4, "connect_failed"), (5, "connect_failed")],
    )
    async def test_who_is_to_blame(self, reply: int, blamed: str) -> None:
        async with SocksProxy({}, reply=reply) as socks, through(socks) as executor:
            for scheme in ("http", "https"):
                assert code(await attempt(executor, f"{scheme}://far.example/")) == blamed
        async with through(socks) as executor:
            assert code(await attempt(executor, "http://far.example/")) == "gateway_failed"

    @pytest.mark.parametrize("scheme", ["socks5", "socks4", "socks4a"])
    async def test_other_kinds_are_refused(self, scheme: str) -> None:
        """With socks5 this machine would resolve the names of targets, past the guard."""
        with pytest.raises(InvalidSetting, match="use socks5h://"):
            async with fetching(gateway=f"{scheme}://127.0.0.1:1"):
                pass

    @pytest.mark.parametrize("kind", [(), ("--download",)])
    async def test_run(self, tmp_path: Path, site: Site, kind: Sequence[str]) -> None:
        cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
        cli.write("urls.txt", "http://far.example/ok?size=1000")
        async with SocksProxy({"far.example": site.port}, login=LOGIN) as socks:
            for written, ending in ((WRITTEN, 0), ("us%40er:hunter3", 3)):
                gateway = f"socks5h://{written}@127.0.0.1:{socks.port}"
                options = ("--gateway", gateway, "--attempts", "1", "--overwrite", *kind)
                done = await asyncio.to_thread(cli, "run", "urls.txt", "-o", "pages.zip", *options)
                assert done.returncode == ending, done.stderr
                assert "hunter" not in done.stdout + done.stderr
                (line,) = manifest(tmp_path / "pages.zip")
                assert "hunter" not in json.dumps(line)
                assert line["size"] == (1000 if ending == 0 else None)

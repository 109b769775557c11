"""TLS as jobs and the operator want it: authorities of a file, certificates that nobody verifies, HTTP/2."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from conveyor.accept.option_limits import check_insecure, check_limits
from conveyor.accept.spec import JobSpec
from conveyor.clock import SystemClock
from conveyor.egress.ca_bundle import read_ca_bundle
from conveyor.egress.clients import Clients, TlsMode
from conveyor.egress.failures import Failure
from conveyor.egress.outbound import Outbound, OutboundFailed
from conveyor.egress.responses import read_body
from conveyor.egress.robots import UNAVAILABLE
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.errors import InvalidField, InvalidSetting
from conveyor.model import Gateway, InputJson, JobKind, Outcome, RobotsMode, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from conveyor.system import System
from tests.flow.test_cli import Cli, manifest, serving
from tests.support.certificates import certificates, server_context
from tests.support.http2_site import Http2Site
from tests.support.make_jobs import make_job
from tests.support.target_site import AUTHORITY, Site, read_request

# One of 127.0.0.1, by an authority that only the file knows.
CA = Path(certificates()["ca"])
TRUSTING: dict[str, Any] = {"ca_bundle": CA}
INSECURE: dict[str, Any] = {"allow_insecure": True}


@asynccontextmanager
async def fetching(**settings: Any) -> AsyncIterator[FetchExecutor]:
    clock = SystemClock()
    made = FetchExecutor(Settings(**settings), clock, TargetGuard(allow_private=True, clock=clock))
    try:
        yield made
    finally:
        await made.close()


async def attempt(executor: FetchExecutor, url: str, **options: Any) -> Outcome:
    job = make_job(SystemClock(), kind=JobKind.FETCH, **options)
    (outcome,) = await executor.attempt(job, [TaskRef(0, InputJson(json.dumps(url)))])
    return outcome


def code(outcome: Outcome) -> str | None:
    return outcome.error.code if outcome.error else None


class Contradicting(Site):
    """A site that sends chunks, and declares another length."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        writer.write(head + b"2\r\nok\r\n0\r\n\r\n")
        await writer.drain()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """A site with a certificate of an authority that the system does not know."""
    made = Site(tls=True)
    made.context = server_context()
    async with made:
        yield made


@pytest.fixture
async def wrong_site() -> AsyncIterator[Site]:
    """A site whose certificate has another name than its own."""
    async with Site(tls=True) as made:
        yield made


class TestBundle:
    async def test_a_fetch_trusts_its_authorities(self, site: Site, wrong_site: Site) -> None:
        async with fetching() as strict:
            assert code(await attempt(strict, site.url("/ok"))) == "tls_failed"
        async with fetching(**TRUSTING) as trusting:
            assert (await attempt(trusting, site.url("/ok"))).body == b"ok"
            assert code(await attempt(trusting, wrong_site.url("/ok"))) == "tls_failed"

    async def test_a_file_may_have_several(self, site: Site, tmp_path: Path) -> None:
        bundle = tmp_path / "all.pem"
        bundle.write_bytes(b"# ours\n" + AUTHORITY + b"\n# theirs\n" + CA.read_bytes())
        async with fetching(ca_bundle=bundle) as trusting:
            assert code(await attempt(trusting, site.url("/ok"))) is None

    async def test_so_do_gateways(self, site: Site) -> None:
        async with fetching(**TRUSTING, gateway=site.url("/gateway?url={url}")) as trusting:
            assert (await attempt(trusting, "http://far.example/")).body == b"through the gateway: http://far.example/"
        async with fetching(**TRUSTING, gateway=f"https://127.0.0.1:{site.port}") as trusting:
            assert code(await attempt(trusting, "http://far.example/ok")) is None

    async def test_so_do_webhooks_and_lists(self, site: Site) -> None:
        clock = SystemClock()
        for bundle in (None, CA):
            guard = TargetGuard(allow_private=True, clock=clock)
            outbound = Outbound(guard, root_certificate=read_ca_bundle(bundle))
            if bundle is None:
                with pytest.raises(OutboundFailed) as failed:
                    await outbound.post(site.url("/ok"), (), b"", 5.0)
                assert failed.value.code == "tls_failed"
            else:
                assert (await outbound.post(site.url("/ok"), (), b"", 5.0)).status == 200
            await outbound.close()

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "cannot be read: No such file"),
            (b"", "has no certificate"),
            (b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "has no certificate"),
            (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "has a certificate that is broken"),
            (b"-----BEGIN CERTIFICATE-----\nAAAA\n", "has a certificate that is broken"),
            (b" " * (1 << 21), "has more than"),
        ],
    )
    async def test_a_file_that_can_not_work_is_named_at_the_start(
        self, system: System, tmp_path: Path, content: bytes | None, said: str
    ) -> None:
        bundle = tmp_path / "corporate.pem"
        if content is not None:
            bundle.write_bytes(content)
        with pytest.raises(InvalidSetting, match=rf"CONVEYOR_CA_BUNDLE: .*corporate\.pem {said}"):
            read_ca_bundle(bundle)
        wrong = replace(system, settings=msgspec.structs.replace(system.settings, ca_bundle=bundle))
        with pytest.raises(InvalidSetting, match=r"corporate\.pem"):
            Embedded(wrong)._executors()


class TestInsecure:
    async def test_no_certificate_is_verified(self, site: Site, wrong_site: Site) -> None:
        async with fetching(**INSECURE) as executor:
            for target in (site, wrong_site):
                assert code(await attempt(executor, target.url("/ok"))) == "tls_failed"
                assert (await attempt(executor, target.url("/ok"), insecure=True)).body == b"ok"
                # A connection of the job before is not taken for this one.
                assert code(await attempt(executor, target.url("/ok"))) == "tls_failed"
            through = wrong_site.url(f"/redirect?to={quote(site.url('/ok'))}")
            assert (await attempt(executor, through, insecure=True)).body == b"ok"

    async def test_the_operator_decides(self, site: Site) -> None:
        """A job may have been accepted while it was allowed."""
        async with fetching() as strict:
            outcome = await attempt(strict, site.url("/ok"), insecure=True)
        assert code(outcome) == "bad_input"
        assert "CONVEYOR_ALLOW_INSECURE" in str(outcome.error)
        assert site.connections == 0

    async def test_the_guard_holds(self, site: Site) -> None:
        clock = SystemClock()
        guard = TargetGuard(allow_private=False, clock=clock)
        executor = FetchExecutor(Settings(**INSECURE), clock, guard)
        assert code(await attempt(executor, site.url("/ok"), insecure=True)) == "target_refused"
        await executor.close()

    async def test_a_gateway_of_the_job_is_not_verified_either(self, site: Site) -> None:
        async with fetching(**INSECURE) as executor:
            for gateway in (
                Gateway(url=site.url("/gateway?url={url}")),
                Gateway(proxy=f"https://127.0.0.1:{site.port}"),
            ):
                assert code(await attempt(executor, "http://far.example/ok", gateway=gateway)) in {
                    "gateway_failed",
                    "tls_failed",
                }
                assert code(await attempt(executor, "http://far.example/ok", gateway=gateway, insecure=True)) is None

    async def test_the_operators_gateway_is_verified(self, site: Site) -> None:
        """It gets the operator's key or password."""
        async with fetching(**INSECURE, gateway=site.url("/gateway?key=hunter2&url={url}")) as executor:
            assert code(await attempt(executor, "http://far.example/", insecure=True)) == "gateway_failed"
        async with fetching(**INSECURE, gateway=f"https://u:hunter2@127.0.0.1:{site.port}") as executor:
            outcome = await attempt(executor, "http://far.example/ok", insecure=True)
            assert code(outcome) == "bad_input"
            assert "CONVEYOR_GATEWAY" in str(outcome.error)
        assert site.seen == []

    async def test_targets_behind_the_operators_proxy_may_be_unverified(self, wrong_site: Site) -> None:
        async with (
            Site(tunnel_to=wrong_site.port) as proxy,
            fetching(**INSECURE, gateway=f"http://127.0.0.1:{proxy.port}") as executor,
        ):
            assert code(await attempt(executor, "https://far.example/ok")) == "tls_failed"
            assert (await attempt(executor, "https://far.example/ok", insecure=True)).body == b"ok"


class TestHttp2:
    async def test_a_site_chooses_it(self) -> None:
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            outcome = await attempt(executor, site.url("/ok?size=3000000"), http2=True, headers={"X-A": "1"})
            assert outcome.body == b"ok" * 1_500_000
            assert site.spoken == ["h2"]
            assert site.requests[0]["x-a"] == "1"
            assert site.requests[0][":authority"] == f"127.0.0.1:{site.port}"

    async def test_nobody_speaks_it_unasked(self) -> None:
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            assert (await attempt(executor, site.url("/ok"))).body == b"ok"
            assert site.spoken == ["http/1.1"]

    async def test_a_site_that_does_not_know_it(self, site: Site) -> None:
        async with Http2Site("http/1.1") as old, fetching(**TRUSTING) as executor:
            assert (await attempt(executor, old.url("/ok"), http2=True)).body == b"ok"
            assert old.spoken == ["http/1.1"]
            assert (await attempt(executor, site.url("/ok"), http2=True)).body == b"ok"
        async with Site() as plain, fetching() as executor:
            assert (await attempt(executor, plain.url("/ok"), http2=True)).body == b"ok"

    async def test_an_old_site_may_declare_a_length_that_does_not_count(self) -> None:
        """Over HTTP/1.1 the chunks do."""
        async with Contradicting() as site, fetching() as executor:
            for http2 in (False, True):
                assert (await attempt(executor, site.url("/"), http2=http2)).body == b"ok"

    async def test_tasks_share_a_connection(self) -> None:
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            job = make_job(SystemClock(), kind=JobKind.FETCH, http2=True)
            refs = [TaskRef(n, InputJson(json.dumps(site.url(f"/ok?size={n}")))) for n in range(1, 60)]
            # Until the first handshake is done, nobody knows that one connection is enough.
            await executor.attempt(job, refs[:1])
            outcomes = await executor.attempt(job, refs)
            assert [len(outcome.body or b"") for outcome in outcomes] == list(range(1, 60))
            assert site.spoken.count("h2") == len(site.spoken) == 1

    async def test_headers_and_failures_are_those_of_http_1(self) -> None:
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            outcome = await attempt(executor, site.url("/latin1"), http2=True)
            assert ("x-name", "Zoë") in (outcome.headers or [])
            for path in ("/reset?size=1000", "/reset?size=1000000", "/reset?size=1000&code=2"):
                assert code(await attempt(executor, site.url(path), http2=True)) == "read_failed", path
            assert code(await attempt(executor, site.url("/refuse"), http2=True)) == "read_failed"

    async def test_an_encoded_body_is_cut_where_it_looks_whole(self) -> None:
        """Before its first byte: no decoder misses anything."""
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            for coding in ("gzip", "br", "zstd", "deflate"):
                outcome = await attempt(executor, site.url(f"/reset?size=0&coding={coding}"), http2=True)
                assert code(outcome) == "read_failed", coding

    async def test_rules_that_are_cut_are_not_obeyed(self) -> None:
        async with Http2Site() as site, fetching(**TRUSTING) as executor:
            site.cut.add("/robots.txt")
            assert code(await attempt(executor, site.url("/ok"), http2=True, robots=RobotsMode.OBEY)) == UNAVAILABLE

    async def test_so_is_what_an_export_api_answers(self) -> None:
        clients = Clients(SystemClock(), "test", CA.read_bytes(), mode=TlsMode(http2=True))
        async with Http2Site() as site:
            for path in ("/reset?size=1000", "/reset?size=1000000"):
                async with clients.shared(10.0).get(site.url(path)).build_streamed() as response:
                    head = await clients.read_head(response)
                    with pytest.raises(Failure, match="bytes of"):
                        await read_body(response, head, "GET", 1 << 24)
        await clients.close()

    async def test_certificates_are_verified(self) -> None:
        async with Http2Site() as site, fetching(**INSECURE) as executor:
            assert code(await attempt(executor, site.url("/ok"), http2=True)) == "tls_failed"
            assert code(await attempt(executor, site.url("/ok"), http2=True, insecure=True)) is None
            assert site.spoken == ["h2"]


class TestCommands:
    """The command line, with the fetchers and the download lanes that users have."""

    @pytest.fixture
    def cli(self, tmp_path: Path, site: Site) -> Cli:
        made = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1"})
        made.write("urls.txt", site.url("/ok"))
        return made

    @pytest.mark.parametrize("kind", [(), ("--download",)])
    async def test_run(self, cli: Cli, kind: Sequence[str]) -> None:
        def run(out: str, *arguments: str) -> subprocess.CompletedProcess[str]:
            return cli("run", "urls.txt", "-o", out, "--attempts", "1", *kind, *arguments)

        strict = await asyncio.to_thread(run, "strict.zip")
        assert strict.returncode == 3
        assert "not verified" not in strict.stderr
        assert manifest(cli.place / "strict.zip")[0]["error"]["code"] == "tls_failed"
        insecure = await asyncio.to_thread(run, "insecure.zip", "--insecure")
        assert insecure.returncode == 0, insecure.stderr
        assert insecure.stderr.count("Warning: certificates are not verified.") == 1
        trusting = await asyncio.to_thread(run, "trusting.zip", "--ca-bundle", str(CA), "--http2")
        assert trusting.returncode == 0, trusting.stderr
        assert "not verified" not in trusting.stderr

    async def test_a_bundle_that_is_not_there(self, cli: Cli) -> None:
        done = await asyncio.to_thread(cli, "run", "urls.txt", "-o", "a.zip", "--ca-bundle", "missing.pem")
        assert done.returncode == 2
        assert "missing.pem cannot be read: No such file or directory" in done.stderr
        assert not (cli.place / "a.zip.conveyor").exists()

    async def test_doctor(self, tmp_path: Path) -> None:
        async def checked(**settings: str) -> dict[str, str]:
            doctor = await asyncio.to_thread(Cli(tmp_path, settings), "doctor", "--json")
            found: list[dict[str, str]] = json.loads(doctor.stdout)
            return next(check for check in found if check["name"] == "certificates")

        assert (await checked())["verdict"] == "ok"
        trusting = await checked(CONVEYOR_CA_BUNDLE=str(CA))
        assert trusting["verdict"] == "ok"
        assert f"1 of {CA}" in trusting["found"]
        missing = await checked(CONVEYOR_CA_BUNDLE="/nowhere/ca.pem")
        assert missing["verdict"] == "fail"
        assert "/nowhere/ca.pem" in missing["found"]
        assert (await checked(CONVEYOR_ALLOW_INSECURE="1"))["verdict"] == "warn"

    async def test_a_server_refuses_what_its_operator_does_not_allow(self, cli: Cli, tmp_path: Path) -> None:
        def submit(place: Path, **settings: str) -> tuple[subprocess.CompletedProcess[str], str]:
            place.mkdir()
            with serving(place, **settings) as up:
                urls = str(cli.place / "urls.txt")
                done = up("submit", urls, "--insecure", "--wait")
                job = up.json("jobs")
                return done, up("show", job[0]["id"]).stdout if job else ""

        refused, _ = await asyncio.to_thread(submit, tmp_path / "strict")
        assert refused.returncode == 2
        assert "CONVEYOR_ALLOW_INSECURE" in refused.stderr
        done, shown = await asyncio.to_thread(submit, tmp_path / "lax", CONVEYOR_ALLOW_INSECURE="1")
        assert done.returncode == 0, done.stderr
        assert "Warning: certificates are not verified." in done.stderr
        assert "certificates are not verified" in shown

    async def test_a_download_over_http2(self, tmp_path: Path) -> None:
        cli = Cli(tmp_path, {"CONVEYOR_ALLOW_PRIVATE_TARGETS": "1", "CONVEYOR_CA_BUNDLE": str(CA)})
        async with Http2Site() as site:
            cuts = (site.url("/reset?size=1000000"), site.url("/reset?size=0&coding=gzip"))
            cli.write("files.txt", site.url("/ok?size=5000000"), *cuts)
            options = ("--attempts", "1", "--download", "--http2")
            done = await asyncio.to_thread(cli, "run", "files.txt", "-o", "files.zip", *options)
            assert done.returncode == 3, done.stderr
            assert set(site.spoken) == {"h2"}
        whole, *cut = manifest(tmp_path / "files.zip")
        assert whole["size"] == 5_000_000
        assert [line["error"]["code"] for line in cut] == ["read_failed", "read_failed"]


class TestAccept:
    async def test_options_are_checked_by_the_settings(self) -> None:
        spec = JobSpec(insecure=True)
        check_insecure(spec, Settings(**INSECURE))
        check_insecure(JobSpec(), Settings())
        with pytest.raises(InvalidField, match="CONVEYOR_ALLOW_INSECURE"):
            check_insecure(spec, Settings())
        behind_tls = Settings(**INSECURE, gateway="http://a:1 https://u:p@b:1")
        with pytest.raises(InvalidField, match="https proxy in CONVEYOR_GATEWAY"):
            check_insecure(spec, behind_tls)
        check_insecure(JobSpec(insecure=True, gateway=Gateway(proxy="https://own:1")), behind_tls)

    @pytest.mark.parametrize("field", ["insecure", "http2"])
    def test_functions_make_no_requests(self, field: str) -> None:
        with pytest.raises(InvalidField, match=field):
            check_limits(JobSpec(kind=JobKind.PYTHON, handler="f", **{field: True}))

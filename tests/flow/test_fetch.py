"""Fetching from a site on loopback that behaves as real ones do, well and badly."""

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from conveyor.clock import SystemClock
from conveyor.egress.clients import MAX_PINS, Clients, Pin, connect_step
from conveyor.egress.failures import Failure
from conveyor.egress.target_guard import TargetGuard, refusal
from conveyor.errors import InvalidSetting
from conveyor.model import Gateway, InputJson, Job, JobKind, Outcome, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor, host_of
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from tests.support.make_jobs import make_job
from tests.support.target_site import AUTHORITY, MIB, Site

# On this address the site passes for a public one; 127.0.0.1 stays what it is.
PUBLIC = "127.0.0.2"
NAMES = {
    "site.example": [PUBLIC],
    "site.example.": [PUBLIC],
    "other.example": [PUBLIC],
    "gate.example": [PUBLIC],
    "evil.example": ["127.0.0.1"],
    "dead.example": ["127.0.0.3", PUBLIC],
}


async def names(host: str, port: int) -> Sequence[str]:
    return NAMES.get(host, [])


def public(address: str) -> str | None:
    return None if address in {PUBLIC, "127.0.0.3"} else refusal(address)


def executor_with(*, guarded: bool = False, gateway: str | None = None, **options: Any) -> FetchExecutor:
    clock = SystemClock()
    guard = TargetGuard(allow_private=not guarded, clock=clock, resolver=names if guarded else None, policy=public)
    return FetchExecutor(Settings(gateway=gateway), clock, guard, root_certificate=AUTHORITY, **options)


async def attempt(executor: FetchExecutor, given: str | dict[str, Any], **options: Any) -> Outcome:
    ref = TaskRef(0, InputJson(msgspec.json.encode(given).decode()))
    (outcome,) = await executor.attempt(job_with(**options), [ref])
    return outcome


def job_with(**options: Any) -> Job:
    return make_job(SystemClock(), kind=JobKind.FETCH, **options)


def code(outcome: Outcome) -> str | None:
    assert (outcome.error is None) == (outcome.status is TaskStatus.SUCCEEDED)
    return outcome.error.code if outcome.error else None


def said(outcome: Outcome) -> dict[str, Any]:
    """What the echo page heard."""
    assert outcome.body is not None
    heard: dict[str, Any] = json.loads(outcome.body)
    return heard


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site(PUBLIC) as made:
        yield made


@pytest.fixture
async def free() -> AsyncIterator[FetchExecutor]:
    """An executor that may go anywhere."""
    made = executor_with()
    yield made
    await made.close()


@pytest.fixture
async def guarded() -> AsyncIterator[FetchExecutor]:
    """An executor to which only the site is public."""
    made = executor_with(guarded=True)
    yield made
    await made.close()


@pytest.fixture(params=["free", "guarded"])
def either(request: pytest.FixtureRequest, free: FetchExecutor, guarded: FetchExecutor) -> FetchExecutor:
    return free if request.param == "free" else guarded


class TestAnswers:
    async def test_a_page_is_kept_whole(self, either: FetchExecutor, site: Site) -> None:
        outcome = await attempt(either, site.url("/ok?size=2000"))
        assert outcome.status is TaskStatus.SUCCEEDED
        assert outcome.http_status == 200
        assert outcome.body == b"ok" * 1000
        assert outcome.content_type == "text/plain"
        assert outcome.final_url == site.url("/ok?size=2000")
        assert outcome.headers == [("content-length", "2000"), ("content-type", "text/plain")]
        assert outcome.elapsed > 0

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/ok?size=0", b""),
            ("/chunked", b"one two three"),
            ("/until-close", b"all of it"),
            ("/gzip", b"hello " * 1000),
            ("/ok?size=300000", b"ok" * 150_000),
        ],
    )
    async def test_a_body_is_read_however_it_is_sent(
        self, either: FetchExecutor, site: Site, path: str, body: bytes
    ) -> None:
        assert (await attempt(either, site.url(path))).body == body

    async def test_connections_are_used_again(self, either: FetchExecutor, site: Site) -> None:
        for path in ("/ok", "/chunked", "/redirect?to=/ok", "/status/404", "/gzip"):
            await attempt(either, site.url(path))
        assert site.connections == 1

    async def test_many_references_are_fetched_at_once(self, free: FetchExecutor, site: Site) -> None:
        refs = [TaskRef(number, InputJson(f'"{site.url(f"/ok?size={number}")}"')) for number in range(20)]
        outcomes = await free.attempt(job_with(), refs)
        assert [len(outcome.body or b"") for outcome in outcomes] == list(range(20))

    @pytest.mark.parametrize("status", [204, 400, 404, 410, 429, 500, 503, 599])
    async def test_a_status_that_is_no_success_fails_and_keeps_its_body(
        self, free: FetchExecutor, site: Site, status: int
    ) -> None:
        outcome = await attempt(free, site.url(f"/status/{status}"))
        assert outcome.http_status == status
        assert code(outcome) == (None if status == 204 else f"http_{status}")
        assert outcome.body == (b"" if status == 204 else b"the page of an error")

    async def test_the_job_says_what_a_success_is(self, free: FetchExecutor, site: Site) -> None:
        assert code(await attempt(free, site.url("/status/404"), success_statuses=[200, 404])) is None
        assert code(await attempt(free, site.url("/status/204"), success_statuses=[200])) == "http_204"
        assert code(await attempt(free, site.url("/redirect?to=/ok"), success_statuses=[302])) is None

    async def test_a_flaky_page_is_fetched_in_the_end(self, free: FetchExecutor, site: Site) -> None:
        codes = [code(await attempt(free, site.url("/flaky/2"))) for _ in range(3)]
        assert codes == ["http_503", "http_503", None]

    @pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("0", 0.0), ("soon", None), ("-1", None), ("", None)])
    async def test_retry_after_is_a_wish(
        self, free: FetchExecutor, site: Site, said: str, seconds: float | None
    ) -> None:
        assert (await attempt(free, site.url(f"/status/503?retry-after={said}"))).retry_after == seconds

    async def test_retry_after_may_be_a_date(self, free: FetchExecutor, site: Site) -> None:
        for ahead, low, high in [(100, 90, 100), (-100, 0, 0)]:
            date = formatdate(SystemClock().now() + ahead, usegmt=True).replace(" ", "%20")
            wish = (await attempt(free, site.url(f"/status/429?retry-after={date}"))).retry_after
            assert wish is not None
            assert low <= wish <= high

    async def test_headers_that_are_not_ascii_do_not_hide_the_others(self, free: FetchExecutor, site: Site) -> None:
        outcome = await attempt(free, site.url("/foreign-letters"))
        assert outcome.status is TaskStatus.SUCCEEDED
        assert outcome.headers is not None
        # Each character is a byte: the value was UTF-8.
        assert ("x-name", "caf\xc3\xa9") in outcome.headers
        assert [value for name, value in outcome.headers if name == "set-cookie"] == ["a=1", "b=2"]

    async def test_headers_that_are_not_ascii_are_kept_as_latin_1(self, either: FetchExecutor, site: Site) -> None:
        outcome = await attempt(either, site.url("/latin-letters"))
        assert outcome.content_type == "text/caf\xe9"
        assert outcome.headers == [
            ("content-type", "text/caf\xe9"),
            ("content-length", "2"),
            ("location", "/caf\xe9"),
            ("x-empty", ""),
            ("x-name", 'caf\xe9 \\xe9 "\\"'),
            ("x-name", "plain"),
            ("x-name", "\xa0\xff"),
        ]

    async def test_such_headers_take_no_way_through_a_proxy(self) -> None:
        async with Site("127.0.0.1") as proxy:
            executor = executor_with(guarded=True, gateway=f"http://127.0.0.1:{proxy.port}")
            outcome = await attempt(executor, "http://far.example/latin-letters")
            assert ("x-name", "\xa0\xff") in (outcome.headers or [])
            assert len(proxy.seen) == 1
            await executor.close()


class TestRequests:
    async def test_the_request_is_the_tasks_own(self, either: FetchExecutor, site: Site) -> None:
        given = {"url": site.url("/echo?a=b#c"), "method": "post", "headers": {"X-A": "1", "x-b": "ü"}, "body": "hé"}
        heard = said(await attempt(either, given, headers={"X-B": "job", "X-C": "job"}))
        assert (heard["method"], heard["target"], heard["body"]) == ("POST", "/echo?a=b", "h\xc3\xa9")
        assert heard["headers"]["x-a"] == "1"
        assert heard["headers"]["x-b"] == "Ã¼"
        assert heard["headers"]["x-c"] == "job"
        assert heard["headers"]["user-agent"].startswith("conveyor/")

    async def test_a_body_may_be_bytes(self, free: FetchExecutor, site: Site) -> None:
        given = {"url": site.url("/echo"), "method": "PUT", "body_base64": "AP8="}
        assert said(await attempt(free, given))["body"] == "\x00\xff"

    async def test_a_head_has_no_body_whatever_it_declares(self, free: FetchExecutor, site: Site) -> None:
        outcome = await attempt(free, {"url": site.url("/echo"), "method": "HEAD"}, max_body_bytes=10)
        assert (outcome.http_status, outcome.body) == (200, b"")

    async def test_a_pinned_name_is_still_the_host(self, guarded: FetchExecutor, site: Site) -> None:
        outcome = await attempt(guarded, site.url("/echo", "site.example"))
        assert said(outcome)["headers"]["host"] == f"site.example:{site.port}"
        assert outcome.final_url == site.url("/echo", "site.example")

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ("ftp://site.example/", "bad_url"),
            ("http://user:pw@site.example/", "bad_url"),
            ({"url": "nothing"}, "bad_url"),
            ({"url": "http://site.example/", "headers": {"Host": "x"}}, "bad_input"),
            ({"url": "http://site.example/", "headers": {"X": "a\r\nb"}}, "bad_input"),
            ({"url": "http://site.example/", "what": 1}, "bad_input"),
            ({"url": "http://site.example/", "timeout": -1}, "bad_input"),
        ],
    )
    async def test_what_was_stored_is_checked_again(self, free: FetchExecutor, given: Any, expected: str) -> None:
        assert code(await attempt(free, given)) == expected

    async def test_options_that_can_not_be_fail_each_task(self, free: FetchExecutor, site: Site) -> None:
        assert code(await attempt(free, site.url(), headers={"Host": "x"})) == "bad_input"
        assert code(await attempt(free, site.url(), gateway=Gateway())) == "bad_input"
        assert site.connections == 0


class TestRedirects:
    async def test_a_chain_is_followed_to_its_end(self, either: FetchExecutor, site: Site) -> None:
        outcome = await attempt(either, site.url("/chain/5"), max_redirects=5)
        assert outcome.body == b"end of the chain"
        assert outcome.final_url == site.url("/chain/0")

    @pytest.mark.parametrize("path", ["/chain/6", "/loop"])
    async def test_a_chain_has_a_limit(self, free: FetchExecutor, site: Site, path: str) -> None:
        assert code(await attempt(free, site.url(path), max_redirects=5)) == "too_many_redirects"
        assert len(site.seen) == 6

    async def test_a_job_may_take_redirects_as_answers(self, free: FetchExecutor, site: Site) -> None:
        outcome = await attempt(free, site.url("/chain/1"), max_redirects=0)
        assert (code(outcome), outcome.http_status) == ("http_302", 302)

    async def test_without_a_location_a_redirect_is_an_answer(self, free: FetchExecutor, site: Site) -> None:
        outcome = await attempt(free, site.url("/nowhere"))
        assert (code(outcome), outcome.body) == ("http_302", b"a redirect without a Location")

    @pytest.mark.parametrize("to", ["ftp://site.example/", "http://", "http://u:p@site.example/"])
    async def test_a_location_that_can_not_be_followed(self, free: FetchExecutor, site: Site, to: str) -> None:
        assert code(await attempt(free, site.url(f"/redirect?to={to}"))) == "bad_redirect"

    @pytest.mark.parametrize(("page", "path"), [("foreign-letters", "/caf%C3%A9"), ("latin-letters", "/caf%E9")])
    async def test_a_location_that_is_not_ascii(self, either: FetchExecutor, site: Site, page: str, path: str) -> None:
        outcome = await attempt(either, site.url(f"/{page}?status=302"))
        assert (outcome.body, outcome.final_url) == (path.encode(), site.url(path))

    @pytest.mark.parametrize(
        ("path", "expected", "status", "end"),
        [
            ("/loop", "too_many_redirects", 302, "/loop"),
            ("/chain/9", "too_many_redirects", 302, "/chain/4"),
            ("/redirect?to=ftp://x/", "bad_redirect", 302, "/redirect?to=ftp://x/"),
            ("/redirect?status=307&to=/hang-up", "read_failed", 307, "/hang-up"),
            # It was cut before the client showed its head.
            ("/redirect?to=/cut", "read_failed", 302, "/cut"),
            ("/redirect?to=/bad-gzip", "decode_failed", 200, "/bad-gzip"),
            ("/redirect?to=/ok?size=200000", "body_too_large", 200, "/ok?size=200000"),
            ("/redirect?to=/slow", "timeout", 302, "/slow"),
            ("/redirect?to=/status/404", "http_404", 404, "/status/404"),
        ],
    )
    async def test_a_chain_that_fails_keeps_how_far_it_came(
        self, either: FetchExecutor, site: Site, path: str, expected: str, status: int, end: str
    ) -> None:
        outcome = await attempt(either, site.url(path), max_redirects=5, timeout=0.5, max_body_bytes=100_000)
        assert (code(outcome), outcome.http_status, outcome.final_url) == (expected, status, site.url(end))

    async def test_a_chain_that_is_refused_keeps_what_refused_it(self, guarded: FetchExecutor, site: Site) -> None:
        outcome = await attempt(guarded, site.url("/redirect?to=http://127.0.0.1:1/x", "site.example"))
        found = (code(outcome), outcome.http_status, outcome.final_url)
        assert found == ("target_refused", 302, "http://127.0.0.1:1/x")

    async def test_a_request_without_an_answer_has_neither(self, free: FetchExecutor, site: Site) -> None:
        outcome = await attempt(free, site.url("/hang-up"))
        assert (code(outcome), outcome.http_status, outcome.final_url) == ("read_failed", None, None)

    async def test_cookies_are_kept_for_the_chain_alone(self, either: FetchExecutor, site: Site) -> None:
        for _ in range(2):
            outcome = await attempt(either, site.url("/consent"))
            assert outcome.body in {b"region=eu; consent=yes", b"consent=yes; region=eu"}
        # The second attempt began without any.
        assert [seen.headers.get("cookie") for seen in site.seen[3:5]] == [None, "region=eu"]

    async def test_post_becomes_get_or_stays(self, free: FetchExecutor, site: Site) -> None:
        for status, method in [(302, "GET"), (303, "GET"), (307, "POST"), (308, "POST")]:
            given = {"url": site.url(f"/redirect?status={status}&to=/echo"), "method": "POST", "body": "x"}
            heard = said(await attempt(free, given))
            assert (heard["method"], heard["body"]) == (method, "x" if method == "POST" else "")

    async def test_secrets_do_not_cross_to_another_origin(self, guarded: FetchExecutor, site: Site) -> None:
        headers = {"Authorization": "secret", "Cookie": "secret", "X-Api-Key": "secret", "X-Plain": "1"}
        for host, kept in [("site.example", True), ("other.example", False)]:
            to = site.url("/echo", host)
            given = {"url": site.url(f"/redirect?to={to}", "site.example"), "headers": headers}
            heard = said(await attempt(guarded, given))["headers"]
            assert ("secret" in heard.values()) is kept
            assert heard["x-plain"] == "1"
            assert heard["host"] == f"{host}:{site.port}"

    async def test_every_hop_is_guarded(self, guarded: FetchExecutor, site: Site) -> None:
        async with Site("127.0.0.1") as private:
            for to in (private.url("/ok"), f"http://evil.example:{private.port}/ok"):
                outcome = await attempt(guarded, site.url(f"/redirect?to={to}", "site.example"))
                assert code(outcome) == "target_refused"
                assert code(await attempt(guarded, to)) == "target_refused"
            assert private.connections == 0
        assert site.visits["/redirect"] == 2


class TestPinning:
    async def test_a_name_that_moves_is_not_followed(self, site: Site) -> None:
        answers = [[PUBLIC], ["127.0.0.1"]]

        async def rebinding(host: str, port: int) -> Sequence[str]:
            return answers.pop(0)

        clock = SystemClock()
        guard = TargetGuard(allow_private=False, clock=clock, resolver=rebinding, policy=public)
        executor = FetchExecutor(Settings(), clock, guard)
        for _ in range(3):
            assert code(await attempt(executor, site.url("/ok", "site.example"))) is None
        assert len(answers) == 1
        await executor.close()

    async def test_tls_is_pinned_and_still_checks_the_name(self, guarded: FetchExecutor) -> None:
        async with Site(PUBLIC, tls=True) as secure:
            outcomes = await asyncio.gather(
                *(attempt(guarded, secure.url("/ok", host)) for host in ("site.example", "other.example") * 5)
            )
            assert {code(outcome) for outcome in outcomes} == {None}
            wrong = await attempt(guarded, secure.url("/ok", "gate.example"))
            assert code(wrong) == "tls_failed"
            assert code(await attempt(guarded, secure.url("/ok", "evil.example"))) == "target_refused"

    async def test_a_dot_at_the_end_does_not_unpin(self, guarded: FetchExecutor) -> None:
        async with Site(PUBLIC, tls=True) as secure:
            assert code(await attempt(guarded, secure.url("/ok", "site.example."))) in {None, "tls_failed"}
            assert secure.connections == 1

    async def test_names_that_come_together_share_a_client(self) -> None:
        clients = Clients(SystemClock(), "test")
        pins = [Pin(f"host{number}.example", PUBLIC, 10.0) for number in range(50)]
        made = await asyncio.gather(*(clients.pinned(pin) for pin in pins))
        assert len({id(client) for client in made}) <= 3
        assert [clients.known_pinned(pin) for pin in pins] == made
        other = await clients.pinned(Pin("host1.example", "127.0.0.3", 10.0))
        assert other is not made[1]
        await clients.close()

    async def test_clients_for_names_are_bounded(self) -> None:
        clients = Clients(SystemClock(), "test")
        pins = [Pin(f"host{number}.example", PUBLIC, 10.0) for number in range(MAX_PINS + 10)]
        await asyncio.gather(*(clients.pinned(pin) for pin in pins))
        assert sum(clients.known_pinned(pin) is not None for pin in pins) == MAX_PINS
        await clients.close()

    async def test_who_waits_for_a_client_is_told_when_there_will_be_none(self) -> None:
        broken = Clients(SystemClock(), "test", root_certificate=b"-----BEGIN CERTIFICATE-----\nno\n")
        with pytest.raises(Exception, match=r"."):
            await broken.pinned(Pin("site.example", PUBLIC, 10.0))
        closing = Clients(SystemClock(), "test")
        waiting = asyncio.create_task(closing.pinned(Pin("site.example", PUBLIC, 10.0)))
        await asyncio.sleep(0)
        await closing.close()
        with pytest.raises(Failure):
            await waiting

    @pytest.mark.parametrize(
        ("wish", "step"), [(0.1, 0.25), (1, 1.0), (1.1, 2.0), (10, 10.0), (299, 300.0), (999, 300.0)]
    )
    def test_connect_timeouts_come_in_steps(self, wish: float, step: float) -> None:
        assert connect_step(wish) == step

    async def test_another_address_is_taken_after_one_where_nobody_is(self, guarded: FetchExecutor, site: Site) -> None:
        codes = [code(await attempt(guarded, site.url("/ok", "dead.example"))) for _ in range(2)]
        assert codes == ["connect_failed", None]


class TestLimits:
    @pytest.mark.parametrize("path", ["/big?size=50000000", "/endless", "/bomb", "/ok?size=100001"])
    async def test_a_body_over_the_cap_is_dropped(self, free: FetchExecutor, site: Site, path: str) -> None:
        outcome = await attempt(free, site.url(path), max_body_bytes=100_000)
        assert (code(outcome), outcome.http_status, outcome.body) == ("body_too_large", 200, None)
        assert site.written < 32 * MIB

    async def test_a_body_of_just_the_cap_is_kept(self, free: FetchExecutor, site: Site) -> None:
        for path in ("/ok?size=6000", "/gzip"):
            outcome = await attempt(free, site.url(path), max_body_bytes=6000)
            assert len(outcome.body or b"") == 6000

    async def test_a_bomb_does_not_fill_the_memory(self, free: FetchExecutor, site: Site) -> None:
        await attempt(free, site.url("/bomb"), max_body_bytes=MIB)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes = await asyncio.gather(*(attempt(free, site.url("/bomb"), max_body_bytes=2 * MIB) for _ in range(8)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert {code(outcome) for outcome in outcomes} == {"body_too_large"}
        assert grown < 128 * 1024

    @pytest.mark.parametrize("path", ["/slow", "/slow-body", "/slow-chain"])
    async def test_one_timeout_spans_it_all(self, either: FetchExecutor, site: Site, path: str) -> None:
        outcome = await attempt(either, site.url(path), timeout=0.3, max_redirects=1000)
        assert code(outcome) == "timeout"
        assert 0.25 < outcome.elapsed < 5

    async def test_a_task_may_have_its_own_timeout(self, free: FetchExecutor, site: Site) -> None:
        given = {"url": site.url("/slow"), "timeout": 0.05, "connect_timeout": 0.1}
        assert code(await attempt(free, given, timeout=60)) == "timeout"

    async def test_an_attempt_can_be_cancelled(self, free: FetchExecutor, site: Site) -> None:
        running = asyncio.create_task(attempt(free, site.url("/slow")))
        await site.asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


class TestFailures:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/cut", "read_failed"),
            ("/cut-late", "read_failed"),
            ("/cut-chunk", "read_failed"),
            ("/cut-head", "read_failed"),
            ("/hang-up", "read_failed"),
            ("/cut-gzip?size=100", "read_failed"),
            ("/cut-gzip?size=300000", "read_failed"),
            ("/garbage", "decode_failed"),
            ("/late-bad-gzip", "decode_failed"),
            ("/bad-gzip", "decode_failed"),
        ],
    )
    async def test_a_broken_answer_has_a_code(
        self, either: FetchExecutor, site: Site, path: str, expected: str
    ) -> None:
        assert code(await attempt(either, site.url(path))) == expected

    async def test_nobody_there(self, free: FetchExecutor) -> None:
        async with Site() as gone:
            url = gone.url()
        assert code(await attempt(free, url)) == "connect_failed"

    async def test_no_such_name(self, free: FetchExecutor, guarded: FetchExecutor) -> None:
        assert code(await attempt(free, "http://no-such-name.invalid/")) == "dns_failed"
        assert code(await attempt(guarded, "http://no-such-name.invalid/")) == "dns_failed"

    async def test_no_end_to_the_handshake(self, free: FetchExecutor, site: Site) -> None:
        given = {"url": f"https://{PUBLIC}:{site.port}/", "connect_timeout": 0.2}
        assert code(await attempt(free, given)) == "connect_timeout"

    async def test_a_certificate_that_nobody_vouches_for(self) -> None:
        strict = FetchExecutor(Settings(), SystemClock(), TargetGuard(allow_private=True, clock=SystemClock()))
        async with Site(tls=True) as secure:
            assert code(await attempt(strict, secure.url())) == "tls_failed"
        await strict.close()

    async def test_a_lookup_that_hangs(self) -> None:
        async def hanging(host: str, port: int) -> Sequence[str]:
            await asyncio.Event().wait()
            return []

        clock = SystemClock()
        guard = TargetGuard(allow_private=False, clock=clock, resolver=hanging)
        executor = FetchExecutor(Settings(), clock, guard)
        assert code(await attempt(executor, "http://site.example/", timeout=0.05)) == "dns_failed"
        await executor.close()

    @pytest.mark.parametrize("path", ["/cut", "/hang-up", "/bad-gzip", "/garbage", "/slow", "/status/500", "/loop"])
    async def test_messages_hold_no_secrets(self, either: FetchExecutor, site: Site, path: str) -> None:
        outcome = await attempt(either, site.url(f"{path}?token=hunter2#hunter2"), timeout=0.2)
        assert outcome.error is not None
        assert "hunter2" not in outcome.error.message
        assert "://" not in outcome.error.message


class TestProxy:
    async def test_the_operators_proxy_is_trusted(self, site: Site) -> None:
        async with Site("127.0.0.1") as proxy:
            executor = executor_with(guarded=True, gateway=f"http://user:pass@127.0.0.1:{proxy.port}")
            outcome = await attempt(executor, "http://far.example/echo?a=1")
            heard = said(outcome)
            assert heard["target"] == "http://far.example/echo?a=1"
            assert heard["headers"]["proxy-authorization"] == "Basic dXNlcjpwYXNz"
            assert outcome.final_url == "http://far.example/echo?a=1"
            await executor.close()

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
    async def test_local_targets_are_refused_behind_it_too(self, url: str) -> None:
        async with Site("127.0.0.1") as proxy:
            executor = executor_with(guarded=True, gateway=f"http://127.0.0.1:{proxy.port}")
            assert code(await attempt(executor, url)) == "target_refused"
            redirect = f"http://far.example/redirect?to={url}"
            assert code(await attempt(executor, redirect)) == "target_refused"
            assert [seen.target for seen in proxy.seen] == [redirect]
            await executor.close()

    async def test_a_tunnel_to_tls(self) -> None:
        async with Site(tls=True) as secure, Site(tunnel_to=secure.port) as proxy:
            executor = executor_with(gateway=f"http://127.0.0.1:{proxy.port}")
            outcome = await attempt(executor, "https://site.example/ok")
            assert (code(outcome), outcome.body) == (None, b"ok")
            assert [seen.target for seen in proxy.seen] == ["site.example:443"]
            assert code(await attempt(executor, "https://wrong.example/ok")) == "tls_failed"
            await executor.close()

    async def test_a_proxy_of_the_job_is_guarded_and_pinned(self, guarded: FetchExecutor, site: Site) -> None:
        gateway = Gateway(proxy=f"http://gate.example:{site.port}", headers={"Proxy-Authorization": "Bearer x"})
        heard = said(await attempt(guarded, "http://far.example/echo", gateway=gateway))
        assert heard["target"] == "http://far.example/echo"
        assert heard["headers"]["proxy-authorization"] == "Bearer x"
        async with Site("127.0.0.1") as private:
            for host in ("127.0.0.1", "evil.example", "localhost"):
                gateway = Gateway(proxy=f"http://{host}:{private.port}")
                outcome = await attempt(guarded, "http://far.example/", gateway=gateway)
                assert code(outcome) in {"target_refused", "gateway_failed"}
            assert private.connections == 0

    async def test_its_failures_are_its_own(self) -> None:
        async with Site() as gone:
            gateway = f"http://127.0.0.1:{gone.port}"
        executor = executor_with(gateway=gateway)
        for url in ("http://far.example/", "https://far.example/"):
            assert code(await attempt(executor, url)) == "gateway_failed"
        await executor.close()
        async with Site() as refusing:
            executor = executor_with(gateway=f"http://127.0.0.1:{refusing.port}")
            assert code(await attempt(executor, "https://far.example/")) == "gateway_failed"
            await executor.close()


async def a_redirect_through_a_gateway_is_relative_to_the_page() -> None:
    async with Site("127.0.0.1") as gate:
        executor = executor_with(guarded=True, gateway=gate.url("/gateway?url={url}"))
        outcome = await attempt(executor, "http://far.example/dir/page?to=next")
        assert outcome.body == b"through the gateway: http://far.example/dir/next"
        assert outcome.final_url == "http://far.example/dir/next"
        outcome = await attempt(executor, "http://far.example/dir/page?to=/ok")
        assert outcome.final_url == "http://far.example/ok"
        await executor.close()


class TestTemplate:
    async def test_the_target_travels_in_the_url(self) -> None:
        async with Site("127.0.0.1") as gate:
            executor = executor_with(guarded=True, gateway=gate.url("/gateway?key=hunter2&url={url}"))
            target = "http://far.example/a b?c=d&e=f#g"
            outcome = await attempt(executor, {"url": target, "headers": {"X-A": "1"}})
            assert outcome.body == b"through the gateway: http://far.example/a%20b?c=d&e=f#g"
            assert outcome.final_url == "http://far.example/a%20b?c=d&e=f#g"
            assert gate.seen[0].headers["x-a"] == "1"
            await executor.close()

    async def test_a_redirect_of_the_target_goes_through_the_gateway_again(self) -> None:
        async with Site("127.0.0.1") as gate:
            executor = executor_with(guarded=True, gateway=gate.url("/gateway?url={url}"))
            outcome = await attempt(executor, "http://far.example/?to=http://away.example/end")
            assert outcome.body == b"through the gateway: http://away.example/end"
            assert outcome.final_url == "http://away.example/end"
            outcome = await attempt(executor, "http://far.example/?to=http://127.0.0.1:1/")
            assert code(outcome) == "target_refused"
            await executor.close()

    async def test_a_redirect_is_relative_to_the_page(self) -> None:
        await a_redirect_through_a_gateway_is_relative_to_the_page()

    async def test_a_redirect_leads_nowhere_on_the_gateway_itself(self) -> None:
        """The operator's gateway may be private, and a page may redirect anywhere."""
        async with Site("127.0.0.1") as gate:
            executor = executor_with(guarded=True, gateway=gate.url("/gateway?url={url}"))
            outcome = await attempt(executor, f"http://far.example/?to={gate.url('/ok', '127.0.0.1')}")
            assert code(outcome) == "target_refused"
            rewritten = quote(gate.url("/gateway?url=http%3A%2F%2Faway.example%2Fend"), safe="")
            outcome = await attempt(executor, f"http://far.example/?to={rewritten}")
            assert outcome.final_url == "http://away.example/end"
            assert {line.target.partition("?")[0] for line in gate.seen} == {"/gateway"}
            await executor.close()

    async def test_one_of_the_job_is_guarded_and_has_its_headers(self, guarded: FetchExecutor, site: Site) -> None:
        template = site.url("/echo?url={url}", "gate.example")
        gateway = Gateway(url=template, headers={"X-Api-Key": "k"})
        heard = said(await attempt(guarded, "http://far.example/", gateway=gateway))
        assert heard["target"] == "/echo?url=http%3A%2F%2Ffar.example%2F"
        assert heard["headers"]["x-api-key"] == "k"
        assert heard["headers"]["host"] == f"gate.example:{site.port}"
        async with Site("127.0.0.1") as private:
            for host in ("127.0.0.1", "evil.example"):
                gateway = Gateway(url=private.url("/gateway?url={url}", host))
                assert code(await attempt(guarded, "http://far.example/", gateway=gateway)) == "target_refused"
            assert private.connections == 0

    async def test_its_failures_are_its_own_and_keep_its_key(self) -> None:
        async with Site() as gone:
            gateway = gone.url("/gateway?key=hunter2&url={url}")
        executor = executor_with(gateway=gateway)
        outcome = await attempt(executor, "http://far.example/")
        assert code(outcome) == "gateway_failed"
        assert "hunter2" not in str(outcome)
        await executor.close()

    @pytest.mark.parametrize("gateway", ["nothing", "socks5://proxy.example:1", "http://{url}/"])
    def test_a_setting_that_can_not_work_stops_the_start(self, gateway: str) -> None:
        with pytest.raises(InvalidSetting, match="CONVEYOR_GATEWAY"):
            executor_with(gateway=gateway)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ('"http://site.example/a"', "site.example"),
        ('"https://site.example"', "site.example"),
        ('"http://site.example:8080?x"', "site.example"),
        ('"HTTP://SITE.EXAMPLE/"', "site.example"),
        ('"http://site.example./"', "site.example"),
        ('"http:\\/\\/site.example\\/a"', "site.example"),
        ('"http://127.1/"', "127.0.0.1"),
        ('"http://[::1]:80/"', "[::1]"),
        ('"http://bücher.example/"', "xn--bcher-kva.example"),
        ('{"url":"http://site.example/","id":"1"}', "site.example"),
        ('{"method":"POST","url":"https://site.example:1/"}', "site.example"),
        ('"http://user@site.example/"', None),
        ('"nothing"', None),
        ("{}", None),
        ("[", None),
    ],
)
def test_the_host_is_the_target_of_limits(text: str, host: str | None) -> None:
    assert host_of(text) == host


async def test_the_executor_takes_tasks_one_by_one(free: FetchExecutor) -> None:
    assert free.grain(job_with()) == 1
    assert free.target(TaskRef(0, InputJson('"http://site.example/"'))) == "site.example"

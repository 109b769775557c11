"""The guard: every way to write an address that is not public, and every way to have one resolved."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyreqwest.http import Url

from conveyor.egress.target_guard import (
    BadUrl,
    DnsFailed,
    Resolver,
    TargetGuard,
    TargetRefused,
    check_url,
    host_refusal,
    ip_literal,
    parse_url,
    public_url,
    refusal,
)
from conveyor.errors import BadInput
from tests.support.addresses import ALLOWED, BAD_URLS, EVIL_NAMES, GOOD_URLS, LOOPBACK_HOSTS, PRIVATE_HOSTS, REFUSED
from tests.support.clocks import ManualClock

PUBLIC = "93.184.216.34"


class Dns:
    """A name server that answers from lists: each lookup of a name takes its next list, the last one stays."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names = names
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self.names.get(host.partition(".")[0], [[]])
        return answers.pop(0) if len(answers) > 1 else answers[0]


def guard_with(resolver: Resolver, **options: float) -> tuple[TargetGuard, ManualClock]:
    clock = ManualClock()
    return TargetGuard(allow_private=False, clock=clock, resolver=resolver, **options), clock  # type: ignore[arg-type]


def test_the_table_is_a_long_one() -> None:
    tables = (REFUSED, ALLOWED, LOOPBACK_HOSTS, PRIVATE_HOSTS, BAD_URLS)
    assert sum(len(set(table)) for table in tables) >= 350


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert refusal(address)


@pytest.mark.parametrize("address", ALLOWED)
def test_a_public_address_is_allowed(address: str) -> None:
    assert refusal(address) is None


@given(st.ip_addresses(v=4))
def test_an_address_is_no_better_for_being_wrapped(address: object) -> None:
    number = int(address)  # type: ignore[call-overload]
    high, low = number >> 16, number & 0xFFFF
    plain = refusal(str(address))
    for wrapped in (f"::ffff:{address}", f"64:ff9b::{address}", f"2002:{high:x}:{low:x}::1"):
        assert (refusal(wrapped) is None) == (plain is None), wrapped


@given(st.ip_addresses(v=6))
def test_what_is_allowed_is_global_unicast_or_translated(address: object) -> None:
    first = int(address) >> 112  # type: ignore[call-overload]
    if refusal(str(address)) is None:
        assert 0x2000 <= first <= 0x3FFF or first in {0, 0x64}


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_told_at_once(url: str) -> None:
    assert check_url(url)
    with pytest.raises(BadUrl):
        parse_url(url)


@pytest.mark.parametrize("url", GOOD_URLS)
def test_a_good_url_is_taken(url: str) -> None:
    assert check_url(url) is None


@given(st.text(max_size=60))
def test_no_text_makes_the_check_raise(text: str) -> None:
    for url in (text, f"http://{text}", f"https://site.example{text}"):
        check_url(url)


@given(st.text(max_size=60), st.sampled_from(["http://", "https://", "HTTP://", "http:/", "http:///", "http:\\\\"]))
def test_the_quick_path_lets_nothing_through(text: str, start: str) -> None:
    try:
        url = parse_url(start + text)
    except BadUrl:
        return
    assert url.scheme in {"http", "https"}
    assert url.host_str
    assert not url.username
    assert url.password is None
    assert url.port != 0


@pytest.mark.parametrize("host", [*LOOPBACK_HOSTS, *PRIVATE_HOSTS])
async def test_a_host_is_refused_however_it_is_written(host: str) -> None:
    async def resolver(name: str, port: int) -> Sequence[str]:
        return EVIL_NAMES[name]

    guard, _ = guard_with(resolver)
    try:
        url = parse_url(f"http://{host}:8080/")
    except BadUrl:
        return
    assert url.host_str
    with pytest.raises(TargetRefused):
        await guard.resolve(url.host_str, 8080)
    with pytest.raises(TargetRefused):
        guard.check_name(url.host_str)


@pytest.mark.parametrize("name", EVIL_NAMES)
async def test_a_name_is_refused_for_any_of_its_addresses(name: str) -> None:
    async def resolver(host: str, port: int) -> Sequence[str]:
        return EVIL_NAMES[host]

    guard, _ = guard_with(resolver)
    with pytest.raises(TargetRefused, match="not public"):
        await guard.resolve(name, 443)
    assert guard.known(name) is None


async def test_a_public_name_is_pinned_to_its_first_address() -> None:
    guard, _ = guard_with(Dns(site=[[PUBLIC, "2606:4700::1111"]]))
    assert await guard.resolve("site.example", 443) == PUBLIC
    assert guard.known("site.example") == PUBLIC


async def test_an_ip_literal_is_checked_without_asking_anyone() -> None:
    dns = Dns()
    guard, _ = guard_with(dns)
    assert await guard.resolve("8.8.8.8", 80) == "8.8.8.8"
    assert await guard.resolve("[2606:4700::1111]", 80) == "2606:4700::1111"
    assert dns.asked == []


async def test_rebinding_changes_nothing_while_the_answer_is_fresh_and_is_refused_after() -> None:
    dns = Dns(rebind=[[PUBLIC], ["127.0.0.1"]])
    guard, clock = guard_with(dns, ttl=30.0)
    assert await guard.resolve("rebind.example", 80) == PUBLIC
    clock.advance(29)
    assert await guard.resolve("rebind.example", 80) == PUBLIC
    clock.advance(1)
    assert guard.known("rebind.example") is None
    with pytest.raises(TargetRefused):
        await guard.resolve("rebind.example", 80)
    assert dns.asked == ["rebind.example"] * 2


async def test_a_refusal_is_forgotten_after_its_time() -> None:
    guard, clock = guard_with(Dns(moved=[["10.0.0.1"], [PUBLIC]]), ttl=30.0)
    with pytest.raises(TargetRefused):
        await guard.resolve("moved.example", 80)
    clock.advance(30)
    assert await guard.resolve("moved.example", 80) == PUBLIC


async def test_a_name_without_an_address_fails_and_is_asked_for_again_soon() -> None:
    dns = Dns(late=[[], [PUBLIC]])
    guard, clock = guard_with(dns, failure_ttl=5.0)
    for _ in range(2):
        with pytest.raises(DnsFailed):
            await guard.resolve("late.example", 80)
    assert dns.asked == ["late.example"]
    clock.advance(5)
    assert await guard.resolve("late.example", 80) == PUBLIC


@pytest.mark.parametrize("error", [OSError("no such name"), UnicodeError("label too long")])
async def test_an_error_of_the_resolver_is_a_failure_of_the_name(error: Exception) -> None:
    async def resolver(host: str, port: int) -> Sequence[str]:
        raise error

    guard, _ = guard_with(resolver)
    with pytest.raises(DnsFailed):
        await guard.resolve("site.example", 80)


async def test_many_who_wait_share_one_lookup() -> None:
    go = asyncio.Event()
    asked = 0

    async def resolver(host: str, port: int) -> Sequence[str]:
        nonlocal asked
        asked += 1
        await go.wait()
        return [PUBLIC]

    guard, _ = guard_with(resolver)
    waiting = [asyncio.create_task(guard.resolve("site.example", 80)) for _ in range(50)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*waiting[1:]) == [PUBLIC] * 49
    assert asked == 1


async def test_a_lookup_that_hangs_is_not_waited_for() -> None:
    async def resolver(host: str, port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    guard, _ = guard_with(resolver)
    with pytest.raises(TimeoutError):
        await guard.resolve("site.example", 80, timeout=0.01)
    await guard.close()


async def test_the_memory_of_answers_is_bounded() -> None:
    dns = Dns(**{f"host{number}": [[PUBLIC]] for number in range(20)})
    guard, _ = guard_with(dns, size=8)
    for number in range(20):
        await guard.resolve(f"host{number}.example", 80)
    assert sum(guard.known(f"host{number}.example") is not None for number in range(20)) == 8
    assert guard.known("host19.example") == PUBLIC


async def test_an_address_where_nobody_answers_goes_to_the_end() -> None:
    guard, _ = guard_with(Dns(site=[["1.1.1.1", "8.8.8.8"]]))
    assert await guard.resolve("site.example", 80) == "1.1.1.1"
    guard.avoid("site.example", "1.1.1.1")
    guard.avoid("site.example", "1.1.1.1")
    guard.avoid("elsewhere.example", "1.1.1.1")
    assert await guard.resolve("site.example", 80) == "8.8.8.8"


async def test_private_targets_can_be_allowed() -> None:
    guard = TargetGuard(allow_private=True, clock=ManualClock(), resolver=Dns(site=[["10.0.0.1"]]))
    guard.check_name("localhost")
    assert await guard.resolve("site.example", 80) == "10.0.0.1"
    assert await guard.resolve("127.0.0.1", 80) == "127.0.0.1"


async def test_the_system_resolver_finds_this_machine() -> None:
    guard = TargetGuard(allow_private=False, clock=ManualClock())
    with pytest.raises(TargetRefused, match="loopback"):
        await guard.resolve("localhost", 80)
    await guard.close()


@pytest.mark.parametrize(
    "host", ["localhost", "db", "printer.local", "metadata.google.internal", "router.lan.", "x.home.arpa"]
)
def test_a_local_name_is_refused_by_its_look(host: str) -> None:
    assert host_refusal(host)


@pytest.mark.parametrize("host", ["site.example", "site.example.", "localhost.example", "local.example", "8.8.8.8"])
def test_other_names_are_left_to_the_proxy(host: str) -> None:
    assert host_refusal(host) is None


@pytest.mark.parametrize(
    ("host", "literal"),
    [("1.2.3.4", "1.2.3.4"), ("[::1]", "::1"), ("::1", "::1"), ("host1", None), ("a.b2", None), ("site.example", None)],
)
def test_an_ip_literal_is_told_from_a_name(host: str, literal: str | None) -> None:
    assert ip_literal(host) == literal


def test_a_url_is_shown_without_its_secrets() -> None:
    shown = public_url(Url("https://user:secret@site.example:8443/path?token=secret#secret"))
    assert shown == "https://site.example:8443/path"


def test_errors_have_codes_for_the_wire() -> None:
    assert issubclass(BadUrl, BadInput)
    assert (BadUrl.code, TargetRefused.code, DnsFailed.code) == ("bad_url", "target_refused", "dns_failed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shop.example/2", "not a URL: https:// is missing"),
        ("127.0.0.1:8917/p3.html", "not a URL: https:// is missing"),
        ("not a URL", "not a URL: it must begin with http:// or https://"),
    ],
)
def test_what_is_not_a_url_says_what_is_missing(text: str, said: str) -> None:
    with pytest.raises(BadUrl) as refused:
        parse_url(text)
    assert refused.value.message == said

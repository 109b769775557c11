"""What the table of vectors and paths (test_egress_table.py) does not say: what a gateway is asked for, names that move
between two looks in time, and what a refusal says.

Canaries listen on both loopback addresses, and must stay alone. The site stands on another loopback address that, for
these tests only, passes for public.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

import pytest
from pyreqwest.http import Url

from conveyor.clock import Clock, SystemClock
from conveyor.egress.target_guard import TargetGuard, host_refusal
from conveyor.model import Gateway, InputJson, JobKind, Outcome, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from tests.support.addresses import EVIL_NAMES, LOOPBACK_HOSTS, PRIVATE_HOSTS, as_input
from tests.support.clocks import JumpingClock
from tests.support.egress_vectors import PUBLIC, Ports, public, vectors
from tests.support.make_jobs import make_job
from tests.support.target_site import Canary, Site

FAR = "http://far.example/"
REFUSALS = {"target_refused", "bad_url", "bad_redirect", "bad_input"}

Attempt = Callable[..., Awaitable[Outcome]]


async def names(host: str, port: int) -> Sequence[str]:
    return EVIL_NAMES.get(host, [PUBLIC])


def executor_with(clock: Clock, resolver: Any = names, gateway: str | None = None) -> FetchExecutor:
    guard = TargetGuard(allow_private=False, clock=clock, resolver=resolver, policy=public)
    return FetchExecutor(Settings(gateway=gateway), clock, guard)


def attempts_of(executor: FetchExecutor) -> Attempt:
    async def attempt(url: str, **options: Any) -> Outcome:
        job = make_job(SystemClock(), kind=JobKind.FETCH, timeout=5.0, **options)
        (outcome,) = await executor.attempt(job, [TaskRef(0, InputJson(as_input(url)))])
        return outcome

    return attempt


def codes(outcomes: Sequence[Outcome]) -> set[str]:
    return {outcome.error.code if outcome.error else "reached" for outcome in outcomes}


async def each(attempt: Attempt, urls: Sequence[str], **options: Any) -> list[Outcome]:
    at_once = asyncio.Semaphore(50)

    async def one(url: str) -> Outcome:
        async with at_once:
            return await attempt(url, **options)

    return await asyncio.gather(*(one(url) for url in urls))


@pytest.fixture
async def canaries() -> AsyncIterator[tuple[Canary, Canary]]:
    async with Canary("127.0.0.1") as four, Canary("::1") as six:
        yield four, six


@pytest.fixture
def ports(canaries: tuple[Canary, Canary]) -> Ports:
    return canaries[0].port, canaries[1].port


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site(PUBLIC) as made:
        yield made


@pytest.fixture
async def attempt(canaries: tuple[Canary, Canary]) -> AsyncIterator[Attempt]:
    """Attempts of an executor as it is by default; at the end nobody may have come to the canaries."""
    executor = executor_with(SystemClock())
    yield attempts_of(executor)
    await executor.close()
    assert [canary.connections for canary in canaries] == [0, 0]


async def test_by_a_redirect_of_a_gateway_of_the_job(attempt: Attempt, ports: Ports, site: Site) -> None:
    urls = [f"{FAR}?to={quote(row.url)}" for row in vectors(ports)[::3]]
    gateway = Gateway(url=site.url("/gateway?url={url}", "gate.example"))
    outcomes = await each(attempt, urls, gateway=gateway)
    # Names go to the gateway, whose business they are; what is local by its look does not even get there.
    assert codes(outcomes) <= REFUSALS | {"reached"}
    asked = {Url(seen.query("url")).host_str or "" for seen in site.seen}
    assert asked
    assert not [host for host in asked if host_refusal(host)]


async def test_behind_the_proxy_of_the_operator(canaries: tuple[Canary, Canary], ports: Ports) -> None:
    hosts = [*LOOPBACK_HOSTS, *PRIVATE_HOSTS]
    async with Site("127.0.0.1") as proxy:
        executor = executor_with(SystemClock(), gateway=f"http://127.0.0.1:{proxy.port}")
        attempt = attempts_of(executor)
        outcomes = await each(attempt, [f"{scheme}://{host}/" for host in hosts for scheme in ("http", "https")])
        assert codes(outcomes) <= REFUSALS
        assert proxy.seen == []
        await each(attempt, [f"{FAR}redirect?to={quote(f'http://{host}/')}" for host in hosts])
        assert {seen.path for seen in proxy.seen} == {"/redirect"}
        await executor.close()


async def test_by_a_name_that_moves_between_two_looks(canaries: tuple[Canary, Canary], site: Site) -> None:
    looks = 0

    async def rebinding(host: str, port: int) -> Sequence[str]:
        nonlocal looks
        looks += 1
        return [PUBLIC] if looks % 2 else ["127.0.0.1", "::1"]

    clock = JumpingClock()
    executor = executor_with(clock, rebinding)
    attempt = attempts_of(executor)
    urls = [site.url("/ok", "rebind.example")]
    urls += [f"{scheme}://rebind.example:{canary.port}/" for canary in canaries for scheme in ("http", "https")]
    for url in urls * 10:
        await attempt(url)
        clock.advance(31)
    assert looks == len(urls) * 10
    assert site.visits["/ok"] > 0
    assert [canary.connections for canary in canaries] == [0, 0]
    await executor.close()


async def test_by_one_bad_address_among_good_ones(canaries: tuple[Canary, Canary], site: Site) -> None:
    async def mixed(host: str, port: int) -> Sequence[str]:
        return [PUBLIC, *(["127.0.0.1"] if host == "mixed.example" else ["::ffff:127.0.0.1"])]

    executor = executor_with(SystemClock(), mixed)
    attempt = attempts_of(executor)
    for host in ("mixed.example", "mapped.example"):
        assert codes([await attempt(site.url("/ok", host))]) == {"target_refused"}
    assert site.connections == 0
    await executor.close()


async def test_a_refusal_says_nothing_of_the_url(attempt: Attempt) -> None:
    outcome = await attempt("http://127.0.0.1/admin?token=hunter2")
    assert outcome.error is not None
    assert "hunter2" not in outcome.error.message
    assert "127.0.0.1" not in outcome.error.message


async def test_the_canaries_would_have_been_reached(canaries: tuple[Canary, Canary], ports: Ports) -> None:
    """The control: with private targets allowed, the same vectors do come through."""
    clock = SystemClock()
    executor = FetchExecutor(Settings(), clock, TargetGuard(allow_private=True, clock=clock))
    hosts = [host for host in LOOPBACK_HOSTS if not host.startswith("[") or host in {"[::1]", "[::]", "[0::0]"}]
    urls = [f"http://{host}:{port}/" for host in hosts for port in ports]
    outcomes = await each(attempts_of(executor), urls)
    assert canaries[0].connections >= 30
    assert canaries[1].connections >= 2
    assert sum(outcome.body == b"secret" for outcome in outcomes) >= 32
    await executor.close()

"""`robots: obey`: what robots.txt disallows is not requested, and what cannot be read is waited for."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.egress import robots
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.model import Breaking, Gateway, InputJson, Job, JobKind, Outcome, PooledGateway, RobotsMode, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.settings import Settings
from conveyor.system import open_system
from tests.support.api import serving
from tests.support.clocks import ManualClock
from tests.support.make_jobs import OTHER, make_job
from tests.support.places import quick_place
from tests.support.target_site import Site
from tests.support.working import all_items, ended

FILE = b"User-agent: *\nDisallow: /status\nUser-agent: shopbot\nDisallow: /ok"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site() as made:
        made.robots = (200, FILE)
        yield made


@pytest.fixture
async def executor(clock: ManualClock) -> AsyncIterator[FetchExecutor]:
    made = FetchExecutor(Settings(), clock, TargetGuard(allow_private=True, clock=clock))
    yield made
    await made.close()


def job_of(clock: ManualClock, **options: Any) -> Job:
    return make_job(clock, kind=JobKind.FETCH, robots=RobotsMode.OBEY, **options)


async def fetch(executor: FetchExecutor, job: Job, url: str, gateway: int = 0, **more: Any) -> Outcome:
    text = msgspec.json.encode({"url": url, **more} if more else url).decode()
    (outcome,) = await executor.attempt_through(gateway, job, [TaskRef(0, InputJson(text))])
    return outcome


def code(outcome: Outcome) -> str | None:
    return outcome.error.code if outcome.error else None


async def test_what_is_disallowed_is_not_requested(executor: FetchExecutor, site: Site, clock: ManualClock) -> None:
    job = job_of(clock)
    refs = [TaskRef(number, InputJson(f'"{site.url(f"/ok?{number}")}"')) for number in range(50)]
    outcomes = await executor.attempt(job, refs)
    assert {code(outcome) for outcome in outcomes} == {None}
    assert site.visits["/robots.txt"] == 1, "read once for all who wait for it"
    blocked = await fetch(executor, job, site.url("/status/200"))
    assert code(blocked) == "blocked_by_robots"
    assert blocked.http_status is None
    assert blocked.spends_attempt
    # On the way of a redirect, too: the page answered, what it leads to is not requested.
    led = await fetch(executor, job, site.url("/redirect?to=/status/200"))
    assert (code(led), led.http_status) == ("blocked_by_robots", 302)
    assert site.visits["/status/200"] == 0
    # Others do not obey.
    plain = make_job(clock, kind=JobKind.FETCH)
    assert code(await fetch(executor, plain, site.url("/status/200"))) is None


async def test_the_agent_is_the_jobs_or_the_tasks(executor: FetchExecutor, site: Site, clock: ManualClock) -> None:
    secrets = {"User-Agent": "ShopBot/1.0", "Authorization": "Bearer x", "Cookie": "a=b"}
    assert code(await fetch(executor, job_of(clock, headers=secrets), site.url("/ok"))) == "blocked_by_robots"
    assert code(await fetch(executor, job_of(clock), site.url("/ok"), headers=secrets)) == "blocked_by_robots"
    assert code(await fetch(executor, job_of(clock), site.url("/ok"))) is None
    files = [seen.headers for seen in site.seen if seen.path == "/robots.txt"]
    assert {seen["user-agent"].partition("/")[0] for seen in files} == {"ShopBot", "conveyor"}
    assert not any("authorization" in seen or "cookie" in seen for seen in files), "no header goes there but that"


async def test_files_are_kept_for_an_hour_for_each_tenant(
    executor: FetchExecutor, site: Site, clock: ManualClock
) -> None:
    job, other = job_of(clock), job_of(clock, tenant=OTHER)
    for each, visits in ((job, 1), (job, 1), (other, 2), (other, 2)):
        await fetch(executor, each, site.url("/ok"))
        assert site.visits["/robots.txt"] == visits
    site.robots = (200, b"User-agent: *\nDisallow: /")
    clock.advance(robots.KEEP_SECONDS - 1)
    assert code(await fetch(executor, job, site.url("/ok"))) is None
    clock.advance(2)
    assert code(await fetch(executor, job, site.url("/ok"))) == "blocked_by_robots"
    # Rules that are known count while the file cannot be read.
    site.robots = (500, b"")
    clock.advance(robots.KEEP_SECONDS + 1)
    assert code(await fetch(executor, job, site.url("/ok"))) == "blocked_by_robots"
    assert site.visits["/robots.txt"] == 4


@pytest.mark.parametrize("status", [400, 403, 404, 410])
async def test_without_a_file_everything_is_allowed(
    executor: FetchExecutor, site: Site, clock: ManualClock, status: int
) -> None:
    site.robots = (status, FILE)
    assert code(await fetch(executor, job_of(clock), site.url("/status/200"))) is None


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_tasks_wait_for_a_file_that_cannot_be_read(
    executor: FetchExecutor, site: Site, clock: ManualClock, status: int
) -> None:
    site.robots = (status, b"")
    job = job_of(clock, breaker=Breaking(patience=100))
    for _ in range(3):
        outcome = await fetch(executor, job, site.url("/ok"))
        assert (code(outcome), outcome.spends_attempt) == ("robots_unavailable", False)
        assert outcome.retry_after is not None
        assert 60 <= outcome.retry_after <= 72
    assert (site.visits["/robots.txt"], site.visits["/ok"]) == (1, 0)
    clock.advance(61)
    site.robots = (200, FILE)
    assert code(await fetch(executor, job, site.url("/ok"))) is None


async def test_patience_ends(executor: FetchExecutor, site: Site, clock: ManualClock) -> None:
    site.robots = (503, b"")
    job = job_of(clock, breaker=Breaking(patience=100))
    assert not (await fetch(executor, job, site.url("/ok"))).spends_attempt
    clock.advance(101)
    outcome = await fetch(executor, job, site.url("/ok"))
    assert (code(outcome), outcome.spends_attempt) == ("robots_unavailable", True)


async def test_a_site_that_is_silent_or_gone(executor: FetchExecutor, clock: ManualClock) -> None:
    async with Site() as gone:
        url = gone.url("/ok")
    outcome = await fetch(executor, job_of(clock), url)
    assert (code(outcome), outcome.spends_attempt) == ("robots_unavailable", False)
    over = asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        silent = await fetch(executor, job_of(clock, timeout=0.1), f"http://127.0.0.1:{port}/ok")
        assert (code(silent), silent.spends_attempt) == ("robots_unavailable", False)
        over.set()
        await asyncio.wait(executor._robots._reading.values())


async def test_the_file_is_read_the_way_of_the_task(executor: FetchExecutor, clock: ManualClock) -> None:
    """Through the job's gateway, and for each gateway of a pool by itself: one that is down says nothing."""
    async with Site() as first:
        async with Site() as gone:
            pool = [PooledGateway(proxy=f"http://127.0.0.1:{port}") for port in (first.port, gone.port)]
        first.robots = (200, FILE)
        job = job_of(clock, gateway=Gateway(pool=pool))
        assert code(await fetch(executor, job, "http://far.example/ok")) is None
        assert code(await fetch(executor, job, "http://far.example/status/200")) == "blocked_by_robots"
        assert [seen.target for seen in first.seen] == ["http://far.example/robots.txt", "http://far.example/ok"]
        outcome = await fetch(executor, job, "http://far.example/ok", gateway=1)
        assert (code(outcome), outcome.spends_attempt) == ("gateway_failed", False)


async def test_redirects_and_large_files(executor: FetchExecutor, site: Site, clock: ManualClock) -> None:
    async with Site() as elsewhere:
        elsewhere.robots = (200, b"User-agent: *\nDisallow: /\n")
        agent = elsewhere.url("/ok").replace(":", "%3A")
        assert code(await fetch(executor, job_of(clock, headers={"User-Agent": agent}), site.url("/ok"))) is None
        assert elsewhere.visits["/ok"] == 1, "what it leads to is the file"
    padding = b"#" * 100 + b"\n"
    site.robots = (200, FILE + b"\n" + padding * 6000 + b"Disallow: /never")
    assert code(await fetch(executor, job_of(clock), site.url("/status/200"))) == "blocked_by_robots"


async def test_what_is_kept_is_bounded(
    executor: FetchExecutor, site: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(robots, "MAX_FILES", 3)
    for number in range(8):
        await fetch(executor, job_of(clock, headers={"User-Agent": f"agent{chr(97 + number)}/1"}), site.url("/ok"))
    files = executor._robots._files
    assert len(files) == 3
    assert executor._robots._characters == sum(robots._characters(key, file) for key, file in files.items())
    monkeypatch.setattr(robots, "MAX_CHARACTERS", 10)
    await fetch(executor, job_of(clock, headers={"User-Agent": "last/1"}), site.url("/ok"))
    assert len(files) == 1
    assert not executor._robots._reading


@pytest.mark.parametrize("kind", ["fetch", "download"])
async def test_a_job_of_both_kinds(site: Site, kind: str) -> None:
    """From the submit to the results: tasks that are disallowed fail at their first attempt."""
    with quick_place() as place:
        settings = Settings.load({}, data=place / "data", fetchers=1, flush_seconds=0.01, allow_private_targets=True)
        async with open_system(settings) as system, serving(system) as api, Embedded(system).running():
            tasks = [site.url("/ok"), site.url("/status/200"), site.url("/ok?2"), site.url("/status/404")]
            answer = await api.submit({"kind": kind, "tasks": tasks, "robots": "obey"})
            assert answer.status == 201, answer.body
            await ended(api, answer.json["id"])
            items = await all_items(api, f"/v1/jobs/{answer.json['id']}/results")
            codes = Counter((item.get("error") or {}).get("code") for item in items)
            assert codes == {None: 2, "blocked_by_robots": 2}
            assert {item["attempts"] for item in items} == {1}
            assert site.visits["/robots.txt"] == 1
            refused = await api.submit({"kind": "python", "handler": "x", "tasks": [1], "robots": "obey"})
            assert (refused.status, refused.json["field"]) == (400, "robots")

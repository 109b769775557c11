"""Why tasks failed and how hosts are doing: of small runs by their rows, of large ones by what workers collected."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from conveyor.api.schemas.breakdown_shapes import ErrorGroups, RunHosts
from conveyor.api.schemas.fleet_shapes import LoadShape
from conveyor.api.schemas.statistics_shapes import StatisticsShape
from conveyor.coordination.breaker_states import KEY, BreakerState, breaker_key
from conveyor.jobs.breakdowns import BREAKDOWN, SMALL_RUN
from conveyor.jobs.load_history import MAX_HOURS, MAX_MINUTES, LoadHistory, LoadPoint, load_history
from conveyor.model import Job, Outcome, RunId, TaskError, TaskRef
from conveyor.recover.sampler import Sampler
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System, open_system
from tests.support.api import Api, serving
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import ACME
from tests.support.working import Echo, ended, until, working

S = TypeVar("S", bound=msgspec.Struct)
LARGE = SMALL_RUN + 100


class Moody(Echo):
    """Every tenth task fails for good on one host, every seventh fails its first attempt on the other."""

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        outcomes = await super().attempt(job, refs)
        return [self._outcome(ref, outcome) for ref, outcome in zip(refs, outcomes, strict=True)]

    def _outcome(self, ref: TaskRef, outcome: Outcome) -> Outcome:
        if ref.index % 10 == 0:
            gone = TaskError("http_404", f"Gone, as page {ref.index % 20}")
            return Outcome(TaskStatus.FAILED, http_status=404, error=gone, elapsed=0.25)
        if ref.index % 7 == 1 and ref.attempt == 1:
            return Outcome(TaskStatus.FAILED, http_status=503, error=TaskError("http_503", "Busy"), elapsed=0.5)
        outcome.elapsed = 0.1
        return outcome


def inputs(count: int) -> list[str]:
    """Tasks that fail for good are on one host, all others on two."""
    return [
        f"http://{'gone' if number % 10 == 0 else 'even' if number % 2 == 0 else 'odd'}.example/{number}"
        for number in range(count)
    ]


async def ask(api: Api, path: str, shape: type[S]) -> S:
    answer = await api.get(path)
    assert answer.status == 200, answer.body
    return msgspec.convert(answer.json, shape)


async def run(api: Api, count: int) -> str:
    spec = {"tasks": inputs(count), "attempts": 3, "backoff": {"base": 0.01}, "breaker": {"enabled": False}}
    job_id: str = (await api.submit(spec)).json["id"]
    await ended(api, job_id)
    return job_id


async def check(api: Api, job_id: str, count: int, is_exact: bool) -> None:
    """Errors, hosts, series and counts tell the same."""
    gone = len(range(0, count, 10))
    busy = [number for number in range(count) if number % 7 == 1 and number % 10]
    errors = await ask(api, f"/v1/jobs/{job_id}/errors", ErrorGroups)
    assert (errors.is_exact, errors.failed, errors.retried) == (is_exact, gone, len(busy))
    first, *others = errors.items
    assert (first.code, first.host, first.failed, first.retried) == ("http_404", "gone.example", gone, 0)
    assert {sample.message for sample in first.samples} == {"Gone, as page 0", "Gone, as page 10"}
    sample = first.samples[0]
    task = (await api.get(f"/v1/jobs/{job_id}/tasks/{sample.task_id}")).json
    assert (task["index"], task["error"]["message"]) == (sample.index, sample.message)
    assert {(group.code, group.host, group.failed) for group in others} == {
        ("http_503", "even.example", 0),
        ("http_503", "odd.example", 0),
    }
    hosts = await ask(api, f"/v1/jobs/{job_id}/hosts", RunHosts)
    assert (hosts.is_exact, hosts.other, hosts.missing) == (is_exact, None, 0)
    found = {host.host: host for host in hosts.items}
    assert (found["gone.example"].failed, found["gone.example"].succeeded) == (gone, 0)
    assert found["gone.example"].p50 == pytest.approx(0.25, rel=0.1)
    assert [(error.code, error.count) for error in found["gone.example"].errors] == [("http_404", gone)]
    succeeded = sum(host.succeeded for host in hosts.items)
    counts = (await api.get(f"/v1/jobs/{job_id}")).json["counts"]
    assert (counts["succeeded"], counts["failed"]) == (succeeded, gone)


async def test_a_small_run_is_told_by_its_rows(server: Api) -> None:
    async with working(server.system, Moody()):
        job_id = await run(server, 100)
        await check(server, job_id, 100, is_exact=True)
    assert await document(server.system, job_id) is None, "a small run costs no write"


async def test_a_large_run_is_told_by_what_workers_collected(settings: Settings, clock: JumpingClock) -> None:
    async with open_system(settings, clock) as system, serving(system) as server:
        async with working(system, Moody()):
            job_id = await run(server, LARGE)
        assert await document(system, job_id) is not None, "workers write the rest when they stop"
        await check(server, job_id, LARGE, is_exact=False)
    async with open_system(settings, clock) as system, serving(system) as server:
        await check(server, job_id, LARGE, is_exact=False)
        # The coordinator of the embedded system is gone with its process.
        statistics = await ask(server, f"/v1/jobs/{job_id}/statistics", StatisticsShape)
        sums = [
            sum(getattr(each, name) for each in statistics.series.items) for name in ("succeeded", "failed", "retried")
        ]
        assert sums == [LARGE - LARGE // 10, LARGE // 10, len([n for n in range(LARGE) if n % 7 == 1 and n % 10])]
        assert sum(each.count for each in statistics.durations) == sum(sums)
        done = [each.succeeded + each.failed for each in statistics.samples]
        assert (done == sorted(done), done[-1]) == (True, LARGE)


async def test_a_group_is_rerun(server: Api) -> None:
    async with working(server.system, Moody()):
        job_id = await run(server, 60)
        select = {"error_code": "http_404", "host": "gone.example"}
        assert (await server.post(f"/v1/jobs/{job_id}/rerun", {"select": select})).status == 202
        shown = await ended(server, job_id)
        assert (shown["run"]["number"], shown["run"]["total"]) == (2, 6)
        again = await ask(server, f"/v1/jobs/{job_id}/errors", ErrorGroups)
        assert (again.run_id, again.failed) == (shown["run"]["id"], 6)
        before = await ask(server, f"/v1/jobs/{job_id}/errors?run=1", ErrorGroups)
        assert (before.failed, before.run_id == again.run_id) == (6, False)
        assert (await server.get(f"/v1/jobs/{job_id}/hosts?run=9")).status == 404
        for part in ("errors", "hosts"):
            refused = await server.get(f"/v1/jobs/{job_id}/{part}?run=latest-per-task")
            assert (refused.status, refused.json["code"]) == (400, "invalid_field")


async def test_tasks_without_a_known_host_are_counted(server: Api) -> None:
    """A worker died before it wrote what it had collected."""
    async with working(server.system, Moody()):
        job_id = await run(server, LARGE)
    stored = await document(server.system, job_id)
    assert stored is not None
    assert await server.system.records.documents.remove_document(stored)
    errors = await ask(server, f"/v1/jobs/{job_id}/errors", ErrorGroups)
    (group,) = errors.items
    assert (group.code, group.host, group.is_other, group.failed) == ("http_404", None, True, LARGE // 10)
    assert errors.failed == LARGE // 10
    hosts = await ask(server, f"/v1/jobs/{job_id}/hosts", RunHosts)
    assert (hosts.items, hosts.missing) == ([], LARGE), "nothing has finished, it would seem otherwise"


async def test_a_host_shows_its_breaker(server: Api) -> None:
    async with working(server.system, Moody()):
        job_id = await run(server, 20)
    now = server.system.clock.now()
    state = BreakerState(now, now + 60, runs=(RunId("run_x"),), error="timeout")
    key = breaker_key(ACME, "http://even.example")
    await server.system.coordinator.cache(KEY, msgspec.json.encode({key: state}), 60.0)
    hosts = await ask(server, f"/v1/jobs/{job_id}/hosts", RunHosts)
    breakers = {host.host: host.breaker for host in hosts.items}
    assert breakers["odd.example"] is None
    found = breakers["even.example"]
    assert found is not None
    assert (found.state, found.error, found.target) == ("open", "timeout", "http://even.example")


async def document(system: System, job_id: str) -> Any:
    rows = await system.records.documents.documents(BREAKDOWN, ACME, None, 10)
    return next((row for row in rows.items if row.job_id == job_id), None)


async def test_the_load_of_all_jobs_is_kept(system: System, clock: JumpingClock) -> None:
    """Counted by minute in the coordinator, kept by the sampler, however often it looks; and by hour in the end."""
    async with serving(system) as server:
        async with working(system, Moody()):
            job_ids = [await run(server, 100), await run(server, 40)]
            sampler = Sampler(system)

            async def look() -> LoadShape:
                await sampler.tick()
                return await ask(server, "/v1/load", LoadShape)

            load = await until(look, lambda load: sum(item.succeeded for item in load.minutes.items) >= 126)
        counts = [(await server.get(f"/v1/jobs/{job_id}")).json["counts"] for job_id in job_ids]
        wanted = [sum(count[name] for count in counts) for name in ("succeeded", "failed")]
        for series in (load.minutes, load.hours):
            assert [sum(getattr(item, name) for item in series.items) for name in ("succeeded", "failed")] == wanted
            assert sum(item.retried for item in series.items) > 0
        clock.advance(3600.0 * 5)
        await sampler.tick()
        assert (await load_history(system.records.documents, ACME)).hours


def test_a_history_is_bounded_and_counts_a_minute_once() -> None:
    history = LoadHistory()
    for minute in range(60 * 24 * 30):
        for seen in (3, 5):
            history = history.put(minute, LoadPoint(seen, 1, 0, 7 - seen, 2))
    assert (len(history.minutes), len(history.hours)) == (MAX_MINUTES, MAX_HOURS)
    assert set(history.hours.values()) == {LoadPoint(300, 60, 0, 4, 2)}
    assert len(msgspec.json.encode(history)) < 20_000

"""Status over HTTP: what a job waits for, how long tasks take, counts that are provable, reads that are shared."""

import asyncio
from typing import Any

import msgspec
import pytest

from conveyor.api.schemas.job_shapes import JobShape
from conveyor.coordination.durations import TaskTime, count_durations, task_time
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.errors import EngineFailed
from conveyor.jobs.secrets import shown_options
from conveyor.model import Counts, Job, JobId, RunId, TenantId
from conveyor.read import status as progress
from conveyor.read import verification
from conveyor.read.status import status_json
from conveyor.system import System
from tests.support.api import Api, new_server
from tests.support.clocks import JumpingClock
from tests.support.make_jobs import end
from tests.support.working import Flaky, ended, until, working

ACME = TenantId("acme")


def urls(count: int) -> list[str]:
    return [f"http://example.com/{number}" for number in range(count)]


async def submit(api: Api, count: int, **spec: Any) -> str:
    job_id: str = (await api.submit({"tasks": urls(count), **spec})).json["id"]
    return job_id


async def job_of(api: Api, job_id: str) -> Job:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def status(api: Api, job_id: str, query: str = "") -> dict[str, Any]:
    answer = await api.get(f"/v1/jobs/{job_id}{query}")
    assert answer.status == 200, answer.body
    msgspec.convert(answer.json, JobShape)
    shown: dict[str, Any] = answer.json
    return shown


class TestWaiting:
    async def test_a_job_that_runs_waits_for_nothing(self, server: Api) -> None:
        shown = await status(server, await submit(server, 3))
        assert (shown["state"], shown["waiting"], shown["reason"]) == ("running", None, None)

    async def test_for_its_list(self, server: Api) -> None:
        upload_id = await server.upload(b"http://example.com/\n")
        spec = {"source": {"upload_id": upload_id}}
        job_id = (await server.submit(spec, headers={"prefer": "respond-async"})).json["id"]
        shown = await status(server, job_id)
        assert (shown["state"], shown["waiting"]["code"], shown["reason"]) == ("ingesting", "ingesting", None)

    async def test_for_tasks(self, server: Api) -> None:
        job_id = (await server.submit({"mode": "open"})).json["id"]
        assert (await status(server, job_id))["waiting"]["code"] == "open"
        await server.post(f"/v1/jobs/{job_id}/tasks", {"tasks": urls(20)})
        async with working(server.system) as echo:
            echo.gate.clear()
            await until(lambda: status(server, job_id), lambda shown: shown["waiting"] is None)
            assert (await status(server, job_id))["run"]["total"] == 20
            echo.gate.set()
            await until(lambda: status(server, job_id), lambda shown: shown["waiting"])
            assert (await status(server, job_id))["waiting"]["code"] == "open"

    async def test_to_be_resumed(self, server: Api) -> None:
        job_id = await submit(server, 3)
        await server.post(f"/v1/jobs/{job_id}/pause")
        shown = await status(server, job_id)
        assert (shown["waiting"]["code"], shown["waiting"]["until"]) == ("paused", None)
        assert (shown["reason"], shown["reason_code"]) == ("paused on request", "paused")
        assert shown["run"]["reason_code"] == "paused"

    async def test_for_what_somebody_else_holds_back(self, server: Api, clock: JumpingClock) -> None:
        """A breaker or a cap says so; it is shown until that lapses."""
        job = await job_of(server, await submit(server, 3))
        wait = Wait("breaker_open", "example.com does not answer.", 1_790_000_000.0)
        await publish_wait(server.system.coordinator, job.run.run_id, wait, ttl=10)
        shown = await status(server, job.job_id)
        assert shown["waiting"] == {
            "code": "breaker_open",
            "detail": "example.com does not answer.",
            "until": "2026-09-21T14:13:20.000Z",
            "target": None,
            "error": None,
        }
        assert (shown["reason"], shown["reason_code"]) == ("example.com does not answer.", "breaker_open")
        listed = (await server.get("/v1/jobs")).json["items"][0]
        assert listed["waiting"] == shown["waiting"]
        clock.advance(11)
        assert (await status(server, job.job_id))["waiting"] is None

    async def test_an_ended_job_waits_for_nothing(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 1))
        await publish_wait(server.system.coordinator, job.run.run_id, Wait("breaker_open", "late"), ttl=10)
        await server.post(f"/v1/jobs/{job.job_id}/cancel")
        assert (await status(server, job.job_id))["waiting"] is None

    async def test_words_of_another_version_are_passed_over(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 1))
        await server.system.coordinator.cache(f"waits:{job.run.run_id}", b'["new"]', 10)
        assert (await status(server, job.job_id))["waiting"] is None


class TestTaskTime:
    @pytest.mark.parametrize("scale", [0.0004, 0.01, 1.0, 3000.0])
    async def test_quantiles_are_right_within_a_tenth(self, system: System, scale: float) -> None:
        run = RunId("run_1")
        for start in range(0, 1000, 100):
            seconds = [scale * (n + 1) / 1000 for n in range(start, start + 100)]
            await count_durations(system.coordinator, {run: seconds, RunId("run_2"): [1e5]})
        found = await task_time(system.coordinator, run)
        assert found is not None
        for quantile, truth in ((found.p50, scale / 2), (found.p95, scale * 0.95)):
            assert quantile == pytest.approx(max(truth, 0.001), rel=0.1)

    async def test_nothing_is_known_of_a_run_that_nobody_timed(self, system: System) -> None:
        await count_durations(system.coordinator, {RunId("run_1"): [0.0, 0.0]})
        assert await task_time(system.coordinator, RunId("run_1")) is None

    async def test_one_task(self, system: System) -> None:
        await count_durations(system.coordinator, {RunId("run_1"): [0.1]})
        found = await task_time(system.coordinator, RunId("run_1"))
        assert found == TaskTime(p50=pytest.approx(0.1, rel=0.06), p95=pytest.approx(0.1, rel=0.06))

    async def test_a_coordinator_that_is_away_stops_nobody(self, system: System) -> None:
        class Away:
            async def add_counters_of(self, *_: object) -> None:
                raise EngineFailed

        await count_durations(Away(), {RunId("run_1"): [0.1]})  # type: ignore[arg-type]

    async def test_it_is_shown(self, server: Api) -> None:
        async with working(server.system, Flaky(lambda job, index: "timeout")):
            job_id = await submit(server, 50, attempts=1)
            done = await ended(server, job_id)
        assert done["task_time"] == {"p50": pytest.approx(0.25, rel=0.06), "p95": pytest.approx(0.25, rel=0.06)}
        assert done["top_errors"] == [{"code": "timeout", "count": 50}]

    async def test_it_is_of_all_attempts_once_the_coordinator_has_forgotten(
        self, server: Api, clock: JumpingClock
    ) -> None:
        """After a restart, and after a day."""
        async with working(server.system, Flaky(lambda job, index: "timeout")):
            job_id = await submit(server, 50, attempts=2, backoff={"base": 0.1})
            await ended(server, job_id)
        clock.advance(100_000.0)
        job = await job_of(server, job_id)
        assert await task_time(server.system.coordinator, job.run.run_id) is None
        shown = (await status(server, job_id))["task_time"]
        assert shown == {"p50": pytest.approx(0.25, rel=0.06), "p95": pytest.approx(0.25, rel=0.06)}


class TestShared:
    """Readers of the same moment share what one of them found."""

    async def test_many_readers_look_once(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        job_id = await submit(server, 3)
        looks = 0
        counts = server.system.tasks.counts

        async def counted(run: Any) -> Counts:
            nonlocal looks
            looks += 1
            return await counts(run)

        monkeypatch.setattr(server.system.tasks, "counts", counted)
        for _ in range(20):
            await status(server, job_id)
        assert looks == 1

    async def test_a_move_is_seen_at_once(self, server: Api) -> None:
        job_id = await submit(server, 3)
        for how, state in (("pause", "paused"), ("resume", "running"), ("pause", "paused"), ("cancel", "cancelled")):
            await server.post(f"/v1/jobs/{job_id}/{how}")
            assert (await status(server, job_id))["state"] == state
        assert (await status(server, job_id))["rate"] == 0, "no task was run"
        await server.request("DELETE", f"/v1/jobs/{job_id}")
        assert (await server.get(f"/v1/jobs/{job_id}")).status == 404

    async def test_an_end_is_seen_with_its_counts(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 3))
        await status(server, job.job_id)
        finished = await server.system.tasks.finish(job.key, [end(index) for index in range(3)])
        from conveyor.lifecycle import Lifecycle

        system = server.system
        await Lifecycle(system.records, system.tasks, system.clock).settle(job, finished.counts)
        shown = await status(server, job.job_id)
        assert (shown["state"], shown["run"]["counts"]["succeeded"]) == ("completed", 3)

    async def test_changed_options_are_seen_at_once(self, server: Api) -> None:
        job_id = await submit(server, 3)
        await status(server, job_id)
        await server.request("PATCH", f"/v1/jobs/{job_id}", body=b'{"concurrency": 3}')
        assert (await status(server, job_id))["options"] == {"concurrency": 3, "pace": "auto"}

    async def test_what_is_shared_is_soon_forgotten(self, server: Api, clock: JumpingClock) -> None:
        job = await job_of(server, await submit(server, 3))
        await status(server, job.job_id)
        await server.system.tasks.finish(job.key, [end(0)])
        clock.advance(1)
        assert (await status(server, job.job_id))["run"]["counts"]["succeeded"] == 1

    async def test_no_secret_is_kept_there(self, server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[bytes] = []
        cache = server.system.coordinator.cache

        async def watched(key: str, value: bytes, ttl: float) -> None:
            kept.append(value)
            await cache(key, value, ttl)

        monkeypatch.setattr(server.system.coordinator, "cache", watched)
        secret = {"headers": {"X-Key": "sesame"}, "gateway": {"url": "http://sesame@example.com/{url}"}}
        async with working(server.system):
            job_id = await submit(server, 3, **secret)
            await ended(server, job_id)
            for _ in range(2):
                await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "all", "options": secret})
                await ended(server, job_id)
        assert kept
        assert not [value for value in kept if b"sesame" in value]

    async def test_values_of_another_version_are_made_again(self, server: Api) -> None:
        job = await job_of(server, await submit(server, 3))
        await server.system.coordinator.cache(f"status:{job.run.run_id}:running", b'{"of": "another"}', 60)
        assert (await status(server, job.job_id))["run"]["total"] == 3


async def a_large_job_is_counted_for_an_administrator_only() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "MAX_VERIFIED_ROWS", 3)
        async with new_server() as api:
            boss = await api.as_tenant("acme", admin=True)
            small, large = await submit(api, 3), await submit(api, 4)
            assert (await api.get(f"/v1/jobs/{small}?verify=true")).status == 200
            refused = await api.get(f"/v1/jobs/{large}?verify=true")
            assert refused.status == 403
            assert refused.json["code"] == "forbidden"
            assert (await boss.get(f"/v1/jobs/{large}?verify=true")).status == 200
            assert (await api.get(f"/v1/jobs/{large}")).status == 200


class TestVerify:
    async def test_the_counts_agree_with_the_rows(self, server: Api) -> None:
        async with working(server.system, Flaky(lambda job, index: 503 if index % 3 == 0 else None)):
            job_id = await submit(server, 60, attempts=1)
            await ended(server, job_id)
            await server.post(f"/v1/jobs/{job_id}/rerun")
            await ended(server, job_id)
        verify = (await status(server, job_id, "?verify=true"))["verify"]
        assert verify["drift"] == 0
        assert [(run["number"], run["exact"], run["drift"]) for run in verify["runs"]] == [(1, True, 0), (2, True, 0)]
        assert verify["runs"][0]["kept"] == verify["runs"][0]["counted"]
        assert verify["runs"][0]["counted"] == {"succeeded": 40, "failed": 20, "cancelled": 0, "unchanged": 0}

    async def test_while_it_runs(self, server: Api) -> None:
        async with working(server.system):
            job_id = await submit(server, 3000)
            for _ in range(20):
                shown = await status(server, job_id, "?verify=true")
                assert shown["verify"]["drift"] == 0
            await ended(server, job_id)

    @pytest.mark.parametrize("kept", [Counts(3, 0, 0), Counts(1, 0, 0), Counts(1, 1, 1)], ids=str)
    async def test_drift_is_told_and_mended(self, server: Api, kept: Counts) -> None:
        job = await job_of(server, await submit(server, 4))
        await server.system.tasks.finish(job.key, [end(index) for index in range(2)])
        await server.post(f"/v1/jobs/{job.job_id}/cancel")
        await server.system.tasks.cancel_pending(job.key, 100, 1.0)
        database: Any = server.system.tasks._database  # type: ignore[attr-defined]
        values = msgspec.structs.asdict(kept)
        await database.change("UPDATE task_runs SET succeeded=:succeeded, failed=:failed, cancelled=:cancelled", values)
        (run,) = (await status(server, job.job_id, "?verify=true"))["verify"]["runs"]
        truth = Counts(2, 0, 2)
        assert (run["kept"], run["counted"]) == (values, msgspec.structs.asdict(truth))
        pairs = zip(msgspec.structs.astuple(kept), msgspec.structs.astuple(truth), strict=True)
        assert (run["drift"], run["exact"]) == (sum(abs(ours - theirs) for ours, theirs in pairs), True)
        again = (await status(server, job.job_id, "?verify=true"))["verify"]
        assert again["drift"] == 0

    async def test_a_large_job_is_for_an_administrator(self) -> None:
        await a_large_job_is_counted_for_an_administrator_only()

    async def test_its_parameter(self, server: Api) -> None:
        job_id = await submit(server, 1)
        assert (await server.get(f"/v1/jobs/{job_id}?verify=perhaps")).status == 400
        assert "verify" not in await status(server, job_id, "?verify=false")

    async def test_a_right_count_writes_nothing(self, server: Api) -> None:
        """The writer is everybody's: counting rows does not hold it."""
        job = await job_of(server, await submit(server, 4))
        database: Any = server.system.tasks._database  # type: ignore[attr-defined]
        writes = 0
        write = database.write

        async def watched(work: Any) -> Any:
            nonlocal writes
            writes += 1
            return await write(work)

        database.write = watched
        await server.system.tasks.finish(job.key, [end(0)])
        assert writes == 1
        assert await server.system.tasks.recount(job.key) == Counts(1, 0, 0)
        assert writes == 1


async def test_many_runs_are_shown_in_part(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "MAX_RUNS", 3)
    async with working(server.system):
        job_id = await submit(server, 1)
        await ended(server, job_id)
        for _ in range(5):
            assert (await server.post(f"/v1/jobs/{job_id}/rerun", {"select": "all"})).status == 202
            shown = await ended(server, job_id)
    assert [run["number"] for run in shown["runs"]] == [6, 5, 4, 3]


def test_secrets_are_hidden_wherever_they_stand() -> None:
    options = {
        "headers": {"X-Key": "sesame"},
        "gateway": {"url": "http://sesame@example.com/{url}", "headers": {"X": "sesame"}, "proxy": None},
        "export": {"create": {"url": "http://example.com/", "headers": {"Authorization": "sesame"}}},
        "attempts": 3,
    }
    shown = shown_options(options)
    assert "sesame" not in str(shown)
    assert shown["headers"] == {"X-Key": "[hidden]"}
    assert (shown["attempts"], shown["export"]["create"]["url"]) == (3, "http://example.com/")


async def test_readers_at_the_same_time(server: Api) -> None:
    job = await job_of(server, await submit(server, 10))
    parts = (server.system.records, server.system.tasks, server.system.coordinator, server.system.clock)
    found = await asyncio.gather(*(status_json(*parts, job) for _ in range(30)))
    assert {each["run"]["total"] for each in found} == {10}

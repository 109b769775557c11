"""Metrics: who may read them, that they say what happened, and that nobody can make them many."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from conveyor.api.scrape import serve_metrics
from conveyor.coordination.breaker_states import BreakerState, breaker_key
from conveyor.engines.queue import CONTROL, Outgoing, run_queue
from conveyor.errors import InvalidSetting, QuotaExceeded, Unavailable
from conveyor.model import Job, TaskEnd
from conveyor.recover.sampler import Sampler
from conveyor.service import Service
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.system import System
from conveyor.telemetry import metrics
from conveyor.telemetry.instruments import Histogram
from conveyor.telemetry.seams import PROTOCOLS
from tests.support.api import Answer, Api, client
from tests.support.small_fleet import open_fleet
from tests.support.working import Flaky, ended, until, working

TOKEN = "scrape-" + "t" * 32


def values() -> dict[str, float]:
    """Every series and what it is at; of a histogram, how many it has seen."""
    found: dict[str, float] = {}
    for metric in metrics.CATALOGUE:
        for labels, value in metric.series.items():
            at = sum(value.counts) if isinstance(metric, Histogram) else value  # type: ignore[union-attr]
            found[f"{metric.name}{[str(label) for label in labels]}"] = at  # type: ignore[assignment]
    return found


def risen(before: dict[str, float], metric: str, *labels: str) -> float:
    name = f"{metric}{list(labels)}"
    return values().get(name, 0) - before.get(name, 0)


def possible_calls(*engines: str) -> set[str]:
    """Every series of `conveyor_engine_call_seconds` that there can be: one for each method of a seam."""
    return {
        f"{metrics.ENGINE_SECONDS.name}{[seam, engine, method]}"
        for seam, protocols in PROTOCOLS.items()
        for protocol in protocols
        for method in dir(protocol)
        for engine in engines
        if not method.startswith("_")
    }


class TestWhoMayRead:
    async def test_an_administrator_may_and_nobody_else(self, server: Api) -> None:
        assert (await server.get("/metrics", auth=False)).status == 401
        assert (await server.get("/metrics")).status == 403
        assert (await server.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})).status == 401
        admin = await server.as_tenant("acme", admin=True)
        answer = await admin.get("/metrics")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert b"conveyor_http_requests_total" in answer.body
        wanted = await admin.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
        assert wanted.headers["content-type"].startswith("application/openmetrics-text")

    @pytest.fixture
    def settings(self, settings: Settings, request: pytest.FixtureRequest) -> Settings:
        return msgspec.structs.replace(settings, metrics_token=getattr(request, "param", None))

    @pytest.mark.parametrize("settings", [TOKEN], indirect=True)
    async def test_the_token_reads_metrics_and_nothing_else(self, server: Api) -> None:
        scraper = {"authorization": f"Bearer {TOKEN}"}
        assert (await server.get("/metrics", headers=scraper)).status == 200
        assert (await server.get("/metrics", headers={"authorization": f"Bearer {TOKEN}x"})).status == 401
        assert (await server.get("/v1/jobs", headers=scraper)).status == 401
        admin = await server.as_tenant("acme", admin=True)
        assert (await admin.get("/metrics")).status == 200


class TestPortOfItsOwn:
    async def test_it_serves_two_paths(self, settings: Settings) -> None:
        free = _free_port()
        async with serve_metrics(msgspec.structs.replace(settings, metrics_port=free)):
            assert (await _get(free, "/metrics")).status == 200
            assert (await _get(free, "/healthz")).body == b"ok\n"
            assert (await _get(free, "/v1/jobs")).status == 404
            assert (await _get(free, "/metrics", "POST")).status == 405
            head = await _get(free, "/healthz", "HEAD")
            assert (head.status, head.body) == (200, b"")
            with pytest.raises(Unavailable):
                async with serve_metrics(msgspec.structs.replace(settings, metrics_port=free)):
                    raise AssertionError("two on one port")

    async def test_health_fails_while_a_role_does(self, settings: Settings) -> None:
        free = _free_port()
        failing: list[str] = []
        quick = msgspec.structs.replace(settings, metrics_port=free)
        async with serve_metrics(quick, lambda: failing[0] if failing else None):
            assert (await _get(free, "/healthz")).status == 200
            failing.append("sweeper")
            answer = await _get(free, "/healthz")
            assert (answer.status, answer.body) == (503, b"every tick of sweeper fails\n")
            failing.clear()
            assert (await _get(free, "/healthz")).status == 200

    async def test_with_a_token_it_asks_for_it(self, settings: Settings) -> None:
        free = _free_port()
        async with serve_metrics(msgspec.structs.replace(settings, metrics_port=free, metrics_token=TOKEN)):
            assert (await _get(free, "/metrics")).status == 401
            assert (await _get(free, "/metrics", token="x")).status == 401
            assert (await _get(free, "/metrics", token=TOKEN)).status == 200
            assert (await _get(free, "/healthz")).status == 200

    def test_open_to_others_it_takes_a_token(self) -> None:
        with pytest.raises(InvalidSetting):
            Settings.load({}, metrics_port=9000, metrics_host="0.0.0.0")
        assert Settings.load({}, metrics_port=9000, metrics_host="0.0.0.0", metrics_token=TOKEN).metrics_port
        with pytest.raises(InvalidSetting):
            Settings.load({}, metrics_token="short")


async def test_what_a_job_did_is_counted(server: Api, system: System) -> None:
    before = values()
    flaky = Flaky(lambda job, index: {0: 404, 1: 503, 2: "no_such_code"}.get(index))
    async with working(system, flaky):
        spec = {
            "kind": "fetch",
            "tasks": [f"http://t.example/{n}" for n in range(30)],
            "backoff": {"base": 0, "cap": 0},
        }
        job_id = (await server.submit({**spec, "attempts": 2})).json["id"]
        await ended(server, job_id)
        assert (await server.get(f"/v1/jobs/{job_id}/results?limit=10")).status == 200

    assert risen(before, "conveyor_jobs_accepted_total", "fetch") == 1
    assert risen(before, "conveyor_tasks_written_total") == 30
    assert risen(before, "conveyor_tasks_finished_total", "succeeded") == 27
    assert risen(before, "conveyor_tasks_finished_total", "failed") == 3
    assert risen(before, "conveyor_task_failures_total", "http_4xx") == 1
    assert risen(before, "conveyor_task_failures_total", "http_5xx") == 1
    assert risen(before, "conveyor_task_failures_total", "other") == 1
    assert risen(before, "conveyor_attempts_total", "fetch", "succeeded") == 27
    assert risen(before, "conveyor_attempts_total", "fetch", "retried") == 1
    assert risen(before, "conveyor_attempts_total", "fetch", "failed") == 3
    assert risen(before, "conveyor_attempt_seconds", "fetch") == 31
    assert risen(before, "conveyor_task_seconds", "fetch") == 30
    assert risen(before, "conveyor_runs_finished_total", "completed") == 1
    assert risen(before, "conveyor_rows_returned_total") == 10
    assert risen(before, "conveyor_rows_read_total") == 11
    assert risen(before, "conveyor_http_requests_total", "POST", "/v1/jobs", "2xx") == 1
    assert risen(before, "conveyor_http_requests_total", "GET", "/v1/jobs/{job_id}/results", "2xx") == 1
    assert risen(before, "conveyor_engine_call_seconds", "atomic_flush", "sqlite", "record_flush") >= 1
    assert risen(before, "conveyor_engine_call_seconds", "atomic_accept", "sqlite", "accept_atomically") == 1
    for role in ("worker", "ingester", "sweeper", "sampler", "monitor", "deliverer"):
        assert risen(before, "conveyor_role_tick_seconds", role) >= 1, role


async def test_nobody_can_make_more_series(server: Api, system: System) -> None:
    """Whatever varies from job to job, tenant to tenant and request to request, the second round adds no series."""

    async def round_of(number: int) -> set[str]:
        for tenant in (f"tenant-{number}-a", f"tenant-{number}-b"):
            api = await server.as_tenant(tenant)
            tasks = [f"http://host-{number}-{n}.example/{number}?q={n}" for n in range(20)]
            spec: dict[str, Any] = {"kind": "fetch", "tasks": tasks, "name": f"job {number}", "attempts": 1}
            made = (await api.submit({**spec, "headers": {f"X-{number}": "1"}})).json
            await ended(api, made["id"])
            await api.get(f"/v1/jobs/{made['id']}/results")
            await api.get(f"/v1/jobs/job_{number}/results")
            await api.get(f"/v1/jobs?unknown{number}=1")
            await api.request(f"ODD{number}", "/v1/jobs")
            await api.request("PUT", f"/v1/uploads/{number}/content?signature={number}", body=b"x")
            await api.get(f"/no/such/{number}", headers={"traceparent": str(number), "x-request-id": str(number)})
            await api.get("/healthz", headers={"authorization": f"Bearer {number}"})
            admin = await api.as_tenant(tenant, admin=True)
            await admin.get("/metrics")
        # A role may make a call of an engine for the first time in any round.
        return set(values()) | possible_calls("sqlite", "local")

    flaky = Flaky(lambda job, index: f"code_{job.job_id}_{index}" if index % 2 else None)
    async with working(system, flaky):
        await round_of(0)
        known = await round_of(1)
        assert await round_of(2) == known
    assert not [name for name in known if "tenant-" in name or "job_0" in name or ".example" in name]


class TestSampler:
    async def test_depth_age_and_movement(self) -> None:
        async with open_fleet() as fleet:
            sampler, clock = Sampler(fleet.system), fleet.clock
            jobs = [await fleet.submit(250), await fleet.submit(50)]
            await fleet.system.queue.send(CONTROL, [Outgoing(b"not a message"), Outgoing(b"later", 1000.0)])
            await sampler.tick()
            assert metrics.QUEUE_MESSAGES.series["runs", "ready"] == 4
            assert metrics.QUEUE_MESSAGES.series["control", "delayed"] == 1
            assert metrics.QUEUE_AGE_SECONDS.series["runs",] == 0
            clock.advance(90)
            await fleet.system.queue.receive(run_queue(jobs[0].run.run_id), 3, 30.0)
            await sampler.tick()
            assert metrics.QUEUE_MESSAGES.series["runs", "in_flight"] == 3
            assert metrics.QUEUE_AGE_SECONDS.series["runs",] == 90
            assert metrics.QUEUE_AGE_SECONDS.series["recovery",] == 0
            assert metrics.RUN_IDLE_SECONDS.series[()] == 90
            assert metrics.RUNS.series["running",] == 2
            assert metrics.DUE_LAG_SECONDS.series["outbox",] == 90
            await fleet.system.tasks.finish(jobs[0].key, [_end(0)])
            clock.advance(10)
            await sampler.tick()
            assert metrics.RUN_IDLE_SECONDS.series[()] == 100
            clock.advance(10)
            await fleet.system.tasks.finish(jobs[1].key, [_end(0)])
            await sampler.tick()
            assert metrics.RUN_IDLE_SECONDS.series[()] == 10

    async def test_dead_letters_and_breakers(self) -> None:
        async with open_fleet() as fleet:
            before = values()
            await fleet.system.queue.send(CONTROL, [Outgoing(b"x")])
            [held] = await fleet.system.queue.receive(CONTROL, 1, 30.0)
            await fleet.system.queue.dead_letter(CONTROL, [held.receipt], "it is no message")
            now = fleet.clock.now()
            doc = {
                breaker_key(tenant, "host.example"): BreakerState(now, now + wait)  # type: ignore[arg-type]
                for tenant, wait in (("a", 60.0), ("b", 60.0), ("c", 1.0))
            }
            await fleet.system.coordinator.cache("breakers", msgspec.json.encode(doc), 600.0)
            fleet.clock.advance(30)
            await Sampler(fleet.system).tick()
            assert metrics.DEAD_LETTERS.series[()] == 1
            assert metrics.QUEUE_AGE_SECONDS.series["dead_letters",] == 30
            assert risen(before, "conveyor_dead_lettered_total", "control") == 1
            assert metrics.BREAKERS.series == {("open",): 2, ("half_open",): 1}

    async def test_it_reads_within_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with open_fleet() as fleet:
            sampler = Sampler(fleet.system)
            many = [await fleet.submit(1)] * 500

            async def active_jobs() -> list[Job]:
                return many

            monkeypatch.setattr(fleet.system.records.jobs, "active_jobs", active_jobs)
            before = values()
            await sampler.tick()
            assert risen(before, "conveyor_engine_call_seconds", "queue", "sqlite", "depth") == 201
            assert metrics.RUNS_UNSAMPLED.series[()] == 400

    async def test_drift_is_counted_when_it_is_mended(self) -> None:
        async with open_fleet() as fleet:
            before = values()
            job = await fleet.submit(20)
            await fleet.system.tasks.finish(job.key, [_end(index) for index in range(20)])
            await fleet.system.queue.drop(run_queue(job.run.run_id))
            database: Any = fleet.system.tasks._database  # type: ignore[attr-defined]
            await database.change(
                "UPDATE task_runs SET succeeded = 13, failed = 2 WHERE run_id = :r", {"r": job.run.run_id}
            )
            await fleet.sweeper.tick()
            assert risen(before, "conveyor_counter_drift_total") == 9
            assert risen(before, "conveyor_swept_total", "completed") == 1


async def test_refusals_are_counted() -> None:
    async with open_fleet(tenant_jobs=1) as fleet:
        before = values()
        await fleet.submit(1)
        with pytest.raises(QuotaExceeded):
            await fleet.submit(1)
        assert risen(before, "conveyor_refusals_total", "quota_exceeded", "jobs") == 1


class Stumbling:
    """A role that fails at first."""

    name = "stumbling_1"
    stopping = False
    ticks = 0

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None

    async def tick(self) -> float:
        self.ticks += 1
        if self.ticks == 1:
            raise ValueError("no")
        return 1000.0

    async def close(self) -> None:
        """Nothing is held."""


async def test_a_role_that_fails_is_counted(system: System) -> None:
    before, role = values(), Stumbling()
    service = Service(role, system.clock)

    async def look() -> int:
        return role.ticks

    with capture_logs() as logs:
        running = asyncio.create_task(service.run())
        await until(look, lambda ticks: ticks == 2)
        service.stop()
        await running
    assert risen(before, "conveyor_role_errors_total", "stumbling") == 1
    assert risen(before, "conveyor_role_tick_seconds", "stumbling") == 1
    assert [line["role"] for line in logs] == ["stumbling_1"]


def _end(index: int) -> TaskEnd:
    return TaskEnd(index, TaskStatus.SUCCEEDED, 1, None, None, json.dumps({}), 0.0)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def _get(port: int, path: str, method: str = "GET", token: str | None = None) -> Answer:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with client() as http:
        response = await http.request(method, f"http://127.0.0.1:{port}{path}").headers(headers).build().send()
        return Answer(response.status, {}, bytes(await response.bytes()))

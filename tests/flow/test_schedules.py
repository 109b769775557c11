"""Schedules: jobs made by cron. Each fire makes one job, whoever dies on the way, and however many they are."""

import asyncio
import gzip
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from structlog.testing import capture_logs

from conveyor import faults
from conveyor.accept import scheduler as scheduling
from conveyor.accept.cron import check_cron, missed_fires, next_fires
from conveyor.accept.scheduler import LEASE_SECONDS, Scheduler
from conveyor.accept.schedules import (
    KEEP_UPLOAD_SECONDS,
    SCHEDULE,
    Missed,
    Schedule,
    Schedules,
    ScheduleSpec,
    schedule_of,
)
from conveyor.api.schemas.schedule_shapes import ScheduleDetail
from conveyor.egress.outbound import Outbound
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.records import Document
from conveyor.engines.s3_source_buckets import S3SourceBuckets
from conveyor.errors import InvalidField
from conveyor.jobs.announced_workers import WorkerAnnouncement
from conveyor.jobs.fire_ids import fire_job_id
from conveyor.model import Job, ListFormat, RemoteSource, Source, UploadRecord
from conveyor.recover.future_documents import FutureDocuments
from conveyor.recover.retention import SETTLE_SECONDS, Removed, Retention
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.api import Api
from tests.support.clocks import ManualClock
from tests.support.make_jobs import ACME
from tests.support.places import quick_place
from tests.support.target_site import PAGES, Seen, Site, answer, page
from tests.support.working import all_items, until

URL = "http://target.example/"
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
BERLIN = "Europe/Berlin"


@pytest.fixture
async def clock() -> ManualClock:  # type: ignore[override]
    return ManualClock(start=datetime(2027, 1, 15, 8, 0, 30, tzinfo=UTC).timestamp())


def scheduler_of(system: System, name: str = "scheduler") -> Scheduler:
    guard = TargetGuard(allow_private=system.settings.allow_private_targets, clock=system.clock)
    return Scheduler(system, Outbound(guard), name)


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


@pytest.fixture
async def scheduler(system: System) -> AsyncIterator[Scheduler]:
    made = scheduler_of(system)
    yield made
    await made.close()


async def run(scheduler: Scheduler) -> None:
    """Let it do all that is due now."""
    while True:
        await scheduler.tick()
        if not scheduler._running:
            return
        await asyncio.gather(*scheduler._running)


def at(text: str, zone: str = "UTC") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def shown_in(zone: str, times: list[float]) -> list[str]:
    return [datetime.fromtimestamp(each, ZoneInfo(zone)).isoformat() for each in times]


async def made(api: Api, **spec: Any) -> dict[str, Any]:
    created = await api.post("/v1/schedules", {"cron": "0 * * * *", "job": {"tasks": [URL, URL]}, **spec})
    assert created.status == 201, created.body
    shown: dict[str, Any] = created.json
    return shown


async def jobs_of(system: System) -> list[Job]:
    return sorted((await system.records.jobs.jobs(ACME, None, 1000)).items, key=lambda job: job.job_id)


async def shown(api: Api, schedule_id: str) -> dict[str, Any]:
    found: dict[str, Any] = (await api.get(f"/v1/schedules/{schedule_id}")).json
    return found


class TestCron:
    @pytest.mark.parametrize(
        ("cron", "zone", "after", "fires"),
        [
            ("0 9 * * MON-FRI", BERLIN, "2027-01-15T10:00", ["2027-01-18T09:00:00+01:00", "2027-01-19T09:00:00+01:00"]),
            ("*/20 * * * *", "UTC", "2027-01-15T08:41", ["2027-01-15T09:00:00+00:00", "2027-01-15T09:20:00+00:00"]),
            ("0 0 L * *", "UTC", "2027-02-01T00:00", ["2027-02-28T00:00:00+00:00", "2027-03-31T00:00:00+00:00"]),
            ("0 0 29 2 *", "UTC", "2027-01-01T00:00", ["2028-02-29T00:00:00+00:00", "2032-02-29T00:00:00+00:00"]),
            # The clocks go from 2:00 to 3:00: what falls into the gap comes right after it.
            ("30 2 * * *", BERLIN, "2027-03-27T12:00", ["2027-03-28T03:00:00+02:00", "2027-03-29T02:30:00+02:00"]),
            # They go from 3:00 back to 2:00: what is repeated fires the first time.
            ("30 2 * * *", BERLIN, "2027-10-30T12:00", ["2027-10-31T02:30:00+02:00", "2027-11-01T02:30:00+01:00"]),
            # What goes by the hour goes on by the hour, through both.
            ("0 * * * *", BERLIN, "2027-03-28T00:30", ["2027-03-28T01:00:00+01:00", "2027-03-28T03:00:00+02:00"]),
            ("0 * * * *", BERLIN, "2027-10-31T01:30", ["2027-10-31T02:00:00+02:00", "2027-10-31T02:00:00+01:00"]),
        ],
    )
    def test_fires(self, cron: str, zone: str, after: str, fires: list[str]) -> None:
        check_cron(cron, zone)
        found = next_fires(cron, zone, at(after, zone), 2)
        assert shown_in(zone, found) == fires
        assert missed_fires(cron, zone, found[0], found[1], 10) == found

    def test_they_grow_from_inside_a_repeated_hour(self) -> None:
        # 2:30 for the second time.
        inside = at("2027-10-31T02:30", BERLIN) + HOUR
        for cron in ("45 2 * * *", "15 2 * * *", "*/5 * * * *", "0 3 * * *"):
            found = next_fires(cron, BERLIN, inside, 50)
            assert found == sorted(set(found))
            assert found[0] > inside

    @pytest.mark.parametrize(
        ("cron", "zone", "field"),
        [
            ("* * * *", "UTC", "cron"),
            ("* * * * * *", "UTC", "cron"),
            ("60 * * * *", "UTC", "cron"),
            ("0 0 31 2 *", "UTC", "cron"),
            ("0 0 1 1 1#6", "UTC", "cron"),
            ("whenever", "UTC", "cron"),
            ("", "UTC", "cron"),
            ("0 " * 300, "UTC", "cron"),
            ("1/0 * * * *", "UTC", "cron"),
            ("0 0 * * *", "Mars/Olympus", "timezone"),
            ("0 0 * * *", "../../etc/passwd", "timezone"),
            ("0 0 * * *", "", "timezone"),
            ("0 0 * * *", "America", "timezone"),
        ],
    )
    def test_what_is_wrong_is_named(self, cron: str, zone: str, field: str) -> None:
        with pytest.raises(InvalidField) as caught:
            check_cron(cron, zone)
        assert caught.value.details["field"] == field

    def test_a_year_asleep_is_not_gone_through(self) -> None:
        started = time.perf_counter()
        found = missed_fires("* * * * *", BERLIN, at("2026-01-01T00:00"), at("2027-01-01T00:00"), 3)
        assert shown_in("UTC", found) == [
            "2026-12-31T23:58:00+00:00",
            "2026-12-31T23:59:00+00:00",
            "2027-01-01T00:00:00+00:00",
        ]
        yearly = missed_fires("0 0 1 1 *", "UTC", at("2020-01-01T00:00"), at("2027-06-01T00:00"), 100)
        assert len(yearly) == 8
        # Going through all of it takes minutes.
        assert time.perf_counter() - started < 20


class TestMaking:
    async def test_it_is_made_shown_changed_and_removed(self, server: Api, clock: ManualClock) -> None:
        job = {"tasks": [URL], "headers": {"x-token": "secret"}, "concurrency": 3}
        created = await server.post(
            "/v1/schedules", {"cron": "30 9 * * *", "timezone": BERLIN, "name": "prices", "job": job}
        )
        assert created.status == 201
        found = created.json
        assert created.headers["location"] == f"/v1/schedules/{found['id']}"
        assert found["next_fires"] == [f"2027-01-{day}T08:30:00.000Z" for day in range(15, 20)]
        assert (found["missed"], found["paused"], found["fires"], found["fired"]) == ("coalesce", False, [], 0)
        assert found["job"] == {**job, "headers": {"x-token": "[hidden]"}}
        path = f"/v1/schedules/{found['id']}"
        assert (await server.get(path)).json == found
        assert (await server.get("/v1/schedules")).json == {"items": [found], "next_cursor": None}
        changed = await server.request("PATCH", path, body=b'{"paused": true, "name": null, "missed": "skip"}')
        assert changed.json == {**found, "paused": True, "name": None, "missed": "skip", "next_fires": []}
        changed = await server.request("PATCH", path, body=b'{"paused": false, "cron": "0 0 1 * *", "timezone": "UTC"}')
        assert changed.json["next_fires"][0] == "2027-02-01T00:00:00.000Z"
        replaced = json.dumps({"job": {"tasks": [URL] * 3}}).encode()
        assert (await server.request("PATCH", path, body=replaced)).json["job"] == {"tasks": [URL] * 3}
        assert (await server.request("DELETE", path)).status == 204
        assert (await server.get(path)).status == 404
        assert (await server.request("DELETE", path)).status == 404

    async def test_fields_of_its_job_are_changed_and_secrets_stay(self, server: Api, system: System) -> None:
        job = {"tasks": [URL], "headers": {"x-token": "secret"}, "concurrency": 3, "priority": 2}
        schedule = await made(server, job=job)
        path = f"/v1/schedules/{schedule['id']}"
        changes = {"tasks": None, "source": {"url": URL}, "concurrency": 5, "priority": None}
        changed = await server.request("PATCH", path, body=json.dumps({"job_changes": changes}).encode())
        shown_headers = {"x-token": "[hidden]"}
        assert changed.json["job"] == {"headers": shown_headers, "concurrency": 5, "source": {"url": URL}}
        stored = await system.records.documents.document(SCHEDULE, ACME, schedule["id"])
        assert stored is not None
        assert json.loads(bytes(schedule_of(stored).job))["headers"] == {"x-token": "secret"}
        for body, field in (
            ({"job_changes": {"concurrency": 0}}, "job.concurrency"),
            ({"job_changes": {"tasks": [URL]}}, "job.source"),
            ({"job_changes": {}, "job": {"tasks": [URL]}}, "job_changes"),
        ):
            refused = await server.request("PATCH", path, body=json.dumps(body).encode())
            assert (refused.status, refused.json["field"]) == (400, field)
        assert (await server.get(path)).json == changed.json

    async def test_its_times_are_shown_in_words(self, server: Api) -> None:
        assert (await made(server, cron="0 6 * * MON-FRI"))["cron_text"] == "At 06:00 on Monday through Friday"
        assert (await made(server, cron="*/5 * * * *"))["cron_text"] == "Every fifth minute of every hour"

    async def test_a_request_under_a_key_makes_one(self, server: Api) -> None:
        body = {"cron": "0 0 * * *", "job": {"tasks": [URL]}}
        answers = [await server.post("/v1/schedules", body, headers={"idempotency-key": "k"}) for _ in range(2)]
        assert answers[0].body == answers[1].body
        assert len((await server.get("/v1/schedules")).json["items"]) == 1

    @pytest.mark.parametrize(
        ("spec", "code", "field"),
        [
            ({"cron": "0 0 * *"}, "invalid_field", "cron"),
            ({"timezone": "Nowhere/Land"}, "invalid_field", "timezone"),
            ({"missed": "sometimes"}, "invalid_field", "missed"),
            ({"name": "x" * 201}, "invalid_field", "name"),
            ({"every": 5}, "unknown_field", "every"),
            ({"job": "run"}, "invalid_field", "job"),
            ({"job": {"tasks": [URL], "speed": 9}}, "unknown_field", "job.speed"),
            ({"job": {"tasks": [URL], "attempts": 0}}, "invalid_field", "job.attempts"),
            ({"job": {"tasks": [URL], "mode": "open"}}, "invalid_field", "job.mode"),
            ({"job": {"tasks": []}}, "no_tasks", None),
            ({"job": {"tasks": ["nonsense"]}}, "invalid_tasks", None),
            ({"job": {"tasks": [URL, "nonsense"], "on_invalid": "reject"}}, "invalid_tasks", None),
            ({"job": {"tasks": [URL], "source": {"url": "https://a.example/"}}}, "invalid_field", "job.source"),
            ({"job": {"source": {}}}, "invalid_field", "job.source"),
            ({"job": {"source": {"url": "https://a.example/", "upload_id": "x"}}}, "invalid_field", "job.source"),
            ({"job": {"source": {"url": "mailto:a@b"}}}, "invalid_field", "job.source.url"),
            ({"job": {"source": {"path": "/etc/passwd"}}}, "unknown_field", "job.source.path"),
            ({"job": {"source": {"url": "https://a.example/", "headers": {"a b": "c"}}}}, "invalid_field", None),
            ({"job": {"source": {"upload_id": "upload_1"}}}, "not_found", None),
            ({"job": {"tasks": [URL], "notify": [{"type": "webhook"}]}}, "invalid_field", "job.notify[0]"),
            ({"job": {"tasks": [URL + "x" * 300_000]}}, "invalid_field", "job"),
        ],
    )
    async def test_what_is_wrong_is_named(
        self, server: Api, spec: dict[str, Any], code: str, field: str | None
    ) -> None:
        refused = await server.post("/v1/schedules", {"cron": "0 0 * * *", "job": {"tasks": [URL]}, **spec})
        assert refused.json["code"] == code, refused.body
        assert field is None or refused.json["field"] == field
        assert (await server.get("/v1/schedules")).json["items"] == []

    async def test_a_change_is_checked_as_well(self, server: Api) -> None:
        schedule = await made(server)
        for change in ({"cron": "x"}, {"timezone": "x"}, {"job": {"tasks": []}}, {"name": "\n"}, {"id": "x"}):
            body = json.dumps(change).encode()
            assert (await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=body)).status == 400
        assert await shown(server, schedule["id"]) == schedule

    async def test_a_tenant_may_have_so_many(self, tmp_path: Path) -> None:
        async with open_system(Settings.load({}, data=tmp_path / "few", max_schedules=1)) as system:
            spec = ScheduleSpec("0 0 * * *", msgspec.Raw(b'{"tasks": ["http://a.example/"]}'))
            await Schedules(system).create(ACME, spec)
            with pytest.raises(Exception, match="1 schedules already"):
                await Schedules(system).create(ACME, spec)

    async def test_they_are_listed_in_pages(self, server: Api) -> None:
        found = [(await made(server, name=f"n{number}"))["id"] for number in range(5)]
        assert [each["id"] for each in await all_items(server, "/v1/schedules", 2)] == found
        assert (await server.get("/v1/schedules?cursor=x")).json["code"] == "bad_cursor"


class TestFiring:
    async def test_invalid_tasks_are_counted_at_once_and_skipped_by_each_fire(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, job={"tasks": [URL, "nonsense", "ftp://x"]})
        assert schedule["invalid_lines"] == 2
        clock.advance(HOUR)
        await run(scheduler)
        (job,) = await jobs_of(system)
        assert (job.run.total, job.run.invalid) == (1, 2)
        [fire] = (await shown(server, schedule["id"]))["fires"]
        assert fire["outcome"]["invalid_lines"] == 2
        body = json.dumps({"job_changes": {"tasks": [URL]}}).encode()
        changed = await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=body)
        assert changed.json["invalid_lines"] == 0
        assert (await shown(server, schedule["id"]))["invalid_lines"] == 0

    async def test_it_makes_a_job_at_each_time(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, name="hourly", cron="0 * * * *")
        await run(scheduler)
        assert await jobs_of(system) == []
        for number in range(1, 4):
            clock.advance(HOUR)
            await run(scheduler)
            assert len(await jobs_of(system)) == number
            await run(scheduler)
        jobs = await jobs_of(system)
        assert [job.name for job in jobs] == ["hourly"] * 3
        assert [job.run.total for job in jobs] == [2] * 3
        found = await shown(server, schedule["id"])
        assert found["fired"] == 3
        assert [(fire["at"], fire["job_id"]) for fire in found["fires"]] == [
            (f"2027-01-15T{hour:02}:00:00.000Z", job.job_id) for hour, job in zip(range(9, 12), jobs, strict=True)
        ]
        assert found["next_fires"][0] == "2027-01-15T12:00:00.000Z"
        notices = (await system.records.outbox.events(ACME, jobs[0].job_id, None, 10)).items
        assert [event.event for event in notices] == ["job.accepted"]

    async def test_its_fires_have_the_outcomes_of_their_jobs(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, name="hourly", cron="0 * * * *")
        for _ in range(2):
            clock.advance(HOUR)
            await run(scheduler)
        gone, there = await jobs_of(system)
        await server.post(f"/v1/jobs/{there.job_id}/cancel", {})
        assert (await server.request("DELETE", f"/v1/jobs/{gone.job_id}")).status in (202, 204)
        found = await shown(server, schedule["id"])
        msgspec.convert(found, ScheduleDetail)
        job = (await server.get(f"/v1/jobs/{there.job_id}")).json
        expected = {name: job[name] for name in ("name", "state", "total", "counts", "invalid_lines")}
        assert [fire["outcome"] for fire in found["fires"]] == [None, expected]
        assert (expected["name"], expected["state"], expected["total"]) == ("hourly", "cancelled", 2)

    async def test_a_paused_one_does_not_and_what_lies_between_was_not_missed(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, paused=True, missed="all")
        path = f"/v1/schedules/{schedule['id']}"
        clock.advance(5 * HOUR)
        await run(scheduler)
        assert await jobs_of(system) == []
        await server.request("PATCH", path, body=b'{"paused": false}')
        await run(scheduler)
        assert await jobs_of(system) == []
        clock.advance(HOUR)
        await run(scheduler)
        assert len(await jobs_of(system)) == 1
        await server.request("PATCH", path, body=b'{"paused": true}')
        clock.advance(HOUR)
        await run(scheduler)
        assert len(await jobs_of(system)) == 1

    @pytest.mark.parametrize("paused", [False, True])
    async def test_it_fires_now_when_it_is_asked_to(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler, paused: bool
    ) -> None:
        schedule = await made(server, paused=paused)
        path = f"/v1/schedules/{schedule['id']}"
        fired = await server.post(f"{path}/run")
        assert (fired.status, fired.json["at"]) == (202, "2027-01-15T08:00:30.000Z")
        again = await server.post(f"{path}/run")
        assert (again.status, again.json["code"]) == (409, "conflict")
        await run(scheduler)
        (job,) = await jobs_of(system)
        assert job.job_id == fired.json["job_id"]
        now = await shown(server, schedule["id"])
        assert [fire["job_id"] for fire in now["fires"]] == [job.job_id]
        assert (now["next_fires"], now["paused"]) == (schedule["next_fires"], paused)
        clock.advance(HOUR)
        await run(scheduler)
        assert len(await jobs_of(system)) == (1 if paused else 2)
        assert (await server.post(f"{path}/run")).status == 202
        await run(scheduler)
        assert len(await jobs_of(system)) == (2 if paused else 3)

    async def test_a_fire_that_was_asked_for_takes_no_other_along(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, missed="all")
        clock.advance(3 * HOUR)
        # In one second with each other, and beside those that were missed.
        asked = [await server.post(f"/v1/schedules/{schedule['id']}/run")]
        await run(scheduler)
        clock.advance(0.4)
        asked.append(await server.post(f"/v1/schedules/{schedule['id']}/run"))
        await run(scheduler)
        jobs = {job.job_id for job in await jobs_of(system)}
        assert {answer.json["job_id"] for answer in asked} <= jobs
        assert len(jobs) == 5

    async def test_a_fire_waits_for_workers_that_have_the_handler(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, job={"kind": "python", "handler": "parse", "tasks": [1]})
        others = WorkerAnnouncement(system.records.documents, clock, "worker_1", 4, ["other"])
        clock.advance(HOUR)
        await others.renew()
        await run(scheduler)
        assert await jobs_of(system) == []
        await WorkerAnnouncement(system.records.documents, clock, "worker_2", 4, ["parse"]).renew()
        clock.advance(MINUTE)
        await run(scheduler)
        (fire,) = (await shown(server, schedule["id"]))["fires"]
        assert (fire["error"], fire["job_id"]) == (None, (await jobs_of(system))[0].job_id)

    @pytest.mark.parametrize(
        ("missed", "fires"),
        [("coalesce", [("13:00", 4)]), ("skip", []), ("all", [(f"{hour:02}:00", 0) for hour in range(9, 14)])],
    )
    async def test_what_was_missed(
        self,
        server: Api,
        system: System,
        clock: ManualClock,
        scheduler: Scheduler,
        missed: str,
        fires: list[tuple[str, int]],
    ) -> None:
        schedule = await made(server, missed=missed)
        clock.advance(5.5 * HOUR)
        await run(scheduler)
        found = await shown(server, schedule["id"])
        assert [(fire["at"][11:16], fire["coalesced"]) for fire in found["fires"]] == fires
        assert len(await jobs_of(system)) == len(fires)
        # And from then on as ever.
        clock.advance(HOUR / 2)
        await run(scheduler)
        assert len(await jobs_of(system)) == len(fires) + 1

    async def test_what_is_skipped_when_missed_is_not_when_it_is_a_little_late(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        await made(server, missed="skip")
        clock.advance(HOUR + 20)
        await run(scheduler)
        assert len(await jobs_of(system)) == 1

    async def test_all_that_was_missed_has_a_bound(self, tmp_path: Path, clock: ManualClock) -> None:
        settings = Settings.load({}, data=tmp_path / "few", schedule_catch_up=7)
        async with open_system(settings, clock) as system:
            spec = ScheduleSpec("* * * * *", msgspec.Raw(b'{"tasks": ["http://a.example/"]}'), missed=Missed.ALL)
            await Schedules(system).create(ACME, spec)
            clock.advance(DAY)
            scheduler = scheduler_of(system)
            await run(scheduler)
            assert len(await jobs_of(system)) == 7
            await scheduler.close()

    async def test_the_history_is_bounded(
        self, server: Api, clock: ManualClock, system: System, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, cron="* * * * *", missed="all")
        clock.advance(30 * MINUTE)
        await run(scheduler)
        found = await shown(server, schedule["id"])
        assert (found["fired"], len(found["fires"])) == (30, 20)
        assert found["fires"][-1]["at"] == "2027-01-15T08:30:00.000Z"

    async def test_a_change_takes_hold_at_once(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        schedule = await made(server, cron="0 0 * * *")
        change = json.dumps({"cron": "*/10 * * * *", "job": {"tasks": [URL] * 7, "name": "new"}}).encode()
        await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=change)
        clock.advance(10 * MINUTE)
        await run(scheduler)
        (job,) = await jobs_of(system)
        assert (job.name, job.run.total) == ("new", 7)

    async def test_whom_a_job_names_goes_with_each(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        notify = [{"type": "webhook", "url": "https://hooks.example/"}]
        await made(server, job={"tasks": [URL], "notify": notify})
        clock.advance(HOUR)
        await run(scheduler)
        (job,) = await jobs_of(system)
        assert [
            row.id for row in (await system.records.documents.documents("notify", ACME, None, 10, job.job_id)).items
        ] == [f"{job.job_id}.0"]

    async def test_what_can_not_be_made_is_written_down_and_it_goes_on(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        webhook = (await server.post("/v1/webhooks", {"url": "https://hooks.example/"})).json["id"]
        notify = [{"type": "webhook", "endpoint_id": webhook}]
        schedule = await made(server, job={"tasks": [URL], "notify": notify})
        await server.request("DELETE", f"/v1/webhooks/{webhook}")
        for _ in range(2):
            clock.advance(HOUR)
            await run(scheduler)
        found = await shown(server, schedule["id"])
        assert [fire["job_id"] for fire in found["fires"]] == [None, None]
        assert all("endpoint was not found" in fire["error"] for fire in found["fires"])
        assert await jobs_of(system) == []

    async def test_one_that_never_ends_is_given_up(
        self, server: Api, system: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        schedule = await made(server, cron="0 0 * * *")
        clock.advance(DAY)

        async def explode(*_: Any) -> None:
            raise RuntimeError("it takes all along")

        monkeypatch.setattr(Scheduler, "_make_job", explode)
        begun = 0
        with capture_logs():
            while not (await shown(server, schedule["id"]))["fires"]:
                scheduler = scheduler_of(system)
                await scheduler.tick()
                await asyncio.gather(*scheduler._running, return_exceptions=True)
                await scheduler.close()
                clock.advance(LEASE_SECONDS + 1)
                begun += 1
        assert begun == scheduling._TRIES + 1
        (fire,) = (await shown(server, schedule["id"]))["fires"]
        assert "started 20 times" in fire["error"]

    async def test_one_tenants_many_do_not_hide_anothers(
        self, server: Api, system: System, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scheduling, "_ROWS", 5)
        monkeypatch.setattr(scheduling, "_SHARE", 2)
        other = await server.as_tenant("other")
        for _ in range(8):
            await made(server, cron="0 9 * * *")
        await made(other, cron="1 9 * * *")
        clock.advance(2 * HOUR)
        stuck = asyncio.Event()
        make_job = Scheduler._make_job

        async def slow(self: Scheduler, row: Document, *rest: Any) -> None:
            if row.tenant == ACME:
                await stuck.wait()
            await make_job(self, row, *rest)

        monkeypatch.setattr(Scheduler, "_make_job", slow)
        scheduler = scheduler_of(system)
        for _ in range(4):
            await scheduler.tick()
            await asyncio.sleep(0.05)
        look = lambda: other.get("/v1/jobs")  # noqa: E731
        await until(look, lambda answer: len(answer.json["items"]) == 1)
        assert sum(tenant == ACME for tenant, _ in scheduler._running.values()) == 2
        stuck.set()
        await run(scheduler)
        await scheduler.close()


@page("list-of-a-schedule")
async def list_of_a_schedule(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """A line more with each visit."""
    answer(writer, "".join(f"{URL}{number}\n" for number in range(site.visits[seen.path])).encode())


@page("list-encoded")
async def list_encoded(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    """A list of two lines, as two gzip members."""
    match seen.path.split("/")[2]:
        case "consent" if "seen=1" not in seen.headers.get("cookie", ""):
            answer(writer, b"", 302, location=seen.path, set_cookie="seen=1; Path=/")
            return
        case "letters":
            answer(writer, b"", 302, location="/list-encoded/caf\xe9")
            return
    packed = gzip.compress(f"{URL}1\n".encode()) + gzip.compress(f"{URL}2\n".encode())
    answer(writer, gzip.compress(packed) if seen.path.endswith("packed") else packed, content_encoding="gzip")


assert "list-of-a-schedule" in PAGES


class TestSources:
    @pytest.fixture
    async def site(self) -> AsyncIterator[Site]:
        async with Site() as site:
            yield site

    async def lists(self, system: System) -> list[bytes]:
        """The lists of the jobs, in the order of their fires."""
        found = []
        for job in await jobs_of(system):
            assert job.source is not None
            data = await system.blobs.get(job.source.key)
            assert data is not None
            assert job.source.key.startswith(f"lists/{ACME}/{job.job_id}/")
            found.append(data)
        return found

    async def test_a_url_is_read_anew_at_each_fire(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler, site: Site
    ) -> None:
        source = {"url": site.url("/list-of-a-schedule"), "headers": {"x-token": "secret"}, "format": "text"}
        schedule = await made(server, job={"source": source})
        assert schedule["job"]["source"]["headers"] == {"x-token": "[hidden]"}
        for _ in range(3):
            clock.advance(HOUR)
            await run(scheduler)
        assert [data.count(b"\n") for data in await self.lists(system)] == [1, 2, 3]
        assert {seen.headers["x-token"] for seen in site.seen} == {"secret"}

    @pytest.mark.parametrize(
        ("path", "compression", "packed"),
        [
            # Two gzip members, as a coding of a plain list.
            ("/list-encoded/plain", None, False),
            ("/list-encoded/plain", "none", False),
            # The server declares the compression of the file itself as a coding.
            ("/list-encoded/plain", "gzip", True),
            # A compressed file that the server encodes once more.
            ("/list-encoded/packed", "gzip", True),
            ("/list-encoded/packed", None, True),
            # The way leads over cookies, and over a Location that is not ASCII.
            ("/list-encoded/consent", None, False),
            ("/list-encoded/letters", None, False),
        ],
    )
    async def test_a_list_is_decoded_as_its_response_says(
        self,
        server: Api,
        system: System,
        clock: ManualClock,
        scheduler: Scheduler,
        site: Site,
        path: str,
        compression: str | None,
        packed: bool,
    ) -> None:
        source = {"url": site.url(path), "format": "text"} | ({"compression": compression} if compression else {})
        schedule = await made(server, job={"source": source})
        clock.advance(HOUR)
        await run(scheduler)
        assert (await shown(server, schedule["id"]))["fires"][-1]["error"] is None
        (data,) = await self.lists(system)
        assert (gzip.decompress(data) if packed else data) == f"{URL}1\n{URL}2\n".encode()

    @pytest.mark.server
    async def test_an_object_in_a_bucket_is_read_by_the_ingest(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        listed = "acme=s3://listed-bucket/mine?region=eu-central-1"
        refused = {"cron": "0 * * * *", "job": {"source": {"url": "s3://listed-bucket/mine/list.txt"}}}
        answer = await server.post("/v1/schedules", refused)
        assert (answer.status, answer.json["code"]) == (403, "source_refused")
        async with S3SourceBuckets.open(listed) as buckets:
            object.__setattr__(system, "source_buckets", buckets)
            await made(server, job={"source": {"url": "s3://listed-bucket/mine/list.txt", "format": "text"}})
            for _ in range(2):
                clock.advance(HOUR)
                await run(scheduler)
        jobs = await jobs_of(system)
        assert len(jobs) == 2
        expected = Source("", 0, "", ListFormat.TEXT, None, RemoteSource("s3://listed-bucket/mine/list.txt"))
        assert [job.source for job in jobs] == [expected, expected]

    async def test_an_upload_serves_every_fire_and_outlives_their_jobs(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        upload_id = await server.upload(f"{URL}\n".encode())
        schedule = await made(server, cron="0 0 * * *", job={"source": {"upload_id": upload_id}, "retention_days": 1})
        for day in range(40):
            clock.advance(DAY)
            await run(scheduler)
            await retention(system).run_once()
            found = await shown(server, schedule["id"])
            assert found["fires"][-1]["error"] is None, day
        assert found["fired"] == 40
        # Paused, it keeps its list.
        await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=b'{"paused": true}')
        for _ in range(10):
            clock.advance(5 * DAY)
            await run(scheduler)
        assert await system.records.access.upload(upload_id) is not None
        # Once it is gone, so is the list.
        await server.request("DELETE", f"/v1/schedules/{schedule['id']}")
        assert await system.records.access.upload(upload_id) is None

    async def test_an_upload_outlives_a_job_that_was_deleted(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        upload_id = await server.upload(f"{URL}\n".encode())
        job = (await server.submit({"source": {"upload_id": upload_id}})).json
        schedule = await made(server, job={"source": {"upload_id": upload_id}})
        assert (await server.request("DELETE", f"/v1/jobs/{job['id']}")).status == 204
        await self.settle(system, clock)
        assert (await server.get(f"/v1/uploads/{upload_id}")).json["stored"]
        clock.advance(HOUR)
        await run(scheduler)
        assert (await shown(server, schedule["id"]))["fires"][-1]["error"] is None
        assert (await server.request("DELETE", f"/v1/schedules/{schedule['id']}")).status == 204
        assert (await server.get(f"/v1/uploads/{upload_id}")).status == 404
        await self.settle(system, clock)
        assert await system.blobs.size(f"uploads/{ACME}/{upload_id}") is None
        assert await self.lists(system) == [f"{URL}\n".encode()], "the job has a copy of its own"

    async def test_another_upload_takes_the_place_of_the_first(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        first, second = await server.upload(f"{URL}1\n".encode()), await server.upload(f"{URL}2\n".encode())
        schedule = await made(server, job={"source": {"upload_id": first}})
        clock.advance(HOUR)
        await run(scheduler)
        changed = {"job": {"kind": "fetch", "source": {"upload_id": second}}}
        patched = await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=json.dumps(changed).encode())
        assert patched.status == 200, patched.body
        # Its own time is over, too.
        clock.advance(2 * DAY)
        await self.settle(system, clock)
        assert await system.blobs.size(f"uploads/{ACME}/{first}") is None
        assert (await server.get(f"/v1/uploads/{second}")).json["stored"]
        await run(scheduler)
        assert await self.lists(system) == [f"{URL}1\n".encode(), f"{URL}2\n".encode()]

    async def test_a_fire_that_is_in_flight_when_its_schedule_is_removed_has_its_list(
        self,
        server: Api,
        system: System,
        clock: ManualClock,
        scheduler: Scheduler,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        upload_id = await server.upload(f"{URL}\n".encode())
        schedule = await made(server, job={"source": {"upload_id": upload_id}})
        staged, go = asyncio.Event(), asyncio.Event()
        stage = scheduler._sources.stage

        async def halting(*given: Any) -> Any:
            source = await stage(*given)
            staged.set()
            await go.wait()
            return source

        monkeypatch.setattr(scheduler._sources, "stage", halting)
        clock.advance(HOUR)
        await scheduler.tick()
        await staged.wait()
        assert (await server.request("DELETE", f"/v1/schedules/{schedule['id']}")).status == 204
        await self.settle(system, clock)
        assert await system.blobs.size(f"uploads/{ACME}/{upload_id}") is None
        go.set()
        await run(scheduler)
        assert await self.lists(system) == [f"{URL}\n".encode()]

    async def test_a_schedule_of_an_older_version_comes_to_refer_to_its_upload(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler
    ) -> None:
        """DynamoDB has such rows: they are never written anew all at once."""
        upload_id = await server.upload(f"{URL}\n".encode())
        schedule = await made(server, cron="0 0 1 1 *", job={"source": {"upload_id": upload_id}})
        row = await system.records.documents.document(SCHEDULE, ACME, schedule["id"])
        assert row is not None
        await system.records.documents.replace_document(msgspec.structs.replace(row, upload_id=None))
        await system.records.access.keep_upload(upload_id, clock.now() + KEEP_UPLOAD_SECONDS)
        clock.advance(KEEP_UPLOAD_SECONDS / 2)
        await run(scheduler)
        found = await system.records.documents.document(SCHEDULE, ACME, schedule["id"])
        assert found is not None
        assert found.upload_id == upload_id

    async def settle(self, system: System, clock: ManualClock) -> None:
        """Let retention remove what it may: jobs, and then uploads that nothing refers to any more."""
        for _ in range(2):
            clock.advance(SETTLE_SECONDS / 2 + 1)
            while await retention(system).run_once() != Removed():
                pass

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("/status/404", "answered 404"),
            ("/status/403", "answered 403"),
            ("/big?size=3000000", "larger than"),
            ("/loop", "too_many_redirects"),
        ],
    )
    async def test_a_list_that_is_not_there(
        self, tmp_path: Path, clock: ManualClock, site: Site, path: str, error: str
    ) -> None:
        settings = Settings.load({}, data=tmp_path / "small", allow_private_targets=True, max_list_bytes=1_000_000)
        async with open_system(settings, clock) as system:
            template = msgspec.json.encode({"source": {"url": site.url(path)}})
            accepted = await Schedules(system).create(ACME, ScheduleSpec("0 0 * * *", msgspec.Raw(template)))
            clock.advance(DAY)
            scheduler = scheduler_of(system)
            await run(scheduler)
            await scheduler.close()
            row = await system.records.documents.document(SCHEDULE, ACME, accepted.subject)
            assert row is not None
            (fire,) = schedule_of(row).fires
            assert error in (fire.error or "")
            assert fire.job_id is None
            assert await jobs_of(system) == []
            assert [info.key async for info in system.blobs.listing("lists/")] == []

    async def test_one_that_is_not_there_now_is_asked_for_again(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler, site: Site
    ) -> None:
        schedule = await made(server, job={"source": {"url": site.url("/flaky/3"), "format": "text"}})
        clock.advance(HOUR)
        for _ in range(3):
            await run(scheduler)
            assert await jobs_of(system) == []
            clock.advance(70)
        await run(scheduler)
        assert len(await jobs_of(system)) == 1
        (fire,) = (await shown(server, schedule["id"]))["fires"]
        assert fire["at"] == "2027-01-15T09:00:00.000Z"

    async def test_it_is_not_asked_for_for_ever(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler, site: Site
    ) -> None:
        schedule = await made(server, cron="0 0 * * *", job={"source": {"url": site.url("/status/503")}})
        clock.advance(DAY)
        while not (found := await shown(server, schedule["id"]))["fires"]:
            await run(scheduler)
            clock.advance(61)
        assert "answered 503" in found["fires"][0]["error"]
        assert site.visits["/status/503"] == 5

    async def test_while_a_long_list_is_read_nobody_else_fires(
        self, server: Api, system: System, clock: ManualClock, scheduler: Scheduler, site: Site
    ) -> None:
        schedule = await made(server, cron="0 0 * * *", job={"source": {"url": site.url("/slow")}})
        clock.advance(DAY)
        other = scheduler_of(system, "other")
        await scheduler.tick()
        await until(lambda: _value(site.visits["/slow"]), lambda visits: visits == 1)
        for _ in range(12):
            clock.advance(LEASE_SECONDS / 3)
            for _ in range(5):
                await asyncio.sleep(0.005)
                await system.records.documents.document(SCHEDULE, ACME, schedule["id"])
            await other.tick()
            assert not other._running
        assert site.visits["/slow"] == 1
        # It is removed under it: nobody waits for that list any more.
        await server.request("DELETE", f"/v1/schedules/{schedule['id']}")
        clock.advance(LEASE_SECONDS / 3)
        await asyncio.wait_for(asyncio.gather(*scheduler._running), 10)
        await other.close()


class TestClockSteps:
    """A clock that is set. As elsewhere, `advance` lets time pass, and `step` sets the clock."""

    @staticmethod
    async def hourly(server: Api, scheduler: Scheduler, clock: ManualClock, hours: int = 3, **spec: Any) -> str:
        """A schedule that has fired for some hours."""
        schedule = await made(server, **spec)
        for _ in range(hours):
            clock.advance(HOUR)
            await run(scheduler)
        return str(schedule["id"])

    @staticmethod
    async def let_pass(scheduler: Scheduler, system: System, clock: ManualClock, hours: int) -> None:
        watch = FutureDocuments(system.records, clock, system.settings)
        for _ in range(hours * 15):
            await watch.part()
            await run(scheduler)
            clock.advance(4 * MINUTE)
        await run(scheduler)

    @pytest.mark.parametrize("back", [2 * HOUR, 6 * DAY, 20 * DAY])
    @pytest.mark.parametrize("missed", ["coalesce", "skip", "all"])
    async def test_it_goes_on_when_the_clock_was_set_back(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock, back: float, missed: str
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, missed=missed)
        assert len(await jobs_of(system)) == 3
        clock.step(-back)
        await self.let_pass(scheduler, system, clock, 5)
        found = await shown(server, schedule_id)
        # Up to three hours are not repeated.
        assert len(await jobs_of(system)) == found["fired"] == (3 + 3 if back == 2 * HOUR else 3 + 5)
        assert all(fire["job_id"] and not fire["error"] for fire in found["fires"])

    @pytest.mark.parametrize("missed", ["coalesce", "skip", "all"])
    async def test_a_step_back_that_is_corrected_repeats_nothing(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock, missed: str
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, missed=missed)
        clock.step(-6 * DAY)
        await self.let_pass(scheduler, system, clock, 2)
        clock.step(6 * DAY)
        await self.let_pass(scheduler, system, clock, 3)
        found = await shown(server, schedule_id)
        # Three before the step, two while the clock was wrong, three after it, and those of the two hours between.
        assert found["fired"] == 8 + {"coalesce": 1, "skip": 0, "all": 2}[missed]
        assert len(await jobs_of(system)) == found["fired"]

    @pytest.mark.parametrize("ahead", [2 * HOUR, 6 * DAY, 20 * DAY])
    @pytest.mark.parametrize("missed", ["coalesce", "skip", "all"])
    async def test_a_step_forward_that_is_corrected_soon_fires_nothing(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock, ahead: float, missed: str
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, missed=missed)
        clock.step(ahead)
        for _ in range(4):
            await run(scheduler)
            clock.advance(MINUTE)
        clock.step(-ahead)
        await run(scheduler)
        assert (await shown(server, schedule_id))["fired"] == 3
        await self.let_pass(scheduler, system, clock, 2)
        assert (await shown(server, schedule_id))["fired"] == 5

    async def test_a_step_forward_that_stays_fires_as_missed_says(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock
    ) -> None:
        every = [await self.hourly(server, scheduler, clock, 0, missed=each) for each in ("coalesce", "skip", "all")]
        await run(scheduler)
        clock.step(6 * DAY)
        await run(scheduler)
        assert await jobs_of(system) == []
        clock.advance(5 * MINUTE + 1)
        await run(scheduler)
        fired = [(await shown(server, each))["fired"] for each in every]
        assert fired == [1, 0, system.settings.schedule_catch_up]

    async def test_a_clock_that_was_ahead_for_hours_takes_no_fire_away(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, 1)
        clock.step(6 * DAY)
        await self.let_pass(scheduler, system, clock, 3)
        clock.step(-6 * DAY)
        before = (await shown(server, schedule_id))["fired"]
        await self.let_pass(scheduler, system, clock, 24)
        found = await shown(server, schedule_id)
        assert found["fired"] - before == 24
        assert len(await jobs_of(system)) == found["fired"]

    async def test_a_fire_that_was_claimed_by_a_clock_that_was_ahead_is_made(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, 1)
        clock.advance(HOUR)
        row = await system.records.documents.document(SCHEDULE, ACME, schedule_id)
        assert row is not None
        schedule = schedule_of(row)
        claimed = await scheduler._claim(row, schedule, scheduler._plan(schedule))
        assert claimed is not None
        clock.step(-6 * DAY)
        await self.let_pass(scheduler, system, clock, 3)
        assert (await shown(server, schedule_id))["fired"] in (5, 6)
        assert len(await jobs_of(system)) == (await shown(server, schedule_id))["fired"]

    async def test_rare_schedules_wait(
        self, server: Api, scheduler: Scheduler, system: System, clock: ManualClock
    ) -> None:
        schedule_id = await self.hourly(server, scheduler, clock, 0, cron="0 0 1 * *")
        clock.step(-6 * DAY)
        await self.let_pass(scheduler, system, clock, 24)
        found = await shown(server, schedule_id)
        assert (found["fired"], found["next_fires"][0]) == (0, "2027-02-01T00:00:00.000Z")


async def _value(value: int) -> int:
    return value


class Killed(BaseException):
    """A scheduler dies here."""


FIRES = 200


class TestExactlyOnce:
    @pytest.mark.parametrize("seed", [11, 12, 13])
    async def test_two_schedulers_killed_at_random_fire_each_time_once(
        self, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, seed: int
    ) -> None:
        """Four schedules, one of them of a list; every fire of them is made by one of two schedulers that die at crash
        points of their own and of what they call, again and again, until each time has its job."""
        chance = random.Random(seed)
        # Captured: there are hundreds of deaths.
        with quick_place() as place, capture_logs():
            settings = Settings.load({}, data=place, idempotency_lease_seconds=5.0, sync_task_limit=1)
            async with open_system(settings, clock) as system:
                await self._let_them_die(system, clock, chance, monkeypatch)

    async def _let_them_die(
        self, system: System, clock: ManualClock, chance: random.Random, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        upload_key = f"uploads/{ACME}/upload_{'0' * 26}"
        await system.blobs.put(upload_key, f"{URL}\n".encode())
        now = clock.now()
        digest = "0" * 64
        await system.records.access.create_upload(
            UploadRecord(ACME, f"upload_{'0' * 26}", upload_key, len(URL) + 1, digest, now, now + 100 * DAY, now), None
        )
        templates = [b'{"tasks": ["%s"]}' % URL.encode()] * 2
        templates += [b'{"tasks": ["%s", "%s"]}' % (URL.encode(), URL.encode())]
        templates += [b'{"source": {"upload_id": "upload_%s", "format": "text"}}' % (b"0" * 26)]
        schedules = [
            (await Schedules(system).create(ACME, ScheduleSpec("0 */6 * * *", msgspec.Raw(job), missed=missed))).subject
            for job, missed in zip(templates, [Missed.COALESCE, Missed.ALL, Missed.COALESCE, Missed.ALL], strict=True)
        ]
        victims: set[asyncio.Task[Any]] = set()
        deaths: Counter[str] = Counter()

        # The fire in the same task as the rest, so that one death is the death of all of it.
        async def fire_with_lease(self: Scheduler, row: Document, plan: Any) -> Any:
            return await self._fire(row, plan)

        monkeypatch.setattr(Scheduler, "_fire_with_lease", fire_with_lease)

        def die(point: str) -> None:
            if not point.startswith(("schedule.", "accept.", "request.")):
                return
            try:
                task = asyncio.current_task()
            except RuntimeError:
                return
            if task in victims and chance.random() < 0.08:
                deaths[point] += 1
                raise Killed

        wanted = {
            (schedule_id, each)
            for schedule_id in schedules
            for each in next_fires("0 */6 * * *", "UTC", now, FIRES // len(schedules))
        }
        faults.arm(die)
        try:
            for _ in range(FIRES // len(schedules)):
                clock.advance(next_fires("0 */6 * * *", "UTC", clock.now(), 1)[0] - clock.now())
                # Until this time is fired, by whom it may be: the lease of who died has to lapse.
                for _ in range(100):
                    pair = [scheduler_of(system, name) for name in ("one", "two")]
                    await asyncio.gather(*(self._live(each, victims) for each in pair), return_exceptions=True)
                    for each in pair:
                        await each.close()
                    rows = [
                        await system.records.documents.document(SCHEDULE, ACME, schedule_id)
                        for schedule_id in schedules
                    ]
                    behind = [
                        row for row in rows if row is not None and (schedule_of(row).next_fire or 0) <= clock.now()
                    ]
                    if not behind:
                        break
                    clock.advance(LEASE_SECONDS / 3)
                else:
                    raise AssertionError("it is never fired")
        finally:
            faults.arm(None)
        assert sum(deaths.values()) > FIRES / 2, deaths
        assert len(deaths) >= 10, deaths
        jobs = await jobs_of(system)
        expected = {fire_job_id(ACME, schedule_id, each): (schedule_id, each) for schedule_id, each in wanted}
        assert len(expected) == FIRES
        made_jobs = Counter(job.job_id for job in jobs)
        assert set(made_jobs) == set(expected)
        assert set(made_jobs.values()) == {1}
        for schedule_id in schedules:
            row = await system.records.documents.document(SCHEDULE, ACME, schedule_id)
            assert row is not None
            schedule = schedule_of(row)
            assert schedule.fired == FIRES // len(schedules)
            assert schedule.firing is None
            assert all(fire.error is None and fire.coalesced == 0 for fire in schedule.fires)
        for job in jobs:
            events = [event.event for event in (await system.records.outbox.events(ACME, job.job_id, None, 10)).items]
            assert events == ["job.accepted"]
        print(f"{FIRES} fires, {sum(deaths.values())} deaths at {len(deaths)} points")

    async def _live(self, scheduler: Scheduler, victims: set[asyncio.Task[Any]]) -> None:
        """One pass of a scheduler, which may be its last."""
        await scheduler.tick()
        victims.update(scheduler._running)
        await asyncio.gather(*scheduler._running, return_exceptions=True)


class TestChangedOnly:
    """Each job compares with the one before that has finished, which is kept until then."""

    async def finish(self, server: Api, job: Job) -> None:
        assert (await server.post(f"/v1/jobs/{job.job_id}/cancel")).status == 200

    async def live(
        self, system: System, scheduler: Scheduler, clock: ManualClock, seconds: float, step: float = 2 * HOUR
    ) -> None:
        """Let time pass, with what is due done on the way."""
        end = clock.now() + seconds
        while clock.now() < end:
            clock.advance(min(step, end - clock.now()))
            await run(scheduler)
            await retention(system).run_once()

    async def test_the_job_to_compare_with_is_kept(
        self, server: Api, system: System, scheduler: Scheduler, clock: ManualClock
    ) -> None:
        job = {"tasks": [URL], "retention_days": 0.5}
        schedule = await made(server, cron="0 0 1 * *", job=job, changed_only=True)
        assert schedule["changed_only"] is True
        await self.live(system, scheduler, clock, 20 * DAY)
        (first,) = await jobs_of(system)
        assert first.options.changed_from is None
        await self.finish(server, first)
        await self.live(system, scheduler, clock, 30 * DAY)
        jobs = await jobs_of(system)
        assert [job.options.changed_from for job in jobs] == [None, first.job_id], "kept for a month"
        # Paused, with the second job still running: it is needed.
        await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=b'{"paused": true}')
        await self.live(system, scheduler, clock, 40 * DAY)
        assert [job.job_id for job in await jobs_of(system)] == [job.job_id for job in jobs]
        await self.finish(server, jobs[1])
        await self.live(system, scheduler, clock, 3 * DAY)
        assert [job.job_id for job in await jobs_of(system)] == [jobs[1].job_id], "the next one has finished"
        # Without the schedule it expires.
        await server.request("DELETE", f"/v1/schedules/{schedule['id']}")
        await self.live(system, scheduler, clock, 2 * DAY)
        assert await jobs_of(system) == []

    async def test_a_scheduler_that_dies_while_it_keeps_the_job(
        self, server: Api, system: System, scheduler: Scheduler, clock: ManualClock
    ) -> None:
        schedule = await made(server, job={"tasks": [URL], "retention_days": 0.1}, changed_only=True)
        clock.advance(HOUR)
        await run(scheduler)
        (first,) = await jobs_of(system)
        await self.finish(server, first)
        await server.request("PATCH", f"/v1/schedules/{schedule['id']}", body=b'{"paused": true}')
        for point in ("schedule.keep.before", "schedule.keep.after"):

            def die(passed: str, point: str = point) -> None:
                if passed == point:
                    raise Killed

            faults.arm(die)
            try:
                await scheduler.tick()
                await asyncio.gather(*scheduler._running, return_exceptions=True)
            finally:
                faults.arm(None)
            await self.live(system, scheduler, clock, DAY / 2, HOUR / 2)
            assert [job.job_id for job in await jobs_of(system)] == [first.job_id]
            clock.advance(0.1 * DAY / 4)

    async def test_it_can_be_changed_and_is_checked(self, server: Api, system: System) -> None:
        schedule = await made(server)
        assert schedule["changed_only"] is False
        path = f"/v1/schedules/{schedule['id']}"
        assert (await server.request("PATCH", path, body=b'{"changed_only": true}')).json["changed_only"] is True
        assert (await server.request("PATCH", path, body=b'{"changed_only": false}')).json["changed_only"] is False
        row = await system.records.documents.document(SCHEDULE, ACME, schedule["id"])
        assert row is not None and schedule_of(row).keep_base_at is None
        for job in ({"kind": "download", "tasks": [URL]}, {"tasks": [URL], "changed_from": f"job_{'0' * 26}"}):
            refused = await server.post("/v1/schedules", {"cron": "0 * * * *", "job": job, "changed_only": True})
            assert (refused.status, refused.json["code"]) == (400, "invalid_field")


def test_the_body_of_a_row_is_small_json() -> None:
    schedule = Schedule("0 0 * * *", "UTC", msgspec.Raw(b'{"tasks":[1]}'), 1.0)
    assert msgspec.json.encode(schedule) == (
        b'{"cron":"0 0 * * *","timezone":"UTC","job":{"tasks":[1]},"created_at":1.0}'
    )

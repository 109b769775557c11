"""What is told, and what is scheduled, on every stack: the same events under the same ids, one job for each fire."""

import asyncio
import dataclasses
from collections import Counter
from typing import Any

import msgspec
import pytest

from conveyor.accept.scheduler import Scheduler
from conveyor.accept.schedules import Schedules, ScheduleSpec
from conveyor.clock import SystemClock
from conveyor.egress.outbound import Outbound
from conveyor.egress.target_guard import TargetGuard
from conveyor.embedded import Embedded
from conveyor.model import TenantId
from conveyor.service import Service
from conveyor.system import System
from tests.flow.test_events import following
from tests.servers.event_targets import shared_targets
from tests.stacks.test_flows import ended
from tests.support.api import Api, staged
from tests.support.receiver import Receiver, answering
from tests.support.target_site import Seen, Site, answer, page
from tests.support.working import all_items, until

pytestmark = pytest.mark.timeout(300)


async def test_a_job_starts_an_execution_and_puts_an_event(api: Api, site: Site) -> None:
    targets = shared_targets()
    notify = [
        {"type": "start_execution", "state_machine_arn": targets.machine},
        {"type": "eventbridge", "event_bus_arn": targets.bus},
    ]
    made = await api.submit({"tasks": [site.url("/ok")], "notify": notify})
    assert made.status == 201, made.body

    async def deliveries() -> list[dict[str, Any]]:
        return await all_items(api, f"/v1/jobs/{made.json['id']}/deliveries", 3)

    first, second = await until(deliveries, lambda rows: [row["status"] for row in rows] == ["delivered"] * 2)
    assert (first["type"], second["type"]) == ("start_execution", "eventbridge")
    assert targets.executions()[first["event_id"]]["data"]["job_id"] == made.json["id"]
    assert [event["detail"]["id"] for event in targets.put()] == [first["event_id"]]


async def test_webhooks_events_and_the_stream_tell_the_same(api: Api, site: Site, system: System) -> None:
    async with Receiver() as receiver:
        receiver.acts = [answering(500)]
        webhook = (await api.post("/v1/webhooks", {"url": receiver.url()})).json
        upload_id = await staged(api, "".join(f"{site.url(f'/ok?n={n}')}\n" for n in range(20)).encode())
        notify = [{"type": "webhook", "url": receiver.url("/own"), "events": ["run.completed"]}]
        spec = {"source": {"upload_id": upload_id}, "notify": notify}
        made = await api.post("/v1/jobs", spec, headers={"Prefer": "respond-async"})
        job_id = made.json["id"]
        async with following(api, job_id) as follower:
            await follower.rest()
        await ended(api, job_id)

        async def deliveries() -> list[dict[str, Any]]:
            return await all_items(api, f"/v1/jobs/{job_id}/deliveries", 2)

        def all_there(found: list[dict[str, Any]]) -> bool:
            events = {each["event"] for each in found if each["status"] == "delivered"}
            return {"job.accepted", "job.ingested", "run.completed"} <= events and all(
                each["status"] == "delivered" for each in found
            )

        # The first one is tried again after five seconds.
        found = await until(deliveries, all_there)
        events = await all_items(api, f"/v1/jobs/{job_id}/events")
        told = [event["event"] for event in events if event["event"] != "run.progress"]
        assert told == ["job.accepted", "job.ingested", "run.completed"]
        assert [frame.data for frame in follower.seen if frame.id] == events
        assert {each["event_id"] for each in found if each["webhook_id"]} == {event["id"] for event in events}
        assert sum(each["webhook_id"] is None for each in found) == 1
        assert {told.id for told in receiver.told} == {event["id"] for event in events}
        for each in receiver.told:
            if each.seen.path != "/own":
                assert each.signed_with(webhook["secret"])
        # Nothing is left of it when the job goes.
        assert (await api.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
        assert (await api.request("DELETE", f"/v1/webhooks/{webhook['id']}")).status == 204


@page("told-list")
async def told_list(site: Site, seen: Seen, writer: asyncio.StreamWriter) -> None:
    answer(writer, f"{site.url('/ok')}\n".encode())


class LongAgo(SystemClock):
    def now(self) -> float:
        return super().now() - 400 * 86_400


async def test_two_schedulers_make_one_job_of_each_fire(
    api: Api, system: System, site: Site, embedded: Embedded
) -> None:
    upload_id = await staged(api, f"{site.url('/ok')}\n".encode())
    past = dataclasses.replace(system, clock=LongAgo())
    templates: list[dict[str, Any]] = [
        {"tasks": [site.url("/ok")]},
        {"source": {"upload_id": upload_id}},
        {"source": {"url": site.url("/redirect?to=/told-list"), "format": "text"}},
        {"source": {"url": site.url("/status/404")}},
    ]
    guard = TargetGuard(allow_private=True, clock=system.clock)
    other = Service(Scheduler(system, Outbound(guard), "other"), system.clock)
    running = asyncio.create_task(other.run())
    try:
        made = [
            (
                await Schedules(past).create(
                    TenantId("acme"), ScheduleSpec("0 0 1 1 *", msgspec.Raw(msgspec.json.encode(template)))
                )
            ).subject
            for template in templates
        ]

        async def shown() -> list[dict[str, Any]]:
            return await all_items(api, "/v1/schedules", 2)

        found = await until(shown, lambda all_of: all(each["fires"] for each in all_of))
        assert [each["id"] for each in found] == made
        assert all(each["next_fires"] for each in found)
        jobs = await all_items(api, "/v1/jobs", 2)
        by_schedule = Counter(fire["job_id"] for each in found for fire in each["fires"])
        refused = [fire["error"] for each in found for fire in each["fires"] if fire["error"]]
        assert len(refused) == 1, refused
        assert set(by_schedule) - {None} == {job["id"] for job in jobs}
        assert len(jobs) == 3
        for job in jobs:
            assert (await ended(api, job["id"]))["state"] == "completed"
    finally:
        other.stop()
        await running

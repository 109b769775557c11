"""A2 for what is told and what is scheduled: die at every crash point of a webhook's way and of a fire, come back, and
have told of everything and fired once."""

import json
import signal
from collections import Counter
from pathlib import Path

import pytest

from conveyor.accept.schedules import Schedule, schedule_of
from conveyor.engines.records import Document
from conveyor.jobs.event_names import WEBHOOK
from conveyor.jobs.fire_ids import fire_job_id
from conveyor.model import Job
from conveyor.notify.deliveries import DELIVERY, DeliveryStatus, delivery_of
from conveyor.settings import Settings
from conveyor.states import RunState
from conveyor.system import System, open_system
from tests.faults.child import TENANT, TOTAL
from tests.faults.forks import Forks
from tests.faults.hits import ALL_HITS
from tests.faults.notify_child import SCENARIOS
from tests.faults.test_crashpoints import passings, points_in_source
from tests.support.receiver import signature

CHILD = "tests.faults.notify_child"
AREAS = ("delivery.", "milestone.", "notify.", "schedule.", "webhook.")
# Flow tests die there: they need a schedule whose jobs are compared.
ELSEWHERE = {"schedule.keep.before", "schedule.keep.after"}

PASSED_IN: dict[str, tuple[str, ...]] = {
    "delivery.again.before": ("webhooks",),
    "delivery.again.after": ("webhooks",),
    "delivery.claim.before": ("webhooks",),
    "delivery.claim.after": ("webhooks",),
    "delivery.record.before": ("webhooks",),
    "delivery.record.after": ("webhooks",),
    "delivery.sent.after": ("webhooks",),
    "milestone.tell.before": ("webhooks", "schedule_list"),
    "milestone.tell.after": ("webhooks", "schedule_list"),
    "notify.deliveries.before": ("webhooks",),
    "notify.deliveries.after": ("webhooks",),
    "notify.told.after": ("webhooks",),
    "schedule.advance.before": ("schedule", "schedule_list"),
    "schedule.advance.after": ("schedule", "schedule_list"),
    "schedule.change.before": ("schedule",),
    "schedule.change.after": ("schedule",),
    "schedule.claim.before": ("schedule", "schedule_list"),
    "schedule.claim.after": ("schedule", "schedule_list"),
    "schedule.create.before": ("schedule",),
    "schedule.create.after": ("schedule",),
    "schedule.remove.before": ("schedule",),
    "schedule.remove.after": ("schedule",),
    "schedule.stage.before": ("schedule_list",),
    "schedule.stage.after": ("schedule_list",),
    "schedule.submit.before": ("schedule", "schedule_list"),
    "schedule.submit.after": ("schedule", "schedule_list"),
    "webhook.change.before": ("webhooks",),
    "webhook.change.after": ("webhooks",),
    "webhook.create.before": ("webhooks",),
    "webhook.create.after": ("webhooks",),
    "webhook.remove.before": ("webhooks",),
    "webhook.remove.after": ("webhooks",),
    # Of what they call.
    "request.claim.after": ("schedule", "schedule_list"),
    "accept.before": ("schedule",),
    "accept.after": ("schedule",),
    "accept.ingested.before": ("schedule_list",),
    "accept.ingested.after": ("schedule_list",),
    "sqlite.commit.before": SCENARIOS,
    "sqlite.commit.after": SCENARIOS,
}


def hits(point: str, first: bool) -> tuple[int, ...]:
    if not point.startswith("sqlite.commit."):
        return (1, 2) if ALL_HITS else (1,)
    if ALL_HITS:
        return (1, 3, 8, 21, 34)
    return (1, 8, 34) if first else (3, 21)


CASES = [
    (scenario, point, nth)
    for point, scenarios in PASSED_IN.items()
    for number, scenario in enumerate(scenarios)
    for nth in hits(point, number == 0)
]


def test_every_point_of_these_parts_has_a_run() -> None:
    points = {point for point in points_in_source() if point.startswith(AREAS)} - ELSEWHERE
    assert len(points) >= 30
    assert points == {point for point in PASSED_IN if point.startswith(AREAS)}


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_without_a_crash(children: Forks, place: Path, scenario: str) -> None:
    assert children.run(place, scenario=scenario, crash_at=None) == 0, (place / "log").read_text()
    assert {point for point, scenarios in PASSED_IN.items() if scenario in scenarios} <= set(passings(place))
    await check(place, scenario)


@pytest.mark.parametrize(("scenario", "point", "nth"), CASES)
async def test_dying_there_loses_nothing(children: Forks, place: Path, scenario: str, point: str, nth: int) -> None:
    died = 0
    # Where no process passes the point so often, several in a row die at their first passing.
    crash_at, wanted = f"{point}:{nth}", 1
    for _ in range(20):
        status = children.run(place, scenario=scenario, crash_at=crash_at if died < wanted else None)
        if status == 0 and died == 0:
            assert passings(place)[point] > 0
            crash_at, wanted = f"{point}:1", nth
            for path in sorted(place.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            continue
        if status == 0:
            break
        assert status == -signal.SIGKILL, (place / "log").read_text()
        died += 1
    assert status == 0, "it is never done:\n" + (place / "log").read_text()[-3000:]
    assert died > 0, "the point was not passed"
    await check(place, scenario)


async def check(place: Path, scenario: str) -> None:
    async with open_system(Settings.load({}, data=place / "data")) as system:
        database = system.records.jobs._database  # type: ignore[attr-defined]
        assert await database.row("PRAGMA integrity_check", {}) == ("ok",)
        (job,) = (await system.records.jobs.jobs(TENANT, None, 10)).items
        assert (job.state, job.run.total) == (RunState.COMPLETED, TOTAL)
        counts = await system.tasks.counts(job.key)
        assert counts.ended == TOTAL == (await system.tasks.recount(job.key)).ended
        events = (await system.records.outbox.events(TENANT, job.job_id, None, 100)).items
        kinds = Counter(event.event for event in events)
        once = {"job.accepted", "run.completed", *(["job.ingested"] if scenario == "schedule_list" else [])}
        assert {kind: kinds[kind] for kind in once} == dict.fromkeys(once, 1)
        assert kinds["run.progress"] <= 3
        failed = sum(event.data["failed"] for event in events if event.event == "tasks.failed")
        assert await system.records.outbox.undispatched(10) == [] or scenario != "webhooks"
        if scenario == "webhooks":
            assert failed == counts.failed == 4
            await check_told(system, place, {event.id: event.event for event in events})
        else:
            await check_fired(system, place, job, scenario == "schedule_list")


async def check_told(system: System, place: Path, events: dict[str | None, str]) -> None:
    """Each event came, signed, and was accepted; what is written down of it agrees."""
    received = [json.loads(line) for line in (place / "received").read_text().splitlines()]
    secret = (place / "secrets").read_text()
    assert {line["webhook-id"] for line in received} == set(events)
    assert {line["webhook-id"] for line in received if line["ok"]} == set(events)
    bodies: dict[str, set[str]] = {}
    for line in received:
        assert line["path"] == "/endpoint"
        signed = signature(secret, line["webhook-id"], line["webhook-timestamp"], line["body"].encode())
        assert line["webhook-signature"] == signed
        assert json.loads(line["body"])["type"] == events[line["webhook-id"]]
        bodies.setdefault(line["webhook-id"], set()).add(line["body"])
    assert all(len(same) == 1 for same in bodies.values())
    (endpoint,) = (await system.records.documents.documents(WEBHOOK, TENANT, None, 10)).items
    rows: list[Document] = (await system.records.documents.documents(DELIVERY, TENANT, None, 100)).items
    assert [row.id for row in rows] == [f"{endpoint.id}:{event_id}" for event_id in sorted(map(str, events))]
    for row in rows:
        delivery = delivery_of(row)
        assert (delivery.standing, row.due_at) == (DeliveryStatus.DELIVERED, None)
        assert [attempt.error for attempt in delivery.log][-1] is None


async def check_fired(system: System, place: Path, job: Job, listed: bool) -> None:
    """One fire, for which there is one job, under the id that follows from it."""
    schedule_id = (place / "schedule").read_text()
    assert (await system.records.documents.documents("schedule", TENANT, None, 10)).items == []
    schedule: Schedule = schedule_of(Document("schedule", TENANT, schedule_id, (place / "row").read_bytes()))
    (fire,) = schedule.fires
    assert (schedule.fired, schedule.firing, schedule.name) == (1, None, "renamed")
    assert fire.job_id == job.job_id == fire_job_id(TENANT, schedule_id, fire.at)
    assert job.name == "yearly"
    lists = [info.key async for info in system.blobs.listing("lists/")]
    # One that was staged by a process that died goes with the job.
    assert all(key.startswith(f"lists/{TENANT}/{job.job_id}/") for key in lists)
    assert bool(lists) == listed

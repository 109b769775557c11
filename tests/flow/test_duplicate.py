"""A duplicate is a new job with the same list and options, secrets included, whichever way the first one came."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.answer import AcceptedView
from conveyor.jobs.event_names import NOTIFY
from conveyor.model import JobId, TenantId
from conveyor.recover.retention import Retention
from conveyor.settings import Settings
from conveyor.system import System
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock
from tests.support.working import all_items, ended, working

ACME = TenantId("acme")
SECRET = "Bearer of-the-original"
OPTIONS = {"headers": {"Authorization": SECRET}, "attempts": 3, "backoff": {"base": 0.5}, "name": "Prices"}
WAYS = ("inline", "staged", "upload", "open", "csv")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return Settings.load({}, data=settings.data, allow_private_targets=True, sync_task_limit=5, sync_list_bytes=200)


@pytest.fixture(autouse=True)
def disarm() -> Iterator[None]:
    yield
    faults.arm(None)


def urls(count: int) -> list[str]:
    return [f"http://example.com/{number}" for number in range(count)]


def lines(count: int) -> bytes:
    return ("\n".join([*urls(count), "not a URL"]) + "\n").encode()


async def original(api: Api, way: str) -> str:
    """A job that came one way, with tasks of which one has a secret of its own."""
    own: dict[str, Any] = {"url": "http://example.com/own", "headers": {"X-Api-Key": SECRET}, "tag": "own"}
    match way:
        case "inline":
            answer = await api.submit({"tasks": [*urls(3), own], **OPTIONS})
        case "staged":
            answer = await api.submit({"tasks": [*urls(8), own], **OPTIONS})
        case "upload":
            answer = await api.submit({"source": {"upload_id": await api.upload(lines(40))}, **OPTIONS})
        case "csv":
            table = b"Link;Shop\nhttp://example.com/a;One\nhttp://example.com/b;Two\n"
            source = {"upload_id": await api.upload(table), "url_column": "Link"}
            answer = await api.submit({"source": source, **OPTIONS})
        case _:
            answer = await api.submit({"mode": "open", **OPTIONS})
            for start in range(0, 6, 3):
                batch = {"tasks": [*urls(6)[start : start + 3], own], "last_batch": start == 3}
                assert (await api.post(f"/v1/jobs/{answer.json['id']}/tasks", batch)).status == 202
    assert answer.status in (201, 202), answer.body
    job_id: str = answer.json["id"]
    return job_id


async def duplicate(api: Api, job_id: str, body: Any = None, key: str | None = None) -> Answer:
    headers = {"idempotency-key": key} if key else None
    return await api.post(f"/v1/jobs/{job_id}/duplicate", body, headers=headers)


def retention(system: System) -> Retention:
    return Retention(system.records, system.tasks, system.queue, system.coordinator, system.blobs, system.clock)


async def stored(api: Api, job_id: str) -> Any:
    job = await api.system.records.jobs.job(ACME, JobId(job_id))
    assert job is not None
    return job


async def inputs(api: Api, job_id: str) -> list[bytes]:
    """As they are stored, secrets included."""
    job = await stored(api, job_id)
    return [bytes(task.input) for task in await api.system.tasks.at(job.key, range(1000))]


@pytest.mark.parametrize("way", WAYS)
async def test_it_has_the_same_tasks_and_secrets(server: Api, clock: JumpingClock, way: str) -> None:
    """Also when the first job is deleted and purged right after."""
    job_id = await original(server, way)
    async with working(server.system):
        before = await ended(server, job_id)
        expected = await inputs(server, job_id)
        answer = await duplicate(server, job_id)
        assert answer.status == (201 if way in ("inline", "csv") else 202), answer.body
        assert SECRET.encode() not in answer.body
        assert answer.headers["location"] == f"/v1/jobs/{answer.json['id']}"
        msgspec.json.decode(answer.body, type=AcceptedView)
        again = await ended(server, answer.json["id"])
    assert again["id"] != job_id
    assert (again["state"], again["total"]) == ("completed", len(expected))
    assert again["options"] == before["options"]
    assert (again["name"], again["invalid_lines"], again["mode"]) == ("Prices", before["invalid_lines"], "closed")
    copy = await stored(server, again["id"])
    assert copy.options == (await stored(server, job_id)).options
    assert copy.options.headers == {"Authorization": SECRET}
    assert await inputs(server, again["id"]) == expected
    # Its list is its own: without the first job it can still be duplicated.
    assert (await server.request("DELETE", f"/v1/jobs/{job_id}")).status == 204
    clock.advance(7200)
    await retention(server.system).tick()
    third = await duplicate(server, again["id"])
    async with working(server.system):
        assert (await ended(server, third.json["id"]))["total"] == len(expected)


async def test_a_name_and_options_replace_those_of_the_original(server: Api) -> None:
    job_id = await original(server, "inline")
    changes = {"name": "Prices again", "options": {"concurrency": 2, "headers": {"X-Other": "new"}}}
    copy = await stored(server, (await duplicate(server, job_id, changes)).json["id"])
    assert (copy.name, copy.options.concurrency, copy.options.attempts) == ("Prices again", 2, 3)
    assert copy.options.headers == {"X-Other": "new"}
    unnamed = await stored(server, (await duplicate(server, job_id, {"name": None})).json["id"])
    assert unnamed.name is None
    for wrong, code in (({"nome": 1}, "unknown_field"), ({"concurrency": 0}, "invalid_field")):
        refused = await duplicate(server, job_id, {"options": wrong})
        assert (refused.status, refused.json["code"], refused.json["field"]) == (400, code, next(iter(wrong)))
    hidden = await duplicate(server, job_id, {"options": {"headers": {"Authorization": "[hidden]"}}})
    assert (hidden.status, hidden.json["field"]) == (400, "headers")


async def test_receivers_of_events_go_along(server: Api) -> None:
    notify = [{"type": "webhook", "url": "http://127.0.0.1:9/hook?key=s3cret", "events": ["run.completed"]}]
    job_id = (await server.submit({"tasks": urls(1), "notify": notify})).json["id"]
    copy = (await duplicate(server, job_id)).json["id"]
    documents = server.system.records.documents
    rows = [await documents.documents(NOTIFY, ACME, None, 10, JobId(each)) for each in (job_id, copy)]
    assert [row.body for row in rows[0].items] == [row.body for row in rows[1].items] != []


@pytest.mark.parametrize("way", WAYS)
async def test_one_key_makes_one_job(server: Api, way: str) -> None:
    job_id = await original(server, way)
    answers = await asyncio.gather(*(duplicate(server, job_id, {}, "k") for _ in range(4)))
    made = {answer.json["id"] for answer in answers if answer.status in (201, 202)}
    assert len(made) == 1
    assert all(answer.status in (201, 202, 409) for answer in answers)
    replayed = await duplicate(server, job_id, {}, "k")
    assert (replayed.headers["idempotency-replayed"], replayed.json["id"]) == ("true", made.pop())


@pytest.mark.parametrize("point", ["duplicate.copy.before", "duplicate.copy.after", "accept.ingested.before"])
async def test_a_crash_leaves_no_job_and_no_list(server: Api, clock: JumpingClock, point: str) -> None:
    """The client asks again with its key and gets its job; a list that no job has is removed."""
    job_id = await original(server, "staged")

    def die(passed: str) -> None:
        if passed == point:
            raise RuntimeError(passed)

    faults.arm(die)
    assert (await duplicate(server, job_id, {}, "k")).status == 500
    faults.arm(None)
    clock.advance(server.system.settings.idempotency_lease_seconds + 1)
    answer = await duplicate(server, job_id, {}, "k")
    assert answer.status == 202
    async with working(server.system):
        assert (await ended(server, answer.json["id"]))["total"] == 9
    assert (await server.request("DELETE", f"/v1/jobs/{answer.json['id']}")).status == 204
    # A copy of the attempt that died is noted, and goes with the note.
    for _ in range(3):
        clock.advance(server.system.settings.idempotency_seconds + 7200)
        await retention(server.system).tick()
    left = [blob.key async for blob in server.system.blobs.listing(f"lists/acme/{answer.json['id']}/")]
    assert left == []


async def test_an_open_job_without_tasks_has_nothing_to_duplicate(server: Api) -> None:
    job_id = (await server.submit({"mode": "open"})).json["id"]
    refused = await duplicate(server, job_id)
    assert (refused.status, refused.json["code"]) == (400, "no_tasks")
    assert len(await all_items(server, "/v1/jobs")) == 1

"""Idempotency over HTTP (SPEC §7.2), for every POST that creates: replay, conflicts, take-over, expiry."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import pytest

from conveyor import faults
from conveyor.engines.records import IdempotencyClaim
from conveyor.errors import EngineFailed
from conveyor.model import JobId, TenantId
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock
from tests.support.working import all_items, ended, until, working

ACME = TenantId("acme")
DAY = 86_400.0


def urls(count: int) -> list[str]:
    return [f"http://example.com/{number}" for number in range(count)]


@dataclass(frozen=True)
class Case:
    """A POST that creates: where, what, how it is answered, and under which name the answer has what it made."""

    path: str
    body: bytes
    status: int
    made: str
    bad: bytes = b'{"nope": 1}'

    @property
    def route(self) -> str:
        return f"POST {self.path}"

    @property
    def fingerprint(self) -> str:
        return sha256(f"POST {self.path}\n".encode() + self.body).hexdigest()


Make = Callable[[Api], Awaitable[Case]]


async def small_job(api: Api) -> Case:
    return Case("/v1/jobs", json.dumps({"tasks": urls(20)}).encode(), 201, "id", b'{"tasks": ["nonsense"]}')


async def large_job(api: Api) -> Case:
    return Case("/v1/jobs", json.dumps({"tasks": urls(1200)}).encode(), 202, "id", b'{"tasks": []}')


async def uploaded_job(api: Api, count: int = 1200, status: int = 202) -> Case:
    upload_id = await api.upload("\n".join(urls(count)).encode())
    body = json.dumps({"source": {"upload_id": upload_id}}).encode()
    return Case("/v1/jobs", body, status, "id", b'{"source": {"upload_id": "upload_nothing"}}')


async def small_uploaded_job(api: Api) -> Case:
    return await uploaded_job(api, 50, 201)


async def open_job(api: Api) -> Case:
    return Case("/v1/jobs", b'{"mode": "open"}', 202, "id", b'{"mode": "open", "tasks": [1]}')


async def upload(api: Api) -> Case:
    body = json.dumps({"size": 7, "sha256": "0" * 64}).encode()
    return Case("/v1/uploads", body, 201, "upload_id", b'{"size": 0, "sha256": ""}')


async def batch(api: Api) -> Case:
    job_id = (await api.submit({"mode": "open"})).json["id"]
    body = json.dumps({"tasks": urls(30)}).encode()
    return Case(f"/v1/jobs/{job_id}/tasks", body, 202, "batch_id", b'{"tasks": []}')


CASES: dict[str, Make] = {
    "small job": small_job,
    "large job": large_job,
    "uploaded job": uploaded_job,
    "small uploaded job": small_uploaded_job,
    "open job": open_job,
    "upload": upload,
    "batch": batch,
}


@pytest.fixture(params=CASES)
async def case(request: pytest.FixtureRequest, server: Api) -> Case:
    return await CASES[request.param](server)


async def send(api: Api, case: Case, key: str = "k1", body: bytes | None = None) -> Answer:
    return await api.post(case.path, case.body if body is None else body, headers={"idempotency-key": key})


async def count(api: Api, table: str) -> int:
    database: Any = api.system.records.jobs._database  # type: ignore[attr-defined]
    return int((await database.row(f"SELECT count(*) FROM {table}", {}))[0])


async def made(api: Api) -> int:
    return await count(api, "jobs") + await count(api, "uploads") + await count(api, "ranges")


def refusal(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


async def test_the_same_request_again_gets_the_same_answer(server: Api, case: Case) -> None:
    before = await made(server)
    first = await send(server, case)
    assert first.status == case.status, first.body
    assert "idempotency-replayed" not in first.headers
    for _ in range(3):
        again = await send(server, case)
        assert (again.status, again.body) == (first.status, first.body)
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers.get("location") == first.headers.get("location")
        assert again.headers["content-type"] == first.headers["content-type"]
    assert await made(server) == before + 1
    other = await send(server, case, "k2")
    assert other.json[case.made] != first.json[case.made]
    assert await made(server) == before + 2


async def test_without_a_key_each_is_its_own(server: Api, case: Case) -> None:
    one, two = await server.post(case.path, case.body), await server.post(case.path, case.body)
    assert one.json[case.made] != two.json[case.made]
    assert await count(server, "idempotency") == 0


async def test_a_burst_makes_one(server: Api, case: Case) -> None:
    before = await made(server)
    answers = await asyncio.gather(*(send(server, case, "burst") for _ in range(20)))
    good = [answer for answer in answers if answer.status == case.status]
    assert good
    assert len({answer.body for answer in good}) == 1
    assert sum("idempotency-replayed" not in answer.headers for answer in good) == 1
    for answer in answers:
        if answer.status != case.status:
            assert refusal(answer) == (409, "idempotency_key_in_flight")
            assert answer.headers["retry-after"] == "1"
    assert await made(server) == before + 1

    async def again() -> Answer:
        return await send(server, case, "burst")

    assert (await until(again, lambda answer: answer.status != 409)).body == good[0].body


async def test_another_request_under_the_key_is_refused(server: Api, case: Case) -> None:
    first = await send(server, case)
    before = await made(server)
    for body in (case.body + b" ", b" " + case.body):
        assert refusal(await send(server, case, body=body)) == (409, "idempotency_key_reused")
    assert await made(server) == before
    assert (await send(server, case)).body == first.body


async def test_a_refused_request_leaves_the_key_free(server: Api, case: Case) -> None:
    before = await made(server)
    for body in (case.bad, b"{", b"[]", b'{"unknown": 1}'):
        assert 400 <= (await send(server, case, body=body)).status < 500
        assert await count(server, "idempotency") == 0
    assert await made(server) == before
    assert (await send(server, case)).status == case.status


async def test_conflicts_leave_the_key_free(server: Api) -> None:
    """Not only what is wrong in itself: also what is wrong at this moment."""
    promised = (await server.post("/v1/uploads", {"size": 1, "sha256": sha256(b"\n").hexdigest()})).json
    spec = {"source": {"upload_id": promised["upload_id"]}}
    early = await server.submit(spec, headers={"idempotency-key": "k"})
    assert refusal(early) == (409, "upload_conflict")
    await server.put(promised["url"], b"\n")
    assert (await server.submit(spec, headers={"idempotency-key": "k"})).status == 202

    closed = (await server.submit({"tasks": urls(1)})).json["id"]
    answer = await server.post(f"/v1/jobs/{closed}/tasks", {"tasks": urls(1)}, headers={"idempotency-key": "k"})
    assert refusal(answer) == (409, "job_closed")
    assert await count(server, "idempotency") == 1


async def test_keys_of_tenants_and_routes_are_apart(server: Api) -> None:
    other = await server.as_tenant("other")
    cases = [await make(api) for api in (server, other) for make in (small_job, upload, batch)]
    for api, case in zip([server] * 3 + [other] * 3, cases, strict=True):
        answer = await send(api, case, "same")
        assert (answer.status, "idempotency-replayed" in answer.headers) == (case.status, False)


async def test_a_key_is_free_again_after_a_day(server: Api, case: Case, clock: JumpingClock) -> None:
    first = await send(server, case)
    clock.advance(DAY - 10)
    assert (await send(server, case)).body == first.body
    clock.advance(11)
    # Another request than before: as long as the row stands, it would be a conflict.
    later = await send(server, case, body=case.body + b" ")
    assert later.status == case.status
    assert "idempotency-replayed" not in later.headers
    assert later.json[case.made] != first.json[case.made]


def claim_of(server: Api, case: Case, clock: JumpingClock) -> IdempotencyClaim:
    """What a request leaves that dies right after it claimed its key."""
    prefix = {"id": "job", "upload_id": "upload", "batch_id": "batch"}[case.made]
    lease = server.system.settings.idempotency_lease_seconds
    return IdempotencyClaim(
        tenant=ACME,
        route=case.route,
        key="k1",
        fingerprint=case.fingerprint,
        subject=clock.new_id(prefix),
        lease_until=clock.now() + lease,
        expires_at=clock.now() + DAY,
    )


async def test_a_crashed_claim_is_taken_over_onto_the_same_id(server: Api, case: Case, clock: JumpingClock) -> None:
    claim = claim_of(server, case, clock)
    assert (await server.system.records.access.claim(claim)).granted
    before = await made(server)
    early = await send(server, case)
    assert refusal(early) == (409, "idempotency_key_in_flight")
    assert early.headers["retry-after"] == "1"
    assert refusal(await send(server, case, body=case.body + b" ")) == (409, "idempotency_key_reused")
    clock.advance(server.system.settings.idempotency_lease_seconds + 1)
    assert refusal(await send(server, case, body=case.body + b" ")) == (409, "idempotency_key_reused")
    assert await made(server) == before
    answers = await asyncio.gather(*(send(server, case) for _ in range(5)))
    good = [answer for answer in answers if answer.status == case.status]
    assert {answer.json[case.made] for answer in good} == {claim.subject}
    assert (await send(server, case)).json[case.made] == claim.subject
    assert await made(server) == before + 1


async def test_a_slow_request_that_was_overtaken_makes_no_second(
    server: Api, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first holds its claim longer than the lease; the second takes over; both are told the same."""
    case = await large_job(server)
    put, held, go = server.system.blobs.put, asyncio.Event(), asyncio.Event()

    async def slow(key: str, data: bytes) -> None:
        if not held.is_set():
            held.set()
            await go.wait()
        await put(key, data)

    monkeypatch.setattr(server.system.blobs, "put", slow)
    first = asyncio.create_task(send(server, case))
    await held.wait()
    clock.advance(server.system.settings.idempotency_lease_seconds + 1)
    second = await send(server, case)
    assert second.status == 202
    go.set()
    late = await first
    assert (late.status, late.body, late.headers["idempotency-replayed"]) == (202, second.body, "true")
    assert await count(server, "jobs") == 1
    async with working(server.system):
        done = await ended(server, second.json["id"])
    assert (done["state"], done["run"]["total"]) == ("completed", 1200)


async def test_a_failure_of_ours_keeps_the_claim(
    server: Api, clock: JumpingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how far it came: the key is taken until its lease is over, and then the same job is made."""
    case = await large_job(server)
    put = server.system.blobs.put

    async def fails(key: str, data: bytes) -> None:
        raise EngineFailed("the disk is full")

    monkeypatch.setattr(server.system.blobs, "put", fails)
    failed = await send(server, case)
    assert refusal(failed) == (503, "engine_failed")
    monkeypatch.setattr(server.system.blobs, "put", put)
    assert refusal(await send(server, case)) == (409, "idempotency_key_in_flight")
    clock.advance(server.system.settings.idempotency_lease_seconds + 1)
    done = await send(server, case)
    assert done.status == 202
    assert await count(server, "jobs") == 1


async def test_a_job_that_is_deleted_is_not_made_again(server: Api) -> None:
    case = await small_job(server)
    first = await send(server, case)
    assert (await server.request("DELETE", f"/v1/jobs/{first.json['id']}")).status == 204
    again = await send(server, case)
    assert (again.status, again.body) == (201, first.body)
    assert await all_items(server, "/v1/jobs") == []
    assert await server.system.records.jobs.job(ACME, JobId(first.json["id"])) is None


class TestSecrets:
    """What a request makes is shown once, and its replay shows which it was."""

    BODY = b'{"tenant": "newcomer"}'

    async def test_a_key_is_made_once_and_its_secret_shown_once(self, server: Api) -> None:
        admin = await server.as_tenant("local", admin=True)
        first = await admin.post("/v1/keys", self.BODY, headers={"idempotency-key": "k1"})
        assert first.status == 201
        assert (await Api(server.url, server.system, first.json["key"], server._client).get("/v1/jobs")).status == 200
        for _ in range(3):
            again = await admin.post("/v1/keys", self.BODY, headers={"idempotency-key": "k1"})
            assert (again.status, again.headers["idempotency-replayed"]) == (201, "true")
            assert again.json == {**first.json, "key": None}
        assert len((await admin.get("/v1/keys?tenant=newcomer")).json["items"]) == 1
        other = await admin.post("/v1/keys", b'{"tenant": "another"}', headers={"idempotency-key": "k1"})
        assert refusal(other) == (409, "idempotency_key_reused")
        database: Any = server.system.records.jobs._database  # type: ignore[attr-defined]
        secret = first.json["key"].rpartition("_")[2]
        stored = await database.rows("SELECT CAST(body AS TEXT), subject FROM idempotency", {})
        assert secret not in str(stored)

    async def test_a_link_is_the_same_for_the_key_that_asked_for_it(self, server: Api, clock: JumpingClock) -> None:
        path = "/v1/sign-in/links"
        first = await server.post(path, headers={"idempotency-key": "k1"})
        assert first.status == 201
        again = await server.post(path, headers={"idempotency-key": "k1"})
        assert (again.status, again.body, again.headers["idempotency-replayed"]) == (201, first.body, "true")
        colleague = await server.as_tenant("acme")
        theirs = await colleague.post(path, headers={"idempotency-key": "k1"})
        assert (theirs.status, "idempotency-replayed" in theirs.headers) == (201, False)
        assert theirs.json["path"] != first.json["path"]
        headers = {"sec-fetch-site": "same-origin", "x-conveyor-dashboard": "1"}
        token = first.json["path"].rpartition("/")[2]
        assert await count(server, "documents WHERE kind = 'sign_in_link'") == 2
        used = [await server.post("/v1/sign-in", {"link": token}, headers=headers) for _ in range(2)]
        assert [answer.status for answer in used] == [204, 401], "a link works once"

    @pytest.mark.parametrize(
        "point", ["key.create.before", "key.create.after", "session.link.before", "session.link.after"]
    )
    async def test_a_request_that_dies_leaves_one(self, server: Api, clock: JumpingClock, point: str) -> None:
        admin = await server.as_tenant("local", admin=True)
        path, body = ("/v1/keys", self.BODY) if point.startswith("key.") else ("/v1/sign-in/links", b"")

        def die(name: str) -> None:
            if name == point:
                raise EngineFailed("it died here")

        faults.arm(die)
        try:
            failed = await admin.post(path, body, headers={"idempotency-key": "k1"})
        finally:
            faults.arm(None)
        assert failed.status == 503
        clock.advance(server.system.settings.idempotency_lease_seconds + 1)
        later = await admin.post(path, body, headers={"idempotency-key": "k1"})
        assert later.status == 201, later.body
        if path == "/v1/keys":
            (made,) = (await admin.get("/v1/keys?tenant=newcomer")).json["items"]
            assert later.json["key_id"] == made["key_id"]
            assert (later.json["key"] is None) == (point == "key.create.after")
        else:
            assert await count(server, "documents WHERE kind = 'sign_in_link'") == 1


async def test_every_post_that_creates_takes_a_key(server: Api) -> None:
    """Those that answer 201 or 202, but for a delivery that is sent again, which makes nothing, a test of an endpoint,
    and a fire, which is refused while another one is in progress."""
    described = (await server.get("/v1/openapi.json")).json["paths"]
    posts = {path: routes["post"] for path, routes in described.items() if "post" in routes}
    creating = {path for path, route in posts.items() if {"201", "202"} & set(route["responses"])}
    takes = {
        path
        for path, route in posts.items()
        if any(parameter["name"] == "Idempotency-Key" for parameter in route.get("parameters", []))
    }
    assert creating - takes == {
        "/v1/webhooks/deliveries/{delivery_id}/redeliver",
        "/v1/webhooks/{webhook_id}/test",
        "/v1/schedules/{schedule_id}/run",
    }
    assert {"/v1/keys", "/v1/jobs", "/v1/sign-in/links"} <= {path.rstrip("/") for path in takes}

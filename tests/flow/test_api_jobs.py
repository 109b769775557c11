"""Jobs over HTTP: accepted whole, readable at once, listed, replayed, exported. Both in one write and in steps."""

import io
import json
import zipfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from conveyor import faults
from conveyor.accept.answer import AcceptedView
from conveyor.accept.spec import JobSpec
from conveyor.accept.submit import Submit
from conveyor.api.router import application
from conveyor.api.schemas.job_shapes import JobShape, JobsPage
from conveyor.api.schemas.task_shapes import EventsPage, ResultsPage
from conveyor.clock import iso_text
from conveyor.engines.queue import Outgoing, Queue, QueueName, run_queue
from conveyor.engines.tasks import TaskEvent
from conveyor.jobs.idempotency import IdempotentRequest
from conveyor.lifecycle import Lifecycle
from conveyor.model import BodyRef, Chunk, Job, JobId, ResultDetail, TaskEnd, TaskError, TenantId, task_id
from conveyor.read import job_search
from conveyor.settings import Settings
from conveyor.states import RunState, TaskStatus
from conveyor.system import System, open_system
from tests.support.api import Answer, Api
from tests.support.clocks import JumpingClock

ACME = TenantId("acme")


@pytest.fixture(params=["atomic", "in steps"])
async def system(request: pytest.FixtureRequest, settings: Settings, clock: JumpingClock) -> AsyncIterator[System]:
    """Every test here runs on both ways of accepting."""
    async with open_system(settings, clock) as opened:
        yield opened if request.param == "atomic" else replace(opened, atomic_accept=None)


@pytest.fixture
def disarm() -> Iterator[None]:
    yield
    faults.arm(None)


def urls(count: int) -> list[str]:
    return [f"http://example.com/{number}" for number in range(count)]


async def stored(system: System, answer: Answer) -> Job:
    job = await system.records.jobs.job(ACME, JobId(answer.json["id"]))
    assert job is not None
    return job


async def references(system: System, job: Job) -> list[Chunk]:
    found = await system.queue.receive(run_queue(job.run.run_id), 10_000, 30)
    return [msgspec.msgpack.decode(delivery.body, type=Chunk) for delivery in found]


async def end_all(system: System, job: Job) -> None:
    """As a worker would: the first task succeeds with a body, the second fails, the rest are cancelled."""
    body = b"<script>alert(1)</script>"
    key = f"results/{job.tenant}/{job.job_id}/0"
    await system.blobs.put(key, body)
    kept = ResultDetail(
        content_type="text/html",
        final_url="http://example.com/0",
        headers=[("x", "y")],
        body=BodyRef(key, len(body), sha256(body).hexdigest()),
        elapsed=0.25,
    )
    failed = ResultDetail(error=TaskError("http_500", "the target answered 500"))
    at = system.clock.now()
    ends = [
        TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(kept).decode(), at),
        TaskEnd(1, TaskStatus.FAILED, 4, 500, "http_500", msgspec.json.encode(failed).decode(), at),
        *(TaskEnd(index, TaskStatus.CANCELLED, 0, None, None, "{}", at) for index in range(2, job.run.total)),
    ]
    finished = await system.tasks.finish(job.key, ends)
    await Lifecycle(system.records, system.tasks, system.clock).settle(job, finished.counts)


async def test_a_job_is_accepted_whole(server: Api) -> None:
    spec = {"name": "pages", "tasks": [*urls(2), {"url": "http://example.com/o", "id": "mine"}], "chunk_size": 2}
    answer = await server.submit(spec)
    assert answer.status == 201, answer.body
    assert answer.headers["content-type"] == "application/json"
    msgspec.json.decode(answer.body, type=AcceptedView)
    assert answer.headers["location"] == f"/v1/jobs/{answer.json['id']}"
    run = answer.json["run"]
    assert (answer.json["state"], answer.json["kind"], answer.json["mode"]) == ("running", "fetch", "closed")
    assert answer.json["task_shard_count"] == 1
    assert (run["number"], run["state"], run["total"]) == (1, "running", 3)
    assert run["counts"] == {"pending": 3, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0, "unchanged": 0}

    job = await stored(server.system, answer)
    assert (job.run.last_batch, job.run.total, job.options.chunk_size) == (True, 3, 2)
    chunks = await references(server.system, job)
    assert [[ref.index for ref in chunk.refs] for chunk in chunks] == [[0, 1], [2]]
    assert {chunk.run for chunk in chunks} == {job.key}
    assert json.loads(chunks[1].refs[0].input) == spec["tasks"][2]


async def test_what_was_accepted_is_what_is_shown(server: Api) -> None:
    answer = await server.submit({"tasks": urls(3), "retention_days": 2})
    shown = (await server.get(answer.headers["location"])).json
    for field, value in answer.json.items():
        if field != "run":
            assert shown[field] == value
    assert answer.json["run"].items() <= shown["run"].items()
    assert shown["options"] == {"pace": "auto", "retention_days": 2.0}


async def test_tasks_are_readable_at_once(server: Api) -> None:
    answer = await server.submit({"tasks": urls(5)})
    job = await stored(server.system, answer)
    page = (await server.get(f"/v1/jobs/{job.job_id}/results")).json
    msgspec.convert(page, ResultsPage)
    expected = [task_id(job.run.run_id, index) for index in range(5)]
    assert [item["task_id"] for item in page["items"]] == expected
    assert {item["status"] for item in page["items"]} == {"pending"}
    assert sorted(item["input"] for item in page["items"]) == urls(5)
    one = (await server.get(f"/v1/jobs/{job.job_id}/tasks/{expected[0]}")).json
    assert one == page["items"][0]
    events = (await server.get(f"/v1/jobs/{job.job_id}/events")).json
    msgspec.convert(events, EventsPage)
    assert [(event["event"], event["data"]) for event in events["items"]] == [("job.accepted", {"total": 5})]


async def test_python_jobs(server: Api) -> None:
    answer = await server.submit({"kind": "python", "handler": "double", "tasks": [1, "two", None, {"a": [3]}]})
    assert answer.status == 201
    job = await stored(server.system, answer)
    assert (job.kind, job.options.handler) == ("python", "double")
    [chunk] = await references(server.system, job)
    assert [json.loads(ref.input) for ref in chunk.refs] == [1, "two", None, {"a": [3]}]


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ({"tasks": urls(1000)}, "packed"),
        ({"tasks": urls(1001), "result_layout": "object"}, "object"),
        ({"tasks": urls(1001)}, "packed"),
        ({"tasks": urls(1), "result_layout": "object"}, "object"),
    ],
    ids=["small", "large but asked for", "large", "asked for"],
)
async def test_the_layout_of_results(server: Api, spec: dict[str, Any], layout: str) -> None:
    answer = await server.submit(spec)
    assert answer.json["result_layout"] == layout


async def test_a_large_job_is_cut_into_messages_by_number_and_size(server: Api) -> None:
    tasks = [{"n": number, "pad": "é" * 20_000} for number in range(20)] + list(range(500))
    spec = {"kind": "python", "handler": "h", "tasks": tasks, "chunk_size": 100}
    answer = await server.submit(json.dumps(spec, ensure_ascii=False).encode())
    assert answer.status == 201
    chunks = await references(server.system, await stored(server.system, answer))
    assert [ref.index for chunk in chunks for ref in chunk.refs] == list(range(520))
    assert max(len(chunk.refs) for chunk in chunks) == 100
    assert max(len(msgspec.msgpack.encode(chunk)) for chunk in chunks) < 256 * 1024
    assert len(chunks) <= 11


async def test_jobs_are_listed_newest_first(server: Api, clock: JumpingClock) -> None:
    ids = []
    for number in range(5):
        ids.append((await server.submit({"tasks": urls(1), "name": f"{number}"})).json["id"])
        clock.advance(1)
    listed: list[str] = []
    cursor = ""
    for _ in range(3):
        page = (await server.get(f"/v1/jobs?limit=2{cursor}")).json
        msgspec.convert(page, JobsPage)
        listed += [item["id"] for item in page["items"]]
        cursor = f"&cursor={page['next_cursor']}"
    assert page["next_cursor"] is None
    assert listed == ids[::-1]


async def test_jobs_are_searched_on_the_server(server: Api, clock: JumpingClock) -> None:
    started = clock.now()
    ids = []
    for number in range(6):
        kind: dict[str, Any] = {"kind": "download"} if number == 3 else {}
        ids.append((await server.submit({"tasks": urls(1), "name": f"Prices {number % 2}", **kind})).json["id"])
        clock.advance(3600)
    await server.post(f"/v1/jobs/{ids[0]}/cancel")

    async def found(query: str) -> list[str]:
        page = (await server.get(f"/v1/jobs?{query}")).json
        msgspec.convert(page, JobsPage)
        return [item["id"] for item in page["items"]]

    assert await found("text=pRICES%201") == [ids[5], ids[3], ids[1]]
    assert await found(f"text={ids[2][4:]}") == [ids[2]]
    assert await found("state=cancelled") == [ids[0]]
    assert await found("state=active") == ids[:0:-1]
    assert await found("kind=download") == [ids[3]]
    after, before = (iso_text(started + hours * 3600) for hours in (1, 3))
    assert await found(f"created_after={after}&created_before={before}") == [ids[2], ids[1]]
    assert await found(f"created_after={after}&created_before={before}&text=s%201") == [ids[1]]
    first = (await server.get("/v1/jobs?text=prices&limit=4")).json
    assert [item["id"] for item in first["items"]] == ids[:1:-1]
    last = (await server.get(f"/v1/jobs?text=prices&limit=4&cursor={first['next_cursor']}")).json
    assert ([item["id"] for item in last["items"]], last["next_cursor"]) == (ids[1::-1], None)
    assert (await server.get("/v1/jobs?text=prices&limit=6")).json["next_cursor"] is None
    for wrong in (
        "state=done",
        "kind=x",
        "created_after=today",
        "created_before=2026-99-01T00:00:00Z",
        "schedule_id=x",
    ):
        assert (await server.get(f"/v1/jobs?{wrong}")).json["code"] == "invalid_field", wrong


async def test_a_search_over_jobs_is_bounded(server: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_search, "_ROWS", 2)
    monkeypatch.setattr(job_search, "_MAX_ROWS", 4)
    ids = [(await server.submit({"tasks": urls(1), "name": name})).json["id"] for name in ("wanted", *"123456")]
    page = (await server.get("/v1/jobs?text=wanted")).json
    assert (page["items"], page["read"]) == ([], 4)
    page = (await server.get(f"/v1/jobs?text=wanted&cursor={page['next_cursor']}")).json
    assert ([item["id"] for item in page["items"]], page["next_cursor"], page["read"]) == ([ids[0]], None, 3)


async def test_results_in_pages_and_filters(server: Api) -> None:
    answer = await server.submit({"tasks": urls(7)})
    job = await stored(server.system, answer)
    await end_all(server.system, job)
    path = f"/v1/jobs/{job.job_id}/results"
    walked: list[str] = []
    cursor = ""
    while True:
        page = (await server.get(f"{path}?limit=3{cursor}")).json
        msgspec.convert(page, ResultsPage)
        walked += [item["task_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = f"&cursor={page['next_cursor']}"
    assert walked == [task_id(job.run.run_id, index) for index in range(7)]

    async def indexes(query: str) -> list[int]:
        return sorted(item["index"] for item in (await server.get(f"{path}?{query}")).json["items"])

    assert await indexes("status=succeeded") == [0]
    assert await indexes("status=failed&error_code=http_500&http_status=500") == [1]
    assert await indexes("status=cancelled") == [2, 3, 4, 5, 6]
    assert await indexes("status=pending") == []
    assert await indexes("http_status=404") == []
    [failed] = (await server.get(f"{path}?status=failed")).json["items"]
    assert failed["error"] == {"code": "http_500", "message": "the target answered 500"}
    shown = (await server.get(f"/v1/jobs/{job.job_id}")).json
    msgspec.convert(shown, JobShape)
    assert shown["state"] == "completed"
    assert shown["run"]["counts"] == {
        "pending": 0,
        "running": 0,
        "succeeded": 1,
        "failed": 1,
        "cancelled": 5,
        "unchanged": 0,
    }
    assert shown["top_errors"] == [{"code": "http_500", "count": 1}]


async def test_a_body_is_a_download_of_no_type(server: Api) -> None:
    job = await stored(server.system, await server.submit({"tasks": urls(2)}))
    await end_all(server.system, job)
    [shown] = (await server.get(f"/v1/jobs/{job.job_id}/results?status=succeeded")).json["items"]
    body = await server.get(shown["body_url"])
    assert body.status == 200
    assert body.body == b"<script>alert(1)</script>"
    assert sha256(body.body).hexdigest() == shown["sha256"] == body.headers["etag"].strip('"')
    assert body.headers["content-type"] == "application/octet-stream"
    assert body.headers["content-disposition"].startswith('attachment; filename="0000000_')
    assert body.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in body.headers["content-security-policy"]
    assert body.headers["x-conveyor-content-type"] == "text/html"
    assert body.headers["content-length"] == str(len(body.body))
    failed = await server.get(f"/v1/jobs/{job.job_id}/tasks/{task_id(job.run.run_id, 1)}/body")
    assert (failed.status, failed.json["code"]) == (404, "no_body")


@pytest.mark.parametrize("content_type", ["text/html\r\nSet-Cookie: a=b", "text/\x00", "té", "x" * 300, ""])
async def test_a_hostile_content_type_stays_out_of_the_headers(server: Api, content_type: str) -> None:
    job = await stored(server.system, await server.submit({"tasks": urls(1)}))
    await server.system.blobs.put("results/x", b"hello")
    detail = ResultDetail(content_type=content_type, body=BodyRef("results/x", 5, sha256(b"hello").hexdigest()))
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await server.system.tasks.finish(job.key, [end])
    answer = await server.get(f"/v1/jobs/{job.job_id}/tasks/{task_id(job.run.run_id, 0)}/body")
    assert (answer.status, answer.body) == (200, b"hello")
    assert "x-conveyor-content-type" not in answer.headers
    assert "set-cookie" not in answer.headers


async def test_a_body_that_is_gone_is_an_error_of_ours(server: Api) -> None:
    job = await stored(server.system, await server.submit({"tasks": urls(1)}))
    detail = ResultDetail(body=BodyRef("results/gone", 5, "0" * 64))
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await server.system.tasks.finish(job.key, [end])
    answer = await server.get(f"/v1/jobs/{job.job_id}/tasks/{task_id(job.run.run_id, 0)}/body")
    assert (answer.status, answer.json["code"]) == (500, "body_damaged")
    assert b"gone" not in answer.body


async def test_the_events_of_one_task(server: Api) -> None:
    job = await stored(server.system, await server.submit({"tasks": urls(2)}))
    noted = [TaskEvent(index, 1.0, "task.retry", json.dumps({"code": "timeout"})) for index in (0, 1, 0)]
    await server.system.tasks.note(job.key, noted)
    path = f"/v1/jobs/{job.job_id}/events?task={task_id(job.run.run_id, 0)}"
    first = (await server.get(f"{path}&limit=1")).json
    msgspec.convert(first, EventsPage)
    rest = (await server.get(f"{path}&cursor={first['next_cursor']}")).json
    items = first["items"] + rest["items"]
    assert [(item["index"], item["event"], item["data"]) for item in items] == [
        (0, "task.retry", {"code": "timeout"})
    ] * 2
    assert rest["next_cursor"] is None
    unknown = await server.get(f"/v1/jobs/{job.job_id}/events?task={'0' * 64}")
    assert (unknown.status, unknown.json["code"]) == (404, "not_found")


async def test_everything_in_one_archive(server: Api) -> None:
    job = await stored(server.system, await server.submit({"tasks": urls(3)}))
    path = f"/v1/jobs/{job.job_id}/export"
    early = await server.get(path)
    assert (early.status, early.json["code"], early.json["state"]) == (409, "conflict", "running")
    partial = await server.get(f"{path}?partial=true")
    assert partial.status == 200
    await end_all(server.system, job)
    answer = await server.get(path)
    assert answer.headers["content-type"] == "application/zip"
    assert answer.headers["content-disposition"] == f'attachment; filename="{job.job_id}.zip"'
    with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
        assert archive.testzip() is None
        lines = [json.loads(line) for line in archive.read("manifest.jsonl").splitlines()]
        assert [(line["index"], line["status"]) for line in lines] == [
            (0, "succeeded"),
            (1, "failed"),
            (2, "cancelled"),
        ]
        assert archive.read(lines[0]["file"]) == b"<script>alert(1)</script>"


async def test_secrets_of_a_job_are_not_shown(server: Api) -> None:
    spec = {
        "tasks": urls(1),
        "headers": {"Authorization": "Bearer canary-1"},
        "gateway": {"url": "https://u:canary-2@gw.example/{url}", "headers": {"X-Key": "canary-3"}},
    }
    answer = await server.submit(spec)
    assert answer.status == 201, answer.body
    for path in ("/v1/jobs", answer.headers["location"], answer.headers["location"] + "/events"):
        shown = await server.get(path)
        assert b"canary" not in shown.body
    options = (await server.get(answer.headers["location"])).json["options"]
    assert options["headers"] == {"Authorization": "[hidden]"}
    job = await stored(server.system, answer)
    assert job.options.headers == {"Authorization": "Bearer canary-1"}


async def test_a_job_goes_when_its_time_is_over(server: Api, clock: JumpingClock) -> None:
    answer = await server.submit({"tasks": urls(1), "retention_days": 1})
    clock.advance(86_401)
    assert (await server.get(answer.headers["location"])).status == 200, "it has not finished"
    assert (await server.post(f"{answer.headers['location']}/cancel")).json["expires_at"] is not None
    clock.advance(86_401)
    gone = await server.get(answer.headers["location"])
    assert (gone.status, gone.json["code"]) == (404, "not_found")


async def test_the_same_request_again_gets_the_same_answer(server: Api) -> None:
    spec = json.dumps({"tasks": urls(3)}).encode()
    first = await server.submit(spec, headers={"idempotency-key": "k1"})
    assert "idempotency-replayed" not in first.headers
    await end_all(server.system, await stored(server.system, first))
    again = await server.submit(spec, headers={"idempotency-key": "k1"})
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["location"] == first.headers["location"]
    other = await server.submit(spec, headers={"idempotency-key": "k2"})
    assert other.json["id"] != first.json["id"]
    assert len((await server.get("/v1/jobs")).json["items"]) == 2


async def test_another_request_under_the_same_key_is_refused(server: Api) -> None:
    await server.submit({"tasks": urls(1)}, headers={"idempotency-key": "k1"})
    for body in (json.dumps({"tasks": urls(2)}).encode(), json.dumps({"tasks": urls(1)}).encode() + b" "):
        refused = await server.submit(body, headers={"idempotency-key": "k1"})
        assert (refused.status, refused.json["code"]) == (409, "idempotency_key_reused")
    assert len((await server.get("/v1/jobs")).json["items"]) == 1


async def test_keys_of_tenants_are_apart(server: Api) -> None:
    other = await server.as_tenant("other")
    first = await server.submit({"tasks": urls(1)}, headers={"idempotency-key": "k1"})
    second = await other.submit({"tasks": urls(2)}, headers={"idempotency-key": "k1"})
    assert (first.status, second.status) == (201, 201)
    assert first.json["id"] != second.json["id"]


async def test_a_key_is_free_again_after_a_day(server: Api, clock: JumpingClock) -> None:
    first = await server.submit({"tasks": urls(1)}, headers={"idempotency-key": "k1"})
    clock.advance(24 * 3600 - 60)
    assert (await server.submit({"tasks": urls(1)}, headers={"idempotency-key": "k1"})).body == first.body
    clock.advance(61)
    later = await server.submit({"tasks": urls(2)}, headers={"idempotency-key": "k1"})
    assert later.status == 201
    assert later.json["id"] != first.json["id"]


async def test_a_refused_request_does_not_take_its_key(server: Api) -> None:
    refused = await server.submit({"tasks": ["nonsense"]}, headers={"idempotency-key": "k1"})
    assert refused.status == 400
    assert (await server.submit({"tasks": urls(1)}, headers={"idempotency-key": "k1"})).status == 201


class Died(Exception):
    """A crash, as far as this process can have one."""


WHOLE = ["accept.before", "accept.after"]
STEPS = ["accept.tasks.before", "accept.tasks.after", "accept.job.before", "accept.job.after", "accept.send.before"]


@pytest.mark.usefixtures("disarm")
@pytest.mark.parametrize("point", [*WHOLE, *STEPS])
async def test_a_crash_leaves_all_or_nothing(server: Api, clock: JumpingClock, point: str) -> None:
    if (point in WHOLE) != (server.system.atomic_accept is not None):
        return

    def die(passed: str) -> None:
        if passed == point:
            raise Died

    faults.arm(die)
    spec = json.dumps({"tasks": urls(3)}).encode()
    crashed = await server.submit(spec, headers={"idempotency-key": "k1"})
    faults.arm(None)
    before = [item["id"] for item in (await server.get("/v1/jobs")).json["items"]]
    if not before:
        early = await server.submit(spec, headers={"idempotency-key": "k1"})
        assert (early.status, early.json["code"]) == (409, "idempotency_key_in_flight")
        clock.advance(server.system.settings.idempotency_lease_seconds)
    again = await server.submit(spec, headers={"idempotency-key": "k1"})
    assert again.status == 201
    after = [item["id"] for item in (await server.get("/v1/jobs")).json["items"]]
    assert after == [again.json["id"]]
    assert before == (after if "idempotency-replayed" in again.headers else [])
    job = await stored(server.system, again)
    assert (await server.system.tasks.recount(job.key)).ended == 0
    assert len(await server.system.tasks.unfinished(job.key, [0, 1, 2])) == 3
    assert crashed.status == (201 if point == "accept.send.before" else 500)


class Reluctant:
    """A queue that takes only some of what it is given, until it has refused a few times."""

    def __init__(self, queue: Queue, refusals: int) -> None:
        self._queue = queue
        self._refusals = refusals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        refused = list(range(0, len(messages), 2)) if self._refusals else []
        self._refusals -= 1 if self._refusals else 0
        await self._queue.send(queue, [message for at, message in enumerate(messages) if at not in refused])
        return refused


async def test_messages_that_were_not_taken_are_sent_again(system: System) -> None:
    if system.atomic_accept is not None:
        return
    submit = Submit(replace(system, queue=Reluctant(system.queue, 3)))  # type: ignore[arg-type]
    tasks = [msgspec.Raw(json.dumps(url).encode()) for url in urls(30)]
    accepted = await submit.submit(ACME, JobSpec(tasks=tasks, chunk_size=1))
    job = await system.records.jobs.job(ACME, JobId(accepted.subject))
    assert job is not None
    chunks = await references(system, job)
    assert sorted(ref.index for chunk in chunks for ref in chunk.refs) == list(range(30))


async def test_submit_itself_replays_too(system: System) -> None:
    submit = Submit(system)
    spec = JobSpec(tasks=[msgspec.Raw(b'"http://example.com/"')])
    key = IdempotentRequest("POST /v1/jobs", "k", "f")
    first = await submit.submit(ACME, spec, key)
    again = await submit.submit(ACME, spec, key)
    assert (again.replayed, again.subject, again.body) == (True, first.subject, first.body)
    page = await system.records.jobs.jobs(ACME, None, 10)
    assert [job.job_id for job in page.items] == [first.subject]
    assert page.items[0].state is RunState.RUNNING


async def test_the_page_of_the_api(server: Api) -> None:
    answer = await server.get("/v1/openapi.json", auth=False)
    assert answer.status == 200
    paths = answer.json["paths"]
    served = {route.path_format for route in application().routes}
    assert set(paths) == {path for path in served if not path.endswith("openapi.json")}
    body = paths["/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"kind", "tasks", "source", "mode", "concurrency", "gateway"} <= set(body["properties"])
    for path, methods in paths.items():
        for method, described in methods.items():
            assert described["summary"], path
            by_link = path.endswith("/content") or path.startswith(("/v1/bodies/", "/v1/extracted/"))
            needs_key = path == "/metrics" or (path.startswith("/v1") and not by_link)
            assert ("401" in described["responses"]) == needs_key, (method, path)
    assert b"$defs" not in answer.body


async def test_health(server: Api) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await server.get(path, auth=False)
        assert (answer.status, answer.json) == (200, {"status": "ok"})

"""Following a job: frames, coming again behind what was seen, and waiting."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from conveyor import errors
from conveyor.client import Client, Event, Job, Progress
from conveyor.client.client_session import ClientSession
from conveyor.client.event_frames import Frame, frames_of
from conveyor.client.io import drive
from tests.support.prepared_answers import Hurried, Said, Server, serving
from tests.unit.client.test_client import SHOWN

PATIENCE = 60.0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as told:
        yield told


@pytest.fixture
def io() -> Hurried:
    return Hurried()


@pytest.fixture
def job(server: Server, io: Hurried) -> Iterator[Job]:
    with Client(server.url, "cv_key") as client:
        client._session = ClientSession(io, server.url, "cv_key", PATIENCE)
        yield Job(client._session, SHOWN)


def frames(*pieces: bytes) -> list[Frame]:
    async def given() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def all_of_them() -> list[Frame]:
        return [frame async for frame in frames_of(given())]

    return drive(all_of_them())


def test_frames() -> None:
    text = b'retry: 2000\n\n: still here\n\nid: 1\nevent: a\ndata: {"x": 1}\n\n'
    text += b"data:one\ndata: two\r\n\r\nid: 3\nevent: cut"
    wanted = [
        Frame("message", "", None, 2000),
        Frame("a", '{"x": 1}', "1", None),
        Frame("message", "one\ntwo", None, None),
    ]
    assert frames(text) == wanted
    assert frames(*(text[at : at + 1] for at in range(len(text)))) == wanted
    assert frames(*(text[at : at + 7] for at in range(0, len(text), 7))) == wanted


def test_an_event_without_end() -> None:
    with pytest.raises(errors.ConveyorError, match="an event larger than"):
        frames(*[b"x" * 1_000_000] * 20)
    with pytest.raises(errors.ConveyorError, match="an event larger than"):
        frames(*[b"data: " + b"x" * 1_000_000 + b"\n"] * 20)


def event(name: str, number: int) -> bytes:
    shown = {"id": f"evt_{number}", "seq": number, "at": "2026-01-01T00:00:00.000Z", "event": name, "run_id": "run_1"}
    data = json.dumps({**shown, "index": None, "data": {"n": number}})
    return f"id: evt_{number}\nevent: {name}\ndata: {data}\n\n".encode()


def progress(done: int) -> bytes:
    counts = {"succeeded": done, "failed": 0, "cancelled": 0}
    shown = {"job_id": "job_1", "run_id": "run_1", "state": "running", "total": 9, "reason": None, "counts": counts}
    return f"event: progress\ndata: {json.dumps(shown)}\n\n".encode()


def streamed(*frames: bytes, cut: bool = False) -> Said:
    body = b"retry: 1500\n\n" + b"".join(frames)
    return Said(200, body, length=len(body) + (100 if cut else 0), headers={"Content-Type": "text/event-stream"})


ENDED = Said(204, b"")


def names(told: list[Event | Progress]) -> list[Any]:
    return [each.event if isinstance(each, Event) else each.counts.succeeded for each in told]


def test_a_stream_to_its_end(server: Server, job: Job, io: Hurried) -> None:
    server.answers = [streamed(event("job.accepted", 1), progress(4), b": still here\n\n", event("run.completed", 2))]
    server.answers += [ENDED]
    told = list(job.stream())
    assert names(told) == ["job.accepted", 4, "run.completed"]
    assert isinstance(told[0], Event)
    assert (told[0].id, told[0].data) == ("evt_1", {"n": 1})
    first, second = server.asked
    assert first.path == "/v1/jobs/job_1/stream"
    assert first.headers["accept"] == "text/event-stream"
    assert "last-event-id" not in first.headers
    assert second.headers["last-event-id"] == "evt_2"
    assert io.pauses == [], "nobody waits to hear that it has ended"


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "ended early"])
def test_a_stream_goes_on_behind_what_was_seen(server: Server, job: Job, io: Hurried, cut: bool) -> None:
    server.answers = [
        streamed(event("job.accepted", 1), progress(4), cut=cut),
        streamed(progress(4), progress(5), event("job.ingested", 2), cut=cut),
        streamed(cut=cut),
        streamed(progress(9), event("run.completed", 3)),
        ENDED,
    ]
    assert names(list(job.stream())) == ["job.accepted", 4, 5, "job.ingested", 9, "run.completed"]
    seen = [asked.headers.get("last-event-id") for asked in server.asked]
    assert seen == [None, "evt_1", "evt_2", "evt_2", "evt_3"]
    assert io.pauses.count(1.5) == 3, "as long as the server asked for"


def test_a_stream_over_a_restart(server: Server, job: Job) -> None:
    server.answers = [streamed(event("job.accepted", 1), cut=True), *[Said(None)] * 6]
    server.answers += [streamed(event("run.completed", 2)), ENDED]
    assert names(list(job.stream())) == ["job.accepted", "run.completed"]


def test_a_later_run_is_followed(server: Server, job: Job) -> None:
    server.answers = [streamed(event("run.completed", 2)), streamed(event("run.added", 3), event("run.failed", 4))]
    server.answers += [ENDED]
    assert names(list(job.stream())) == ["run.completed", "run.added", "run.failed"]


def test_events_of_a_newer_server(server: Server, job: Job) -> None:
    strange = b"event: strange\ndata: [1]\n\nevent: none\ndata: no json\n\n"
    server.answers = [streamed(strange, event("run.completed", 1)), ENDED]
    assert names(list(job.stream())) == ["run.completed"]


def test_a_server_that_never_says_anything(server: Server, job: Job) -> None:
    server.answers = [Said(200, b"")] * 100
    with pytest.raises(errors.ServerUnreachable):
        list(job.stream())
    assert len(server.asked) < 40


def test_too_many_streams(server: Server, job: Job, io: Hurried) -> None:
    refused = Said(429, b'{"code": "too_many_streams"}', headers={"Retry-After": "2"})
    server.answers = [refused, refused, streamed(event("run.completed", 1)), ENDED]
    assert names(list(job.stream())) == ["run.completed"]
    assert io.pauses == [2, 2]


def test_a_job_that_is_gone(server: Server, job: Job) -> None:
    server.answers = [streamed(event("job.accepted", 1)), Said(404, b'{"code": "not_found"}')]
    stream = job.stream()
    assert names([next(stream)]) == ["job.accepted"]
    with pytest.raises(errors.NotFound):
        next(stream)


def test_a_stream_that_is_left(server: Server, job: Job) -> None:
    server.answers = [streamed(event("job.accepted", 1), event("run.completed", 2))]
    for told in job.stream():
        assert names([told]) == ["job.accepted"]
        break
    assert len(server.asked) == 1


def shown(state: str, done: int) -> Said:
    run = {**SHOWN["run"], "counts": {"succeeded": done, "failed": 0, "cancelled": 0}}
    return Said(body=json.dumps({**SHOWN, "state": state, "run": run}).encode())


def test_waiting(server: Server, job: Job, io: Hurried) -> None:
    server.answers = [
        shown("ingesting", 0),
        shown("running", 1),
        Said(None),
        shown("running", 2),
        shown("completed", 3),
    ]
    seen: list[int] = []
    assert job.wait(progress=lambda now: seen.append(now.done)) is job
    assert seen == [0, 1, 2, 3]
    assert (job.state, job.ended, job.ok, job.done) == ("completed", True, True, 3)
    assert max(io.pauses) <= 1


def test_waiting_not_for_ever(server: Server, job: Job, io: Hurried) -> None:
    server.answers = [shown("running", 1)] * 50
    with pytest.raises(TimeoutError, match="running"):
        job.wait(timeout=10)
    assert io.monotonic() == pytest.approx(10)
    assert job.done == 1, "as it was seen last"

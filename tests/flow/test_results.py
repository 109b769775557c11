"""Pages of results, the public shape of a task, and bodies, over a real store."""

import asyncio
import os
from hashlib import sha256

import msgspec
import pytest

from conveyor.engines.tasks import TaskFilter
from conveyor.errors import BadCursor, BodyDamaged, NoBody
from conveyor.model import (
    BodyRef,
    InputJson,
    JobId,
    ResultDetail,
    RunId,
    RunKey,
    Task,
    TaskEnd,
    TaskError,
    TaskId,
    TaskSeed,
    TenantId,
    task_id,
)
from conveyor.read.results import body_ref, iso_time, read_body, result_page, stream_body, task_json
from conveyor.states import TaskStatus
from conveyor.system import System

RUN = RunKey(TenantId("acme"), JobId("job_1"), RunId("run_1"))
MIB = 1024 * 1024


async def seed(system: System, count: int) -> None:
    await system.tasks.put(
        RUN, [TaskSeed(index, InputJson(f'"https://example.com/{index}"')) for index in range(count)]
    )


async def finish(system: System, index: int, detail: ResultDetail, status: TaskStatus = TaskStatus.SUCCEEDED) -> Task:
    code = detail.error.code if detail.error else None
    at = 1_790_000_000.25
    await system.tasks.finish(RUN, [TaskEnd(index, status, 3, 200, code, msgspec.json.encode(detail).decode(), at)])
    found = await system.tasks.task(RUN, task_id(RUN.run_id, index))
    assert found is not None
    return found


@pytest.mark.parametrize(("count", "limit"), [(0, 10), (1, 10), (10, 10), (11, 10), (25, 10), (25, 1), (25, 25)])
async def test_pages_hold_every_task_once_in_order(system: System, count: int, limit: int) -> None:
    await seed(system, count)
    seen: list[TaskId] = []
    cursor: str | None = None
    pages = 0
    while True:
        page = await result_page(system.tasks, RUN, TaskFilter(), limit, cursor)
        seen += [task.task_id for task in page.items]
        pages += 1
        cursor = page.next_cursor
        if cursor is None:
            break
        assert len(page.items) == limit
    assert seen == sorted(task_id(RUN.run_id, index) for index in range(count))
    assert pages == max(-(-count // limit), 1), "the last page is never empty"


async def test_a_filter_holds_over_pages(system: System) -> None:
    await seed(system, 30)
    for index in range(0, 30, 3):
        await finish(system, index, ResultDetail(error=TaskError("timeout", "late")), TaskStatus.FAILED)
    where = TaskFilter(status=TaskStatus.FAILED, error_code="timeout")
    first = await result_page(system.tasks, RUN, where, 7, None)
    second = await result_page(system.tasks, RUN, where, 7, first.next_cursor)
    assert sorted(task.index for task in first.items + second.items) == list(range(0, 30, 3))
    assert second.next_cursor is None


@pytest.mark.parametrize("cursor", ["", "x", "sh:W10", "0" * 63, "0" * 65, "../../etc"])
async def test_a_bad_cursor_is_refused(system: System, cursor: str) -> None:
    with pytest.raises(BadCursor):
        await result_page(system.tasks, RUN, TaskFilter(), 10, cursor)


async def test_the_public_shape_of_a_task(system: System) -> None:
    await seed(system, 2)
    ref = BodyRef("r/seg", 5, sha256(b"hello").hexdigest(), 3)
    headers = [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")]
    detail = ResultDetail(
        content_type="text/plain", final_url="https://example.com/end", headers=headers, body=ref, elapsed=0.5
    )
    task = await finish(system, 0, detail)
    shown = msgspec.json.decode(msgspec.json.encode(task_json(task, "/v1/body")))
    assert shown == {
        "task_id": task_id(RUN.run_id, 0),
        "dead_lettered": False,
        "index": 0,
        "input": "https://example.com/0",
        "status": "succeeded",
        "attempts": 3,
        "http_status": 200,
        "error": None,
        "content_type": "text/plain",
        "size": 5,
        "sha256": sha256(b"hello").hexdigest(),
        "final_url": "https://example.com/end",
        "headers": [["Set-Cookie", "a=1"], ["Set-Cookie", "b=2"]],
        "elapsed": 0.5,
        "finished_at": "2026-09-21T14:13:20.250Z",
        "body_url": "/v1/body",
        "unchanged": False,
    }
    pending = await system.tasks.task(RUN, task_id(RUN.run_id, 1))
    assert pending is not None
    waiting = msgspec.json.decode(msgspec.json.encode(task_json(pending, "/v1/body")))
    assert waiting.keys() == shown.keys()
    assert (waiting["status"], waiting["attempts"], waiting["input"]) == ("pending", 0, "https://example.com/1")
    rest = waiting.keys() - {"task_id", "index", "input", "status", "attempts", "dead_lettered", "unchanged"}
    assert {waiting[name] for name in rest} == {None}, "no address for a body that is not there"


async def test_an_error_is_shown_with_its_code(system: System) -> None:
    await seed(system, 1)
    task = await finish(system, 0, ResultDetail(error=TaskError("timeout", "late")), TaskStatus.FAILED)
    assert task_json(task, None)["error"] == TaskError("timeout", "late")
    bare = msgspec.structs.replace(task, detail=ResultDetail())
    assert task_json(bare, None)["error"] == TaskError("timeout", "")


@pytest.mark.parametrize(
    ("at", "shown"),
    [(None, None), (0.0, "1970-01-01T00:00:00.000Z"), (1_790_000_000.9999, "2026-09-21T14:13:20.999Z")],
)
def test_times(at: float | None, shown: str | None) -> None:
    assert iso_time(at) == shown


def task_with(ref: BodyRef | None) -> Task:
    return Task(TaskId("0" * 64), 0, msgspec.Raw(b"0"), TaskStatus.SUCCEEDED, detail=ResultDetail(body=ref))


@pytest.mark.parametrize("size", [0, 1, 1000, 300_000, 2 * MIB])
@pytest.mark.parametrize("offset", [-1, 0, 700_000])
async def test_a_body_is_read_whole_and_in_pieces(system: System, size: int, offset: int) -> None:
    body = os.urandom(size)
    around = (b"", b"") if offset < 0 else (os.urandom(offset), b"of somebody else" * 50_000)
    await system.blobs.put("r/x", around[0] + body + around[1])
    task = task_with(BodyRef("r/x", size, sha256(body).hexdigest(), offset))
    assert await read_body(system.blobs, task) == body
    pieces = [piece async for piece in stream_body(system.blobs, body_ref(task))]
    assert b"".join(pieces) == body
    assert all(pieces)


async def test_no_body(system: System) -> None:
    with pytest.raises(NoBody):
        await read_body(system.blobs, task_with(None))
    with pytest.raises(NoBody):
        body_ref(task_with(None))


@pytest.mark.parametrize("offset", [-1, 2])
@pytest.mark.parametrize("stored", [None, b"", b"..hell", b"..jello...", b"xxhello."])
async def test_a_damaged_or_missing_body_is_an_error(system: System, offset: int, stored: bytes | None) -> None:
    if stored is not None:
        await system.blobs.put("r/x", stored if offset >= 0 else stored[2:])
    sound = offset >= 0 and stored == b"xxhello."
    task = task_with(BodyRef("r/x", 5, sha256(b"hello").hexdigest(), offset))

    async def streamed() -> bytes:
        return b"".join([piece async for piece in stream_body(system.blobs, body_ref(task))])

    if sound:
        assert await asyncio.gather(read_body(system.blobs, task), streamed()) == [b"hello", b"hello"]
        return
    for read in (read_body(system.blobs, task), streamed()):
        with pytest.raises(BodyDamaged, match=r"A stored body is (damaged|missing)"):
            await read

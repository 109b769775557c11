"""References: from tasks to messages, and all of them sent."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.engines.queue import Outgoing, Queue, QueueName
from conveyor.jobs.chunks import MAX_CHUNK_BYTES, decode, encode, messages, send_all
from conveyor.model import (
    Chunk,
    IngestJob,
    IngestRange,
    InputJson,
    JobId,
    RunId,
    RunKey,
    TaskRef,
    TaskSeed,
    TenantId,
)
from tests.support.clocks import ManualClock

RUN = RunKey(TenantId("acme"), JobId("job_1"), RunId("run_1"), 8)
RUN_IDS = (RUN.tenant, RUN.job_id, RUN.run_id)
QUEUE = QueueName("q")


class Picky:
    """A queue that takes what it is told to take of each batch, as SQS may."""

    def __init__(self, *refusals: set[int]) -> None:
        self.refusals = list(refusals)
        self.taken: list[Outgoing] = []
        self.calls = 0

    async def send(self, queue: QueueName, batch: Sequence[Outgoing]) -> list[int]:
        assert queue == QUEUE
        self.calls += 1
        refused = self.refusals.pop(0) if self.refusals else set()
        self.taken += [one for position, one in enumerate(batch) if position not in refused]
        return sorted(refused)


@pytest.mark.parametrize("chunk_size", [1, 3, 100, 1000])
def test_every_task_is_in_one_chunk_in_order(chunk_size: int) -> None:
    seeds = [TaskSeed(index, InputJson(f'"input {index}"')) for index in range(250)]
    chunks = [decode(one.body) for one in messages(RUN, seeds, chunk_size)]
    assert [(ref.index, ref.input) for chunk in chunks for ref in chunk.refs] == [(s.index, s.input) for s in seeds]
    assert all(0 < len(chunk.refs) <= chunk_size for chunk in chunks)
    assert {chunk.run for chunk in chunks} == {RUN}
    assert {ref.attempt for chunk in chunks for ref in chunk.refs} == {1}
    assert len(chunks) == -(-250 // chunk_size)


def test_no_tasks_no_messages() -> None:
    assert messages(RUN, [], 100) == []


@given(sizes=st.lists(st.sampled_from([1, 1000, 60_000, 150_000, 262_144]), max_size=12), wide=st.booleans())
def test_a_message_is_small_or_carries_one_task(sizes: list[int], wide: bool) -> None:
    char = "ü" if wide else "u"
    seeds = [TaskSeed(i, InputJson(json.dumps(char * size, ensure_ascii=False))) for i, size in enumerate(sizes)]
    sent = messages(RUN, seeds, 100)
    assert [ref.index for one in sent for ref in decode(one.body).refs] == list(range(len(sizes)))
    for one in sent:
        assert len(one.body) <= MAX_CHUNK_BYTES + 1000 or len(decode(one.body).refs) == 1


def test_a_chunk_survives_the_wire() -> None:
    chunk = Chunk(RUN, [TaskRef(5, InputJson('{"url": "http://ü/\\u0000"}'), 3)])
    sent = encode(chunk, 1.5)
    assert sent.delay == 1.5
    assert decode(sent.body) == chunk


def test_a_newer_chunk_with_more_fields_is_still_read() -> None:
    """Messages are in flight while a deploy goes on."""
    body = msgspec.msgpack.encode(
        [list(msgspec.structs.astuple(RUN)), [[0, '"a"', 1, 0, "new"]], 2, False, "", "", 0, 0.0, "new"]
    )
    assert decode(body).refs == [TaskRef(0, InputJson('"a"'))]
    older = msgspec.msgpack.encode([list(msgspec.structs.astuple(RUN)), [[0, '"a"']]])
    assert decode(older) == Chunk(RUN, [TaskRef(0, InputJson('"a"'))])


def test_a_reference_without_a_shard_count_is_unsharded() -> None:
    """From before there were shards; it has no version either."""
    oldest = msgspec.msgpack.encode([["acme", "job_1", "run_1"], [[0, '"a"']]])
    unsharded = RunKey(TenantId("acme"), JobId("job_1"), RunId("run_1"), 1)
    assert decode(oldest) == Chunk(unsharded, [TaskRef(0, InputJson('"a"'))], version=1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"op": "ingest_job"}, IngestJob(*RUN_IDS)),
        ({"op": "ingest_range", "number": 3}, IngestRange(*RUN_IDS, 3)),
        ({"op": "ingest_job", "version": 1, "new": "something"}, IngestJob(*RUN_IDS)),
    ],
    ids=["job", "range", "newer"],
)
def test_a_control_message_without_a_version_is_of_the_first(more: Any, message: IngestJob | IngestRange) -> None:
    body = msgspec.json.encode({"tenant": "acme", "job_id": "job_1", "run_id": "run_1", **more})
    assert msgspec.json.decode(body, type=IngestJob | IngestRange) == message


@pytest.mark.parametrize("body", [b"", b"\xff", b"[]", msgspec.msgpack.encode({"a": 1})])
def test_what_is_not_a_chunk_is_an_error(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(body)


async def sending(queue: Picky, clock: ManualClock, count: int) -> asyncio.Task[None]:
    outgoing = [Outgoing(b"%d" % number) for number in range(count)]
    task = asyncio.create_task(send_all(cast(Queue, cast(Any, queue)), QUEUE, outgoing, clock))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_all_taken_is_one_call() -> None:
    queue = Picky()
    await (await sending(queue, ManualClock(), 10))
    assert queue.calls == 1
    assert len(queue.taken) == 10


async def test_what_was_not_taken_is_sent_again_alone() -> None:
    clock, queue = ManualClock(), Picky({0, 7, 9}, {1})
    task = await sending(queue, clock, 10)
    assert queue.calls == 1
    clock.advance(0.05)
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)
    assert queue.calls == 2
    clock.advance(0.1)
    await asyncio.wait_for(task, 5)
    assert queue.calls == 3
    assert sorted(one.body for one in queue.taken) == sorted(b"%d" % number for number in range(10))


async def test_it_goes_on_as_long_as_it_takes_with_bounded_pauses() -> None:
    clock, queue = ManualClock(), Picky(*[{0}] * 20)
    task = await sending(queue, clock, 1)
    for calls in range(1, 21):
        assert queue.calls == calls
        assert (clock.next_wake() or 0) <= 5.0
        clock.advance(5.0)
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.wait_for(task, 5)
    assert len(queue.taken) == 1


async def test_nothing_to_send_is_no_call() -> None:
    queue = Picky()
    await (await sending(queue, ManualClock(), 0))
    assert queue.calls == 0

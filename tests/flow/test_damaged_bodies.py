"""Bodies that the disk changed or lost: nobody gets them as good, and everybody is told."""

import os
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import BodyDamaged
from conveyor.jobs.block_sums import BLOCK_BYTES, CHECKED_WHOLE, block_sums
from conveyor.jobs.body_coding import deflate
from conveyor.model import BodyRef, Job, JobId, ResultDetail, TaskEnd, TenantId, piece_key, task_id
from conveyor.process.executors.download.pieces import Pieces
from conveyor.read.results import stream_body, stream_range
from conveyor.states import TaskStatus
from tests.support.api import Api, raw
from tests.support.places import quick_place

MIB = 1024 * 1024
ACME = TenantId("acme")
LONG = CHECKED_WHOLE + 3 * MIB + 5
KINDS = ["inline", "segment", "deflated", "object", "pieces"]


async def stored(server: Api, kind: str, body: bytes, *, with_sums: bool = False) -> tuple[str, BodyRef, Path]:
    """A finished task with this body; the path of the body's route, its reference, and the file that holds it."""
    job_id = (await server.submit({"tasks": ["http://example.com/"]})).json["id"]
    job = await server.system.records.jobs.job(ACME, JobId(job_id))
    assert isinstance(job, Job)
    key, digest = f"results/acme/{job_id}/stored", sha256(body).hexdigest()
    ref = BodyRef(key, len(body), digest, sums=block_sums(body) if with_sums else None)
    data: bytes = body
    if kind == "inline":
        ref, data = BodyRef("", len(body), digest, inline=body[:-1] + b"?"), b""
    elif kind == "segment":
        ref, data = BodyRef(key, len(body), digest, offset=3), b"abc" + body
    elif kind == "deflated":
        smaller = deflate(body)
        assert smaller is not None
        ref, data = BodyRef(key, len(body), digest, offset=0, stored=smaller.stored), smaller.data
    elif kind == "pieces":
        size = len(body) // 2 + 1
        ref = BodyRef(key, len(body), digest, piece=size)
        await server.system.blobs.put(piece_key(key, 1), body[size:])
        key, data = piece_key(key, 0), body[:size]
    await server.system.blobs.put(key, data)
    detail = ResultDetail(body=ref, content_type="image/png")
    end = TaskEnd(0, TaskStatus.SUCCEEDED, 1, 200, None, msgspec.json.encode(detail).decode(), 1.0)
    await server.system.tasks.finish(job.key, [end])
    path = f"/v1/jobs/{job_id}/tasks/{task_id(job.run.run_id, 0)}/body"
    return path, ref, server.system.settings.data / "blobs" / key


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_small_body_is_checked_before_it_is_sent(server: Api, kind: str, damage: str) -> None:
    path, _, file = await stored(server, kind, b"one page after the other " * 100)
    if damage == "gone":
        file.unlink()
    elif damage == "short":
        os.truncate(file, 3)
    elif kind != "inline":
        flip(file, len(file.read_bytes()) // 2)
    for headers in ({}, {"range": "bytes=1-2"}, {"accept-encoding": "gzip"}):
        answer = await server.get(path, headers=headers)
        assert (answer.status, answer.json["code"]) == (500, "body_damaged")
        assert "conveyor rerun JOB --damaged" in answer.json["detail"]


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
@pytest.mark.parametrize("kind", ["object", "pieces"])
async def test_a_long_body_never_ends_cleanly(server: Api, kind: str, damage: str) -> None:
    path, ref, file = await stored(server, kind, os.urandom(3 * MIB))
    second = file if kind == "object" else file.with_name("000001")
    if damage == "flipped":
        flip(second, -1)
    elif damage == "short":
        os.truncate(second, second.stat().st_size - 1)
    else:
        second.unlink()
    request = (
        f"GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {server.key}\r\nconnection: close\r\n\r\n"
    )
    received = await raw(server.address, request.encode())
    head, _, body = received.partition(b"\r\n\r\n")
    if damage == "gone" and kind == "object":
        assert head.startswith(b"HTTP/1.1 500 ")
        assert b'"body_damaged"' in body
    else:
        assert head.startswith(b"HTTP/1.1 200 ")
        assert len(body) < ref.length, "a client that counts sees that it is cut"
    answer = await server.get(path, headers={"range": "bytes=0-9"})
    assert (answer.status, answer.json["code"]) == (500, "body_damaged")


async def test_the_last_piece_of_a_long_body_comes_after_its_check() -> None:
    body = os.urandom(3 * MIB)
    with quick_place() as place:
        blobs = LocalBlobs(place)
        await blobs.put("results/long", body)
        ref = BodyRef("results/long", len(body), sha256(body).hexdigest())
        assert b"".join([piece async for piece in stream_body(blobs, ref)]) == body
        flip(place / "results/long", 0)
        got = b""
        with pytest.raises(BodyDamaged):
            async for piece in stream_body(blobs, ref):
                got += piece
        assert len(got) < len(body)
        with pytest.raises(BodyDamaged):
            await anext(stream_range(blobs, ref, 2 * MIB, 2 * MIB + 1))


async def read_range(blobs: LocalBlobs, ref: BodyRef, start: int, end: int) -> bytes:
    return b"".join([piece async for piece in stream_range(blobs, ref, start, end)])


@pytest.mark.parametrize("kind", ["object", "pieces", "one piece"])
async def test_a_range_of_a_long_body_is_checked_by_block(kind: str) -> None:
    body = os.urandom(LONG)
    with quick_place() as place:
        blobs = LocalBlobs(place)
        if kind == "object":
            await blobs.put("results/long", body)
            ref = BodyRef("results/long", len(body), sha256(body).hexdigest(), sums=block_sums(body))
            file, block, place_in_file = place / "results/long", BLOCK_BYTES, 5 * BLOCK_BYTES + 9
        else:
            size = 16 * MIB if kind == "one piece" else 4 * MIB
            pieces = Pieces(blobs, "results/file", size)
            await pieces.take(memoryview(body))
            ref = await pieces.seal()
            name = "000000" if kind == "one piece" else "000001"
            file, block, place_in_file = place / "results/file" / name, size, 1 * MIB
        assert ref.sums is not None
        assert ref.sums.size == block
        for start, end in ((0, 1), (0, LONG), (min(LONG, block) - 1, min(LONG, block + 1)), (LONG - 7, LONG)):
            assert await read_range(blobs, ref, start, end) == body[start:end]
        flip(file, place_in_file)
        damaged = 5 * BLOCK_BYTES if kind == "object" else 0 if kind == "one piece" else 4 * MIB
        # Another byte of the same block: nothing of it is sent.
        with pytest.raises(BodyDamaged):
            await anext(stream_range(blobs, ref, damaged + 3, damaged + 5))
        if kind != "one piece":
            assert await read_range(blobs, ref, 0, damaged) == body[:damaged]
            assert await read_range(blobs, ref, damaged + block, LONG) == body[damaged + block :]
            got = b""
            with pytest.raises(BodyDamaged):
                async for piece in stream_range(blobs, ref, 0, LONG):
                    got += piece
            assert got == body[:damaged], "it ends with the last good block"


async def test_a_download_that_was_resumed_has_all_checksums() -> None:
    body = os.urandom(LONG)
    with quick_place() as place:
        blobs = LocalBlobs(place)
        first = Pieces(blobs, "results/file", 4 * MIB)
        await first.take(memoryview(body)[: 5 * MIB])
        await first.settle()
        await first.leave()
        second = Pieces(blobs, "results/file", 4 * MIB)
        await second.find(len(body))
        await second.take(memoryview(body)[second.offset :])
        ref = await second.seal()
        assert ref.sums is not None
        assert len(ref.sums.crcs) == 4 * 3
        assert await read_range(blobs, ref, 0, LONG) == body
        flip(place / "results/file" / "000000", 0)
        with pytest.raises(BodyDamaged):
            await read_range(blobs, ref, 9, 10)


async def test_a_damaged_range_of_a_long_body_is_an_error_in_the_api(server: Api) -> None:
    body = os.urandom(LONG)
    path, _, file = await stored(server, "object", body, with_sums=True)
    answer = await server.get(path, headers={"range": f"bytes={LONG - 3}-"})
    assert (answer.status, answer.body) == (206, body[-3:])
    flip(file, LONG - 1)
    answer = await server.get(path, headers={"range": f"bytes={LONG - 3}-{LONG - 2}"})
    assert (answer.status, answer.json["code"]) == (500, "body_damaged")
    assert (await server.get(path, headers={"range": "bytes=0-9"})).body == body[:10]

"""Any bytes survive their encoding, and any change of the stored bytes is found."""

import asyncio
import zlib
from contextlib import suppress
from hashlib import sha256

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.clock import SystemClock
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import BodyDamaged
from conveyor.jobs.body_coding import (
    DeflatedBody,
    check_deflated,
    deflate,
    inflate,
    inflate_all,
    is_compressed,
    is_worth_deflating,
)
from conveyor.model import BodyRef, ResultDetail, ResultLayout, Task, TaskId
from conveyor.states import TaskStatus
from tests.support.body_readers import all_readings
from tests.support.make_jobs import make_job
from tests.support.places import quick_place

# Repeated, so that many of them shrink.
BODIES = st.builds(lambda part, times: part * times, st.binary(max_size=3000), st.integers(1, 40))


def ref_of(body: bytes, deflated: DeflatedBody | None, offset: int = 0) -> BodyRef:
    stored = None if deflated is None else deflated.stored
    return BodyRef("results/seg", len(body), sha256(body).hexdigest(), offset, stored=stored)


@given(body=BODIES)
def test_a_body_comes_back(body: bytes) -> None:
    deflated = deflate(body)
    if deflated is None:
        return
    assert len(deflated.data) <= len(body) - len(body) // 16
    assert zlib.decompress(deflated.data, -zlib.MAX_WBITS) == body
    assert (deflated.stored.crc, deflated.stored.stored_crc) == (zlib.crc32(body), zlib.crc32(deflated.data))
    assert inflate(ref_of(body, deflated), memoryview(deflated.data)) == body


@given(bodies=st.lists(BODIES, min_size=1, max_size=6), change=st.integers(1, 255), at=st.integers(0, 10**6))
def test_bodies_come_back_together(bodies: list[bytes], change: int, at: int) -> None:
    pairs = [(ref_of(body, deflated), deflated.data) for body in bodies if (deflated := deflate(body)) is not None]
    if not pairs:
        return
    assert [bytes(body) for body in inflate_all(pairs)] == [body for body in bodies if deflate(body) is not None]
    ref, data = pairs[at % len(pairs)]
    assert ref.stored is not None
    changed = bytearray(data)
    changed[at % len(data)] ^= change
    lies = msgspec.structs.replace(ref.stored, stored_crc=zlib.crc32(changed))
    wrong_crc = msgspec.structs.replace(ref.stored, crc=ref.stored.crc ^ change)
    for wrong in (
        (ref, bytes(changed)),
        (ref, data[:-1]),
        (msgspec.structs.replace(ref, stored=wrong_crc), data),
        (msgspec.structs.replace(ref, length=ref.length + change), data),
    ):
        pairs[at % len(pairs)] = wrong
        with pytest.raises(BodyDamaged, match="A stored body is damaged"):
            inflate_all(pairs)
    # Stored bytes with a fitting CRC-32: they may differ in bits that nobody reads.
    pairs[at % len(pairs)] = (msgspec.structs.replace(ref, stored=lies), bytes(changed))
    with suppress(BodyDamaged):
        assert sha256(inflate_all(pairs)[at % len(pairs)]).hexdigest() == ref.sha256


@given(body=BODIES, change=st.integers(1, 255), place=st.integers(0, 10**6))
def test_a_changed_byte_is_found(body: bytes, change: int, place: int) -> None:
    deflated = deflate(body)
    if deflated is None:
        return
    data = bytearray(deflated.data)
    data[place % len(data)] ^= change
    ref = ref_of(body, deflated)
    for wrong in (bytes(data), deflated.data[:-1], deflated.data + b"\0", b""):
        for check in (check_deflated, inflate):
            with pytest.raises(BodyDamaged, match="A stored body is damaged"):
                check(ref, wrong)


def test_a_wrong_crc_of_the_body_is_found() -> None:
    body = b"one page after the other " * 100
    deflated = deflate(body)
    assert deflated is not None
    wrong = DeflatedBody(deflated.data, msgspec.structs.replace(deflated.stored, crc=1))
    with pytest.raises(BodyDamaged, match="wrong CRC-32"):
        inflate(ref_of(body, wrong), deflated.data)
    with pytest.raises(BodyDamaged, match="wrong CRC-32"):
        inflate(ref_of(body + b"x", deflated), deflated.data)
    rubbish = b"\xff" * 50
    lies = deflated.stored.__class__("deflate", 50, 0, zlib.crc32(rubbish))
    with pytest.raises(BodyDamaged, match="does not inflate"):
        inflate(ref_of(body, DeflatedBody(rubbish, lies)), rubbish)


@settings(deadline=None, max_examples=25)
@given(bodies=st.lists(BODIES, min_size=1, max_size=5), rubbish=st.binary(max_size=20))
def test_every_reader_gives_the_same_bytes(bodies: list[bytes], rubbish: bytes) -> None:
    """Whatever is in a segment before and between them."""

    async def read() -> dict[str, list[bytes]]:
        data, tasks = bytearray(), []
        for index, body in enumerate(bodies):
            data += rubbish
            deflated = deflate(body)
            detail = ResultDetail(body=ref_of(body, deflated, len(data)))
            tasks.append(Task(TaskId(f"{index:064d}"), index, msgspec.Raw(b"0"), TaskStatus.SUCCEEDED, detail=detail))
            data += body if deflated is None else deflated.data
        with quick_place() as place:
            blobs = LocalBlobs(place)
            await blobs.put("results/seg", data + rubbish)
            try:
                return await all_readings(blobs, tasks)
            finally:
                blobs.close()

    for reader, got in asyncio.run(read()).items():
        assert got == bodies, reader


@pytest.mark.parametrize(
    ("content_type", "shrinks"),
    [
        (None, True),
        ("", True),
        ("text/html; charset=utf-8", True),
        ("Application/JSON", True),
        ("image/svg+xml", True),
        ("image/bmp", True),
        ("application/pdf", True),
        ("image/png", False),
        (" IMAGE/JPEG;q=1", False),
        ("video/mp4", False),
        ("font/woff2", False),
        ("application/zip", False),
        ("application/gzip", False),
    ],
)
def test_types_that_are_worth_a_try(content_type: str | None, shrinks: bool) -> None:
    job = make_job(SystemClock(), layout=ResultLayout.PACKED)
    assert is_compressed(content_type) is not shrinks
    assert is_worth_deflating(job, 512, content_type) is shrinks
    assert is_worth_deflating(job, 1024 * 1024, content_type) is shrinks
    for length in (0, 511, 1024 * 1024 + 1):
        assert not is_worth_deflating(job, length, content_type), "it is in no segment"
    objects = make_job(SystemClock(), layout=ResultLayout.OBJECT)
    assert not is_worth_deflating(objects, 1000, content_type)

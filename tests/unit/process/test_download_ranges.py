"""What an answer to a request for the rest of a file is, and how files are cut into pieces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.egress.failures import Failure
from conveyor.egress.responses import ResponseHead
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.process.executors.download.pieces import Pieces, piece_size
from conveyor.process.executors.download.ranges import (
    RemoteFile,
    ResumeDecision,
    judge,
    rest_headers,
    validator_of,
)
from tests.support.places import quick_place

KIB = 1024
FILE = RemoteFile("k", 100, '"one"', 1000)


def head(status: int, **fields: str) -> ResponseHead:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    return ResponseHead(status, list(named.items()), named)


def test_what_is_asked_for() -> None:
    assert rest_headers(FILE, 10) == (("range", "bytes=10-"), ("if-range", '"one"'))


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"content_range": "bytes 10-999/1000", "etag": '"one"'}, ResumeDecision.REST),
        ({"content_range": "bytes 10-999/1000"}, ResumeDecision.REST),
        ({"content_range": "BYTES 10-500/1000", "etag": '"one"'}, ResumeDecision.REST),
        ({"content_range": "bytes 11-999/1000", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 9-999/1000", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-999/1001", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-999/*", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-1000/1000", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-9/1000", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "10-999/1000", "etag": '"one"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-999/1000", "etag": '"two"'}, ResumeDecision.USELESS),
        ({"content_range": "bytes 10-999/1000", "etag": '"one"', "content_encoding": "gzip"}, ResumeDecision.USELESS),
        ({}, ResumeDecision.USELESS),
    ],
)
def test_a_206(fields: dict[str, str], verdict: ResumeDecision) -> None:
    assert judge(FILE, 10, head(206, **fields)) is verdict


def test_other_answers() -> None:
    assert judge(FILE, 10, head(200)) is ResumeDecision.WHOLE
    assert judge(FILE, 10, head(416)) is ResumeDecision.USELESS
    for status in (204, 304, 404, 500):
        with pytest.raises(Failure) as caught:
            judge(FILE, 10, head(status))
        assert caught.value.error.code == f"http_{status}"
    # The file from its start: the transfer decodes it.
    assert judge(FILE, 10, head(200, content_encoding="br")) is ResumeDecision.WHOLE
    unknown = RemoteFile("k", 100, '"one"')
    assert judge(unknown, 10, head(206, content_range="bytes 10-99/100")) is ResumeDecision.REST


@pytest.mark.parametrize(
    ("fields", "validator"),
    [
        ({"etag": '"x"'}, '"x"'),
        ({"etag": '""'}, '""'),
        ({"etag": 'W/"x"'}, None),
        ({"etag": "x"}, None),
        ({"etag": '"a"b"'}, None),
        ({"etag": '"x"', "last_modified": "whatever"}, '"x"'),
        ({"etag": 'W/"x"', "last_modified": "Sun, 15 Nov 2026 10:00:00 GMT"}, None),
        ({"last_modified": "Sun, 15 Nov 2026 10:00:00 GMT"}, None),
        (
            {"last_modified": "Sun, 15 Nov 2026 10:00:00 GMT", "date": "Sun, 15 Nov 2026 10:01:00 GMT"},
            "Sun, 15 Nov 2026 10:00:00 GMT",
        ),
        ({"last_modified": "Sun, 15 Nov 2026 10:00:30 GMT", "date": "Sun, 15 Nov 2026 10:01:00 GMT"}, None),
        ({"last_modified": "yesterday", "date": "Sun, 15 Nov 2026 10:01:00 GMT"}, None),
        ({}, None),
    ],
)
def test_what_says_that_a_file_is_the_same(fields: dict[str, str], validator: str | None) -> None:
    assert validator_of(head(200, **fields)) == validator


@given(st.one_of(st.none(), st.integers(0, 1 << 45)), st.integers(64 * KIB, 64 * KIB * KIB))
def test_pieces_are_neither_many_nor_large(total: int | None, largest: int) -> None:
    size = piece_size(total, largest)
    assert 0 < size <= largest
    if total is not None and size < largest:
        assert -(-total // size) <= 192


@given(
    parts=st.lists(st.binary(max_size=250), max_size=12),
    stops=st.sets(st.integers(0, 11)),
)
async def test_a_file_survives_being_left_anywhere(parts: list[bytes], stops: set[int]) -> None:
    """Taken in parts of any size, and left and found again between some of them, it is the same file."""
    from hashlib import sha256

    whole = b"".join(parts)
    with quick_place() as place:
        blobs = LocalBlobs(place)
        pieces = Pieces(blobs, "results/x/file_1", 100)
        at = 0
        for number, part in enumerate(parts):
            want = at + len(part)
            await pieces.take(memoryview(whole[pieces.offset : want]))
            at = want
            if number in stops:
                await pieces.leave()
                pieces = Pieces(blobs, "results/x/file_1", 100)
                await pieces.find(len(whole))
                assert pieces.offset <= at
                assert pieces.offset % 100 == 0
        await pieces.take(memoryview(whole[pieces.offset :]))
        ref = await pieces.seal()
        assert (ref.length, ref.sha256) == (len(whole), sha256(whole).hexdigest())
        # Found again after its end, nothing is missing.
        found = Pieces(blobs, "results/x/file_1", 100)
        await found.find(len(whole))
        assert found.offset == len(whole) or not whole
        assert await found.seal() == ref


async def test_a_piece_that_can_not_be_read_back_spoils_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    with quick_place() as place:
        blobs = LocalBlobs(place)
        pieces = Pieces(blobs, "results/x/file_1", 10)
        await pieces.take(memoryview(b"x" * 25))
        await pieces.leave()

        def broken(*_: Any) -> Any:
            raise OSError("gone")

        found = Pieces(blobs, "results/x/file_1", 10)
        monkeypatch.setattr(blobs, "stream", broken)
        await found.find(25)
        await found.take(memoryview(b"x" * 5))
        with pytest.raises(OSError, match="gone"):
            await found.seal()
        await found.leave()

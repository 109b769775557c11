"""The ZIP writer, read back by the standard library, and where that would have to write gigabytes, by its fields."""

import io
import random
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.export.zip_writer import (
    DEFLATED,
    LAST_BLOCK,
    STORED,
    Deflate,
    EntryState,
    ZipState,
    ZipWriter,
    deflated_bound,
)

WHEN = datetime(2026, 3, 4, 5, 6, 8, tzinfo=UTC)
GIB = 1 << 30


def finished(archive: ZipWriter, *emitted: bytes) -> bytes:
    return b"".join([*emitted, archive.drain(), archive.end()])


def streamed(archive: ZipWriter, name: str, data: bytes, step: int = 1000) -> bytes:
    entry = archive.add_stream(name)
    pieces = [entry.feed(data[start : start + step]) for start in range(0, len(data), step)]
    return b"".join([entry.header, *pieces, entry.end()])


def opened(data: bytes) -> zipfile.ZipFile:
    found = zipfile.ZipFile(io.BytesIO(data))
    assert found.testzip() is None
    return found


def one_pass(data: bytes) -> Iterator[tuple[str, bytes]]:
    """What a reader sees that takes the archive from front to back and never gets to the directory."""
    at = 0
    while data[at : at + 4] == b"PK\3\4":
        fields = struct.unpack("<4s5H3L2H", data[at : at + 30])
        flags, method, crc, packed, size, name_length, extra_length = fields[2], fields[3], *fields[6:]
        name = data[at + 30 : at + 30 + name_length].decode()
        at += 30 + name_length + extra_length
        if flags & 8:
            unpacker = zlib.decompressobj(-15)
            body = unpacker.decompress(data[at:])
            assert unpacker.eof
            sent = len(data) - at - len(unpacker.unused_data)
            descriptor = struct.unpack("<4sLQQ", data[at + sent : at + sent + 24])
            assert descriptor == (b"PK\7\x08", zlib.crc32(body), sent, len(body))
            at += sent + 24
        else:
            raw = data[at : at + packed]
            body = zlib.decompress(raw, -15) if method == DEFLATED else raw
            assert (len(body), zlib.crc32(body)) == (size, crc)
            at += packed
        yield name, body


names = st.text("abcXYZ019._- äß漢/", min_size=1, max_size=20)
bodies = st.one_of(st.binary(max_size=300), st.binary(max_size=20).map(lambda data: data * 500))


@settings(max_examples=300, deadline=None)
@given(
    entries=st.dictionaries(names, st.tuples(bodies, st.booleans()), max_size=8),
    level=st.integers(0, 3),
)
def test_the_standard_library_reads_back_what_was_written(entries: dict[str, tuple[bytes, bool]], level: int) -> None:
    archive = ZipWriter(modified=WHEN, level=level)
    emitted: list[bytes] = []
    expected: dict[str, bytes] = {}
    for name, (body, stream) in entries.items():
        try:
            emitted.append(streamed(archive, name, body) if stream else archive.add(name, body))
        except ValueError:
            continue
        expected[name] = body
        assert archive.offset == sum(map(len, emitted))
    data = finished(archive, *emitted)
    found = opened(data)
    assert {info.filename: found.read(info) for info in found.infolist()} == expected
    assert found.namelist() == list(expected)
    assert dict(one_pass(data)) == expected


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("level", [0, 3])
def test_any_buffer_is_taken(kind: type, level: int) -> None:
    archive = ZipWriter(modified=WHEN, level=level)
    data = finished(archive, archive.add("a", kind(b"body " * 100)))
    assert opened(data).read("a") == b"body " * 100


def test_what_an_entry_says_of_itself() -> None:
    archive = ZipWriter(modified=WHEN)
    data = finished(archive, archive.add("bodies/ä.txt", b"hello"), streamed(archive, "big", b"hello"))
    small, big = opened(data).infolist()
    assert (small.filename, small.compress_type, small.flag_bits, small.extra) == ("bodies/ä.txt", STORED, 0x800, b"")
    assert (small.file_size, small.compress_size, small.CRC) == (5, 5, zlib.crc32(b"hello"))
    assert (big.compress_type, big.flag_bits, big.extra) == (DEFLATED, 0x808, b"")
    for info in (small, big):
        assert info.date_time == (2026, 3, 4, 5, 6, 8)
        assert info.external_attr >> 16 == 0o100644, "a plain file, never a link"
        assert not info.is_dir()


@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        (datetime(1970, 1, 1, tzinfo=UTC), (1980, 1, 1, 0, 0, 0)),
        (datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), (2026, 12, 31, 23, 59, 58)),
        (datetime(2200, 1, 2, tzinfo=UTC), (2107, 1, 2, 0, 0, 0)),
    ],
)
def test_dates_are_kept_within_the_format(moment: datetime, shown: tuple[int, ...]) -> None:
    archive = ZipWriter(modified=moment)
    assert opened(finished(archive, archive.add("a", b""))).infolist()[0].date_time == shown


def test_the_same_input_makes_the_same_bytes() -> None:
    def make() -> bytes:
        archive = ZipWriter(modified=WHEN, level=1)
        return finished(archive, archive.add("a", b"x" * 99), streamed(archive, "b", b"y" * 9999))

    assert make() == make()


def test_an_entry_with_a_known_crc_is_the_same_entry() -> None:
    body = bytes(1000)
    known, made = ZipWriter(modified=WHEN), ZipWriter(modified=WHEN)
    emitted = known.add_stored("a.bin", zlib.crc32(body), len(body)) + body
    assert finished(known, emitted) == finished(made, made.add("a.bin", body))


def test_deflate_only_where_it_helps() -> None:
    archive = ZipWriter(modified=WHEN, level=3)
    noise = bytes(range(256))
    found = opened(finished(archive, archive.add("text", b"a" * 1000), archive.add("noise", noise)))
    assert [info.compress_type for info in found.infolist()] == [DEFLATED, STORED]


def test_an_empty_archive() -> None:
    assert opened(finished(ZipWriter(modified=WHEN))).namelist() == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "..\\up",
        "C:evil",
        "a\0b",
        "a\nb",
        "a\x7f",
        "a\x85",
        "trailing.",
        "trailing ",
        "dir./a",
        "x" * 70_000,
        "\udc80",
    ],
    ids=lambda name: repr(name[:12]),
)
def test_unsafe_names_are_refused(name: str) -> None:
    archive = ZipWriter(modified=WHEN)
    for add in (lambda: archive.add(name, b""), lambda: archive.add_stream(name)):
        with pytest.raises(ValueError, match=r"safe name|surrogates"):
            add()
    assert opened(finished(archive)).namelist() == []


def test_one_entry_at_a_time() -> None:
    archive = ZipWriter(modified=WHEN)
    entry = archive.add_stream("a")
    for step in (lambda: archive.add("b", b""), lambda: archive.add_stream("b"), archive.end):
        with pytest.raises(RuntimeError, match="open"):
            step()
    data = finished(archive, entry.header, entry.end())
    assert opened(data).read("a") == b""


@pytest.mark.slow
@pytest.mark.parametrize("count", [65_534, 65_535, 65_536, 70_000])
def test_more_entries_than_sixteen_bits_count(count: int, tmp_path: Path) -> None:
    archive = ZipWriter(modified=WHEN)
    emitted = [archive.add(f"bodies/{number:07d}.txt", b"%d" % number) for number in range(count)]
    data = finished(archive, *emitted)
    # 65,535 is how the short field says "see the long one".
    assert (b"PK\6\6" in data) is (count >= 65_535)
    found = zipfile.ZipFile(io.BytesIO(data))
    assert len(found.namelist()) == count
    for number in (0, 1, 65_533, count - 1):
        assert found.read(f"bodies/{number:07d}.txt") == b"%d" % number
    path = tmp_path / "many.zip"
    path.write_bytes(data)
    checked = subprocess.run([sys.executable, "-m", "zipfile", "-t", path], capture_output=True, check=True)
    assert b"Done testing" in checked.stdout


@pytest.mark.parametrize("start", [4 * GIB - 60, 4 * GIB - 1, 4 * GIB, 5 * GIB])
def test_offsets_that_thirty_two_bits_do_not_hold(start: int, tmp_path: Path) -> None:
    """A sparse file stands for the first gigabytes: nothing is written there, and the offsets are real."""
    archive = ZipWriter(modified=WHEN, state=ZipState(start))
    path = tmp_path / "sparse.zip"
    with path.open("wb") as file:
        file.seek(start)
        file.write(
            finished(archive, archive.add("one", b"1" * 50), streamed(archive, "two", b"2"), archive.add("three", b"3"))
        )
    with zipfile.ZipFile(path) as found:
        assert found.testzip() is None
        assert found.infolist()[0].header_offset == start
        assert {name: found.read(name)[:1] for name in found.namelist()} == {"one": b"1", "two": b"2", "three": b"3"}
    checked = subprocess.run([sys.executable, "-m", "zipfile", "-t", path], capture_output=True, check=True)
    assert b"Done testing" in checked.stdout


def test_the_header_of_a_streamed_entry_leaves_room_for_any_size() -> None:
    header = ZipWriter(modified=WHEN).add_stream("big").header
    fields = struct.unpack("<4s5H3L2H", header[:30])
    assert fields[1] == 45, "needs zip64"
    assert fields[2] & 8, "a descriptor follows"
    assert fields[6:] == (0, 0xFFFFFFFF, 0xFFFFFFFF, 3, 20)
    assert struct.unpack("<2H2Q", header[33:]) == (1, 16, 0, 0)


def test_the_directory_of_an_entry_of_five_gibibytes() -> None:
    """Writing it for real takes minutes, so its counts are set as if five gibibytes had passed."""
    archive = ZipWriter(modified=WHEN)
    begun = archive.add_stream("big")
    sent = 5 * GIB + 7
    archive = ZipWriter(modified=WHEN, state=ZipState(len(begun.header) + sent))
    end = archive.resume_entry(EntryState("big", 0, 0, sent, 5 * GIB)).end()
    crc, packed, size = struct.unpack("<LQQ", end[-20:])
    assert (crc, packed, size) == (0, 5 * GIB + 7 + len(end) - 24, 5 * GIB)
    assert archive.offset == len(begun.header) + packed + 24
    small = archive.add("small", b"x")
    data = archive.drain() + archive.end()
    first = struct.unpack("<4s6H3L5H2L", data[:46])
    assert first[2] == 45
    assert first[8:10] == (0xFFFFFFFF, 0xFFFFFFFF)
    assert struct.unpack("<2H2Q", data[49:69]) == (1, 16, 5 * GIB, packed)
    second = struct.unpack("<4s6H3L5H2L", data[69:115])
    assert second[8:10] == (1, 1)
    assert second[-1] == 0xFFFFFFFF
    assert struct.unpack("<2HQ", data[120:132]) == (1, 8, archive.offset - len(small))


def test_a_body_in_memory_of_four_gibibytes_has_a_long_header() -> None:
    header = ZipWriter(modified=WHEN).add_deflated("x", 0, 7, 4 * GIB - 1)
    assert struct.unpack("<4s5H3L2H", header[:30])[7:] == (0xFFFFFFFF, 0xFFFFFFFF, 1, 20)
    assert struct.unpack("<2H2Q", header[31:]) == (1, 16, 4 * GIB - 1, 7)


@pytest.mark.slow
def test_memory_does_not_grow_with_entries() -> None:
    archive = ZipWriter(modified=WHEN)
    drained = 0
    tracemalloc.start()
    try:
        for number in range(60_000):
            archive.add(f"bodies/{number:07d}_some.host.example-a-path.html", b"x")
            if number % 1000 == 999:
                drained += len(archive.drain())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert drained == archive.directory > 5_000_000
    assert peak < 1024 * 1024


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(st.tuples(bodies, st.booleans()), max_size=6),
    level=st.sampled_from([0, 2]),
    chance=st.randoms(use_true_random=False),
)
def test_another_process_goes_on_anywhere(entries: list[tuple[bytes, bool]], level: int, chance: random.Random) -> None:
    """At each step a writer may be put down, in the middle of an entry too, and another one made from its state."""
    emitted, drained = [], []
    archive = ZipWriter(modified=WHEN, level=level)

    def taken_up() -> ZipWriter:
        drained.append(archive.drain())
        return ZipWriter(
            modified=WHEN, level=level, state=msgspec.json.decode(msgspec.json.encode(archive.state), type=ZipState)
        )

    for number, (body, stream) in enumerate(entries):
        if chance.random() < 0.3:
            archive = taken_up()
        if not stream:
            emitted.append(archive.add(f"{number}", body))
            continue
        entry = archive.add_stream(f"{number}")
        emitted.append(entry.header)
        for start in range(0, len(body), 100):
            emitted.append(entry.feed(body[start : start + 100]))
            if chance.random() < 0.3:
                emitted.append(entry.flush())
                archive = taken_up()
                entry = archive.resume_entry(entry.state)
        emitted.append(entry.end())
    crc, size = zlib.crc32(b"line\n" * 9), 45
    lines = Deflate(2)
    packed = [lines.feed(b"line\n" * 4) + lines.flush(), Deflate(2).flush(), lines.feed(b"line\n" * 5) + lines.flush()]
    packed.append(LAST_BLOCK)
    header = archive.add_deflated("lines", crc, sum(map(len, packed)), size)
    data = b"".join([*emitted, header, *packed, *drained, archive.drain(), archive.end()])
    found = opened(data)
    expected = {f"{number}": body for number, (body, _) in enumerate(entries)} | {"lines": b"line\n" * 9}
    assert {name: found.read(name) for name in found.namelist()} == expected
    assert dict(one_pass(data)) == expected


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("feed", [300, 5000, 256 * 1024])
def test_noise_grows_no_further_than_the_bound(level: int, feed: int) -> None:
    noise = random.Random(1).randbytes(3_000_000)
    deflate = Deflate(level)
    made = sum(len(deflate.feed(noise[start : start + feed])) for start in range(0, len(noise), feed))
    made += len(deflate.flush())
    assert len(noise) < made <= deflated_bound(len(noise)) or (level == 0 and feed == 300)

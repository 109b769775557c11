"""The Blobs seam, over every engine behind it.

What only the local directory has (fsync, its temporary folder, the order of system calls) stands at the end.
"""

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.blobs import BlobInfo, Blobs
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.errors import EngineFailed, NotFound
from tests.conformance.conftest import ENGINES, behind
from tests.support.clocks import ManualClock

MIB = 1024 * 1024


async def keys(blobs: Blobs, prefix: str) -> list[str]:
    return [info.key async for info in blobs.listing(prefix)]


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_what_was_put_is_got(blobs: Blobs, kind: Callable[[bytes], bytes | bytearray | memoryview]) -> None:
    await blobs.put("results/acme/job_1/seg=1#a.bin", kind(b"hello"))
    assert await blobs.get("results/acme/job_1/seg=1#a.bin") == b"hello"
    assert await blobs.size("results/acme/job_1/seg=1#a.bin") == 5


async def test_an_empty_object_is_an_object(blobs: Blobs) -> None:
    await blobs.put("a/empty", b"")
    assert await blobs.get("a/empty") == b""
    assert await blobs.size("a/empty") == 0
    assert await collect(blobs.stream("a/empty")) == b""
    assert await keys(blobs, "a") == ["a/empty"]


async def test_a_missing_object_is_none(blobs: Blobs) -> None:
    await blobs.put("a/b", b"x")
    for key in ("a/c", "a", "nothing/at/all"):
        assert await blobs.get(key) is None
        assert await blobs.get(key, 3, 0) is None
        assert await blobs.size(key) is None
        with pytest.raises(NotFound):
            await anext(blobs.stream(key))


async def test_a_put_replaces(blobs: Blobs) -> None:
    await blobs.put("a/b", b"long first version")
    await blobs.put("a/b", b"second")
    assert await blobs.get("a/b") == b"second"


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, None, b"0123456789"),
        (4, None, b"456789"),
        (2, 3, b"234"),
        (0, 10, b"0123456789"),
        (8, 100, b"89"),
        (10, None, b""),
        (10, 5, b""),
        (11, 5, b""),
        (10**9, None, b""),
        (0, 0, b""),
        (5, 0, b""),
    ],
)
async def test_ranges(blobs: Blobs, offset: int, length: int | None, expected: bytes) -> None:
    await blobs.put("a/digits", b"0123456789")
    assert await blobs.get("a/digits", offset, length) == expected


async def test_a_negative_range_is_refused(blobs: Blobs) -> None:
    await blobs.put("a/b", b"x")
    for offset, length in ((-1, None), (0, -1)):
        with pytest.raises(ValueError, match="range"):
            await blobs.get("a/b", offset, length)
    with pytest.raises(ValueError, match="range"):
        await anext(blobs.stream("a/b", -1))


async def test_eight_mebibytes(blobs: Blobs) -> None:
    data = os.urandom(8 * MIB + 17)
    await blobs.put("a/large", data)
    assert await blobs.get("a/large") == data
    assert await blobs.get("a/large", 8 * MIB) == data[8 * MIB :]
    pieces = [piece async for piece in blobs.stream("a/large", 5)]
    assert b"".join(pieces) == data[5:]
    assert len(pieces) > 8, "in pieces, not whole"


async def test_a_stream_is_put_and_counted(blobs: Blobs) -> None:
    data = os.urandom(3 * MIB + 1)
    parts = [data[start : start + 100_000] for start in range(0, len(data), 100_000)]
    assert await blobs.put_stream("a/streamed", chunks(*parts)) == len(data)
    assert await blobs.get("a/streamed") == data


async def test_an_empty_stream_is_an_empty_object(blobs: Blobs) -> None:
    assert await blobs.put_stream("a/empty", chunks()) == 0
    assert await blobs.get("a/empty") == b""


async def test_a_stream_that_raises_leaves_nothing(blobs: Blobs) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * (2 * MIB)
        raise ConnectionResetError("cut")

    with pytest.raises(ConnectionResetError):
        await blobs.put_stream("a/new", broken())
    await blobs.put("a/old", b"as it was")
    with pytest.raises(ConnectionResetError):
        await blobs.put_stream("a/old", broken())
    assert await keys(blobs, "") == ["a/old"]
    assert await blobs.get("a/old") == b"as it was"


async def test_a_cancelled_stream_leaves_nothing(blobs: Blobs) -> None:
    waiting = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * (2 * MIB)
        waiting.set()
        await asyncio.Event().wait()

    put = asyncio.create_task(blobs.put_stream("a/new", endless()))
    await waiting.wait()
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    assert await keys(blobs, "") == []


async def test_readers_see_all_or_nothing(blobs: Blobs) -> None:
    """While one writer replaces an object again and again, a reader never sees a mixture or a part."""
    versions = [bytes([digit]) * (MIB + digit) for digit in range(20)]
    done = asyncio.Event()

    async def write() -> None:
        for version in versions:
            await blobs.put("a/b", version)
        done.set()

    seen: set[bytes | None] = set()

    async def read() -> None:
        while not done.is_set():
            seen.add(await blobs.get("a/b"))

    await asyncio.gather(write(), read(), read())
    assert seen <= {None, *versions}


async def test_parallel_puts_of_the_same_key(blobs: Blobs) -> None:
    versions = [bytes([digit]) * 300_000 for digit in range(24)]
    await asyncio.gather(*(blobs.put("deep/er/same", version) for version in versions))
    assert await blobs.get("deep/er/same") in versions
    assert await blobs.size("deep/er/same") == 300_000


async def test_a_stream_outlives_a_delete(blobs: Blobs) -> None:
    """A reader that began gets the whole of what it began with, or an error; never a part as if it were whole."""
    data = os.urandom(2 * MIB)
    await blobs.put("a/b", data)
    reader = blobs.stream("a/b")
    first = await anext(reader)
    await blobs.delete(["a/b"])
    assert first + await collect(reader) == data


async def test_listing_is_in_order_of_key(blobs: Blobs) -> None:
    """A dash, a dot and a hash sort before the slash, so the order of names in each directory is not enough."""
    names = ["a/b", "a-b", "a.b", "a#b/c", "a=b", "a0", "A/z", "a/b.c/d", "a/b-c", "a/bc/d/e", "b/1", "b/10", "b/2"]
    names.remove("a/b")
    for name in names:
        await blobs.put(name, name.encode())
    listed = [info async for info in blobs.listing("")]
    assert listed == [BlobInfo(name, len(name)) for name in sorted(names)]


async def test_a_prefix_is_whole_segments(blobs: Blobs) -> None:
    """Else the end of job_1 would be the end of job_10."""
    for name in ("t/job_1/a", "t/job_1/b/c", "t/job_10/a", "t/job_1.x", "u/job_1/a"):
        await blobs.put(name, b"x")
    for prefix in ("t/job_1", "t/job_1/"):
        assert await keys(blobs, prefix) == ["t/job_1/a", "t/job_1/b/c"]
    assert await keys(blobs, "t/job_1/b/c") == []
    assert await keys(blobs, "t/job_2") == []
    assert len(await keys(blobs, "")) == 5


async def test_listing_many(blobs: Blobs) -> None:
    names = [f"many/{number % 7}/{number:05d}" for number in range(2500)]
    # Not all at once: a store may take its time for each of 2,500 requests, and one that waits in line times out.
    for batch in (names[at : at + 100] for at in range(0, 2500, 100)):
        await asyncio.gather(*(blobs.put(name, b"") for name in batch))
    assert await keys(blobs, "many") == sorted(names)


async def test_delete(blobs: Blobs) -> None:
    for name in ("a/b", "a/c", "d/e/f"):
        await blobs.put(name, b"x")
    await blobs.delete(["a/b", "d/e/f", "never/there", "a/b/below-an-object"])
    await blobs.delete(["a/b"])
    await blobs.delete([])
    assert await keys(blobs, "") == ["a/c"]


async def test_prefix_delete_with_a_limit(blobs: Blobs) -> None:
    for number in range(10):
        await blobs.put(f"t/job/{number % 3}/{number}", b"x")
    await blobs.put("t/job2/keep", b"x")
    assert await blobs.delete_prefix("t/job", 4) == 4
    assert len(await keys(blobs, "t/job")) == 6
    assert await blobs.delete_prefix("t/job/", 0) == 0
    assert await blobs.delete_prefix("t/job/", 100) == 6
    assert await blobs.delete_prefix("t/job", 100) == 0
    assert await keys(blobs, "") == ["t/job2/keep"]


async def test_puts_and_prefix_deletes_at_once(blobs: Blobs) -> None:
    """A delete that removes a directory in front of a put does not lose the put."""

    async def put(number: int) -> None:
        for turn in range(20):
            await blobs.put(f"t/{number % 2}/{number}-{turn}", b"x")

    async def sweep() -> int:
        return sum([await blobs.delete_prefix("t", 5) for _ in range(60)])

    *_, swept = await asyncio.gather(*(put(number) for number in range(6)), sweep())
    assert swept + len(await keys(blobs, "t")) == 6 * 20


BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    "..",
    ".",
    "../a",
    "a/../b",
    "a/..",
    "./a",
    ".tmp/a",
    "a/.hidden",
    "a b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\n",
    "ä",
    "a:b",
    "a%2fb",
    "~",
    "a" * 300,
    "a/" * 600 + "a",
]


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key[:20]))
async def test_bad_keys_are_refused(blobs: Blobs, key: str) -> None:
    async def puts() -> None:
        await blobs.put(key, b"x")

    async def streams() -> None:
        await blobs.put_stream(key, chunks(b"x"))

    async def gets() -> None:
        await blobs.get(key)

    async def reads() -> None:
        await anext(blobs.stream(key))

    async def sizes() -> None:
        await blobs.size(key)

    async def deletes() -> None:
        await blobs.delete([key])

    for step in (puts, streams, gets, reads, sizes, deletes):
        with pytest.raises(ValueError, match="not a blob key"):
            await step()
    assert await keys(blobs, "") == []


@pytest.mark.parametrize("prefix", ["..", "a/..", "/", "//", "/a", ".tmp", "a//"])
async def test_bad_prefixes_are_refused(blobs: Blobs, prefix: str) -> None:
    with pytest.raises(ValueError, match=r"blob key|empty prefix"):
        await blobs.delete_prefix(prefix, 10)


async def test_an_empty_prefix_deletes_nothing(blobs: Blobs) -> None:
    await blobs.put("a/b", b"x")
    with pytest.raises(ValueError, match="empty prefix"):
        await blobs.delete_prefix("", 10)
    assert await keys(blobs, "") == ["a/b"]


segments = st.text("ab.-#=_01", min_size=1, max_size=3).filter(lambda text: not text.startswith("."))
paths = st.lists(segments, min_size=1, max_size=4).map("/".join)


def fits(names: set[str]) -> bool:
    return not any(other.startswith(f"{name}/") for name in names for other in names)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(paths, max_size=12).filter(fits), paths)
@pytest.mark.parametrize("engine", behind("blobs"))
def test_listing_is_a_sorted_filter(
    tmp_path_factory: pytest.TempPathFactory, engine: str, names: set[str], prefix: str
) -> None:
    async def scenario() -> None:
        async with ENGINES[engine].open(tmp_path_factory.mktemp("blobs"), ManualClock()) as opened:
            blobs: Blobs = opened.blobs
            for name in names:
                await blobs.put(name, b"x")
            under = sorted(name for name in names if name.startswith(f"{prefix}/"))
            assert await keys(blobs, "") == sorted(names)
            assert await keys(blobs, prefix) == under
            assert await blobs.delete_prefix(prefix, 100) == len(under)
            assert await keys(blobs, "") == sorted(names - set(under))

    asyncio.run(scenario())


async def test_a_signed_request_is_for_one_object_or_there_is_none(blobs: Blobs) -> None:
    """What the store does with it is in the suite of the engine that has one."""
    await blobs.put("exports/acme/one.zip", b"hello")
    got = await blobs.presigned_get("exports/acme/one.zip", 60, "application/zip", "one.zip")
    assert got is None or (got.method, "exports/acme/one.zip" in got.url) == ("GET", True)
    digest = hashlib.sha256(b"hello").hexdigest()
    put = await blobs.presigned_put("uploads/acme/one", 5, digest, 60)
    assert put is None or (put.method, "uploads/acme/one" in put.url) == ("PUT", True)
    assert (got is None) == (put is None)
    assert await blobs.get("uploads/acme/one") is None, "promising it stores nothing"


class TestLocalDirectory:
    """What only this engine has."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "blobs"

    async def test_a_put_is_on_disk_when_it_returns(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The page cache hides a missing fsync from every reader, and killing the process does too; only a power cut
        shows it. So this one property is checked by recording the calls instead of by what they come to."""
        synced: list[str] = []
        fsync = os.fsync

        def record(fd: int) -> None:
            synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix(f"{root}"))
            fsync(fd)

        blobs = LocalBlobs(root)
        monkeypatch.setattr(os, "fsync", record)
        await blobs.put("a/b/c", b"x")
        assert synced[0].startswith("/.tmp/"), "the file, before its name is there"
        assert synced[1:] == ["", "/a", "/a/b"], "each new directory's entry, then that of the file"
        synced.clear()
        await blobs.put_stream("a/b/d", chunks(b"x"))
        assert synced[0].startswith("/.tmp/")
        assert synced[1:] == ["/a/b"]
        synced.clear()
        await blobs.delete_prefix("a/b", 10)
        assert synced == [""], "the directory that stays"
        synced.clear()
        await blobs.put("a/b/c", b"x")
        assert synced[1:] == ["", "/a", "/a/b"], "a directory that is made again is synced again"
        synced.clear()
        await LocalBlobs(root).put("a/b/e", b"x")
        assert synced[-4:-3][0].startswith("/.tmp/")
        assert synced[-3:] == ["", "/a", "/a/b"], "what another process made may not be on disk"

    async def test_no_name_without_an_fsync(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blobs = LocalBlobs(root)
        await blobs.put("a/old", b"as it was")

        def fail(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        for put in (blobs.put("a/new", b"x"), blobs.put("a/old", b"x"), blobs.put_stream("a/new", chunks(b"x"))):
            with pytest.raises(EngineFailed, match="is full"):
                await put
        monkeypatch.undo()
        assert await keys(blobs, "") == ["a/old"]
        assert await blobs.get("a/old") == b"as it was"
        assert list((root / ".tmp").iterdir()) == []

    @pytest.mark.parametrize(("point", "there"), [("blob.put.before", False), ("blob.put.after", True)])
    async def test_killed_at_a_crash_point(self, root: Path, point: str, there: bool) -> None:
        script = (
            "import asyncio, sys; from pathlib import Path; from conveyor import faults;"
            "from conveyor.engines.local_blobs import LocalBlobs; faults.arm(faults.kill_at(sys.argv[2]));"
            "asyncio.run(LocalBlobs(Path(sys.argv[1])).put('a/b', b'x' * 100_000))"
        )
        killed = subprocess.run([sys.executable, "-c", script, str(root), point], check=False)
        assert killed.returncode == -signal.SIGKILL
        assert len(list((root / ".tmp").iterdir())) == (0 if there else 1)
        blobs = LocalBlobs(root)
        assert list((root / ".tmp").iterdir()) == [], "what the dead left is swept"
        assert await keys(blobs, "") == (["a/b"] if there else [])
        assert await blobs.get("a/b") == (b"x" * 100_000 if there else None)

    async def test_a_live_writer_is_not_swept(self, root: Path) -> None:
        blobs = LocalBlobs(root)
        started = asyncio.Event()
        go_on = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b"x" * (2 * MIB)
            started.set()
            await go_on.wait()
            yield b"y"

        put = asyncio.create_task(blobs.put_stream("a/slow", slow()))
        await started.wait()
        LocalBlobs(root)
        go_on.set()
        assert await put == 2 * MIB + 1
        assert await blobs.size("a/slow") == 2 * MIB + 1

    async def test_empty_directories_go(self, root: Path) -> None:
        blobs = LocalBlobs(root)
        for name in ("t/1/a/b/c", "t/1/d", "t/2/e"):
            await blobs.put(name, b"x")
        (root / "t/1/left/by/a/crash").mkdir(parents=True)
        assert await blobs.delete_prefix("t/1", 2) == 2
        assert await blobs.delete_prefix("t/1", 2) == 0
        assert sorted(path.name for path in root.rglob("*")) == [".tmp", "2", "e", "t"]
        await blobs.delete(["t/2/e"])
        assert [path.name for path in root.rglob("*")] == [".tmp"]

    async def test_files_are_for_their_owner(self, root: Path) -> None:
        await LocalBlobs(root).put("a/b", b"x")
        modes = {path.name: path.stat().st_mode & 0o777 for path in (root, root / "a", root / "a/b", root / ".tmp")}
        assert modes == {"blobs": 0o700, "a": 0o700, "b": 0o600, ".tmp": 0o700}

    async def test_no_descriptor_is_left_open(self, root: Path) -> None:
        blobs = LocalBlobs(root)
        await blobs.put("a/b", os.urandom(MIB))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            await blobs.get("a/b", 5, 5)
            await blobs.get("a")
            await blobs.put("a/c", b"x")
            stream = blobs.stream("a/b")
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        assert len(list(Path("/proc/self/fd").iterdir())) <= before

"""Export. Gets a run, walks its tasks once, reads their bodies, and hands on one zip archive: every body under a name
made here, then `manifest.jsonl` with the outcome of every task, in the order of the user's list.

Tasks come in the order of their ids, which are hashes, so that their bodies lie all over the segments. The walk
therefore only spools two sorted lists to disk: where each body is, by object and offset, and the manifest, by index.
Then each segment is read once, from front to back. Memory holds a page of tasks, a few megabytes of each list and one
window of bodies, whatever the size of the job. No body goes out that differs from its sha256.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import IO

import msgspec

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import TaskFilter, Tasks
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Job, RunKey, Task, TaskError, TaskId
from conveyor.serve.archive import ZipWriter
from conveyor.serve.names import body_name
from conveyor.serve.results import check_body, error_json, missing_body, stream_body
from conveyor.serve.spool import SortedSpool

MANIFEST = "manifest.jsonl"
PAGE = 1000
# A longer body is never whole in memory.
LARGE = 8 * 1024 * 1024

_WINDOW_BYTES = 8 * 1024 * 1024
_WINDOW_RANGES = 512
_RANGE_BYTES = 4 * 1024 * 1024
# Reading over a gap is cheaper than asking again.
_GAP_BYTES = 64 * 1024
_READS_AT_ONCE = 16
_PIECE_BYTES = 256 * 1024
# The manifest repeats itself ten times over, even where bodies are stored as they are.
_MANIFEST_LEVEL = 1


class ExportProgress(msgspec.Struct, frozen=True):
    """How far an export has come: tasks listed, bodies found among them, bodies written, bytes of the archive."""

    tasks: int = 0
    bodies: int = 0
    written: int = 0
    archive_bytes: int = 0


Report = Callable[[ExportProgress], None]


class ManifestLine(msgspec.Struct, frozen=True):
    """A line of manifest.jsonl. Scripts rely on these names."""

    index: int
    task_id: TaskId
    input: msgspec.Raw
    status: str
    http_status: int | None
    attempts: int
    file: str | None
    size: int | None
    sha256: str | None
    content_type: str | None
    error: TaskError | None
    final_url: str | None


async def export_zip(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    *,
    level: int = 0,
    spool_dir: Path | None = None,
    report: Report | None = None,
) -> AsyncGenerator[bytes, None]:
    """The archive of the job's latest run, in pieces of up to some megabytes. The first comes when all tasks have been
    listed. Raises EngineFailed at a missing or damaged body: what was yielded till then is no archive. `level` 1 to 9
    deflates; `spool_dir` is for temporary files of about a kilobyte for each task."""
    modified = datetime.fromtimestamp(job.run.created_at, UTC)
    with ExitStack() as stack:
        archive = stack.enter_context(ZipWriter(modified=modified, level=level, spool_dir=spool_dir))
        work = _Export(
            archive, stack.enter_context(SortedSpool(spool_dir)), stack.enter_context(SortedSpool(spool_dir)), report
        )
        await work.list_tasks(tasks, job.key)
        async with aclosing(work.bodies(blobs)) as bodies:
            async for piece in bodies:
                yield piece
        async for piece in work.manifest():
            yield piece
        for piece in archive.finish():
            yield piece
        work.advance()


async def export_to_file(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    path: Path,
    *,
    level: int = 0,
    report: Report | None = None,
) -> int:
    """Write the archive to a file; returns its size. Under its name there is a whole archive, on disk, or none: until
    then it is `<path>.part`, which a failure removes. Temporary files stand beside it, where there must be room."""
    part = path.with_name(f"{path.name}.part")
    size = 0
    try:
        with await asyncio.to_thread(part.open, "wb") as file:
            made = export_zip(tasks, blobs, job, level=level, spool_dir=path.parent, report=report)
            async with aclosing(made) as pieces:
                async for piece in pieces:
                    size += await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_seal, file)
        await asyncio.to_thread(_publish, part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


class _Export:
    """One export at work: the archive, and the two lists that are sorted on the way."""

    def __init__(self, archive: ZipWriter, places: SortedSpool, manifest: SortedSpool, report: Report | None) -> None:
        self._archive = archive
        self._places = places
        self._manifest = manifest
        self._report = report
        self._progress = ExportProgress()

    async def list_tasks(self, tasks: Tasks, run: RunKey) -> None:
        """Shard by shard: nothing here needs the tasks in one order."""
        for shard in range(max(run.shard_count, 1)):
            after: TaskId | None = None
            while page := await tasks.page(run, shard, after, PAGE, TaskFilter()):
                after = page[-1].task_id
                bodies = await asyncio.to_thread(self._spool, page)
                self.advance(tasks=len(page), bodies=bodies)

    async def bodies(self, blobs: Blobs) -> AsyncGenerator[bytes, None]:
        windows = _windows(_ranges(map(_decode_place, self._places)))
        while window := await asyncio.to_thread(next, windows, None):
            if window[0].length > LARGE:
                async for piece in self._stream(blobs, window[0].places[0]):
                    yield piece
            else:
                yield await asyncio.to_thread(self._pack, window, await _read(blobs, window))
            self.advance(written=sum(len(each.places) for each in window))

    async def manifest(self) -> AsyncGenerator[bytes, None]:
        entry = self._archive.add_stream(MANIFEST, level=_MANIFEST_LEVEL)
        yield entry.header
        pieces = filter(None, map(entry.feed, _manifest_pieces(self._manifest)))
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece
        yield entry.end()

    def _spool(self, page: list[Task]) -> int:
        bodies = 0
        for task in page:
            name = None
            if task.detail.body is not None:
                name = body_name(task)
                bodies += 1
                self._places.add(_encode_place(_Place(task.detail.body, name)))
            self._manifest.add(_manifest_line(task, name))
        return bodies

    def _pack(self, window: Sequence["_Range"], found: Sequence[bytes]) -> bytes:
        return b"".join(
            self._archive.add(place.name, _checked(place, data, each.start))
            for each, data in zip(window, found, strict=True)
            for place in each.places
        )

    async def _stream(self, blobs: Blobs, place: "_Place") -> AsyncGenerator[bytes, None]:
        entry = self._archive.add_stream(place.name)
        yield entry.header
        async for piece in stream_body(blobs, place.ref):
            if packed := await asyncio.to_thread(entry.feed, piece):
                yield packed
        yield entry.end()

    def advance(self, tasks: int = 0, bodies: int = 0, written: int = 0) -> None:
        before = self._progress
        self._progress = ExportProgress(
            before.tasks + tasks, before.bodies + bodies, before.written + written, self._archive.offset
        )
        if self._report is not None:
            self._report(self._progress)


class _Place(msgspec.Struct, frozen=True, gc=False):
    """A body, where it is, and what it is called in the archive."""

    ref: BodyRef
    name: str


class _Range(msgspec.Struct):
    """Bytes of one object that are read at once, and the bodies that lie in them. A start of -1 is a whole object."""

    key: str
    start: int
    length: int
    places: list[_Place]

    def takes(self, ref: BodyRef) -> bool:
        """Whether a body that follows is near enough to be read along."""
        return (
            self.start >= 0
            and self.length <= LARGE
            and ref.key == self.key
            and ref.offset <= self.start + self.length + _GAP_BYTES
            and ref.offset + ref.length <= self.start + _RANGE_BYTES
        )

    def take(self, place: _Place) -> None:
        self.places.append(place)
        self.length = max(self.length, place.ref.offset + place.ref.length - self.start)


def _manifest_line(task: Task, name: str | None) -> bytes:
    """The index in front sorts the line, and goes when the line has its place."""
    body = task.detail.body
    line = msgspec.json.encode(
        ManifestLine(
            index=task.index,
            task_id=task.task_id,
            input=task.input,
            status=task.status.label,
            http_status=task.http_status,
            attempts=task.attempts,
            file=name,
            size=body.length if body else None,
            sha256=body.sha256 if body else None,
            content_type=task.detail.content_type,
            error=error_json(task),
            final_url=task.detail.final_url,
        )
    )
    # The input goes in as it was written. Inside a JSON string a newline is escaped, so this one is but space.
    if b"\n" in line:
        line = line.replace(b"\n", b" ")
    return b"%013d%s\n" % (task.index, line)


def _manifest_pieces(lines: Iterator[bytes] | SortedSpool) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line[13:])
        size += len(line)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def _encode_place(place: _Place) -> bytes:
    """Text that sorts by object and offset: a tab comes before all characters of a key."""
    ref = place.ref
    return f"{ref.key}\t{ref.offset + 1:016d}\t{ref.length}\t{ref.sha256}\t{place.name}\n".encode()


def _decode_place(line: bytes) -> _Place:
    key, offset, length, digest, name = line.decode().rstrip("\n").split("\t")
    return _Place(BodyRef(key, int(length), digest, int(offset) - 1), name)


def _ranges(places: Iterator[_Place]) -> Iterator[_Range]:
    current: _Range | None = None
    for place in places:
        if current is not None and current.takes(place.ref):
            current.take(place)
            continue
        if current is not None:
            yield current
        current = _Range(place.ref.key, place.ref.offset, place.ref.length, [place])
    if current is not None:
        yield current


def _windows(ranges: Iterator[_Range]) -> Iterator[list[_Range]]:
    """Ranges that are read together: bounded in bytes and in number, a large body alone."""
    window: list[_Range] = []
    size = 0
    for each in ranges:
        if window and (size + each.length > _WINDOW_BYTES or len(window) == _WINDOW_RANGES):
            yield window
            window, size = [], 0
        window.append(each)
        size += each.length
    if window:
        yield window


async def _read(blobs: Blobs, window: Sequence[_Range]) -> list[bytes]:
    """The bytes of each range, some read at the same time."""
    found: list[bytes] = [b""] * len(window)
    todo = iter(enumerate(window))

    async def reader() -> None:
        for position, each in todo:
            # An object that is longer than it should be is caught by the one byte more.
            start, length = (0, each.length + 1) if each.start < 0 else (each.start, each.length)
            data = await blobs.get(each.key, start, length)
            if data is None:
                raise missing_body(each.places[0].ref)
            found[position] = data

    await asyncio.gather(*(reader() for _ in range(min(_READS_AT_ONCE, len(window)))))
    return found


def _checked(place: _Place, data: bytes, start: int) -> memoryview:
    ref = place.ref
    view = memoryview(data)
    body = view if ref.offset < 0 else view[ref.offset - start : ref.offset - start + ref.length]
    check_body(ref, len(body), sha256(body).hexdigest())
    return body


def _seal(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _publish(part: Path, path: Path) -> None:
    crashpoint("export.publish.before")
    part.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    crashpoint("export.publish.after")

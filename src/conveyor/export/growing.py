"""The archive of a job that runs: the same zip as a direct export makes (`direct`), begun while tasks still run, so
that little is left to write when the job finishes. Its bodies are in the order in which they were packed; its manifest
is in the order of the list.

It packs a batch of neighbours in the list once all of them are finished: a task finishes once. The file is
`<path>.part` until it is complete and on disk. Nothing of it survives a stop or a crash: the next process begins anew
from the rows.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, NamedTuple

import structlog
from isal import isal_zlib

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import ReadsByIndex, TaskFilter, Tasks, by_index
from conveyor.errors import BodyDamaged
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.direct import ExportProgress, Report, publish, seal
from conveyor.export.formats import ManifestLines, ZipPart
from conveyor.export.zip_writer import LEVEL
from conveyor.model import Job, Task
from conveyor.read.body_reader import LARGE, Window, damage_of, windows
from conveyor.read.prefetch import prefetch
from conveyor.read.results import stream_body
from conveyor.read.walk import ROWS, Position, RunStream, TaskBatch, merged
from conveyor.states import TERMINAL

log = structlog.get_logger()

# How long to wait for more finished tasks, in seconds.
_PAUSE_SECONDS = 0.1
# How often to look again at batches in which a task was unfinished, in seconds.
_SKIPPED_SECONDS = 2.0
_COPY_BYTES = 1024 * 1024
_ZEROS = bytes(_COPY_BYTES)


class _BatchLines(NamedTuple):
    """Where the manifest's lines from an index on are in the temporary file."""

    first: int
    place: int
    length: int
    crc: int
    size: int


@asynccontextmanager
async def growing_archive(
    tasks: Tasks, blobs: Blobs, clock: Clock, job: Job, path: Path, names: str | None = None
) -> AsyncIterator["GrowingArchive | None"]:
    """An archive that grows while the block runs, until it is finished; an unfinished one is removed. None for an
    engine that does not store tasks in the order of the list."""
    engine = by_index(tasks, job.key)
    if engine is None:
        yield None
        return
    archive = GrowingArchive(engine, tasks, blobs, clock, job, path, names)
    following = asyncio.create_task(archive.follow())
    try:
        yield archive
    finally:
        archive.stop()
        await asyncio.gather(following, return_exceptions=True)
        archive.discard()


class GrowingArchive:
    """One archive. `follow` packs what is finished, `finish` the rest."""

    def __init__(
        self,
        engine: ReadsByIndex,
        tasks: Tasks,
        blobs: Blobs,
        clock: Clock,
        job: Job,
        path: Path,
        names: str | None = None,
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._blobs = blobs
        self._clock = clock
        self._job = job
        self._path = path
        self._part_path = path.with_name(f"{path.name}.part")
        self._part = ZipPart(
            datetime.fromtimestamp(job.run.created_at, UTC), LEVEL, None, ArchiveNames(job.kind, names)
        )
        self._file: IO[bytes] | None = None
        self._line_file: IO[bytes] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115  (see discard)
        self._directory: IO[bytes] = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115  (see discard)
        self._lines: list[_BatchLines] = []
        # The first index of the next batch, and of batches that were passed over.
        self._next = 0
        self._skipped: list[int] = []
        self._looked_at = clock.monotonic()
        self._stopping = asyncio.Event()
        self._is_sound = True
        self._turn = asyncio.Lock()
        self._progress = ExportProgress()
        self._report: Report | None = None

    async def follow(self) -> None:
        """Pack batches as they finish, until `stop`. A failure ends it: see `is_sound`."""
        while not self._stopping.is_set():
            async with self._turn:
                try:
                    has_packed = await self._pack_one()
                except Exception as error:
                    log.warning("archive not begun while the job runs", error=repr(error))
                    self._is_sound = False
                    return
            if not has_packed:
                await self._clock.sleep(_PAUSE_SECONDS)

    async def is_sound(self) -> bool:
        """Stop `follow`. Whether `finish` can complete the file; if not, an export has to begin anew from the rows."""
        self.stop()
        async with self._turn:
            if not self._is_sound:
                self.discard()
            return self._is_sound

    def stop(self) -> None:
        """End `follow` after the batch that it packs."""
        self._stopping.set()

    async def finish(self, job: Job, report: Report) -> int:
        """Pack all other tasks as they are now, and publish the file. Returns its size."""
        self.stop()
        async with self._turn:
            self._report = report
            for first in self._skipped:
                tasks = [task for task in await self._batch(first) if task.index < first + ROWS]
                await self._pack(_one(tasks))
            rest = merged([RunStream(self._engine, job.key, TaskFilter(), self._next - 1)], self._next - 1)
            await self._pack(prefetch(rest))
            size = await asyncio.to_thread(self._end)
        await asyncio.to_thread(publish, self._part_path, self._path)
        return size

    def discard(self) -> None:
        """Remove the file, unless it was published, and the temporary ones."""
        self._line_file.close()
        self._directory.close()
        if self._file is not None:
            self._file.close()
            self._part_path.unlink(missing_ok=True)
            self._file = None

    async def _pack_one(self) -> bool:
        """Pack a batch whose tasks are all finished, if there is one."""
        now = self._clock.monotonic()
        if self._skipped and now - self._looked_at >= _SKIPPED_SECONDS:
            self._looked_at = now
            first = self._skipped[0]
            if await self._pack_if_finished(first):
                self._skipped.remove(first)
                return True
            # The next look is at another one.
            self._skipped.append(self._skipped.pop(0))
        finished = (await self._tasks.counts(self._job.key)).ended - self._progress.tasks
        # One batch more: tasks of the next one are in flight until then.
        if finished < (2 + len(self._skipped)) * ROWS:
            return False
        first, self._next = self._next, self._next + ROWS
        if not await self._pack_if_finished(first):
            self._skipped.append(first)
        return True

    async def _pack_if_finished(self, first: int) -> bool:
        tasks = await self._batch(first)
        if len(tasks) < ROWS or tasks[-1].index != first + ROWS - 1:
            return False
        if any(task.status not in TERMINAL for task in tasks):
            return False
        await self._pack(_one(tasks))
        return True

    async def _batch(self, first: int) -> list[Task]:
        return (await self._engine.walk(self._job.key, first - 1, ROWS, TaskFilter())).tasks

    async def _pack(self, batches: AsyncGenerator[TaskBatch, None]) -> None:
        async with aclosing(
            windows(self._blobs, batches, with_bodies=True, deflated=True, with_extracted=True)
        ) as stream:
            async for window in stream:
                await self._pack_window(window)

    async def _pack_window(self, window: Window) -> None:
        if not window.tasks:
            return
        bodies = sum(body is not None for body in window.bodies)
        ref = window.tasks[0].detail.body
        if ref is not None and ref.length > LARGE:
            bodies = 1
            await asyncio.to_thread(self._write, self._part.begin_large(window.tasks[0], ref) or b"")
            damage = None
            try:
                async for piece in stream_body(self._blobs, ref):
                    await asyncio.to_thread(self._feed_large, piece)
            except BodyDamaged as error:
                damage = damage_of(error)
            await asyncio.to_thread(self._write, self._part.end_large(damage))
            await asyncio.to_thread(self._take_lines, window.tasks[0].index)
        else:
            await asyncio.to_thread(self._pack_bodies, window)
        done = self._progress
        self._progress = ExportProgress(done.tasks + len(window.tasks), done.bodies + bodies, done.archive_bytes)
        if self._report is not None:
            self._report(self._progress)

    def _pack_bodies(self, window: Window) -> None:
        self._write(self._part.pack(window.tasks, window.bodies).data)
        self._take_lines(window.tasks[0].index)

    def _feed_large(self, piece: bytes) -> None:
        self._write(self._part.feed_large(piece))

    def _take_lines(self, first: int) -> None:
        lines: ManifestLines = self._part.take_lines()
        self._lines.append(_BatchLines(first, self._line_file.tell(), len(lines.data), lines.crc, lines.size))
        self._line_file.write(lines.data)
        self._directory.write(self._part.take_directory())

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = self._part_path.open("wb")
        self._file.write(data)

    def _end(self) -> int:
        """Write the manifest and the directory."""
        self._lines.sort()
        crc = 0
        for lines in self._lines:
            crc = joined_crc(crc, lines.crc, lines.size)
        packed, size = sum(lines.length for lines in self._lines), sum(lines.size for lines in self._lines)
        header, last_block, end = self._part.end_with(packed, crc, size)
        self._write(header)
        for lines in self._lines:
            self._line_file.seek(lines.place)
            self._write(self._line_file.read(lines.length))
        self._write(last_block)
        self._directory.seek(0)
        for piece in _pieces(self._directory.read):
            self._write(piece)
        self._write(end)
        assert self._file is not None
        written = self._file.tell()
        seal(self._file)
        self._file.close()
        return written


def joined_crc(first: int, second: int, size: int) -> int:
    """The CRC-32 of two texts after each other, of which the second has `size` bytes. CRCs are linear: the second one
    counts from zero, and the first one passes over that many zeros."""
    shifted, zeros = first, 0
    while size:
        step = min(size, len(_ZEROS))
        some = memoryview(_ZEROS)[:step]
        shifted, zeros, size = isal_zlib.crc32(some, shifted), isal_zlib.crc32(some, zeros), size - step
    return shifted ^ zeros ^ second


async def _one(tasks: list[Task]) -> AsyncGenerator[TaskBatch, None]:
    yield TaskBatch(tasks, Position(), tasks[-1].index if tasks else -1, len(tasks))


def _pieces(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while piece := read(_COPY_BYTES):
        yield piece

"""The results of a job that runs, as files in a directory: each body under the name that it has in an archive, as soon
as its task has finished, and at the end `manifest.jsonl` with a line for each task, in the order of the list.

A file is written under another name first, so that it is there whole or not at all, and the manifest only after all
files are on disk. After a stop or a crash the next process begins anew from the rows, and keeps the files that are
right.
"""

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import IO, NamedTuple

import structlog

from conveyor.clock import Clock
from conveyor.disk import sync_file_system
from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import ReadsByIndex, TaskFilter, Tasks, by_index
from conveyor.errors import BodyDamaged
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.direct import ExportProgress, Report, in_order, publish, seal
from conveyor.export.formats import MANIFEST
from conveyor.export.lines import damaged_line, manifest_line
from conveyor.export.spool import SortedSpool
from conveyor.model import BodyRef, Job, Task
from conveyor.read.body_names import FOLDER
from conveyor.read.body_reader import LARGE, Window, damage_of, windows
from conveyor.read.results import stream_body
from conveyor.read.walk import ROWS, Position, TaskBatch
from conveyor.states import TERMINAL

log = structlog.get_logger()

# How long to wait before the next look at unfinished tasks: at least this, in seconds, and some times as long as a look
# took that found little to write, so that jobs with many unfinished tasks are not slowed down by it.
_PAUSE_SECONDS = 0.2
_REST_FACTOR = 5.0
_LITTLE = 100
# Batches with unfinished tasks whose finished ones have files. Lines of the manifest wait in memory for the others.
_MAX_OPEN = 32
_COPY_BYTES = 1024 * 1024
_TEMPORARY = ".part"
# A name that was taken has the index of its task.
_MARKED = re.compile(r"~\d+(\.|$)")


class _StoredLines(NamedTuple):
    """Where the lines from an index on are in the temporary file."""

    first: int
    place: int
    length: int


@asynccontextmanager
async def growing_directory(
    tasks: Tasks,
    blobs: Blobs,
    clock: Clock,
    job: Job,
    place: Path,
    names: str | None = None,
    with_bodies: bool = True,
) -> AsyncIterator["GrowingDirectory"]:
    """A directory that grows while the block runs, until it is finished."""
    await asyncio.to_thread(place.mkdir, exist_ok=True)
    directory = GrowingDirectory(tasks, blobs, clock, job, place, names, with_bodies)
    following = asyncio.create_task(directory.follow())
    try:
        yield directory
    finally:
        directory.stop()
        await asyncio.gather(following, return_exceptions=True)
        directory.discard()


class GrowingDirectory:
    """One directory. `follow` writes what is finished, `finish` the rest."""

    def __init__(
        self,
        tasks: Tasks,
        blobs: Blobs,
        clock: Clock,
        job: Job,
        place: Path,
        names: str | None,
        with_bodies: bool,
    ) -> None:
        self._engine = by_index(tasks, job.key)
        self._tasks = tasks
        self._blobs = blobs
        self._clock = clock
        self._job = job
        self._template = names
        self._with_bodies = with_bodies
        self._files = _BodyFiles(place)
        self._line_file: IO[bytes] = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  (see discard)
        self._stopping = asyncio.Event()
        self._turn = asyncio.Lock()
        self._report: Report | None = None
        self._begin()

    def _begin(self) -> None:
        self._names = ArchiveNames(self._job.kind, self._template)
        self._marked: set[str] = set()
        self._lines: list[_StoredLines] = []
        # By the first index of a batch, the lines of its tasks that have finished.
        self._open: dict[int, dict[int, bytes]] = {}
        # The first indexes of batches whose lines are stored.
        self._closed: set[int] = set()
        self._next = 0
        self._progress = ExportProgress()

    async def follow(self) -> None:
        """Write files as tasks finish, until `stop`. A failure ends it, and `finish` begins anew."""
        engine, ended = self._engine, 0
        while engine is not None and not self._stopping.is_set():
            began, written = self._clock.monotonic(), self._progress.tasks
            async with self._turn:
                try:
                    counts = await self._tasks.counts(self._job.key)
                    if counts.ended != ended:
                        await self._look(engine)
                    ended = counts.ended
                except Exception as error:
                    log.warning("files not written while the job runs", error=repr(error))
                    self._begin()
                    return
            factor = _REST_FACTOR if self._progress.tasks - written < _LITTLE else 0.0
            due = self._clock.monotonic() + factor * (self._clock.monotonic() - began)
            await self._clock.sleep(_PAUSE_SECONDS)
            while self._clock.monotonic() < due and not self._stopping.is_set():
                await self._clock.sleep(_PAUSE_SECONDS)

    def stop(self) -> None:
        """End `follow` after the look that it takes."""
        self._stopping.set()

    async def is_sound(self) -> bool:
        """Stop `follow`. `finish` can always complete the directory."""
        self.stop()
        return True

    async def finish(self, job: Job, report: Report) -> int:
        """Write all other tasks as they are now, then the manifest. Returns the size of all files."""
        self.stop()
        async with self._turn:
            self._report = report
            written, self._open = self._open, {}
            with SortedSpool(self._files.place) as spool:
                async with aclosing(in_order(self._tasks, [job.key], spool)) as walk:
                    async for batch in walk:
                        await self._finish_batch(batch.tasks, written)
            size = await asyncio.to_thread(self._end)
        return self._files.size + size

    def discard(self) -> None:
        """Remove temporary files."""
        self._line_file.close()
        self._files.remove_temporary()

    async def _look(self, engine: ReadsByIndex) -> None:
        """Write the bodies of tasks that have finished since the last look."""
        for first in sorted(self._open):
            await self._look_at(engine, first)
        while len(self._open) < _MAX_OPEN and not self._stopping.is_set():
            if not await self._look_at(engine, self._next):
                return
            self._next += ROWS

    async def _look_at(self, engine: ReadsByIndex, first: int) -> bool:
        """Whether the batch has tasks."""
        rows = (await engine.walk(self._job.key, first - 1, ROWS, TaskFilter())).tasks
        tasks = [task for task in rows if task.index < first + ROWS]
        if not tasks:
            return False
        written = self._open.setdefault(first, {})
        await self._write([task for task in tasks if task.status in TERMINAL and task.index not in written], written)
        if len(written) == ROWS:
            self._store(first, self._open.pop(first))
            self._closed.add(first)
        return True

    async def _finish_batch(self, tasks: Sequence[Task], written: dict[int, dict[int, bytes]]) -> None:
        """Write the tasks of neighbours that have no stored lines yet."""
        by_batch: dict[int, list[Task]] = {}
        for task in tasks:
            by_batch.setdefault(task.index - task.index % ROWS, []).append(task)
        for first, some in by_batch.items():
            if first in self._closed:
                continue
            lines = {task.index: line for task in some if (line := written.get(first, {}).get(task.index))}
            await self._write([task for task in some if task.index not in lines], lines)
            self._store(some[0].index, lines)

    async def _write(self, tasks: list[Task], lines: dict[int, bytes]) -> None:
        if not tasks:
            return
        batches = windows(self._blobs, _one(tasks), self._with_bodies, with_extracted=True)
        async with aclosing(batches) as stream:
            async for window in stream:
                ref = window.tasks[0].detail.body if window.tasks else None
                if self._with_bodies and ref is not None and ref.length > LARGE:
                    await self._write_large(window.tasks[0], ref, lines)
                else:
                    await asyncio.to_thread(self._write_window, window, lines)
                done = self._progress
                bodies = sum(body is not None for body in window.bodies)
                self._progress = ExportProgress(done.tasks + len(window.tasks), done.bodies + bodies, self._files.size)
                if self._report is not None:
                    self._report(self._progress)

    def _write_window(self, window: Window, lines: dict[int, bytes]) -> None:
        for task, body in zip(window.tasks, window.bodies, strict=True):
            name = None if body is None else self._name(task)
            if body is not None and name is not None:
                self._files.write(name, bytes(body))
            lines[task.index] = manifest_line(task, name)

    async def _write_large(self, task: Task, ref: BodyRef, lines: dict[int, bytes]) -> None:
        name = self._name(task)
        line = manifest_line(task, name)
        with self._files.begin() as file:
            try:
                async for piece in stream_body(self._blobs, ref):
                    await asyncio.to_thread(file.write, piece)
            except BodyDamaged as error:
                line = damaged_line(line, damage_of(error))
        await asyncio.to_thread(self._files.end, name)
        lines[task.index] = line

    def _name(self, task: Task) -> str:
        name = self._names.name(task)
        if _MARKED.search(name):
            self._marked.add(name)
        return name

    def _store(self, first: int, lines: dict[int, bytes]) -> None:
        data = b"".join(lines[index] for index in sorted(lines))
        self._line_file.seek(0, os.SEEK_END)
        self._lines.append(_StoredLines(first, self._line_file.tell(), len(data)))
        self._line_file.write(data)

    def _end(self) -> int:
        """Make all files durable, then write the manifest."""
        self._files.remove_strays(self._marked)
        self._files.sync()
        self._lines.sort()
        with self._files.begin() as file:
            for lines in self._lines:
                self._line_file.seek(lines.place)
                file.write(self._line_file.read(lines.length))
            size = file.tell()
            seal(file)
        publish(self._files.temporary, self._files.place / MANIFEST)
        return size


class _BodyFiles:
    """The files of a directory, each written whole."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.size = 0
        self.temporary = place / f"{_TEMPORARY}-{os.getpid()}"
        self._folders: set[Path] = set()
        # An earlier process may have written some.
        self._has_earlier = (place / FOLDER).exists()
        for left in place.glob(f"{_TEMPORARY}-*"):
            left.unlink(missing_ok=True)

    def write(self, name: str, data: bytes) -> None:
        self.size += len(data)
        path = self.place / name
        if self._has_earlier and _holds(path, data):
            return
        with self.begin() as file:
            file.write(data)
        self._publish(path)

    def begin(self) -> IO[bytes]:
        """A file that has no name yet. There is one at a time."""
        return self.temporary.open("wb")

    def end(self, name: str) -> None:
        """Give the file its name."""
        self.size += self.temporary.stat().st_size
        self._publish(self.place / name)

    def _publish(self, path: Path) -> None:
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        self.temporary.replace(path)

    def remove_strays(self, marked: set[str]) -> None:
        """Remove files whose names an earlier process gave to tasks that have other names now."""
        if not self._has_earlier:
            return
        for path in (self.place / FOLDER).rglob("*~*"):
            name = path.relative_to(self.place).as_posix()
            if _MARKED.search(name) and name not in marked and path.is_file():
                path.unlink()

    def remove_temporary(self) -> None:
        self.temporary.unlink(missing_ok=True)

    def sync(self) -> None:
        """Make all files durable at once: one by one would take a write of the disk for each."""
        sync_file_system(self.place)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


async def _one(tasks: list[Task]) -> AsyncGenerator[TaskBatch, None]:
    yield TaskBatch(tasks, Position(), tasks[-1].index, len(tasks))

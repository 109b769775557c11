"""Direct export: a file for a caller who waits for it, without a record (`exports`) or a background role (`exporter`).
Gets a job, reads its tasks with their bodies, and yields one archive: every body under a safe name, then
`manifest.jsonl` with the result of every task, in the order of the user's list; or one file of another format.

A temporary file holds what the end of the archive is made of. Engines that return tasks by id, which is a hash, need
further files for sorting. Memory holds some pages of tasks and two windows of bodies, whatever the size of the job.
Every body is checked before it is written (`body_reader`). Bodies that are stored deflated are copied as they are.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from conveyor.disk import sync, sync_directory
from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import TaskFilter, Tasks, by_index
from conveyor.errors import BodyDamaged
from conveyor.export.archive_names import ArchiveNames
from conveyor.export.columns import ColumnScan
from conveyor.export.formats import Part, ZipPart
from conveyor.export.part_forms import TAKEN_COLUMNS, PartForm, has_own_columns, new_part
from conveyor.export.request import ExportBodies
from conveyor.export.sorting import PAGE
from conveyor.export.spool import SortedSpool
from conveyor.export.zip_writer import LEVEL
from conveyor.faults import crashpoint
from conveyor.jobs.latest_outcomes import hides
from conveyor.model import Job, RunKey, Task, TaskId
from conveyor.read.body_reader import LARGE, Window, damage_of, extracted_slices, windows
from conveyor.read.prefetch import prefetch
from conveyor.read.results import stream_body
from conveyor.read.walk import END, ROWS, Position, RunStream, TaskBatch, merged

# Of the manifest and the central directory, in memory.
_BUFFER_BYTES = 1024 * 1024

# The index of a task and the place of its run, before its line in the spool.
_KEY_DIGITS = 13 + 6

_decode = msgspec.json.Decoder(Task).decode


class ExportProgress(msgspec.Struct, frozen=True):
    """Progress of a direct export: tasks read, bodies written, bytes of the archive."""

    tasks: int = 0
    bodies: int = 0
    archive_bytes: int = 0


Report = Callable[[ExportProgress], None]


async def export_zip(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    *,
    level: int = LEVEL,
    spool_dir: Path | None = None,
    report: Report | None = None,
    runs: Sequence[RunKey] = (),
    names: str | None = None,
) -> AsyncGenerator[bytes, None]:
    """The archive of the latest outcome of each task over these runs, oldest first; without them, of the latest run. It
    comes in pieces of up to some megabytes. Missing and damaged bodies are left out, and the manifest lists
    them. `level` 1 to 3 deflates, 0 stores; `spool_dir` is for temporary files: some hundred bytes per task; `names` is
    a template for names of bodies."""
    modified = datetime.fromtimestamp(job.run.created_at, UTC)
    part = ZipPart(modified, level, None, ArchiveNames(job.kind, names))
    async with aclosing(_pieces(tasks, blobs, job, part, True, spool_dir, report, runs)) as pieces:
        async for piece in pieces:
            yield piece


async def export_form(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    form: PartForm,
    *,
    spool_dir: Path | None = None,
    report: Report | None = None,
    runs: Sequence[RunKey] = (),
    names: str | None = None,
) -> AsyncGenerator[bytes, None]:
    """As `export_zip`, for any format. The columns of a table are collected by a first pass over the tasks."""
    if has_own_columns(job, form.format):
        scan = ColumnScan(job.kind)
        with SortedSpool(spool_dir) as spool:
            walk = in_order(tasks, list(reversed(runs)) or [job.key], spool)
            async with aclosing(prefetch(walk)) as batches:
                async for batch in batches:
                    async for some in extracted_slices(blobs, batch.tasks):
                        await asyncio.to_thread(scan.add, some)
        form = msgspec.structs.replace(form, columns=scan.columns(TAKEN_COLUMNS))
    part = new_part(form, None, ArchiveNames(job.kind, names))
    with_bodies = form.bodies is not ExportBodies.NONE
    async with aclosing(_pieces(tasks, blobs, job, part, with_bodies, spool_dir, report, runs)) as pieces:
        async for piece in pieces:
            yield piece


async def _pieces(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    part: Part,
    with_bodies: bool,
    spool_dir: Path | None,
    report: Report | None,
    runs: Sequence[RunKey],
) -> AsyncGenerator[bytes, None]:
    deflated = isinstance(part, ZipPart) and part.copies
    with ExitStack() as stack:
        stack.callback(part.close)
        work = _DirectExport(part, stack.enter_context(Sidecar(spool_dir)), report)
        spool = stack.enter_context(SortedSpool(spool_dir))
        walk = in_order(tasks, list(reversed(runs)) or [job.key], spool)
        async with aclosing(windows(blobs, prefetch(walk), with_bodies, deflated, with_extracted=True)) as stream:
            async for window in stream:
                async for piece in work.pack(blobs, window):
                    yield piece
        async for piece in work.end():
            yield piece


async def export_to_file(
    tasks: Tasks,
    blobs: Blobs,
    job: Job,
    path: Path,
    *,
    form: PartForm | None = None,
    report: Report | None = None,
    runs: Sequence[RunKey] = (),
    names: str | None = None,
) -> int:
    """Write the archive, or the file of another form, to a file; returns its size. It is `<path>.part` until it is
    complete and on disk; a failure removes that. Temporary files go to the same directory, which needs room for it."""
    part = path.with_name(f"{path.name}.part")
    size = 0
    made = (
        export_zip(tasks, blobs, job, spool_dir=path.parent, report=report, runs=runs, names=names)
        if form is None
        else export_form(tasks, blobs, job, form, spool_dir=path.parent, report=report, runs=runs, names=names)
    )
    try:
        with await asyncio.to_thread(part.open, "wb") as file:
            async with aclosing(made) as pieces:
                async for piece in pieces:
                    size += await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(seal, file)
        await asyncio.to_thread(publish, part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return size


def in_order(tasks: Tasks, runs: Sequence[RunKey], spool: SortedSpool) -> AsyncGenerator[TaskBatch, None]:
    """The latest outcomes over these runs, newest first, in the order of the list: from an engine that stores tasks so,
    or sorted here."""
    engine = by_index(tasks, runs[0])
    if engine is not None:
        return merged([RunStream(engine, run, TaskFilter(), -1) for run in runs], -1)
    return _sorted(tasks, runs, spool)


async def _sorted(tasks: Tasks, runs: Sequence[RunKey], spool: SortedSpool) -> AsyncGenerator[TaskBatch, None]:
    for place, run in enumerate(runs):
        for shard in range(max(run.shard_count, 1)):
            after: TaskId | None = None
            while page := await tasks.page(run, shard, after, PAGE, TaskFilter()):
                after = page[-1].task_id
                await asyncio.to_thread(_spool, spool, place, page)
    lines = _latest(iter(spool))
    while batch := await asyncio.to_thread(list, itertools.islice(lines, ROWS)):
        yield TaskBatch(batch, Position(), END, len(batch))


class Sidecar:
    """The parts of the manifest and of the central directory, in a temporary file until the end of the archive."""

    def __init__(self, directory: Path | None) -> None:
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115  (see __exit__)
        self._places: list[tuple[int, int]] = []

    def __enter__(self) -> "Sidecar":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._places)

    def add(self, data: bytes) -> None:
        self._places.append((self._file.tell(), len(data)))
        self._file.write(data)

    def get(self, numbers: Sequence[int]) -> list[bytes]:
        return [self._at(number) for number in numbers]

    def _at(self, number: int) -> bytes:
        start, length = self._places[number]
        self._file.seek(start)
        return self._file.read(length)


class _DirectExport:
    """One direct export."""

    def __init__(self, part: Part, sidecar: Sidecar, report: Report | None) -> None:
        self._part = part
        self._sidecar = sidecar
        self._report = report
        self._progress = ExportProgress()

    async def pack(self, blobs: Blobs, window: Window) -> AsyncGenerator[bytes, None]:
        bodies = sum(body is not None for body in window.bodies)
        ref = window.tasks[0].detail.body if window.tasks else None
        part = self._part
        if ref is not None and ref.length > LARGE and isinstance(part, ZipPart):
            bodies = 1
            yield part.begin_large(window.tasks[0], ref) or b""
            damage = None
            try:
                async for piece in stream_body(blobs, ref):
                    if packed := await asyncio.to_thread(part.feed_large, piece):
                        yield packed
                        self._advance(size=len(packed))
            except BodyDamaged as error:
                damage = damage_of(error)
            yield part.end_large(damage)
        elif packed := await asyncio.to_thread(self._pack, window):
            yield packed
            self._advance(size=len(packed))
        self._advance(window.read, bodies)

    async def end(self) -> AsyncGenerator[bytes, None]:
        flushed = await asyncio.to_thread(self._part.flush)
        if flushed.data:
            yield flushed.data
            self._advance(size=len(flushed.data))
        if flushed.sidecar:
            self._sidecar.add(flushed.sidecar)
        for needed, make in self._part.end(len(self._sidecar)):
            if data := make(await asyncio.to_thread(self._sidecar.get, needed)):
                yield data
                self._advance(size=len(data))

    def _pack(self, window: Window) -> bytes:
        packed = self._part.pack(window.tasks, window.bodies)
        # The groups of a table are as large as the part makes them; a zip keeps its directory in memory.
        if isinstance(self._part, ZipPart) and self._part.buffered > _BUFFER_BYTES:
            self._sidecar.add(self._part.flush().sidecar)
        return packed.data

    def _advance(self, tasks: int = 0, bodies: int = 0, size: int = 0) -> None:
        before = self._progress
        self._progress = ExportProgress(before.tasks + tasks, before.bodies + bodies, before.archive_bytes + size)
        if self._report is not None:
            self._report(self._progress)


def _spool(spool: SortedSpool, place: int, page: list[Task]) -> None:
    """Lines sort by the index in front, then by the place of the run. Newlines in an input are whitespace between JSON
    tokens."""
    for task in page:
        spool.add(b"%013d%06d%s\n" % (task.index, place, msgspec.json.encode(task).replace(b"\n", b" ")))


def _latest(lines: Iterator[bytes]) -> Iterator[Task]:
    """Each task once, with its latest outcome. The lines of a task follow each other, newest first."""
    shown: Task | None = None
    for line in lines:
        task = _decode(line[_KEY_DIGITS:])
        if shown is not None and shown.index != task.index:
            yield shown
            shown = None
        if shown is None or not hides(shown, task):
            shown = task
    if shown is not None:
        yield shown


def seal(file: IO[bytes]) -> None:
    """Make a file durable."""
    file.flush()
    sync(file.fileno())


def publish(part: Path, path: Path) -> None:
    """Give a durable file its name."""
    crashpoint("export.publish.before")
    part.replace(path)
    sync_directory(path.parent)
    crashpoint("export.publish.after")

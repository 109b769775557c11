"""Assembly: one process at work on one export. Gets a row that is its own, goes on where the last one stopped, and
leaves files.

After each piece of a file that is durable, and what is kept beside it for the end of the file, the row is replaced: it
says how far the tasks are and how far the file is, and is all that another process needs. A process that was given up
and writes on writes over nothing (`drafts`), and its row is refused.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import TaskFilter, Tasks, WalksByIndex
from conveyor.errors import BadInput
from conveyor.export import zip_writer as archive
from conveyor.export.body_reader import LARGE, Body, Window, windows
from conveyor.export.exports import MAX_PARTS, ExportRecord, ExportState, PartInProgress, part_name
from conveyor.export.formats import LinesPart, PackedTasks, Part, ZipPart
from conveyor.export.lines import csv_header, csv_row, result_line, result_line_with_body
from conveyor.export.request import ExportBodies, ExportCompression, ExportFormat, load_parquet
from conveyor.export.sorting import SortedStream, sort_some
from conveyor.export.staged_file import Digest, StagedFile
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Compression, Job, OutboxEvent, Task, export_prefix
from conveyor.read.prefetch import prefetch
from conveyor.read.results import stream_body
from conveyor.read.walk import RunStream, TaskBatch, TaskStream, merged

T = TypeVar("T")

# The row is written at least so often, so that it shows how far it is.
_SHOWN_SECONDS = 2.0


class ExportSuperseded(Exception):
    """The row is another's, or gone: whatever this process does for it is for nothing."""


class ExportPaused(Exception):
    """It was asked to stop, and what it did is kept."""


class Turn:
    """How long a process works at an export before others come first. Getting back to where the last turn stopped is
    no part of it, so that each turn gets on, however long that takes."""

    def __init__(self, clock: Clock, seconds: float, interrupted: Callable[[], bool]) -> None:
        self._clock = clock
        self._seconds = seconds
        self._interrupted = interrupted
        self.begin()

    def begin(self) -> None:
        """From here on the time counts."""
        self._until = self._clock.monotonic() + self._seconds

    @property
    def is_over(self) -> bool:
        return self._interrupted() or self._clock.monotonic() >= self._until

    def check_interrupted(self) -> None:
        """For steps that change nothing. Raises Paused."""
        if self._interrupted():
            raise ExportPaused


class ExportWriter:
    """Made for one export by one attempt; `run` returns when it is ready. The row is the last that was written."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        blobs: Blobs,
        clock: Clock,
        job: Job,
        row: Document,
        export: ExportRecord,
        *,
        piece_bytes: int,
        turn: Turn,
        digest: Digest | None = None,
    ) -> None:
        """`turn` is looked at between steps. `digest` is that of the file so far, where this process has it still."""
        self._records = records
        self._tasks = tasks
        self._blobs = blobs
        self._clock = clock
        self._job = job
        self._turn = turn
        self._piece_bytes = piece_bytes
        self._prefix = export_prefix(job.tenant, job.job_id, row.id)
        self.row = row
        self.export = export
        making = export.making
        self._sorting, self._position = making.sorting, making.position
        self._kept, self._step, self._last = making.kept, making.step, making.last
        self._counts = dict(export.counts)
        self._kept_at = clock.monotonic()
        self._saving: asyncio.Task[None] | None = None
        self._draft = self._new_draft(making, digest)
        self._part = self._new_part(making)

    @property
    def digest(self) -> Digest:
        """That of the file so far, good for the row if all is kept."""
        return self._draft.digest

    async def run(self) -> None:
        """Go on to the end. Raises Paused and Overtaken."""
        try:
            await self._draft.open()
            self._turn.begin()
            await self._sort()
            if self._step is not None:
                await self._end_part()
            if isinstance(self._part, ZipPart) and self._part.large is not None:
                await self._feed_large(self._part, self._part.large.ref)
            if self.export.state is not ExportState.READY:
                await self._write_tasks()
        finally:
            self._part.close()
            if self._saving is not None:
                # Whoever looks at the row next finds the last one. What went wrong with it is for the next attempt.
                await asyncio.gather(self._saving, return_exceptions=True)

    async def _write_tasks(self) -> None:
        with_bodies = self.export.bodies is not ExportBodies.NONE
        async with aclosing(windows(self._blobs, prefetch(self._walk()), with_bodies)) as found:
            async for window in found:
                await self._take(window)
                self._position = window.position
                self._advance(read=window.read)
                await self._keep_if_due()
        self._last = True
        await self._end_part()

    # How tasks are found

    async def _sort(self) -> None:
        runs = self.export.run_keys(self._job)
        if isinstance(self._tasks, WalksByIndex):
            return
        while self._sorting.run < len(runs):
            self._sorting, read = await sort_some(
                self._tasks, self._blobs, runs, self._pushed, self._sorting, self.export.attempt, self._sort_key
            )
            self._advance(read=read)
            await self._write_row()
            await self._pause_if_asked()

    def _walk(self) -> AsyncGenerator[TaskBatch, None]:
        after, offsets = self._position.after, self._position.offsets
        runs = self.export.run_keys(self._job)
        streams: list[TaskStream] = []
        if isinstance(self._tasks, WalksByIndex):
            streams += [RunStream(self._tasks, run, self._pushed, after) for run in runs]
        else:
            # The newest run first; those of one run have no task in common.
            for number, (_, attempt) in sorted(enumerate(self._sorting.objects), key=lambda each: each[1][0]):
                offset = offsets[len(streams)] if offsets else 0
                streams.append(SortedStream(self._blobs, self._sort_key(number, attempt), after, offset))
        return merged(streams, after, self.export.where if len(runs) > 1 else None)

    @property
    def _pushed(self) -> TaskFilter:
        """What the engine is to filter by. Over several runs a task counts as the newest has it: nothing."""
        return self.export.where if len(self.export.runs) == 1 else TaskFilter()

    def _sort_key(self, number: int, attempt: int) -> str:
        return f"{self._prefix}/sorted/{number:06d}-{attempt}"

    # How a file is made

    def _new_draft(self, making: PartInProgress, digest: Digest | None = None) -> StagedFile:
        return StagedFile(self._blobs, self._prefix, len(self.export.parts) + 1, self.export.attempt, making, digest)

    def _new_part(self, making: PartInProgress) -> Part:
        export, limit = self.export, self.export.part_bytes
        kept = making.kept if making.kept != msgspec.Raw(b"null") else None
        if export.format is ExportFormat.ZIP:
            level = archive.LEVEL if export.compression is ExportCompression.DEFLATE else 0
            return ZipPart(datetime.fromtimestamp(export.created_at, UTC), level, limit, kept)
        compression = Compression(export.compression.value)
        if export.format is ExportFormat.PARQUET:
            made: Part = load_parquet().ParquetPart(compression, limit, export.bodies is ExportBodies.BINARY, kept)
            return made
        if export.format is ExportFormat.CSV:
            return LinesPart(lambda task, _: csv_row(task), compression, limit, csv_header(), kept)
        return LinesPart(_json_line(export.bodies), compression, limit, kept=kept)

    async def _take(self, window: Window) -> None:
        task = window.tasks[0] if window.tasks else None
        ref = task.detail.body if task is not None else None
        if task is not None and ref is not None and ref.length > LARGE and self.export.bodies is ExportBodies.FILE:
            await self._take_large(task, ref)
            return
        start = 0
        while start < len(window.tasks):
            packed = await asyncio.to_thread(self._pack, window.tasks[start:], window.bodies[start:])
            self._count(window.tasks[start : start + packed.taken], window.bodies[start : start + packed.taken])
            start += packed.taken
            if start < len(window.tasks):
                after = window.tasks[start].index - 1
                self._position = msgspec.structs.replace(window.position, after=after)
                await self._end_part()

    def _pack(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> PackedTasks:
        packed = self._part.pack(tasks, bodies)
        self._draft.add(packed.data)
        return packed

    async def _take_large(self, task: Task, ref: BodyRef) -> None:
        part = self._part
        assert isinstance(part, ZipPart)
        header = part.begin_large(task, ref)
        if header is None:
            self._position = msgspec.structs.replace(self._position, after=task.index - 1)
            await self._end_part()
            part = self._part
            assert isinstance(part, ZipPart)
            header = part.begin_large(task, ref) or b""
        self._draft.add(header)
        # It counts when it has begun: who goes on with it does not begin it.
        self._count([task], [None])
        self._advance(bodies=1, body_bytes=ref.length)
        self._position = msgspec.structs.replace(self._position, after=task.index)
        await self._feed_large(part, ref)

    async def _feed_large(self, part: ZipPart, ref: BodyRef) -> None:
        """Of what another process has fed, the sha256 is made again, since only the whole can be checked."""
        assert part.large is not None
        skip = part.large.entry.size
        async for piece in stream_body(self._blobs, ref):
            fresh = piece[skip:]
            if skip:
                self._turn.check_interrupted()
                self._turn.begin()
            skip -= len(piece) - len(fresh)
            if fresh:
                await asyncio.to_thread(self._add, part.feed_large, fresh)
                await self._keep_if_due()
        self._draft.add(part.end_large())

    def _add(self, make: Callable[[T], bytes], given: T) -> None:
        self._draft.add(make(given))

    async def _end_part(self) -> None:
        """Make the end of the file, step by step, and close it."""
        if self._step is None:
            await self._keep()
            await self._saved()
            self._step = 0
        for number, (needed, make) in enumerate(self._part.end(self._draft.beside)):
            if number < self._step:
                continue
            given = await self._draft.beside_at(needed)
            await asyncio.to_thread(self._add, make, given)
            self._step = number + 1
            if self._due:
                await self._draft.put(self._draft.cut())
                await self._write_row()
                await self._pause_if_asked()
        await self._draft.put(self._draft.cut())
        await self._close_part()

    async def _close_part(self) -> None:
        if len(self.export.parts) >= MAX_PARTS:
            raise BadInput(f"The export would have more than {MAX_PARTS} parts. Ask for larger ones by `part_bytes`.")
        draft, ended = self._draft, self._last
        part = await draft.close(self._part.tasks)
        self._part.close()
        self.export = msgspec.structs.replace(self.export, parts=[*self.export.parts, part])
        self._draft = self._new_draft(PartInProgress())
        self._kept, self._step = msgspec.Raw(b"null"), None
        if ended:
            await self._ready()
        else:
            self._part = self._new_part(PartInProgress())
            await self._write_row()
        await draft.tidy(part)
        if not ended:
            await self._pause_if_asked()
            return
        while await self._blobs.delete_prefix(f"{self._prefix}/sorted", 1000):
            pass

    async def _ready(self) -> None:
        now = self._clock.now()
        self.export = msgspec.structs.replace(self._as_kept(), state=ExportState.READY, ended_at=now, held=False)
        notice = export_notice(self._clock, self._job, self.row, self.export, "export.ready")
        crashpoint("exports.ready.before")
        # It is due when it has expired: whoever removes it finds it by that.
        await self._write_row(due_at=self.row.expires_at, notice=notice)
        crashpoint("exports.ready.after")

    # What is durable

    async def _keep_if_due(self) -> None:
        if not self._due and not self._turn.is_over:
            return
        await self._keep()
        await self._pause_if_asked()

    @property
    def _due(self) -> bool:
        waited = self._clock.monotonic() - self._kept_at
        return self._draft.held + self._part.held >= self._piece_bytes or waited >= _SHOWN_SECONDS

    async def _keep(self) -> None:
        """Have all that was done made durable, while the work goes on. What was to be so before, is then."""
        flushed = await asyncio.to_thread(self._part.flush)
        if flushed.data:
            await asyncio.to_thread(self._draft.add, flushed.data)
        self._kept = self._part.kept()
        await self._saved()
        puts = self._draft.cut(flushed.beside)
        self._kept_at = self._clock.monotonic()
        self._saving = asyncio.create_task(self._save(puts, self._row()))

    async def _saved(self) -> None:
        """Wait for what is being made durable."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def _save(self, puts: Sequence[tuple[str, bytes]], row: Document) -> None:
        await self._draft.put(puts)
        await self._write(row)

    async def _write_row(self, due_at: float | None = None, notice: OutboxEvent | None = None) -> None:
        await self._saved()
        self._kept_at = self._clock.monotonic()
        await self._write(self._row(due_at), notice)

    def _row(self, due_at: float | None = None) -> Document:
        """The row as it is to be once all that it tells of is durable. Its version is that of the one before it."""
        body = msgspec.json.encode(self._as_kept())
        return msgspec.structs.replace(self.row, body=body, due_at=due_at or self.row.due_at)

    async def _write(self, row: Document, notice: OutboxEvent | None = None) -> None:
        """The row is the fence: whoever wrote it last goes on, and no one else."""
        if await self._records.job(self._job.tenant, self._job.job_id) is None:
            raise ExportSuperseded
        crashpoint("exports.checkpoint.before")
        written = await self._records.replace_row(row, notice)
        crashpoint("exports.checkpoint.after")
        if written is None:
            raise ExportSuperseded
        self.row = written

    def _as_kept(self) -> ExportRecord:
        """The export with all that this process knows of it. It got on, and so nothing failed lately."""
        making = PartInProgress(
            self._sorting,
            self._position,
            self._draft.size,
            self._draft.pieces,
            self._draft.beside,
            self._draft.attempts,
            self._kept,
            self._step,
            self._last,
        )
        return msgspec.structs.replace(self.export, making=making, counts=self._counts, tries=0, lost=0)

    async def _pause_if_asked(self) -> None:
        if self._turn.is_over:
            await self._saved()
            raise ExportPaused

    # What is counted

    def _count(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> None:
        for task in tasks:
            label = task.status.label
            self._counts[label] = self._counts.get(label, 0) + 1
        kept = [body for body in bodies if body is not None]
        self._advance(bodies=len(kept), body_bytes=sum(map(len, kept)))

    def _advance(self, read: int = 0, bodies: int = 0, body_bytes: int = 0) -> None:
        export = self.export
        self.export = msgspec.structs.replace(
            export,
            read=export.read + read,
            body_count=export.body_count + bodies,
            body_bytes=export.body_bytes + body_bytes,
        )


def export_notice(clock: Clock, job: Job, row: Document, export: ExportRecord, event: str) -> OutboxEvent:
    """What is told of an export that has come to its end."""
    data: dict[str, Any] = {"export_id": row.id, "format": export.format}
    if export.error is not None:
        data["error"] = msgspec.structs.asdict(export.error)
    else:
        data |= {
            "tasks": sum(export.counts.values()),
            "bytes": export.bytes,
            "parts": len(export.parts),
            "name": part_name(row, export, 1),
        }
    return OutboxEvent(clock.new_id("evt"), job.tenant, job.job_id, job.run.run_id, event, clock.now(), data)


def _json_line(bodies: ExportBodies) -> Callable[[Task, Body | None], bytes]:
    if bodies is ExportBodies.NONE:
        return lambda task, _: result_line(task)
    as_text = bodies is ExportBodies.TEXT
    return lambda task, body: result_line_with_body(task, body, as_text)

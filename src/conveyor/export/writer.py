"""The export writer: one process at work on one export. Gets a row that it has claimed, resumes at its checkpoint, and
writes the files.

After each durable piece of a file and its sidecar, the writer replaces the row. The row is the checkpoint: it has the
position among the tasks and the state of the file, which is all that another process needs. A process that lost its
claim and keeps writing overwrites nothing (`staged_file`), and the store rejects its row.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import TaskFilter, Tasks, by_index
from conveyor.errors import BadInput, BodyDamaged
from conveyor.export.archive_names import ArchiveNames, EarlierNames, NameRegister
from conveyor.export.columns import ColumnScan
from conveyor.export.exports import (
    MAX_PARTS,
    ColumnsInProgress,
    ExportRecord,
    ExportState,
    PartInProgress,
    part_name,
)
from conveyor.export.formats import PackedTasks, Part, ZipPart
from conveyor.export.part_forms import TAKEN_COLUMNS, PartForm, has_own_columns, new_part
from conveyor.export.request import ExportBodies
from conveyor.export.sorting import merge_lists, sort_some, sorted_streams
from conveyor.export.staged_file import Digest, StagedFile
from conveyor.export.time_slice import ExportPaused, ExportSuperseded, TimeSlice
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Job, OutboxEvent, Task, export_prefix
from conveyor.read.body_reader import LARGE, Body, Window, damage_of, extracted_slices, is_damaged, windows
from conveyor.read.prefetch import prefetch
from conveyor.read.results import stream_body
from conveyor.read.walk import Position, RunStream, TaskBatch, TaskStream, merged

T = TypeVar("T")

# The longest time between two checkpoints while the writer works, in seconds: users see progress by them.
_CHECKPOINT_SECONDS = 2.0


class ExportWriter:
    """Writes one export in one attempt; `run` returns when all its files are made. `row` is the last one written."""

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
        time_slice: TimeSlice,
        digest: Digest | None = None,
        names: NameRegister | None = None,
    ) -> None:
        """The writer checks `time_slice` between steps. `digest` is that of the file so far, and `names` has the names
        of all files so far, if this process has them."""
        self._records = records
        self._tasks = tasks
        self._blobs = blobs
        self._clock = clock
        self._job = job
        self._time_slice = time_slice
        self._piece_bytes = piece_bytes
        self._prefix = export_prefix(job.tenant, job.job_id, row.id)
        self.row = row
        self.export = export
        making = export.making
        self._sorting, self._position = making.sorting, making.position
        self._part_state, self._step, self._last = making.part_state, making.step, making.last
        self._counts = dict(export.counts)
        self._saved_at = clock.monotonic()
        self._saving: asyncio.Task[None] | None = None
        self._file = self._new_file(making, digest)
        register = names or NameRegister(is_new=not export.parts and making.position.after < 0)
        kind_of_names = ArchiveNames if export.has_labels else EarlierNames
        self._names = kind_of_names(job.kind, export.names, register)
        self._begun: Part | None = None

    @property
    def digest(self) -> Digest:
        """The digest of the file so far. It belongs to the row once the checkpoint is durable."""
        return self._file.digest

    @property
    def names(self) -> NameRegister:
        """The names that the archive has so far."""
        return self._names.register

    @property
    def _part(self) -> Part:
        assert self._begun is not None
        return self._begun

    async def run(self) -> None:
        """Write to the end. Raises ExportPaused and ExportSuperseded."""
        try:
            await self._file.open()
            self._time_slice.begin()
            await self._sort()
            await self._find_columns()
            self._begun = self._new_part(self.export.making)
            if self._step is not None:
                await self._end_part()
            if isinstance(self._part, ZipPart) and self._part.large is not None:
                await self._feed_large(self._part, self._part.large.ref)
            if not self.export.is_made and self.export.state is not ExportState.READY:
                await self._write_tasks()
        finally:
            if self._begun is not None:
                self._begun.close()
            if self._saving is not None:
                # The next reader of the row must find the last one. The next attempt meets whatever failed here.
                await asyncio.gather(self._saving, return_exceptions=True)

    async def _write_tasks(self) -> None:
        with_bodies = self.export.bodies is not ExportBodies.NONE
        deflated = isinstance(self._part, ZipPart) and self._part.copies
        async with aclosing(
            windows(self._blobs, prefetch(self._walk(self._position)), with_bodies, deflated, with_extracted=True)
        ) as stream:
            async for window in stream:
                await self._add_window(window)
                self._position = window.position
                self._advance(read=window.read)
                await self._checkpoint_if_due()
        self._last = True
        await self._end_part()

    # Reading tasks

    async def _sort(self) -> None:
        runs = self.export.run_keys(self._job)
        if by_index(self._tasks, self._job.key) is not None:
            return
        while self._sorting.run < len(runs):
            self._sorting, read = await sort_some(
                self._tasks, self._blobs, runs, self._engine_filter, self._sorting, self.export.attempt, self._sort_key
            )
            self._advance(read=read)
            await self._write_row()
            await self._pause_if_due()
        if self._position != Position():
            # The walk has begun: its position is one in these lists.
            return
        merges = merge_lists(self._blobs, self._sorting, self.export.attempt, self._sort_key)
        async with aclosing(merges) as checkpoints:
            async for checkpoint in checkpoints:
                self._sorting = checkpoint
                await self._write_row()
                await self._pause_if_due()

    async def _find_columns(self) -> None:
        """Collect the list's own columns, in a pass over the tasks of its own."""
        export = self.export
        if not export.has_labels or export.columns is not None:
            return
        scan = ColumnScan(self._job.kind, export.scan.types, export.scan.extracted)
        if has_own_columns(self._job, export.format):
            async with aclosing(prefetch(self._walk(export.scan.position))) as batches:
                async for batch in batches:
                    async for some in extracted_slices(self._blobs, batch.tasks):
                        await asyncio.to_thread(scan.add, some)
                    if self._is_late or self._time_slice.is_over:
                        position = Position(batch.last, batch.position.offsets)
                        progress = ColumnsInProgress(position, scan.types, scan.extracted)
                        self.export = msgspec.structs.replace(self.export, scan=progress)
                        await self._write_row()
                        await self._pause_if_due()
        columns = scan.columns(TAKEN_COLUMNS, with_unchanged=export.has_unchanged)
        self.export = msgspec.structs.replace(self.export, columns=columns, scan=ColumnsInProgress())

    def _walk(self, position: Position) -> AsyncGenerator[TaskBatch, None]:
        after = position.after
        runs = self.export.run_keys(self._job)
        streams: list[TaskStream] = []
        engine = by_index(self._tasks, self._job.key)
        if engine is not None:
            streams += [RunStream(engine, run, self._engine_filter, after) for run in runs]
        else:
            streams += sorted_streams(self._blobs, self._sorting, position, self._sort_key)
        batches = merged(streams, after, self.export.where if len(runs) > 1 else None)
        return _changed(batches) if self.export.select.changed else batches

    @property
    def _engine_filter(self) -> TaskFilter:
        """The filter for the engine. Over several runs it is empty: only the latest result of a task counts, which the
        engine does not know."""
        return self.export.where if len(self.export.runs) == 1 else TaskFilter()

    def _sort_key(self, number: int, attempt: int) -> str:
        return f"{self._prefix}/sorted/{number:06d}-{attempt}"

    # Writing a file

    def _new_file(self, making: PartInProgress, digest: Digest | None = None) -> StagedFile:
        return StagedFile(self._blobs, self._prefix, len(self.export.parts) + 1, self.export.attempt, making, digest)

    def _new_part(self, making: PartInProgress) -> Part:
        export = self.export
        stored = making.part_state if making.part_state != msgspec.Raw(b"null") else None
        columns = export.columns if export.has_labels else None
        form = PartForm(export.format, export.compression, export.bodies, export.created_at, self._job.kind, columns)
        return new_part(form, export.part_bytes, self._names, stored)

    async def _add_window(self, window: Window) -> None:
        task = window.tasks[0] if window.tasks else None
        ref = task.detail.body if task is not None else None
        if task is not None and ref is not None and ref.length > LARGE and self.export.bodies is ExportBodies.FILE:
            await self._add_large_body(task, ref)
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
        self._file.add(packed.data)
        return packed

    async def _add_large_body(self, task: Task, ref: BodyRef) -> None:
        part = self._part
        assert isinstance(part, ZipPart)
        header = part.begin_large(task, ref)
        if header is None:
            self._position = msgspec.structs.replace(self._position, after=task.index - 1)
            await self._end_part()
            part = self._part
            assert isinstance(part, ZipPart)
            header = part.begin_large(task, ref) or b""
        self._file.add(header)
        # Counted at its start: a process that resumes in the middle does not count it again.
        self._count([task], [None])
        self._advance(bodies=1, body_bytes=ref.length)
        self._position = msgspec.structs.replace(self._position, after=task.index)
        await self._feed_large(part, ref)

    async def _feed_large(self, part: ZipPart, ref: BodyRef) -> None:
        """Read the body from its start, even if another process wrote a part of it: its sha256 is over all bytes."""
        assert part.large is not None
        skip = part.large.entry.size
        damage = None
        try:
            async for piece in stream_body(self._blobs, ref):
                fresh = piece[skip:]
                if skip:
                    self._time_slice.check_interrupted()
                    self._time_slice.begin()
                skip -= len(piece) - len(fresh)
                if fresh:
                    await asyncio.to_thread(self._add, part.feed_large, fresh)
                    await self._checkpoint_if_due()
        except BodyDamaged as error:
            damage = damage_of(error)
            self._advance(damaged=1)
        self._file.add(part.end_large(damage))

    def _add(self, make: Callable[[T], bytes], source: T) -> None:
        self._file.add(make(source))

    async def _end_part(self) -> None:
        """Write the end of the file, step by step, and close it."""
        if self._step is None:
            await self._checkpoint()
            await self._wait_for_save()
            self._step = 0
        for number, (needed, make) in enumerate(self._part.end(self._file.sidecars)):
            if number < self._step:
                continue
            sidecars = await self._file.read_sidecars(needed)
            await asyncio.to_thread(self._add, make, sidecars)
            self._step = number + 1
            if self._is_due:
                await self._file.put(self._file.cut())
                await self._write_row()
                await self._pause_if_due()
        await self._file.put(self._file.cut())
        await self._close_part()

    async def _close_part(self) -> None:
        if len(self.export.parts) >= MAX_PARTS:
            raise BadInput(f"The export would have more than {MAX_PARTS} parts. Ask for larger ones by `part_bytes`.")
        staged, ended = self._file, self._last
        part = await staged.close(self._part.tasks)
        self._part.close()
        self.export = msgspec.structs.replace(self.export, parts=[*self.export.parts, part])
        self._file = self._new_file(PartInProgress())
        self._part_state, self._step = msgspec.Raw(b"null"), None
        if ended:
            await self._finish()
        else:
            self._begun = self._new_part(PartInProgress())
            await self._write_row()
        await staged.tidy(part)
        if not ended:
            await self._pause_if_due()
            return
        while await self._blobs.delete_prefix(f"{self._prefix}/sorted", 1000):
            pass

    async def _finish(self) -> None:
        if self.export.to is not None:
            # Ready once it is copied.
            self.export = msgspec.structs.replace(self._current_record(), is_made=True)
            await self._write_row()
            return
        now = self._clock.now()
        self.export = msgspec.structs.replace(
            self._current_record(), state=ExportState.READY, ended_at=now, is_claimed=False
        )
        event = export_event(self._clock, self._job, self.row, self.export, "export.ready")
        crashpoint("exports.ready.before")
        # Due when it expires: retention finds it by that.
        await self._write_row(due_at=self.row.expires_at, event=event)
        crashpoint("exports.ready.after")

    # Checkpoints

    async def _checkpoint_if_due(self) -> None:
        if not self._is_due and not self._time_slice.is_over:
            return
        await self._checkpoint()
        await self._pause_if_due()

    @property
    def _is_due(self) -> bool:
        return self._file.buffered + self._part.buffered >= self._piece_bytes or self._is_late

    @property
    def _is_late(self) -> bool:
        return self._clock.monotonic() - self._saved_at >= _CHECKPOINT_SECONDS

    async def _checkpoint(self) -> None:
        """Start to make all work so far durable, in the background. Waits for the checkpoint before it."""
        flushed = await asyncio.to_thread(self._part.flush)
        if flushed.data:
            await asyncio.to_thread(self._file.add, flushed.data)
        self._part_state = self._part.checkpoint()
        await self._wait_for_save()
        puts = self._file.cut(flushed.sidecar)
        self._saved_at = self._clock.monotonic()
        self._saving = asyncio.create_task(self._save(puts, self._row()))

    async def _wait_for_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            await saving

    async def _save(self, puts: Sequence[tuple[str, bytes]], row: Document) -> None:
        await self._file.put(puts)
        await self._write(row)

    async def _write_row(self, due_at: float | None = None, event: OutboxEvent | None = None) -> None:
        await self._wait_for_save()
        self._saved_at = self._clock.monotonic()
        await self._write(self._row(due_at), event)

    def _row(self, due_at: float | None = None) -> Document:
        """The row to write once its work is durable. It has the version of the row that it replaces."""
        body = msgspec.json.encode(self._current_record())
        return msgspec.structs.replace(self.row, body=body, due_at=due_at or self.row.due_at)

    async def _write(self, row: Document, event: OutboxEvent | None = None) -> None:
        """The row is the fence: only the process that wrote it last may continue."""
        if await self._records.jobs.job(self._job.tenant, self._job.job_id) is None:
            raise ExportSuperseded
        crashpoint("exports.checkpoint.before")
        written = await self._records.documents.replace_document(row, event)
        crashpoint("exports.checkpoint.after")
        if written is None:
            raise ExportSuperseded
        self.row = written

    def _current_record(self) -> ExportRecord:
        """The export with the progress of this process, which resets the counts of failures in a row."""
        making = PartInProgress(
            self._sorting,
            self._position,
            self._file.size,
            self._file.pieces,
            self._file.sidecars,
            self._file.attempts,
            self._part_state,
            self._step,
            self._last,
        )
        return msgspec.structs.replace(self.export, making=making, counts=self._counts, tries=0, lost=0)

    async def _pause_if_due(self) -> None:
        if self._time_slice.is_over:
            await self._wait_for_save()
            raise ExportPaused

    # Counts

    def _count(self, tasks: Sequence[Task], bodies: Sequence[Body | None]) -> None:
        for label, count in Counter([task.status.label for task in tasks]).items():
            self._counts[label] = self._counts.get(label, 0) + count
        written = [task.detail.body for task, body in zip(tasks, bodies, strict=True) if body is not None]
        size = sum(ref.length for ref in written if ref is not None)
        self._advance(bodies=len(written), body_bytes=size, damaged=sum(map(is_damaged, tasks)))

    def _advance(self, read: int = 0, bodies: int = 0, body_bytes: int = 0, damaged: int = 0) -> None:
        export = self.export
        self.export = msgspec.structs.replace(
            export,
            read=export.read + read,
            body_count=export.body_count + bodies,
            body_bytes=export.body_bytes + body_bytes,
            damaged=export.damaged + damaged,
        )


def export_event(clock: Clock, job: Job, row: Document, export: ExportRecord, event: str) -> OutboxEvent:
    """The outbox event of a finished export."""
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


async def _changed(batches: AsyncGenerator[TaskBatch, None]) -> AsyncGenerator[TaskBatch, None]:
    """The same batches without unchanged tasks."""
    async with aclosing(batches):
        async for batch in batches:
            yield batch._replace(tasks=[task for task in batch.tasks if not task.is_unchanged])

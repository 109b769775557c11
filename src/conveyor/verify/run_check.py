"""One run: its rows are counted and compared with its counts and its total, and every body that they refer to is read
and compared with what was written. Rows are read in pages, bodies in windows, long bodies as streams."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from conveyor.engines.blobs import Blobs
from conveyor.engines.tasks import TaskFilter, Tasks, by_index
from conveyor.errors import BodyDamaged
from conveyor.jobs.job_counts import forget_job_counts
from conveyor.jobs.row_counts import RowCounts
from conveyor.model import BodyRef, Counts, Job, Run, RunKey, Task, TaskError, piece_key
from conveyor.read.body_reader import LARGE, as_extracted, damage_of, is_damaged, windows
from conveyor.read.results import stream_body
from conveyor.read.verification import count_drift
from conveyor.read.walk import END, ROWS, Position, TaskBatch
from conveyor.states import ENDED
from conveyor.system import System
from conveyor.verify.findings import Finding, FindingKind, Findings, Pacing

# Of a long body that is read between two pauses.
_BYTES_AT_ONCE = 8 * 1024 * 1024


async def row_pages(tasks: Tasks, run: RunKey) -> AsyncGenerator[list[Task], None]:
    """All rows of a run, in list order where the engine has it: neighbours have their bodies together."""
    engine = by_index(tasks, run)
    if engine is not None:
        after: int | None = -1
        while after is not None:
            walked = await engine.walk(run, after, ROWS, TaskFilter())
            yield walked.tasks
            after = walked.last
        return
    for shard in range(max(1, run.shard_count)):
        last = None
        while page := await tasks.page(run, shard, last, ROWS, TaskFilter()):
            yield page
            last = page[-1].task_id


class RunCheck:
    """Checks runs, one after the other."""

    def __init__(self, system: System, findings: Findings, pacing: Pacing, repair: bool) -> None:
        self._system = system
        self._findings = findings
        self._pacing = pacing
        self._repair = repair

    async def check(self, job: Job, run: Run) -> bool:
        """Check one run. True if its counts are final and were right, or were repaired."""
        tasks, key = self._system.tasks, job.key_of(run)
        # Before the rows: those of an unfinished run may only be ahead of it.
        stored = await tasks.counts(key)
        rows = await self._read_rows(job, run)
        counted = rows.counts
        exact = run.state in ENDED and counted.ended == run.total
        if exact:
            # They are final now; the sweeper may have cancelled tasks since.
            stored = await tasks.counts(key)
        drifted = count_drift(stored, counted, exact) > 0
        repaired = drifted and self._repair and run.state in ENDED
        if repaired:
            await tasks.recount(key)
            await forget_job_counts(self._system.coordinator, job)
        if drifted:
            detail = f"The run counts {count_text(stored)}; its rows are {count_text(counted)}."
            self._add(Finding(FindingKind.COUNTS, detail, job.job_id, run.number, repaired=repaired))
        await self._check_total(job, run, rows.total)
        self._findings.checked.runs += 1
        return exact and (repaired or not drifted)

    async def _check_total(self, job: Job, run: Run, rows: int) -> None:
        if not run.last_batch:
            return
        if rows != run.total:
            detail = f"The run has {run.total} tasks, but {rows} rows."
            self._add(Finding(FindingKind.TOTAL, detail, job.job_id, run.number))
        lines = await self._system.records.ingests.ingested(run.run_id)
        if lines.ranges and lines.done and (lines.tasks, lines.invalid) != (run.total, run.invalid):
            detail = (
                f"The run has {run.total} tasks and {run.invalid} invalid lines; "
                f"{lines.tasks} tasks and {lines.invalid} invalid lines were ingested."
            )
            self._add(Finding(FindingKind.TOTAL, detail, job.job_id, run.number))

    async def _read_rows(self, job: Job, run: Run) -> RowCounts:
        """Check the bodies of all rows, and count the rows by status."""
        blobs, checked = self._system.blobs, self._findings.checked
        counted = RowCounts()
        rows = _batches(row_pages(self._system.tasks, job.key_of(run)))
        async with aclosing(windows(blobs, rows, with_bodies=True, deflated=True)) as stream:
            async for window in stream:
                counted.add(window.tasks)
                for task, body in zip(window.tasks, window.bodies, strict=True):
                    ref = task.detail.body
                    if ref is None:
                        continue
                    damage = task.detail.error if is_damaged(task) else None
                    if damage is None and body is None and ref.length > LARGE:
                        damage = await self._stream(ref)
                    checked.bodies += 1
                    checked.bytes += ref.stored_length
                    if damage is not None:
                        await self._add_damage(job, run, task, ref, damage)
                await self._check_extracted(job, run, window.tasks)
                checked.tasks += len(window.tasks)
                self._findings.step()
                await self._pacing.rest()
        return counted

    async def _check_extracted(self, job: Job, run: Run, tasks: list[Task]) -> None:
        """Check what was extracted from bodies, as bodies are checked."""
        extracted = [as_extracted(task) for task in tasks if task.detail.extracted is not None]
        for task in extracted:
            ref = task.detail.body
            assert ref is not None
            damage = await self._stream(ref)
            self._findings.checked.bodies += 1
            self._findings.checked.bytes += ref.stored_length
            if damage is not None:
                await self._add_damage(job, run, task, ref, damage)

    async def _stream(self, ref: BodyRef) -> TaskError | None:
        read = 0
        try:
            async for piece in stream_body(self._system.blobs, ref):
                read += len(piece)
                if read >= _BYTES_AT_ONCE:
                    read = 0
                    await self._pacing.rest()
        except BodyDamaged as error:
            return damage_of(error)
        return None

    async def _add_damage(self, job: Job, run: Run, task: Task, ref: BodyRef, damage: TaskError) -> None:
        is_gone = await _is_missing(self._system.blobs, ref)
        kind = FindingKind.BODY_MISSING if is_gone else FindingKind.BODY_DAMAGED
        self._add(Finding(kind, damage.message, job.job_id, run.number, task.index, ref.key or None, ref.length))

    def _add(self, finding: Finding) -> None:
        self._findings.add(finding)


def count_text(counts: Counts) -> str:
    """Counts in words."""
    unchanged = f" ({counts.unchanged} unchanged)" if counts.unchanged else ""
    return f"{counts.succeeded} succeeded{unchanged}, {counts.failed} failed, {counts.cancelled} cancelled"


async def _batches(pages: AsyncGenerator[list[Task], None]) -> AsyncGenerator[TaskBatch, None]:
    async with aclosing(pages):
        async for page in pages:
            yield TaskBatch(page, Position(), END, len(page))


async def _is_missing(blobs: Blobs, ref: BodyRef) -> bool:
    if ref.inline is not None:
        return False
    pieces = -(-ref.length // ref.piece) if ref.piece else 0
    keys = [piece_key(ref.key, number) for number in range(pieces)] or [ref.key]
    for key in keys:
        if await blobs.size(key) is None:
            return True
    return False

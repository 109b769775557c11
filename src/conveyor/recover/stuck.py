"""Stuck tasks: takes long tasks from attempts without progress and from dead workers, and requeues them on the recovery
queue with their checkpoint. A task that never makes progress fails.

It reads only progress documents that are due, and overdue heartbeats of workers. A task is taken over by writing its
document on the version that was read: that supersedes the attempt, and excludes every other monitor. The document
becomes due again until the next attempt starts, so that a message that was lost between the two steps is sent again.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.isolation import Isolation, run_all
from conveyor.engines.queue import Outgoing, Queue, recovery_queue
from conveyor.engines.records import Document, Records
from conveyor.engines.tasks import Tasks
from conveyor.errors import EngineFailed
from conveyor.faults import crashpoint
from conveyor.jobs.chunks import drop_if_ended, encode, send_all
from conveyor.model import (
    BEAT,
    PROGRESS,
    Beat,
    Chunk,
    InputJson,
    Job,
    JobId,
    LongTask,
    Task,
    TaskProgress,
    TaskRef,
    TenantId,
    progress_id,
)
from conveyor.recover.monitored import Monitored
from conveyor.settings import Settings
from conveyor.states import WORKABLE, RunState, TaskStatus

log = structlog.get_logger()

_PAGE = 100
# Pages of due documents that one pass reads.
_PAGES = 50
# The part of a lease in which a dead worker may have written progress after its last heartbeat. Later progress is that
# of another worker: the message was redelivered after a whole lease.
_LAST_WORDS = 2 / 3

_progress = msgspec.json.Decoder(TaskProgress)
_beat = msgspec.json.Decoder(Beat)

# Called for each task that is taken over.
OnTakeover = Callable[[Job, TaskProgress], Awaitable[None]]


class OverdueProgress(msgspec.Struct, frozen=True):
    """A progress document that is due, decoded."""

    row: Document
    progress: TaskProgress
    # Its worker is dead.
    orphaned: bool = False


class Stuck:
    """A part of the monitor."""

    def __init__(
        self,
        records: Records,
        tasks: Tasks,
        queue: Queue,
        clock: Clock,
        settings: Settings,
        told: OnTakeover | None = None,
    ) -> None:
        self._records = records
        self._tasks = tasks
        self._queue = queue
        self._clock = clock
        self._settings = settings
        self._told = told
        self._isolation = Isolation("monitor", clock)

    async def run_once(self, seen: Monitored) -> None:
        await run_all(partial(self._check_workers, seen), partial(self._look_at_tasks, seen))

    async def _check_workers(self, seen: Monitored) -> None:
        for _ in range(_PAGES):
            beats = await self._records.documents.due_documents(BEAT, self._clock.now(), _PAGE)
            await self._isolation.due_rows(self._records, beats, partial(self._release_worker, seen))
            if len(beats) < _PAGE:
                break

    async def _look_at_tasks(self, seen: Monitored) -> None:
        limit = _PAGE
        for _ in range(_PAGES):
            rows = await self._records.documents.due_documents(PROGRESS, self._clock.now(), limit)
            overdue = await self._read(rows, seen)
            # Postponing a document would change its version, and so supersede an attempt: documents of a failing run
            # stay due, and more documents are read after them.
            fresh = [due for due in overdue if not self._isolation.is_resting(due.progress.run_id)]
            seen.checked += len(rows) - (len(overdue) - len(fresh))
            await self._look(fresh, seen)
            if len(rows) < limit:
                break
            limit = min(_PAGE + len(overdue) - len(fresh), _PAGE * _PAGES)

    async def _release_worker(self, seen: Monitored, row: Document) -> None:
        """Send the tasks of a dead worker again. Its document goes last, so that a crash repeats a harmless step."""
        try:
            beat = _beat.decode(row.body)
        except msgspec.MsgspecError as error:
            log.error("a worker's document cannot be read", worker=row.id, error=str(error))
            beat = Beat(0.0, [])
        overdue = [each for task in beat.tasks if (each := await self._orphan(task, beat)) is not None]
        seen.checked += len(beat.tasks)
        if not await self._look(overdue, seen):
            raise EngineFailed(f"Tasks of the worker {row.id}, which is gone, could not be taken over.")
        crashpoint("monitor.worker.before")
        if await self._records.documents.remove_document(row):
            seen.workers += 1
            log.warning("a worker is gone", worker=row.id, tasks=len(overdue))

    async def _orphan(self, task: LongTask, beat: Beat) -> OverdueProgress | None:
        row = await self._records.documents.document(PROGRESS, task.tenant, progress_id(task.run_id, task.index))
        if row is None or row.due_at is None:
            return None
        progress = _decoded(row)
        if progress is None or not progress.holder:
            return None
        last_words = beat.at + self._settings.lease_seconds * _LAST_WORDS
        return OverdueProgress(row, progress, orphaned=True) if progress.at <= last_words else None

    async def _read(self, rows: Sequence[Document], seen: Monitored) -> list[OverdueProgress]:
        overdue = []
        for row in rows:
            progress = _decoded(row)
            if progress is not None and (row.expires_at is None or row.expires_at > self._clock.now()):
                overdue.append(OverdueProgress(row, progress))
                continue
            if progress is None:
                log.error("progress document cannot be decoded", tenant=row.tenant, row=row.id)
            removed = await self._records.documents.remove_document(row)
            seen.settled += removed
        return overdue

    async def _look(self, overdue: Sequence[OverdueProgress], seen: Monitored) -> bool:
        """Handle tasks, the runs at once; False if the handling of a run failed."""
        by_run: dict[tuple[TenantId, JobId | None, str], list[OverdueProgress]] = {}
        for due in overdue:
            by_run.setdefault((due.row.tenant, due.row.job_id, due.progress.run_id), []).append(due)
        groups = list(by_run.values())
        await self._isolation.each(groups, lambda group: group[0].progress.run_id, partial(self._look_at_run, seen))
        return not any(self._isolation.is_resting(run_id) for _, _, run_id in by_run)

    async def _look_at_run(self, seen: Monitored, group: Sequence[OverdueProgress]) -> None:
        """`group` are tasks of one run."""
        run_id, row = group[0].progress.run_id, group[0].row
        job = None if row.job_id is None else await self._records.jobs.job(row.tenant, row.job_id)
        if job is None or job.run.run_id != run_id or job.state not in WORKABLE:
            paused = job is not None and job.run.run_id == run_id and job.state is RunState.PAUSED
            for due in group:
                settled = await self._settle(due, paused=paused)
                seen.settled += settled
            return
        await self._take_over(job, group, seen)

    async def _take_over(self, job: Job, group: Sequence[OverdueProgress], seen: Monitored) -> None:
        tasks = {task.index: task for task in await self._tasks.at(job.key, [due.progress.index for due in group])}
        outgoing = []
        for due in group:
            task = tasks.get(due.progress.index)
            if task is None or task.status is not TaskStatus.PENDING:
                settled = await self._settle(due)
                seen.settled += settled
                continue
            message = await self._take(job, due, task, seen)
            if message is not None:
                outgoing.append(message)
        if outgoing:
            crashpoint("monitor.send.before")
            await send_all(self._queue, recovery_queue(job.run.run_id), outgoing, self._clock)
            crashpoint("monitor.send.after")
            await drop_if_ended(self._records, self._queue, job, self._clock.now())

    async def _take(self, job: Job, due: OverdueProgress, task: Task, seen: Monitored) -> Outgoing | None:
        """Take the task over; returns the message that requeues it, or that has a worker fail it."""
        before = due.progress
        stuck_after = job.options.stuck_after or self._settings.stuck_after
        due_at = self._clock.now() + stuck_after
        waits = before.holder == ""
        if waits and (await self._queue.depth(recovery_queue(job.run.run_id))).total:
            # It was requeued, and no worker has received it yet.
            await self._records.documents.replace_document(msgspec.structs.replace(due.row, due_at=due_at))
            return None
        lost = before.lost if waits else 1 if before.done > before.begun else before.lost + 1
        after = msgspec.structs.replace(
            before, holder="", lost=lost, begun=max(before.begun, before.done), turn=before.turn + 1, rate=0.0
        )
        crashpoint("monitor.take.before")
        taken = await self._records.documents.replace_document(
            msgspec.structs.replace(due.row, body=msgspec.json.encode(after), due_at=due_at)
        )
        crashpoint("monitor.take.after")
        if taken is None:
            # It has made progress after all, or another monitor was first.
            return None
        if self._told is not None:
            await self._told(job, after)
        ref = TaskRef(before.index, InputJson(bytes(task.input).decode()), before.attempt, before.since)
        if lost < max(1, self._settings.max_lost_starts):
            if due.orphaned:
                seen.orphans += 1
            else:
                seen.requeued += 1
            log.warning("task taken over", run=job.run.run_id, index=before.index, orphaned=due.orphaned, lost=lost)
            return encode(Chunk(job.key, [ref], turn=after.turn))
        seen.failed += 1
        why = f"The task made no progress for {stuck_after:g} seconds, {lost} times in a row."
        if due.orphaned:
            why = f"The worker was lost {lost} times while it ran this task, without progress."
        code = "" if due.orphaned else "stuck"
        return encode(Chunk(job.key, [ref], alone=True, lost=why, code=code, turn=after.turn))

    async def _settle(self, due: OverdueProgress, *, paused: bool = False) -> bool:
        """A task that has finished, or must not run now, is not late: remove its document, or clear its due time."""
        if not paused:
            return await self._records.documents.remove_document(due.row)
        return await self._records.documents.replace_document(msgspec.structs.replace(due.row, due_at=None)) is not None


def _decoded(row: Document) -> TaskProgress | None:
    try:
        return _progress.decode(row.body)
    except msgspec.MsgspecError:
        return None

"""Callback monitor: sends heartbeats and answers to state machines that wait for jobs. It reads the callbacks that are
due (callbacks.py), and for each sends a heartbeat while its run makes progress, WORKER_STUCK if it does not, or the
answer in the document.

A document is claimed on its version before anything is sent, so that several monitors share the load; a claim expires.
The progress of a run is read from its counts, its ingest and the documents of its long tasks, never from its tasks.
"""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from conveyor.clock import iso_text
from conveyor.coordination.breaker_states import current_wait
from conveyor.coordination.fail_open import FailOpen
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.engines.queue import run_queues
from conveyor.engines.records import Document
from conveyor.engines.step_functions import CallOutcome, StepFunctions
from conveyor.faults import crashpoint
from conveyor.jobs.callbacks import (
    CALLBACK,
    Callback,
    CallbackAnswer,
    CallbackMarks,
    CallbackStatus,
    callback_of,
    error_answer,
    seal_name,
    with_callback,
)
from conveyor.model import BEAT, BEAT_TENANT, EXPORT, PROGRESS, Beat, Job, Mode, RunId, TaskProgress, progress_id
from conveyor.states import ENDED, RunState
from conveyor.system import System
from conveyor.telemetry import metrics

log = structlog.get_logger()

WORKER_STUCK = "WORKER_STUCK"
JOB_DELETED = "JOB_DELETED"

_EVERY = 1.0
_PAGE = 100
# Pages of due documents that one pass reads.
_PAGES = 20
# Documents in a page of long tasks, or of workers; and pages of long tasks.
_ROWS = 100
_ROW_PAGES = 5
# The part of HeartbeatSeconds after which a heartbeat is sent at the latest.
_LATEST = 0.8
_SOONEST = 0.25
# Seconds for which a claim is valid.
_LONGEST_CLAIM = 30.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 300.0

_progress = msgspec.json.Decoder(TaskProgress)
_beat = msgspec.json.Decoder(Beat)


class CallbackPass(msgspec.Struct):
    """What one pass did."""

    checked: int = 0
    heartbeats: int = 0
    stuck: int = 0
    answers: int = 0
    # The state machine no longer waited.
    timed_out: int = 0
    # Calls that are retried.
    later: int = 0


class Callbacks:
    """A role, and a part of the monitor."""

    def __init__(self, system: System, waiters: StepFunctions) -> None:
        self.name = "callbacks"
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._records = system.records
        self._tasks = system.tasks
        self._queue = system.queue
        # Without the coordinator no limit holds a run back: one without progress does not wait for it.
        self._coordinator = FailOpen(system.coordinator, system.clock)
        self._clock = system.clock
        self._settings = system.settings
        self._waiters = waiters
        # A run is stuck by a time that a jump of the clock does not move: the state machine is told so once.
        self._deadline_time = TrustedTime(system.records.documents, system.clock, deadlines=True)
        self._isolation = Isolation(self.name, self._clock)

    async def tick(self) -> float:
        kept = await self.run_once()
        if kept != CallbackPass():
            log.debug("callbacks handled", **msgspec.structs.asdict(kept))
        return _EVERY

    async def close(self) -> None:
        """Nothing to release between ticks."""

    async def part(self) -> Mapping[str, int]:
        """One pass, as an additional step of the monitor."""
        counts: dict[str, int] = msgspec.structs.asdict(await self.run_once())
        return {f"callback_{name}": count for name, count in counts.items() if count}

    async def run_once(self) -> CallbackPass:
        kept = CallbackPass()
        workers: dict[RunId, str] | None = None
        await self._deadline_time.now()
        for _ in range(_PAGES):
            rows = await self._records.documents.due_documents(CALLBACK, self._clock.now(), _PAGE)
            if rows and workers is None:
                workers = await self._workers()
            # A callback that fails does not stop the others; it is retried when its claim has expired.
            await self._isolation.due_rows(self._records, rows, partial(self._look, workers or {}, kept))
            if len(rows) < _PAGE or self.stopping:
                break
        metrics.add_counts(metrics.CALLBACKS, kept)
        return kept

    async def _workers(self) -> dict[RunId, str]:
        """The workers that run long tasks, by run."""
        page = await self._records.documents.documents(BEAT, BEAT_TENANT, None, _ROWS)
        workers: dict[RunId, str] = {}
        for row in page.items:
            try:
                workers |= {task.run_id: row.id for task in _beat.decode(row.body).tasks}
            except msgspec.MsgspecError:
                continue
        return workers

    async def _look(self, workers: Mapping[RunId, str], kept: CallbackPass, row: Document) -> None:
        try:
            callback = callback_of(row)
        except msgspec.MsgspecError as error:
            log.error("callback cannot be decoded", tenant=row.tenant, callback=row.id, error=str(error))
            await self._records.documents.replace_document(msgspec.structs.replace(row, due_at=None))
            return
        if row.expires_at is not None and row.expires_at <= self._clock.now():
            await self._records.documents.remove_document(row)
            return
        if callback.answer is not None:
            await self._answer(row, callback, callback.answer, kept)
        else:
            await self._keep(row, callback, workers, kept)

    async def _keep(self, row: Document, callback: Callback, workers: Mapping[RunId, str], kept: CallbackPass) -> None:
        """Send a heartbeat if the run makes progress or has to wait; else answer WORKER_STUCK."""
        crashpoint("callback.claim.before")
        claimed = await self._records.documents.replace_document(
            with_callback(row, callback, self._claim_until(callback))
        )
        crashpoint("callback.claim.after")
        if claimed is None:
            return
        kept.checked += 1
        job = await self._records.jobs.job(row.tenant, callback.job_id)
        if job is None:
            gone = error_answer(self._clock.now(), JOB_DELETED, callback, "the job was deleted")
            await self._fail(claimed, callback, gone, kept)
            return
        if callback.export_id is not None:
            seen = await self._seen_export(claimed, callback, kept)
            if seen is None:
                return
        else:
            seen = await self._seen(job, callback)
        now = self._clock.now()
        moved = seen != callback.marks
        # A clock that was ahead may have set it.
        at = now if moved else min(now, callback.progress_at)
        changed = msgspec.structs.replace(
            callback, marks=seen, progress_at=at, worker=workers.get(callback.run_id, callback.worker)
        )
        if self._deadline_time.peek() - at >= callback.stuck_after and not await self._waits(job, callback):
            kept.stuck += 1
            since = f"the run has made no progress since {iso_text(at)}"
            log.warning("run of a waiting state machine is stuck", job=callback.job_id, callback=row.id)
            await self._fail(claimed, changed, error_answer(now, WORKER_STUCK, changed, since), kept)
            return
        if moved:
            changed = msgspec.structs.replace(changed, status=CallbackStatus.IN_PROGRESS)
        await self._heartbeat(claimed, changed, kept)

    async def _heartbeat(self, row: Document, callback: Callback, kept: CallbackPass) -> None:
        crashpoint("callback.heartbeat.before")
        told = await self._waiters.heartbeat(callback.token, seal_name(row))
        crashpoint("callback.heartbeat.after")
        now = self._clock.now()
        if told is CallOutcome.TAKEN:
            kept.heartbeats += 1
            # A run without any progress yet gets its first heartbeat too.
            sent = msgspec.structs.replace(callback, heartbeat_at=now, tries=0)
            await self._write(row, sent, now + self._interval(callback))
        elif told is CallOutcome.GONE:
            await self._end(row, callback, CallbackStatus.TIMED_OUT, kept)
        else:
            await self._again(row, callback, kept)

    async def _fail(self, row: Document, callback: Callback, answer: CallbackAnswer, kept: CallbackPass) -> None:
        """Store the error as the answer, unless the dispatcher was first, and send it."""
        failed = msgspec.structs.replace(callback, status=CallbackStatus.FAILED, answer=answer, tries=0)
        crashpoint("callback.fail.before")
        written = await self._records.documents.replace_document(with_callback(row, failed, self._clock.now()))
        crashpoint("callback.fail.after")
        if written is not None:
            await self._answer(written, failed, answer, kept)

    async def _answer(self, row: Document, callback: Callback, answer: CallbackAnswer, kept: CallbackPass) -> None:
        """Send the answer. `doubtful` is written first: after a crash the answer may have been accepted."""
        begun = msgspec.structs.replace(callback, doubtful=True)
        crashpoint("callback.claim.before")
        claimed = await self._records.documents.replace_document(with_callback(row, begun, self._claim_until(callback)))
        crashpoint("callback.claim.after")
        if claimed is None:
            return
        kept.checked += 1
        told = await self._send(claimed, callback, answer)
        crashpoint("callback.sent.after")
        if told is CallOutcome.TAKEN:
            kept.answers += 1
            await self._end(claimed, begun, CallbackStatus.SENT, kept)
        elif told is CallOutcome.GONE:
            # Too late, unless an earlier call was accepted.
            status = CallbackStatus.SENT if callback.doubtful else CallbackStatus.TIMED_OUT
            await self._end(claimed, begun, status, kept)
        else:
            doubtful = callback.doubtful or told is CallOutcome.UNKNOWN
            await self._again(claimed, msgspec.structs.replace(begun, doubtful=doubtful), kept)

    async def _send(self, row: Document, callback: Callback, answer: CallbackAnswer) -> CallOutcome:
        name = seal_name(row)
        if answer.output is not None:
            return await self._waiters.succeed(callback.token, name, answer.output)
        return await self._waiters.fail(callback.token, name, answer.error or "", answer.cause or "")

    async def _end(self, row: Document, callback: Callback, status: CallbackStatus, kept: CallbackPass) -> None:
        """Finish the callback: remove the token, and keep the document for a while."""
        now = self._clock.now()
        answered_at = now if status is CallbackStatus.SENT else None
        ended = msgspec.structs.replace(
            callback, status=status, token="", doubtful=False, tries=0, answered_at=answered_at, output=None
        )
        if status is CallbackStatus.TIMED_OUT:
            kept.timed_out += 1
            log.warning("state machine no longer waits for the job", job=callback.job_id, callback=row.id)
        else:
            error = None if callback.answer is None else callback.answer.error
            log.info("state machine answered", job=callback.job_id, callback=row.id, error=error)
        expiring = msgspec.structs.replace(row, expires_at=now + self._settings.callback_log_seconds)
        await self._write(expiring, ended, None)

    async def _again(self, row: Document, callback: Callback, kept: CallbackPass) -> None:
        """Retry after a backoff that is shorter than the heartbeat interval."""
        kept.later += 1
        longest = _LONGEST_PAUSE if callback.answer is not None else callback.heartbeat_seconds / 10
        pause = min(_FIRST_PAUSE * 2 ** min(callback.tries, 20), longest) * (0.5 + self._clock.jitter() / 2)
        await self._write(row, msgspec.structs.replace(callback, tries=callback.tries + 1), self._clock.now() + pause)

    async def _write(self, row: Document, callback: Callback, due_at: float | None) -> None:
        """Write the document, unless another monitor has claimed it or it has got an answer."""
        crashpoint("callback.record.before")
        await self._records.documents.replace_document(with_callback(row, callback, due_at))
        crashpoint("callback.record.after")

    def _claim_until(self, callback: Callback) -> float:
        return self._clock.now() + min(_LONGEST_CLAIM, max(1.0, callback.heartbeat_seconds / 10))

    def _interval(self, callback: Callback) -> float:
        """Seconds until the next heartbeat: short enough to be in time even if one pass is missed."""
        seconds = callback.heartbeat_seconds
        return max(seconds * _SOONEST, seconds * _LATEST - 2 * self._settings.monitor_seconds)

    async def _seen(self, job: Job, callback: Callback) -> CallbackMarks:
        """The progress of the run. Documents of long tasks are read only if nothing else has changed."""
        if job.run.run_id != callback.run_id:
            # It has finished, and a rerun was started: its outbox event has the answer.
            return callback.marks
        before = callback.marks
        counts = await self._tasks.counts(job.key)
        seen = msgspec.structs.replace(before, ended=counts.ended)
        if not job.run.last_batch:
            ingested = await self._records.ingests.ingested(callback.run_id)
            seen = msgspec.structs.replace(seen, ingested=ingested.tasks + ingested.invalid, read=ingested.bytes_read)
        if seen != before:
            return seen
        return msgspec.structs.replace(seen, written_at=await self._written_at(job, before.written_at))

    async def _written_at(self, job: Job, before: float) -> float:
        """When one of its long tasks last wrote its progress, if that is later than `before`."""
        first = progress_id(job.run.run_id, 0).removesuffix("0")
        cursor: str | None = first
        for _ in range(_ROW_PAGES):
            page = await self._records.documents.documents(PROGRESS, job.tenant, cursor, _ROWS, job.job_id)
            for row in page.items:
                if row.id.startswith(first) and (at := _moved_at(row)) > before:
                    return at
            cursor = page.next_cursor
            if cursor is None or not cursor.startswith(first):
                break
        return before

    async def _seen_export(self, row: Document, callback: Callback, kept: CallbackPass) -> CallbackMarks | None:
        """The progress of the export that the answer waits for; None if it was removed, and the answer was sent."""
        export = await self._records.documents.document(EXPORT, row.tenant, callback.export_id or "")
        if export is not None:
            return msgspec.structs.replace(callback.marks, export=export.version)
        event_id = msgspec.json.decode(callback.output or "{}").get("event_id")
        answer = CallbackAnswer(self._clock.now(), event_id, output=callback.output)
        done = msgspec.structs.replace(callback, status=CallbackStatus.COMPLETED, answer=answer, tries=0)
        crashpoint("callback.fail.before")
        written = await self._records.documents.replace_document(with_callback(row, done, self._clock.now()))
        crashpoint("callback.fail.after")
        if written is not None:
            await self._answer(written, done, answer, kept)
        return None

    async def _waits(self, job: Job, callback: Callback) -> bool:
        """Whether a run without progress has to wait: it has finished and its event is being dispatched, is paused, is
        open and has no tasks, or is kept back until a time."""
        if callback.export_id is not None:
            return False
        if job.run.run_id != callback.run_id or job.state in ENDED or job.state is RunState.PAUSED:
            return True
        if job.mode is Mode.OPEN and not job.run.sealed:
            return (await self._records.ingests.ingested(callback.run_id)).tasks <= callback.marks.ended
        if await current_wait(self._coordinator, self._clock, job) is not None:
            return True
        # Retries of this run that are not due. Messages of which the engine does not know whose or how many they are
        # are no reason to wait: a process that has just started knows little.
        return any([(await self._queue.depth(queue)).delayed > 0 for queue in run_queues(callback.run_id)])


def _moved_at(row: Document) -> float:
    try:
        return _progress.decode(row.body).at
    except msgspec.MsgspecError:
        return 0.0

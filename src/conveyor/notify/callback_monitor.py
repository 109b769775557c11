"""Callbacks: keeps state machines waiting for jobs, and answers them. Gets the rows that are due (callbacks.py), and
for each sends a heartbeat while its run moves, WORKER_STUCK when it does not, or the answer that the row has.

A row is claimed on its version before anything is sent, so that several monitors share the load; a claim that was not
seen through lapses. Whether a run moves is seen from what is kept anyway: counts, how far its list is, the rows of its
long tasks; never from its tasks.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import structlog

from conveyor.clock import iso_text
from conveyor.coordination.isolation import Isolation
from conveyor.coordination.waits import waiting
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
    failure,
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
# Pages of due rows that one pass looks at.
_PAGES = 20
_AT_ONCE = 16
# Of the rows of a run's long tasks, and of those of workers.
_ROWS = 100
_ROW_PAGES = 5
# The part of HeartbeatSeconds after which a heartbeat is sent at latest, by the pass after the next.
_LATEST = 0.8
_SOONEST = 0.25
# Seconds for which a claimed row is left alone by others.
_LONGEST_CLAIM = 30.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 300.0

_progress = msgspec.json.Decoder(TaskProgress)
_beat = msgspec.json.Decoder(Beat)


class CallbackPass(msgspec.Struct):
    """What one pass did."""

    looked: int = 0
    heartbeats: int = 0
    stuck: int = 0
    answers: int = 0
    # Nobody waited for them any more.
    timed_out: int = 0
    # Calls that are to be made again.
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
        self._coordinator = system.coordinator
        self._clock = system.clock
        self._settings = system.settings
        self._waiters = waiters
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._isolation = Isolation(self.name, self._clock)

    async def tick(self) -> float:
        kept = await self.run_once()
        if kept != CallbackPass():
            log.debug("kept state machines waiting", **msgspec.structs.asdict(kept))
        return _EVERY

    async def close(self) -> None:
        """Nothing is held between ticks."""

    async def part(self) -> Mapping[str, int]:
        """A pass, for the monitor that it is hung into."""
        counts: dict[str, int] = msgspec.structs.asdict(await self.run_once())
        return {f"callback_{name}": count for name, count in counts.items() if count}

    async def run_once(self) -> CallbackPass:
        kept = CallbackPass()
        workers: dict[RunId, str] | None = None
        for _ in range(_PAGES):
            rows = await self._records.documents.due_rows(CALLBACK, self._clock.now(), _PAGE)
            if rows and workers is None:
                workers = await self._workers()
            looks = [
                self._isolation.due_row(self._records, row, partial(self._look, row, workers or {}, kept))
                for row in rows
            ]
            # One that fails does not keep the others waiting; it is looked at again when its claim has lapsed.
            for came in await asyncio.gather(*looks, return_exceptions=True):
                if came is not None:
                    raise came
            if len(rows) < _PAGE or self.stopping:
                break
        metrics.count(metrics.CALLBACKS, kept)
        return kept

    async def _workers(self) -> dict[RunId, str]:
        """Who runs long tasks of which runs."""
        page = await self._records.documents.documents(BEAT, BEAT_TENANT, None, _ROWS)
        found: dict[RunId, str] = {}
        for row in page.items:
            try:
                found |= {task.run_id: row.id for task in _beat.decode(row.body).tasks}
            except msgspec.MsgspecError:
                continue
        return found

    async def _look(self, row: Document, workers: Mapping[RunId, str], kept: CallbackPass) -> None:
        async with self._slots:
            try:
                callback = callback_of(row)
            except msgspec.MsgspecError as error:
                log.error("a callback can not be read", tenant=row.tenant, callback=row.id, error=str(error))
                await self._records.documents.replace_row(msgspec.structs.replace(row, due_at=None))
                return
            if row.expires_at is not None and row.expires_at <= self._clock.now():
                await self._records.documents.remove_row(row)
                return
            if callback.answer is not None:
                await self._answer(row, callback, callback.answer, kept)
            else:
                await self._keep(row, callback, workers, kept)

    async def _keep(self, row: Document, callback: Callback, workers: Mapping[RunId, str], kept: CallbackPass) -> None:
        """A heartbeat, if the run moves or waits as it is meant to; else the end of it."""
        crashpoint("callback.claim.before")
        claimed = await self._records.documents.replace_row(with_callback(row, callback, self._claim_until(callback)))
        crashpoint("callback.claim.after")
        if claimed is None:
            return
        kept.looked += 1
        job = await self._records.jobs.job(row.tenant, callback.job_id)
        if job is None:
            gone = failure(self._clock.now(), JOB_DELETED, callback, "the job was deleted")
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
        at = now if moved else callback.progress_at
        changed = msgspec.structs.replace(
            callback, marks=seen, progress_at=at, worker=workers.get(callback.run_id, callback.worker)
        )
        if now - at >= callback.stuck_after and not await self._waits(job, callback):
            kept.stuck += 1
            since = f"nothing of the run has moved since {iso_text(at)}"
            log.warning("a run is stuck that a state machine waits for", job=callback.job_id, callback=row.id)
            await self._fail(claimed, changed, failure(now, WORKER_STUCK, changed, since), kept)
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
            # A state machine that waits for a run which has not moved yet gets its first heartbeat too.
            sent = msgspec.structs.replace(callback, heartbeat_at=now, tries=0)
            await self._write(row, sent, now + self._interval(callback))
        elif told is CallOutcome.GONE:
            await self._end(row, callback, CallbackStatus.TIMED_OUT, kept)
        else:
            await self._again(row, callback, kept)

    async def _fail(self, row: Document, callback: Callback, answer: CallbackAnswer, kept: CallbackPass) -> None:
        """End it, unless the outbox was first."""
        failed = msgspec.structs.replace(callback, status=CallbackStatus.FAILED, answer=answer, tries=0)
        crashpoint("callback.fail.before")
        written = await self._records.documents.replace_row(with_callback(row, failed, self._clock.now()))
        crashpoint("callback.fail.after")
        if written is not None:
            await self._answer(written, failed, answer, kept)

    async def _answer(self, row: Document, callback: Callback, answer: CallbackAnswer, kept: CallbackPass) -> None:
        """Send it. That it was begun is written first: whoever finds it so knows that it may have been taken."""
        begun = msgspec.structs.replace(callback, doubtful=True)
        crashpoint("callback.claim.before")
        claimed = await self._records.documents.replace_row(with_callback(row, begun, self._claim_until(callback)))
        crashpoint("callback.claim.after")
        if claimed is None:
            return
        kept.looked += 1
        told = await self._send(claimed, callback, answer)
        crashpoint("callback.sent.after")
        if told is CallOutcome.TAKEN:
            kept.answers += 1
            await self._end(claimed, begun, CallbackStatus.SENT, kept)
        elif told is CallOutcome.GONE:
            # Not heard, unless it was already.
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
        """Nothing more is to be said. The token goes; the row stays for a while, to be looked at."""
        now = self._clock.now()
        answered_at = now if status is CallbackStatus.SENT else None
        ended = msgspec.structs.replace(
            callback, status=status, token="", doubtful=False, tries=0, answered_at=answered_at, output=None
        )
        if status is CallbackStatus.TIMED_OUT:
            kept.timed_out += 1
            log.warning("a state machine no longer waits for a job", job=callback.job_id, callback=row.id)
        else:
            error = None if callback.answer is None else callback.answer.error
            log.info("a state machine was answered", job=callback.job_id, callback=row.id, error=error)
        expiring = msgspec.structs.replace(row, expires_at=now + self._settings.callback_log_seconds)
        await self._write(expiring, ended, None)

    async def _again(self, row: Document, callback: Callback, kept: CallbackPass) -> None:
        """Try it again after a while, sooner than a heartbeat is due."""
        kept.later += 1
        most = _LONGEST_PAUSE if callback.answer is not None else callback.heartbeat_seconds / 10
        pause = min(_FIRST_PAUSE * 2 ** min(callback.tries, 20), most) * (0.5 + self._clock.jitter() / 2)
        await self._write(row, msgspec.structs.replace(callback, tries=callback.tries + 1), self._clock.now() + pause)

    async def _write(self, row: Document, callback: Callback, due_at: float | None) -> None:
        """If the row is another's by now, or has an answer, that stands."""
        crashpoint("callback.record.before")
        await self._records.documents.replace_row(with_callback(row, callback, due_at))
        crashpoint("callback.record.after")

    def _claim_until(self, callback: Callback) -> float:
        return self._clock.now() + min(_LONGEST_CLAIM, max(1.0, callback.heartbeat_seconds / 10))

    def _interval(self, callback: Callback) -> float:
        """Until the next heartbeat: such that one more pass may be missed, and it is not late."""
        most = callback.heartbeat_seconds
        return max(most * _SOONEST, most * _LATEST - 2 * self._settings.monitor_seconds)

    async def _seen(self, job: Job, callback: Callback) -> CallbackMarks:
        """How far the run is. Rows of long tasks are read only if nothing else has moved."""
        if job.run.run_id != callback.run_id:
            # It has ended, and there is another: the answer is on its way.
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
        """When one of its long tasks wrote how far it is, if that is later than `before`."""
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
        """How far the export is that the answer waits for. None if it is gone: then the answer goes without it."""
        export = await self._records.documents.document(EXPORT, row.tenant, callback.export_id or "")
        if export is not None:
            return msgspec.structs.replace(callback.marks, export=export.version)
        event_id = msgspec.json.decode(callback.output or "{}").get("event_id")
        answer = CallbackAnswer(self._clock.now(), event_id, output=callback.output)
        done = msgspec.structs.replace(callback, status=CallbackStatus.COMPLETED, answer=answer, tries=0)
        crashpoint("callback.fail.before")
        written = await self._records.documents.replace_row(with_callback(row, done, self._clock.now()))
        crashpoint("callback.fail.after")
        if written is not None:
            await self._answer(written, done, answer, kept)
        return None

    async def _waits(self, job: Job, callback: Callback) -> bool:
        """Whether a run that does not move is not meant to: it has ended and that is about to be told, is paused, is
        open and has nothing to do, or is held back until a time."""
        if callback.export_id is not None:
            return False
        if job.run.run_id != callback.run_id or job.state in ENDED or job.state is RunState.PAUSED:
            return True
        if job.mode is Mode.OPEN and not job.run.sealed:
            return (await self._records.ingests.ingested(callback.run_id)).tasks <= callback.marks.ended
        if await waiting(self._coordinator, callback.run_id) is not None:
            return True
        return any([(await self._queue.depth(queue)).delayed > 0 for queue in run_queues(callback.run_id)])


def _moved_at(row: Document) -> float:
    try:
        return _progress.decode(row.body).at
    except msgspec.MsgspecError:
        return 0.0

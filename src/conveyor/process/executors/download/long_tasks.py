"""What the executors of long tasks share: the clients, the rows of progress, and the way from whatever ended an attempt
to its outcome.

An attempt that moved a file on and then failed for a reason that may pass spends nothing: the next one goes on from
there, so that a file of hours needs no more attempts than one of seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.egress.failures import Failure, failure_of
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.blobs import Blobs
from conveyor.engines.records import Records
from conveyor.errors import Unavailable
from conveyor.model import Job, Outcome, TaskError, TaskRef
from conveyor.process.executors.download.exchange import Exchange, ExchangePlan
from conveyor.process.executors.download.ranges import RemoteFile
from conveyor.process.executors.download.transfer import DownloadedFile, DownloadRequest, TargetError, Transfer
from conveyor.process.retry import backoff_delay, is_retryable, late, retry_delay, too_late
from conveyor.process.task_progress import ProgressBook, Superseded, Track
from conveyor.settings import Settings
from conveyor.states import TaskStatus

log = structlog.get_logger()

# How long a task waits that could not be kept here.
_STORE_PAUSE = 30.0

Step = Callable[[ExchangePlan, Track], Awaitable[Outcome]]


class LongTasks:
    """The parts of one executor of long tasks. `root_certificate` is a PEM to trust beside the usual."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        guard: TargetGuard,
        records: Records,
        blobs: Blobs,
        root_certificate: bytes | None = None,
    ) -> None:
        self.exchange = Exchange(settings, clock, guard, root_certificate=root_certificate)
        self._settings = settings
        self._clock = clock
        self._blobs = blobs
        self._book = ProgressBook(records, clock, settings)

    async def attempt(self, job: Job, ref: TaskRef, step: Step) -> Outcome:
        """Take the task's row, do the step, and say what came of it. Raises Superseded."""
        started = self._clock.monotonic()
        track: Track | None = None
        blamed: frozenset[str] = frozenset()
        try:
            plan = self.exchange.plan(job)
            blamed = plan.route.blamed
            track = await self._book.begin(job, ref)
            if too_late(job.options, msgspec.structs.replace(ref, since=track.since), self._clock.now()):
                outcome = Outcome(TaskStatus.FAILED, error=late(job.options, None))
                await _rest(track)
            else:
                outcome = await step(plan, track)
        except Superseded:
            raise
        except asyncio.CancelledError:
            await _rest(track)
            raise
        except Exception as error:
            outcome = outcome_of(error, blamed)
            await _rest(track)
        outcome.elapsed = self._clock.monotonic() - started
        outcome.since = 0 if track is None else track.since
        return outcome

    async def take(
        self,
        job: Job,
        ref: TaskRef,
        plan: ExchangePlan,
        track: Track,
        wanted: DownloadRequest,
        left: RemoteFile | None,
        remember: Callable[[RemoteFile | None], msgspec.Raw],
        spare: frozenset[int] = frozenset(),
    ) -> Outcome:
        """Take a file; the step that a download is, and with which an export ends. After one of the statuses in `spare`
        what is there is kept: the caller knows how to go on."""
        transfer = Transfer(self.exchange, self._blobs, self._clock, self._settings, job, plan, track, remember)
        try:
            return _succeeded(await transfer.take(wanted, left))
        except (Superseded, Unavailable):
            raise
        except Exception as error:
            outcome = outcome_of(error, plan.route.blamed)
        if transfer.advanced and is_retryable(job.options, outcome):
            outcome.spend = False
            outcome.retry_after = backoff_delay(job.options.backoff, 1, self._clock.jitter(), outcome.retry_after)
        elif outcome.http_status not in spare and retry_delay(job.options, ref.attempt, outcome, 0.0) is None:
            # Nobody will go on with what is there.
            await transfer.drop()
            return outcome
        await track.rest()
        return outcome


def outcome_of(error: Exception, blamed: frozenset[str]) -> Outcome:
    """The outcome of an attempt that ended so. What our own stores did is not the task's failure: it waits."""
    if isinstance(error, Unavailable):
        log.warning("a long task waits for the store", error=repr(error))
        why = TaskError("store_failed", error.message)
        return Outcome(TaskStatus.FAILED, error=why, retry_after=_STORE_PAUSE, spend=False)
    failure = failure_of(error, blamed)
    if failure.code == "internal":
        log.error("a long task failed inside Conveyor", exc_info=error)
    outcome = Outcome(TaskStatus.FAILED, error=failure)
    if isinstance(error, Failure):
        outcome.http_status = error.http_status
    if isinstance(error, TargetError):
        outcome.retry_after = error.retry_after
    return outcome


def _succeeded(taken: DownloadedFile) -> Outcome:
    return Outcome(
        TaskStatus.SUCCEEDED,
        http_status=200,
        kept=taken.body,
        content_type=taken.file.content_type,
        final_url=taken.file.final_url,
        headers=taken.file.headers,
    )


async def _rest(track: Track | None) -> None:
    """Best effort: a row that stays due is looked at by the monitor, which finds the task waiting in its queue."""
    if track is not None:
        with suppress(Superseded, Unavailable):
            await track.rest()

"""Long tasks: what the executors of downloads and export APIs share: clients, progress documents, and outcomes.

An attempt that advanced a file and then failed with a retryable error spends no attempt: the next one resumes, so that
a file of hours needs no more attempts than one of seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.trusted_time import TrustedTime
from conveyor.egress import descriptors
from conveyor.egress.failures import Failure, failure_of
from conveyor.egress.robots import RobotsUnavailable
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

# How long a task waits after a failure of our own store.
_STORE_PAUSE = 30.0

Step = Callable[[ExchangePlan, Track], Awaitable[Outcome]]


class LongTasks:
    """The shared parts of one executor. `root_certificate` is a PEM to trust beside the system's."""

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
        self._deadline_time = TrustedTime(records.documents, clock, deadlines=True)

    async def attempt(self, job: Job, ref: TaskRef, step: Step, gateway: int = 0) -> Outcome:
        """Take over the progress document, run the step, and return the outcome. Raises Superseded."""
        started = self._clock.monotonic()
        track: Track | None = None
        gateway_codes: frozenset[str] = frozenset()
        try:
            plan = self.exchange.plan(job, gateway)
            gateway_codes = plan.route.gateway_codes
            track = await self._book.begin(job, ref)
            if too_late(job.options, msgspec.structs.replace(ref, since=track.since), await self.deadline_now()):
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
            outcome = outcome_of(error, gateway_codes)
            await _rest(track)
        outcome.elapsed = self._clock.monotonic() - started
        outcome.since = 0 if track is None else track.since
        return outcome

    async def deadline_now(self) -> float:
        """The time by which tasks fail."""
        return await self._deadline_time.now()

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
        """Download a file: the only step of a download, and the last one of an export. After one of the statuses in
        `spare` the stored pieces stay: the caller resumes."""
        transfer = Transfer(self.exchange, self._blobs, self._clock, self._settings, job, plan, track, remember)
        try:
            return _succeeded(await transfer.take(wanted, left))
        except (Superseded, Unavailable):
            raise
        except Exception as error:
            outcome = outcome_of(error, plan.route.gateway_codes)
        if transfer.reached is not None and outcome.http_status is None:
            outcome.http_status = transfer.reached.head.status
            outcome.final_url = str(transfer.reached.request.url)
        if transfer.advanced and is_retryable(job.options, outcome):
            outcome.spends_attempt = False
            outcome.retry_after = backoff_delay(job.options.backoff, 1, self._clock.jitter(), outcome.retry_after)
        elif outcome.http_status not in spare and retry_delay(job.options, ref.attempt, outcome, 0.0) is None:
            # No attempt will resume it.
            await transfer.drop()
            return outcome
        await track.rest()
        return outcome


def outcome_of(error: Exception, gateway_codes: frozenset[str]) -> Outcome:
    """Return the outcome of an attempt that raised this. A failure of our own store is not the task's: it waits."""
    if isinstance(error, Unavailable):
        log.warning("store failed; long task waits", error=repr(error))
        failure = TaskError("store_failed", error.message)
        return Outcome(TaskStatus.FAILED, error=failure, retry_after=_STORE_PAUSE, spends_attempt=False)
    failure = failure_of(error, gateway_codes)
    if failure.code == "internal":
        log.error("long task failed inside Conveyor", exc_info=error)
    outcome = Outcome(TaskStatus.FAILED, error=failure)
    if failure.code == descriptors.CODE:
        outcome.spends_attempt, outcome.retry_after = False, descriptors.DELAY
    if isinstance(error, RobotsUnavailable) and not error.is_final:
        outcome.spends_attempt, outcome.retry_after = False, error.delay
    if isinstance(error, Failure):
        outcome.http_status = error.http_status
        outcome.final_url = error.final_url
    if isinstance(error, TargetError):
        outcome.retry_after = error.retry_after
    return outcome


def _succeeded(download: DownloadedFile) -> Outcome:
    return Outcome(
        TaskStatus.SUCCEEDED,
        http_status=200,
        kept=download.body,
        content_type=download.file.content_type,
        final_url=download.file.final_url,
        headers=download.file.headers,
    )


async def _rest(track: Track | None) -> None:
    """Best effort: if the document stays due, the monitor looks at it and finds the task in its queue."""
    if track is not None:
        with suppress(Superseded, Unavailable):
            await track.rest()

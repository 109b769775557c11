"""Packs: the outcomes of a fetcher, collected for a moment and sent together.

Where processes share the logs of the blobs, the fetcher appends pages to its own log, and the detail of each outcome
says where its page is: the worker sees none of their bytes, and makes them durable before it writes a row
(body_store.py). Elsewhere, and where appending fails, bodies travel in the pack.
"""

import asyncio
import logging
from hashlib import sha256

from conveyor.clock import Clock
from conveyor.engines.blobs import SharedLogs
from conveyor.faults import crashpoint
from conveyor.jobs.body_coding import INLINE_PAGE, LARGE, deflate, is_compressed, is_worth_deflating
from conveyor.model import Job, Outcome, ResultLayout, RunId, StoredAs, TaskError
from conveyor.process.body_store import new_key
from conveyor.process.executors.fetch.frames import (
    FrameWriter,
    OutcomePack,
    PackedOutcome,
    RunningReport,
    StoredPages,
    write_frame,
)
from conveyor.process.executors.fetch.loop_lag import LoopLag
from conveyor.process.outcomes import detail_json, page_place, with_pages
from conveyor.states import TaskStatus

log = logging.getLogger(__name__)

# How long an outcome waits for others of the same pack, in seconds; and so many times as long again while that holds
# nobody up.
LINGER = 0.004
_MORE_LINGERS = 3
_PACK_COUNT = 256
_PACK_BYTES = 1024 * 1024


class Segment:
    """The pages of one run in a pack, which are stored as one object: once encoded, by column, so that there is no
    object for each."""

    __slots__ = ("data", "details", "elapsed", "http_statuses", "job", "numbers", "outcomes", "places")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcomes: list[tuple[int, Outcome]] = []
        self.numbers: list[int] = []
        self.http_statuses: list[int | None] = []
        self.elapsed: list[float] = []
        self.details: list[str] = []
        # Where each page is in the segment, as JSON, and its bytes.
        self.places: list[str] = []
        self.data: list[bytes | memoryview] = []

    def encode(self) -> list[PackedOutcome]:
        """Make pages of the outcomes: all of them in a row, which takes half the time of one now and then. Returns
        failures instead of those that cannot be encoded."""
        failures: list[PackedOutcome] = []
        offset = 0
        # Most pages of a pack have the type of the page before.
        content_type, may_shrink = None, True
        for number, outcome in self.outcomes:
            body = outcome.body or b""
            if outcome.content_type != content_type:
                content_type = outcome.content_type
                may_shrink = not is_compressed(content_type)
            try:
                data, stored, digest = _encoded(body, outcome.sha256, may_shrink=may_shrink)
                detail = detail_json(outcome)
            except Exception:
                log.exception("page not encoded")
                failures.append(_packed(number, internal_error()))
                continue
            self.numbers.append(number)
            self.http_statuses.append(outcome.http_status)
            self.elapsed.append(outcome.elapsed)
            self.details.append(detail)
            self.places.append(page_place(len(body), digest, offset, stored))
            self.data.append(data)
            offset += len(data)
        return failures

    def as_stored(self, key: str) -> StoredPages:
        """The outcomes, once the segment has a key."""
        details = with_pages(key, self.details, self.places)
        return StoredPages(key, self.numbers, self.http_statuses, self.elapsed, details)

    def as_outcomes(self) -> tuple[list[PackedOutcome], list[bytes | memoryview]]:
        """The same outcomes, and their bodies, which travel in the pack."""
        encoded = set(self.numbers)
        packed = []
        for number, outcome in self.outcomes:
            if number in encoded:
                packed.append(_packed(number, outcome, *_encoded_page(outcome, outcome.body or b"")))
        return packed, self.data


class Packer:
    """Collects and sends outcomes. `logs` are those that the fetcher may append to, if any. It reads no clock but for
    new keys; a timer of the loop limits how long an outcome waits for its pack."""

    def __init__(
        self, writer: FrameWriter, clock: Clock, logs: SharedLogs | None = None, linger: float = LINGER
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._logs = logs
        self._linger = linger
        self.lag = LoopLag()
        self._outcomes: list[PackedOutcome] = []
        self._bodies: list[bytes | memoryview] = []
        self._segments: dict[RunId, Segment] = {}
        # That of the last page: most pages are of the same job as the one before.
        self._last: Segment | None = None
        self._count = 0
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # Whether nobody waits for an outcome of the pack.
        self._may_wait = True
        self._lingers_left = _MORE_LINGERS
        # Whether a pack was written since the last drain.
        self.is_behind = False

    async def until_room(self) -> None:
        """Wait until the worker takes more: it reads no packs while its recorder is behind. Raises ConnectionError if
        the worker is gone."""
        await self._writer.drain()
        self.is_behind = False

    def put(self, job: Job, number: int, outcome: Outcome, *, is_last: bool, may_wait: bool = False) -> None:
        """Add the outcome of an order. `is_last`: no other is on its way. `may_wait`: the fetcher has enough to do
        without new orders of the lane. If it raises, nothing was added."""
        body = outcome.body
        segment = None if body is None or not _is_page(outcome, len(body)) else self._segment(job)
        if segment is not None and body is not None:
            # Encoded when the pack is sent.
            segment.outcomes.append((number, outcome))
            self._bytes += len(body)
        else:
            data, stored, digest = None, None, ""
            if body is not None:
                data, stored, digest = _encoded(
                    body, outcome.sha256, may_shrink=is_worth_deflating(job, len(body), outcome.content_type)
                )
            self._outcomes.append(_packed(number, outcome, data, stored, digest))
            if data:
                self._bodies.append(data)
                self._bytes += len(data)
        self._on_added(is_last=is_last, may_wait=may_wait)

    def _on_added(self, *, is_last: bool, may_wait: bool) -> None:
        self._count += 1
        self._may_wait &= may_wait
        if is_last or self._count >= _PACK_COUNT or self._bytes >= _PACK_BYTES:
            self.send()
        elif self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._linger, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._may_wait and self._lingers_left:
            self._lingers_left -= 1
            self._start_timer()
        else:
            self.send()

    def send(self) -> None:
        """Send what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._count:
            return
        outcomes, bodies, segments = self._outcomes, self._bodies, list(self._segments.values())
        self._outcomes, self._bodies, self._segments, self._count, self._bytes = [], [], {}, 0, 0
        self._last = None
        self._may_wait = True
        self._lingers_left = _MORE_LINGERS
        pages: list[StoredPages] = []
        for segment in segments:
            outcomes += segment.encode()
        segments = [segment for segment in segments if segment.data]
        if segments and self._logs is not None:
            try:
                keys = self._append(self._logs, segments)
            except Exception as error:
                log.warning("pages not stored; they go to the worker: %r", error)
                for segment in segments:
                    packed, data = segment.as_outcomes()
                    outcomes += packed
                    bodies += data
            else:
                pages = [segment.as_stored(key) for segment, key in zip(segments, keys, strict=True)]
        crashpoint("fetcher.pack.before")
        write_frame(self._writer, OutcomePack(outcomes, b"".join(bodies), [], pages, lag=self.lag.seconds))
        crashpoint("fetcher.pack.after")
        self.is_behind = True

    def hand_back(self, numbers: list[int]) -> None:
        """Return orders that have not started."""
        write_frame(self._writer, OutcomePack([], b"", numbers))

    def report(self, report: RunningReport) -> None:
        """Report how many orders of a lane run. Outcomes do not wait for it, nor it for them."""
        write_frame(self._writer, OutcomePack([], b"", [], [], [report]))

    def _segment(self, job: Job) -> Segment | None:
        """The segment for pages of a job; None if they go to the worker."""
        if self._last is not None and self._last.job is job:
            return self._last
        # Pages for `extract` are handed on by the worker, which may not store them at all.
        if self._logs is None or job.result_layout is not ResultLayout.PACKED or job.options.extract is not None:
            return None
        self._last = self._segments.get(job.run.run_id)
        if self._last is None:
            self._last = self._segments[job.run.run_id] = Segment(job)
        return self._last

    def _append(self, logs: SharedLogs, segments: list[Segment]) -> list[str]:
        """Append segments; returns their keys. It goes to the cache of the system, which is quicker than a thread."""
        objects = [(new_key(self._clock, segment.job, "seg"), b"".join(segment.data)) for segment in segments]
        return logs.append(objects)


def _is_page(outcome: Outcome, length: int) -> bool:
    """Whether the body may go into a segment. The worker decides about failures, which it may retry, about bodies so
    small that they may be part of their rows, and about large ones."""
    return outcome.status is TaskStatus.SUCCEEDED and INLINE_PAGE < length <= LARGE


def internal_error() -> Outcome:
    """The outcome of an attempt that failed through a mistake of ours."""
    return Outcome(TaskStatus.FAILED, error=TaskError("internal", "the fetch failed inside Conveyor"))


def _encoded_page(outcome: Outcome, body: bytes | memoryview) -> tuple[bytes | memoryview, StoredAs | None, str]:
    return _encoded(body, outcome.sha256, may_shrink=not is_compressed(outcome.content_type))


def _encoded(
    body: bytes | memoryview, known: str | None, *, may_shrink: bool
) -> tuple[bytes | memoryview, StoredAs | None, str]:
    """The bytes to store, how they are encoded, and the digest of the body, which may be known."""
    digest = known or sha256(body).hexdigest()
    deflated = deflate(body) if may_shrink else None
    return (body, None, digest) if deflated is None else (deflated[0], deflated[1], digest)


def _packed(
    number: int,
    outcome: Outcome,
    data: bytes | memoryview | None = None,
    stored: StoredAs | None = None,
    digest: str = "",
) -> PackedOutcome:
    return PackedOutcome(
        number,
        outcome.status,
        outcome.http_status,
        outcome.error,
        outcome.retry_after,
        detail_json(outcome),
        -1 if data is None else len(data),
        digest,
        outcome.elapsed,
        stored,
        len(outcome.body or b""),
        spends_attempt=outcome.spends_attempt,
        first_byte=outcome.first_byte,
        unchanged=outcome.unchanged,
    )

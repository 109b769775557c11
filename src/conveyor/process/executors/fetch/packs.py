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
from conveyor.jobs.body_coding import INLINE_PAGE, LARGE, deflate, is_worth_deflating
from conveyor.model import BodyRef, Job, Outcome, ResultLayout, RunId
from conveyor.process.body_store import new_key
from conveyor.process.executors.fetch.frames import FrameWriter, OutcomePack, PackedOutcome, framed
from conveyor.process.outcomes import detail_json, with_body
from conveyor.states import TaskStatus

log = logging.getLogger(__name__)

# How long an outcome waits for others of the same pack, in seconds; and twice as long while that holds nobody up.
LINGER = 0.004
_PACK_COUNT = 128
_PACK_BYTES = 1024 * 1024


class Segment:
    """The pages of one run in a pack, which are stored as one object."""

    __slots__ = ("job", "length", "pages", "places")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.length = 0
        self.pages: list[bytes | memoryview] = []
        # Of each page: its outcome's place in the pack, its offset and its digest.
        self.places: list[tuple[int, int, str]] = []


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
        self._outcomes: list[PackedOutcome] = []
        self._bodies: list[bytes | memoryview] = []
        self._segments: dict[RunId, Segment] = {}
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        # Whether nobody waits for an outcome of the pack.
        self._may_wait = True
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
        detail = detail_json(outcome)
        body, digest, length = outcome.body, "", -1
        stored, decoded_length = None, 0
        if body is not None:
            decoded_length, digest = len(body), sha256(body).hexdigest()
            if is_worth_deflating(job, decoded_length, outcome.content_type) and (smaller := deflate(body)) is not None:
                body, stored = smaller
            length = len(body)
            self._bytes += length
            if self._is_page(job, outcome, decoded_length):
                self._add_page(job, body, digest)
            elif length:
                self._bodies.append(body)
        self._outcomes.append(
            PackedOutcome(
                number,
                outcome.status,
                outcome.http_status,
                outcome.error,
                outcome.retry_after,
                detail,
                length,
                digest,
                outcome.elapsed,
                stored,
                decoded_length,
                spends_attempt=outcome.spends_attempt,
            )
        )
        self._may_wait &= may_wait
        if is_last or len(self._outcomes) >= _PACK_COUNT or self._bytes >= _PACK_BYTES:
            self.send()
        elif self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._linger, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._may_wait:
            # Once.
            self._may_wait = False
            self._start_timer()
        else:
            self.send()

    def send(self) -> None:
        """Send what was collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._outcomes:
            return
        outcomes, bodies, segments = self._outcomes, self._bodies, list(self._segments.values())
        self._outcomes, self._bodies, self._segments, self._bytes = [], [], {}, 0
        self._may_wait = True
        keys: list[str] = []
        if segments and self._logs is not None:
            try:
                keys = self._append(self._logs, segments)
            except Exception as error:
                log.warning("pages not stored; they go to the worker: %r", error)
                bodies = _all_bodies(outcomes, bodies, segments)
            else:
                _fill_in(outcomes, keys, segments)
        crashpoint("fetcher.pack.before")
        self._writer.write(framed(OutcomePack(outcomes, b"".join(bodies), [], keys)))
        crashpoint("fetcher.pack.after")
        self.is_behind = True

    def hand_back(self, numbers: list[int]) -> None:
        """Return orders that have not started."""
        self._writer.write(framed(OutcomePack([], b"", numbers)))

    def _is_page(self, job: Job, outcome: Outcome, length: int) -> bool:
        """Whether the body belongs into a segment. The worker decides about failures, which it may retry, about bodies
        so small that they may be part of their rows, and about large ones."""
        return (
            self._logs is not None
            and INLINE_PAGE < length <= LARGE
            and outcome.status is TaskStatus.SUCCEEDED
            and job.result_layout is ResultLayout.PACKED
        )

    def _add_page(self, job: Job, page: bytes | memoryview, digest: str) -> None:
        segment = self._segments.get(job.run.run_id)
        if segment is None:
            segment = self._segments[job.run.run_id] = Segment(job)
        segment.places.append((len(self._outcomes), segment.length, digest))
        segment.pages.append(page)
        segment.length += len(page)

    def _append(self, logs: SharedLogs, segments: list[Segment]) -> list[str]:
        """Append segments; returns their keys. It goes to the cache of the system, which is quicker than a thread."""
        objects = [(new_key(self._clock, segment.job, "seg"), b"".join(segment.pages)) for segment in segments]
        return logs.append(objects)


def _fill_in(outcomes: list[PackedOutcome], keys: list[str], segments: list[Segment]) -> None:
    """Put the places of pages into the details of their outcomes."""
    for number, (key, segment) in enumerate(zip(keys, segments, strict=True)):
        for place, offset, digest in segment.places:
            outcome = outcomes[place]
            detail = with_body(
                outcome.detail, BodyRef(key, outcome.decoded_length, digest, offset, stored=outcome.stored)
            )
            outcomes[place] = PackedOutcome(
                outcome.number,
                outcome.status,
                outcome.http_status,
                None,
                None,
                detail,
                -1,
                "",
                outcome.elapsed,
                segment=number,
            )


def _all_bodies(
    outcomes: list[PackedOutcome], bodies: list[bytes | memoryview], segments: list[Segment]
) -> list[bytes | memoryview]:
    """The bodies of all outcomes, pages too, in their order."""
    pages = {
        place: page for segment in segments for (place, *_), page in zip(segment.places, segment.pages, strict=True)
    }
    others = iter(bodies)
    return [
        pages[place] if place in pages else next(others) for place, packed in enumerate(outcomes) if packed.length > 0
    ]

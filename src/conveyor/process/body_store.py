"""Bodies: stores the bodies of a batch of outcomes and returns where each is, before any row points to one.

With the layout `packed`, a small body becomes part of its task's row and is not stored here at all; the others of a run
are joined into one segment, deflated where that makes them smaller, and the segments of all runs of a batch are put
together, which a local disk makes durable with one fsync. `object` makes one object of each body. A body over a
mebibyte always gets an object of its own. Pages that a fetcher has written (executors/fetch/packs.py) stay where they
are, and are made durable here; other bodies of fetchers are deflated already.
"""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs, SyncsLogs
from conveyor.engines.tasks import Tasks, inline_bytes
from conveyor.faults import crashpoint
from conveyor.jobs.block_sums import CHECKED_WHOLE, block_sums
from conveyor.jobs.body_coding import INLINE_PAGE, LARGE, deflate, is_compressed, is_worth_deflating
from conveyor.model import BodyRef, Job, JobKind, Outcome, ResultLayout

# The type of what handlers return.
JSON = "application/json"
_AT_ONCE = 16
# More bytes than this to deflate would delay the event loop.
_DEFLATED_HERE = 64 * 1024


class _Segment(NamedTuple):
    """Bodies of one run that are joined: where their references go, and their outcomes."""

    key: str
    refs: list[BodyRef | None]
    outcomes: list[tuple[int, Outcome]]
    # Bytes that may become less, and nobody has tried that.
    plain: int


class BodyStore:
    """Writes result bodies under results/<tenant>/<job>/<run>/."""

    def __init__(self, blobs: Blobs, tasks: Tasks, clock: Clock) -> None:
        self.blobs = blobs
        self._tasks = tasks
        self._clock = clock
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def keep(
        self, batches: Sequence[tuple[Job, Sequence[Outcome]]], segments_written: Iterable[str] = ()
    ) -> list[list[BodyRef | None]]:
        """Store the bodies of outcomes, by run. Returns a durable reference for each outcome, None where it has no
        body. A body that the executor has stored stays where it is; it is durable now, and so are the segments that
        fetchers have written."""
        crashpoint("bodies.keep.before")
        kept: list[list[BodyRef | None]] = []
        segments: list[_Segment] = []
        writes: list[Awaitable[None]] = []
        written = set(segments_written)
        for job, outcomes in batches:
            written.update([outcome.segment for outcome in outcomes if outcome.segment is not None])
            bodies = [*outcomes, *_extracted_bodies(job, outcomes)]
            refs: list[BodyRef | None] = [outcome.kept for outcome in bodies]
            kept.append(refs)
            packed: list[tuple[int, Outcome]] = []
            for position, outcome in self._inline(job, bodies, refs, len(outcomes)):
                if job.result_layout is ResultLayout.PACKED and _length(outcome) <= LARGE:
                    packed.append((position, outcome))
                else:
                    writes.append(self._store_object(job, refs, position, outcome))
            if packed:
                plain = sum(_plain_bytes(job, outcome) for _, outcome in packed)
                segments.append(_Segment(new_key(self._clock, job, "seg"), refs, packed, plain))
        if segments:
            writes.append(self._store_segments(segments))
        if written:
            assert isinstance(self.blobs, SyncsLogs)
            writes.append(self.blobs.make_durable(written))
        await asyncio.gather(*writes)
        crashpoint("bodies.keep.after")
        for (job, outcomes), refs in zip(batches, kept, strict=True):
            if job.options.extract is not None:
                _take_extracted(outcomes, refs)
        return kept

    def _inline(
        self, job: Job, outcomes: Sequence[Outcome], refs: list[BodyRef | None], count: int
    ) -> list[tuple[int, Outcome]]:
        """Fill in the references of bodies that are part of their rows; returns the outcomes with other bodies. What
        follows the first `count` outcomes was extracted: it is a result, as that of a handler."""
        limit = largest = -1
        if job.result_layout is ResultLayout.PACKED:
            largest = inline_bytes(self._tasks, job.key)
            limit = largest if job.kind is JobKind.PYTHON else min(largest, INLINE_PAGE)
        others: list[tuple[int, Outcome]] = []
        for position, outcome in enumerate(outcomes):
            body = outcome.body
            if body is None:
                continue
            if _length(outcome) <= (limit if position < count else largest):
                refs[position] = BodyRef("", len(body), _digest(outcome), inline=bytes(body))
            else:
                others.append((position, outcome))
        return others

    async def _store_segments(self, segments: Sequence[_Segment]) -> None:
        plain = sum(segment.plain for segment in segments)
        if plain > _DEFLATED_HERE:
            segments = await asyncio.to_thread(_deflate_all, segments)
        elif plain:
            segments = _deflate_all(segments)
        objects = [
            (segment.key, b"".join([outcome.body for _, outcome in segment.outcomes if outcome.body is not None]))
            for segment in segments
        ]
        for segment, key in zip(segments, await self.blobs.put_all(objects), strict=True):
            offset = 0
            for position, outcome in segment.outcomes:
                stored = outcome.stored
                segment.refs[position] = BodyRef(key, _length(outcome), _digest(outcome), offset, stored=stored)
                offset += len(outcome.body or b"")

    async def _store_object(self, job: Job, refs: list[BodyRef | None], position: int, outcome: Outcome) -> None:
        async with self._at_once:
            key = new_key(self._clock, job, "body")
            body = outcome.body or b""
            await self.blobs.put(key, body)
            sums = await asyncio.to_thread(block_sums, body) if len(body) > CHECKED_WHOLE else None
            refs[position] = BodyRef(key, len(body), _digest(outcome), sums=sums)


def new_key(clock: Clock, job: Job, kind: str) -> str:
    """The key of a new object for bodies of a run. It is unique to this attempt: a late worker never overwrites the
    body of the attempt that counts."""
    return f"results/{job.tenant}/{job.job_id}/{job.run.run_id}/{clock.new_id(kind)}"


def _extracted_bodies(job: Job, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """What was extracted from the bodies of these outcomes and is not stored yet, as bodies."""
    if job.options.extract is None:
        return []
    return [
        Outcome(outcome.status, body=outcome.extracted, content_type=JSON)
        for outcome in outcomes
        if outcome.extracted is not None and outcome.extracted_ref is None
    ]


def _take_extracted(outcomes: Sequence[Outcome], refs: list[BodyRef | None]) -> None:
    """Hand the references of what was extracted, which are the last ones, to the outcomes."""
    extracted = iter(refs[len(outcomes) :])
    del refs[len(outcomes) :]
    for outcome in outcomes:
        if outcome.extracted is not None and outcome.extracted_ref is None:
            outcome.extracted_ref = next(extracted)


def _plain_bytes(job: Job, outcome: Outcome) -> int:
    # What has a digest comes from a process that has deflated it if that helps.
    length = 0 if outcome.body is None or outcome.sha256 is not None else len(outcome.body)
    return length if length and is_worth_deflating(job, length, outcome.content_type) else 0


def _deflate_all(segments: Sequence[_Segment]) -> list[_Segment]:
    """The same segments with bodies deflated. Their outcomes are new: those of the caller may be written once more."""
    return [
        segment._replace(outcomes=[(position, _deflated(outcome)) for position, outcome in segment.outcomes])
        for segment in segments
    ]


def _deflated(outcome: Outcome) -> Outcome:
    body = outcome.body
    if body is None or outcome.sha256 is not None or is_compressed(outcome.content_type):
        return outcome
    digest, deflated = sha256(body).hexdigest(), deflate(body)
    if deflated is None:
        return msgspec.structs.replace(outcome, sha256=digest)
    data, stored = deflated
    return msgspec.structs.replace(outcome, body=data, sha256=digest, stored=stored, length=len(body))


def _length(outcome: Outcome) -> int:
    """The length of the body itself."""
    return len(outcome.body or b"") if outcome.stored is None else outcome.length


def _digest(outcome: Outcome) -> str:
    return outcome.sha256 or sha256(outcome.body or b"").hexdigest()

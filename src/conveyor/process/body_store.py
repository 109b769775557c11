"""Bodies: stores the bodies of a batch of outcomes and returns where each is, before any row points to one.

The layout `packed` joins the bodies of a batch into one segment, so that one object and one fsync serve them all;
`object` makes one object of each. A body over a mebibyte always gets an object of its own.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha256

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.faults import crashpoint
from conveyor.model import BodyRef, Job, Outcome, ResultLayout

LARGE = 1024 * 1024

_AT_ONCE = 16


class BodyStore:
    """Writes result bodies under results/<tenant>/<job>/<run>/."""

    def __init__(self, blobs: Blobs, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    async def keep(self, job: Job, outcomes: Sequence[Outcome]) -> list[BodyRef | None]:
        """Store the bodies. Returns a durable reference for each outcome, None where it has no body. A body that the
        executor has stored stays where it is."""
        crashpoint("bodies.keep.before")
        packed = job.result_layout is ResultLayout.PACKED
        refs: list[BodyRef | None] = [outcome.kept for outcome in outcomes]
        segment: list[tuple[int, Outcome]] = []
        alone: list[tuple[int, Outcome]] = []
        for position, outcome in enumerate(outcomes):
            if outcome.body is not None:
                kind = segment if packed and len(outcome.body) <= LARGE else alone
                kind.append((position, outcome))
        writes = [self._store_object(job, refs, position, outcome) for position, outcome in alone]
        if segment:
            writes.append(self._store_segment(job, refs, segment))
        await asyncio.gather(*writes)
        crashpoint("bodies.keep.after")
        return refs

    async def _store_segment(
        self, job: Job, refs: list[BodyRef | None], outcomes: Sequence[tuple[int, Outcome]]
    ) -> None:
        key = self._key(job, "seg")
        data = b"".join([outcome.body for _, outcome in outcomes if outcome.body is not None])
        await self._blobs.put(key, data)
        offset = 0
        for position, outcome in outcomes:
            body = outcome.body or b""
            refs[position] = BodyRef(key, len(body), _digest(outcome), offset)
            offset += len(body)

    async def _store_object(self, job: Job, refs: list[BodyRef | None], position: int, outcome: Outcome) -> None:
        async with self._at_once:
            key = self._key(job, "body")
            body = outcome.body or b""
            await self._blobs.put(key, body)
            refs[position] = BodyRef(key, len(body), _digest(outcome))

    def _key(self, job: Job, kind: str) -> str:
        # Unique to this attempt: a late worker never overwrites the body of the attempt that counts.
        return f"results/{job.tenant}/{job.job_id}/{job.run.run_id}/{self._clock.new_id(kind)}"


def _digest(outcome: Outcome) -> str:
    return outcome.sha256 or sha256(outcome.body or b"").hexdigest()

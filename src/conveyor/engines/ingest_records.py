"""The ingests part of Records: the ranges of a run's list, and how many lines of each are ingested."""

from collections.abc import Sequence
from typing import Protocol

from conveyor.engines.access_records import IdempotencyClaim
from conveyor.model import Ingested, JobId, Range, RunId, Source


class IngestRecords(Protocol):
    """Stores how a run's list is split into ranges, and the checkpoint of each range."""

    async def split(self, job_id: JobId, run_id: RunId, ranges: Sequence[Range]) -> bool:
        """Write the ranges of a complete list and seal the run. False, and nothing written, if the run is sealed
        already or finished."""

    async def append_range(
        self,
        job_id: JobId,
        run_id: RunId,
        source: Source,
        lines: int,
        answer: IdempotencyClaim | None,
        seal: bool,
    ) -> Range | IdempotencyClaim | None:
        """Append a range of `lines` inputs in JSON Lines, with task indexes of its own, and write the answer to the
        claimed request in the same transaction. Returns the stored claim if the caller lost it, and None if the run
        is sealed or finished."""

    async def ranges(self, run_id: RunId) -> list[Range]:
        """All ranges of a run, in order."""

    async def range(self, run_id: RunId, number: int) -> Range | None:
        """One range of a run."""

    async def ingested(self, run_id: RunId) -> Ingested:
        """The sums over all ranges of a run. A point read, whatever the number of ranges."""

    async def checkpoint(self, run_id: RunId, range: Range, fence: int) -> bool:
        """Store the progress of a range. False, and nothing written, if a later holder of the range's lease has
        written a checkpoint, or the run has finished."""

    async def seal(
        self,
        job_id: JobId,
        run_id: RunId,
        reason: str | None,
        *,
        touched_at: float | None = None,
        code: str | None = None,
    ) -> bool:
        """Seal the run: it accepts no more ranges, and readers see the reason and its code. True for the one
        caller that sealed it. With `touched_at`, seal only if nothing was appended since that time."""

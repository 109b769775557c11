"""Milestones: what is told of a run beside its moves. Its list is ingested, a quarter of it is done, tasks failed.

They stand in one row for each run. A notice of one is written with the row that says so, on the row's version: whoever
finds out first tells, once, and whoever dies in between has told nothing.
"""

from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.faults import crashpoint
from conveyor.model import Counts, OutboxEvent, RunKey

MILESTONES = "milestones"


class ReportedProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of the row, as JSON."""

    ingested: bool = False
    # Quarters of its tasks that have ended, as they were last told: 0 to 3.
    quarter: int = 0
    # Failed tasks that were told of, and when.
    failures: int = 0
    failures_at: float = 0.0


_reached = msgspec.json.Decoder(ReportedProgress)


class ProgressEvents:
    """Reads the rows, and tells."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock

    async def told_ingested(self, run: RunKey, total: int, invalid: int) -> None:
        """Have it told, once, that all tasks of the run are written."""
        told = False
        while not told:
            row, reached = await self.of(run)
            changed = msgspec.structs.replace(reached, ingested=True)
            data = {"total": total, "invalid": invalid}
            told = reached.ingested or await self.tell(run, row, changed, "job.ingested", data)

    async def told_failures(self, run: RunKey, counts: Counts, errors: list[tuple[str, int]]) -> None:
        """Have those of the failed tasks told that were not yet."""
        told = False
        while not told:
            row, reached = await self.of(run)
            changed = msgspec.structs.replace(reached, failures=counts.failed, failures_at=self._clock.now())
            data = {
                "failed": counts.failed - reached.failures,
                "counts": msgspec.structs.asdict(counts),
                "top_errors": [{"code": code, "count": count} for code, count in errors],
            }
            told = counts.failed <= reached.failures or await self.tell(run, row, changed, "tasks.failed", data)

    async def of(self, run: RunKey) -> tuple[Document, ReportedProgress]:
        """The run's row, made if there is none."""
        row = await self._records.documents.document(MILESTONES, run.tenant, run.run_id)
        if row is None:
            fresh = Document(
                MILESTONES, run.tenant, run.run_id, msgspec.json.encode(ReportedProgress()), job_id=run.job_id
            )
            await self._records.documents.create_rows([fresh])
            row = await self._records.documents.document(MILESTONES, run.tenant, run.run_id) or fresh
        return row, _reached.decode(row.body)

    async def tell(
        self, run: RunKey, row: Document, reached: ReportedProgress, event: str, data: dict[str, Any]
    ) -> bool:
        """Write down what was reached, and the notice with it. False if somebody else has changed the row."""
        notice = OutboxEvent(
            self._clock.new_id("evt"), run.tenant, run.job_id, run.run_id, event, self._clock.now(), data
        )
        crashpoint("milestone.tell.before")
        told = await self._records.documents.replace_row(
            msgspec.structs.replace(row, body=msgspec.json.encode(reached)), notice
        )
        crashpoint("milestone.tell.after")
        return told is not None

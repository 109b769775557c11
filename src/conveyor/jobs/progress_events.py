"""Progress events: report the progress of a run, beside its changes of state. Its list is ingested, a quarter of its
tasks is finished, tasks failed.

One document for each run says what was reported. An outbox event is written in one step with the document, on the
document's version: of several processes one reports, once, and a crash in between reports nothing.
"""

from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.records import Document, Records
from conveyor.faults import crashpoint
from conveyor.model import Counts, OutboxEvent, RunKey

# The kind of the documents, as earlier versions have stored it.
REPORTED = "milestones"


class ReportedProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was reported of a run: the body of its document, as JSON."""

    ingested: bool = False
    # Quarters of its tasks that were last reported as finished: 0 to 3.
    quarter: int = 0
    # Failed tasks that were reported, and when.
    failures: int = 0
    failures_at: float = 0.0


_reported = msgspec.json.Decoder(ReportedProgress)


class ProgressEvents:
    """Reads the documents, and reports."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock

    async def report_ingested(self, run: RunKey, total: int, invalid: int) -> None:
        """Report once that all tasks of the run are written."""
        is_reported = False
        while not is_reported:
            document, reported = await self.read(run)
            changed = msgspec.structs.replace(reported, ingested=True)
            data = {"total": total, "invalid": invalid}
            is_reported = reported.ingested or await self.report(run, document, changed, "job.ingested", data)

    async def report_failures(
        self, run: RunKey, counts: Counts, errors: list[tuple[str, int]], of_job: dict[str, Any]
    ) -> None:
        """Report the failed tasks of the run that were not reported yet. `of_job` are the counts of the job."""
        is_reported = False
        while not is_reported:
            document, reported = await self.read(run)
            changed = msgspec.structs.replace(reported, failures=counts.failed, failures_at=self._clock.now())
            data = {
                "failed": counts.failed - reported.failures,
                "counts": msgspec.structs.asdict(counts),
                "job": of_job,
                "top_errors": [{"code": code, "count": count} for code, count in errors],
            }
            is_reported = counts.failed <= reported.failures or await self.report(
                run, document, changed, "tasks.failed", data
            )

    async def read(self, run: RunKey) -> tuple[Document, ReportedProgress]:
        """The run's document, created if there is none."""
        document = await self._records.documents.document(REPORTED, run.tenant, run.run_id)
        if document is None:
            fresh = Document(
                REPORTED, run.tenant, run.run_id, msgspec.json.encode(ReportedProgress()), job_id=run.job_id
            )
            await self._records.documents.create_documents([fresh])
            document = await self._records.documents.document(REPORTED, run.tenant, run.run_id) or fresh
        return document, _reported.decode(document.body)

    async def report(
        self, run: RunKey, document: Document, reported: ReportedProgress, event: str, data: dict[str, Any]
    ) -> bool:
        """Write the document with the outbox event. False if another process has changed the document."""
        outbox_event = OutboxEvent(
            self._clock.new_id("evt"), run.tenant, run.job_id, run.run_id, event, self._clock.now(), data
        )
        crashpoint("milestone.tell.before")
        changed = msgspec.structs.replace(document, body=msgspec.json.encode(reported))
        written = await self._records.documents.replace_document(changed, outbox_event)
        crashpoint("milestone.tell.after")
        return written is not None

"""The JSON of a job as a value, for the progress bar and the summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.cli import EXIT_BAD_INPUT, EXIT_TASKS_FAILED
from conveyor.model import INGEST_FAILED
from conveyor.states import ENDED, INGEST_CODES, ReasonCode, RunState


@dataclass(frozen=True)
class IngestSnapshot:
    """Progress of an ingest. Bytes are those of the decompressed list."""

    tasks: int
    invalid: int
    bytes_read: int
    bytes_total: int | None

    @classmethod
    def of(cls, ingest: Mapping[str, Any]) -> "IngestSnapshot":
        # The size is unknown until the ingester has split the list into ranges.
        total = ingest["bytes_total"] if ingest["ranges"] else None
        return cls(ingest["tasks"], ingest["invalid"], ingest["bytes_read"], total)


@dataclass(frozen=True)
class Snapshot:
    """The status of a job at one moment."""

    job_id: str
    state: RunState
    reason: str | None
    reason_code: str | None
    total: int
    succeeded: int
    failed: int
    cancelled: int
    rate: float | None
    eta: float | None
    errors: tuple[tuple[str, int], ...]
    # None for a job that was written by the request.
    ingest: IngestSnapshot | None
    # Other work to report, such as writing the archive.
    note: str | None = None
    # Counted when the list was read to its end; an ingest in progress counts its own.
    invalid_lines: int = 0

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> "Snapshot":
        counts = job["run"]["counts"]
        return cls(
            job_id=job["id"],
            state=RunState(job["state"]),
            reason=job.get("reason"),
            reason_code=job.get("reason_code"),
            total=job["run"]["total"],
            succeeded=counts["succeeded"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            rate=job.get("rate"),
            eta=job.get("eta"),
            errors=tuple((error["code"], error["count"]) for error in job.get("top_errors", [])),
            ingest=IngestSnapshot.of(job["ingest"]) if job.get("ingest") else None,
            invalid_lines=job.get("invalid_lines", 0),
        )

    @property
    def done(self) -> int:
        return self.succeeded + self.failed + self.cancelled

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def invalid(self) -> int:
        """Number of invalid lines in the list."""
        return max(self.ingest.invalid if self.ingest else 0, self.invalid_lines)

    @property
    def bad_list(self) -> str | None:
        """What is wrong with the list, if the job failed because of its list."""
        if self.state is not RunState.FAILED or self.reason is None:
            return None
        if self.reason_code in INGEST_CODES or self.reason_code == ReasonCode.NO_TASKS:
            return self.reason.removeprefix(INGEST_FAILED)
        return None

    @property
    def is_untouched(self) -> bool:
        """Whether no task was ingested yet, so that none can have run."""
        return self.done == 0 and (self.ingest is None or self.ingest.tasks == 0)

    @property
    def exit_code(self) -> int:
        """The exit code for the job: 0 if every task succeeded."""
        if self.bad_list is not None:
            return EXIT_BAD_INPUT
        clean = self.state is RunState.COMPLETED and self.succeeded == self.total
        return 0 if clean else EXIT_TASKS_FAILED

"""The JSON of a job as a value, for the progress bar and the summary."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.cli import EXIT_BAD_INPUT, EXIT_TASKS_FAILED
from conveyor.model import INGEST_FAILED, Breaking
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
    """The status of a job at one moment. Its counts are by the latest outcome of each task, over all runs."""

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
    # The target that is down, the error that showed it, and for how many seconds tasks wait for it.
    outage: tuple[str, str | None, float] | None = None
    # Number of invalid lines in the list.
    invalid: int = 0
    # The number of the latest run, its total and how many of its tasks are finished.
    run: int = 1
    run_total: int = 0
    run_done: int = 0
    # Other work to report, such as writing the archive.
    note: str | None = None
    # Of the downloads in progress: bytes, their total if it is known, and bytes a second.
    transfers: tuple[int, int | None, float] | None = None
    # Of the succeeded tasks, those with the body of an earlier run.
    unchanged: int = 0

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> "Snapshot":
        run = job["run"]
        # A server of an earlier version shows the counts of the latest run alone.
        counts = job.get("counts", run["counts"])
        return cls(
            job_id=job["id"],
            state=RunState(job["state"]),
            reason=job.get("reason"),
            reason_code=job.get("reason_code"),
            total=job.get("total", run["total"]),
            succeeded=counts["succeeded"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            # An earlier version does not count them.
            unchanged=counts.get("unchanged", 0),
            rate=job.get("rate"),
            eta=job.get("eta"),
            errors=tuple((error["code"], error["count"]) for error in job.get("top_errors", [])),
            ingest=IngestSnapshot.of(job["ingest"]) if job.get("ingest") else None,
            outage=_outage(job),
            # An ingest in progress counts its own.
            invalid=max(job.get("invalid_lines") or 0, (job.get("ingest") or {}).get("invalid", 0)),
            run=run.get("number", 1),
            run_total=run["total"],
            transfers=_transfers(job.get("transfers")),
            run_done=sum(run["counts"][status] for status in ("succeeded", "failed", "cancelled")),
        )

    @property
    def done(self) -> int:
        return self.succeeded + self.failed + self.cancelled

    @property
    def ended(self) -> bool:
        return self.state in ENDED

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
        return self.run == 1 and self.done == 0 and (self.ingest is None or self.ingest.tasks == 0)

    @property
    def exit_code(self) -> int:
        """The exit code for the job: 0 if every task succeeded."""
        if self.bad_list is not None:
            return EXIT_BAD_INPUT
        clean = self.state is RunState.COMPLETED and self.succeeded == self.total
        return 0 if clean else EXIT_TASKS_FAILED


def _transfers(moving: Mapping[str, Any] | None) -> tuple[int, int | None, float] | None:
    return None if moving is None else (moving["done"], moving["total"], moving["rate"])


def _outage(job: Mapping[str, Any]) -> tuple[str, str | None, float] | None:
    waiting = job.get("waiting") or {}
    if not waiting.get("target"):
        return None
    patience = job.get("options", {}).get("breaker", {}).get("patience", Breaking().patience)
    return waiting["target"], waiting.get("error"), patience

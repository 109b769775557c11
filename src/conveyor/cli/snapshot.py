"""A job's JSON as the progress bar and the summary read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor.cli import EXIT_TASKS_FAILED
from conveyor.states import ENDED, RunState


@dataclass(frozen=True)
class Snapshot:
    """Where a job stood when it was asked."""

    job_id: str
    state: RunState
    reason: str | None
    total: int
    succeeded: int
    failed: int
    cancelled: int
    rate: float | None
    eta: float | None
    errors: tuple[tuple[str, int], ...]
    # What goes on besides, such as the writing of the archive.
    note: str | None = None

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> "Snapshot":
        counts = job["run"]["counts"]
        return cls(
            job_id=job["id"],
            state=RunState(job["state"]),
            reason=job.get("reason"),
            total=job["run"]["total"],
            succeeded=counts["succeeded"],
            failed=counts["failed"],
            cancelled=counts["cancelled"],
            rate=job.get("rate"),
            eta=job.get("eta"),
            errors=tuple((error["code"], error["count"]) for error in job.get("top_errors", [])),
        )

    @property
    def done(self) -> int:
        return self.succeeded + self.failed + self.cancelled

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def exit_code(self) -> int:
        """0 when every task succeeded."""
        clean = self.state is RunState.COMPLETED and self.succeeded == self.total
        return 0 if clean else EXIT_TASKS_FAILED

"""StepFunctions: the state machines that wait for jobs with a task token."""

from enum import Enum
from typing import Protocol


class CallOutcome(Enum):
    """What became of a call of Step Functions."""

    TAKEN = "taken"
    # Nobody waits with this token: it was answered, timed out, or never was.
    GONE = "gone"
    # Not carried out; the same call may be later.
    LATER = "later"
    # Nobody knows whether it was carried out.
    UNKNOWN = "unknown"


class StepFunctions(Protocol):
    """The state machines that wait. A token is sealed for one name, and can be used under that name only; it is in the
    clear nowhere else."""

    def seal(self, token: str, name: str) -> str:
        """The token as it may be kept; the same each time."""

    async def heartbeat(self, sealed: str, name: str) -> CallOutcome:
        """Say that work goes on."""

    async def succeed(self, sealed: str, name: str, output: str) -> CallOutcome:
        """Answer with a result, as JSON."""

    async def fail(self, sealed: str, name: str, error: str, cause: str) -> CallOutcome:
        """Answer with an error."""

"""The StepFunctions seam: callbacks to state machines that wait for jobs with a task token."""

from enum import Enum
from typing import Protocol


class CallOutcome(Enum):
    """The outcome of a call to Step Functions."""

    TAKEN = "taken"
    # No task waits with this token: it was answered, timed out, or never existed.
    GONE = "gone"
    # Not executed; the call may be retried.
    LATER = "later"
    # Unknown whether it was executed.
    UNKNOWN = "unknown"


class StepFunctions(Protocol):
    """Calls back state machines. A token is sealed for one name and usable under that name only; it is never stored in
    clear text."""

    def seal(self, token: str, name: str) -> str:
        """Seal a token for storage. Deterministic."""

    async def heartbeat(self, sealed: str, name: str) -> CallOutcome:
        """Send a heartbeat."""

    async def succeed(self, sealed: str, name: str, output: str) -> CallOutcome:
        """Report success, with a JSON result."""

    async def fail(self, sealed: str, name: str, error: str, cause: str) -> CallOutcome:
        """Report failure, with an error."""

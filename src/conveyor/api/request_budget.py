"""Request budget: limits the number and the total size of the request bodies that this process handles at once. A
request above the budget is refused before its body is read, so a flood costs no memory."""

from typing import Any

from conveyor.errors import Overloaded
from conveyor.settings import Settings
from conveyor.telemetry import metrics

_STATE = "body_in_hand"
_AGAIN = 2


class RequestBudget:
    """The budget of one application."""

    def __init__(self, settings: Settings) -> None:
        self.most = settings.max_requests
        self.most_bytes = settings.max_requests_bytes
        self.requests = 0
        self.bytes = 0


class InHand:
    """The share of one request: from the first byte of its body to the end of the response."""

    def __init__(self, intake: RequestBudget) -> None:
        self._intake = intake
        self._entered = False
        self._bytes = 0

    def enter(self, announced: int) -> None:
        """Reserve a request whose body announces this many bytes. Raises Overloaded."""
        intake = self._intake
        if intake.requests >= intake.most or intake.bytes + announced > intake.most_bytes:
            raise _full()
        intake.requests += 1
        self._entered = True

    def take(self, count: int) -> None:
        """Add `count` bytes that arrived. Raises Overloaded."""
        if self._intake.bytes + count > self._intake.most_bytes:
            raise _full()
        self._intake.bytes += count
        self._bytes += count

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._intake.requests -= 1
            self._intake.bytes -= self._bytes


def hand(scope: Any, intake: RequestBudget) -> InHand:
    """Attach an empty share to a new request."""
    scope["state"][_STATE] = made = InHand(intake)
    return made


def in_hand(scope: Any) -> InHand | None:
    """The share of a request; None if the request did not pass the edge."""
    found: InHand | None = scope.get("state", {}).get(_STATE)
    return found


def _full() -> Overloaded:
    metrics.REFUSALS.add(1, Overloaded.code, "requests")
    return Overloaded(
        "The server is at its limit of concurrent requests. Retry in a moment.",
        reason="requests",
        retry_after=_AGAIN,
    )

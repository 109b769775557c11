"""Intake: how many request bodies are in the hands of this process at once, and how large they are together. What is
over that is refused before it is read: a flood costs answers and no memory."""

from typing import Any

from conveyor.errors import Overloaded
from conveyor.settings import Settings
from conveyor.telemetry import metrics

_STATE = "body_in_hand"
_AGAIN = 2


class RequestBudget:
    """One for each app."""

    def __init__(self, settings: Settings) -> None:
        self.most = settings.max_requests
        self.most_bytes = settings.max_requests_bytes
        self.requests = 0
        self.bytes = 0


class InHand:
    """The body of one request: in hand from its first byte to the end of the answer."""

    def __init__(self, intake: RequestBudget) -> None:
        self._intake = intake
        self._entered = False
        self._bytes = 0

    def enter(self, announced: int) -> None:
        """A body of about so many bytes is about to be read. Raises Overloaded."""
        intake = self._intake
        if intake.requests >= intake.most or intake.bytes + announced > intake.most_bytes:
            raise _full()
        intake.requests += 1
        self._entered = True

    def take(self, count: int) -> None:
        """So many bytes of it have come. Raises Overloaded."""
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
    """What a request that just came in holds: nothing yet."""
    scope["state"][_STATE] = made = InHand(intake)
    return made


def in_hand(scope: Any) -> InHand | None:
    """The same, where its body is read; None for a request that came in by another way."""
    found: InHand | None = scope.get("state", {}).get(_STATE)
    return found


def _full() -> Overloaded:
    metrics.REFUSALS.add(1, Overloaded.code, "requests")
    return Overloaded(
        "The server has as many requests in hand as it can. Send this again in a moment.",
        reason="requests",
        retry_after=_AGAIN,
    )

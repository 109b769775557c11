"""Request budget: limits the number and the total size of the request bodies that this process handles at once. A
request above the budget is refused before its body is read, so a flood costs no memory."""

from typing import Any

from conveyor.errors import Overloaded
from conveyor.settings import Settings
from conveyor.telemetry import metrics

_STATE = "body_reservation"
_RETRY_AFTER = 2


class RequestBudget:
    """The budget of one application."""

    def __init__(self, settings: Settings) -> None:
        self.max_requests = settings.max_requests
        self.max_bytes = settings.max_requests_bytes
        self.requests = 0
        self.bytes = 0


class BodyReservation:
    """The reservation of one request: from the first byte of its body to the end of the response."""

    def __init__(self, budget: RequestBudget) -> None:
        self._budget = budget
        self._entered = False
        self._bytes = 0

    def enter(self, announced: int) -> None:
        """Reserve a request whose body announces this many bytes. Raises Overloaded."""
        budget = self._budget
        if budget.requests >= budget.max_requests or budget.bytes + announced > budget.max_bytes:
            raise _overloaded()
        budget.requests += 1
        self._entered = True

    def take(self, count: int) -> None:
        """Add `count` bytes that arrived. Raises Overloaded."""
        if self._budget.bytes + count > self._budget.max_bytes:
            raise _overloaded()
        self._budget.bytes += count
        self._bytes += count

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._budget.requests -= 1
            self._budget.bytes -= self._bytes


def attach_reservation(scope: Any, budget: RequestBudget) -> BodyReservation:
    """Attach an empty reservation to a new request."""
    scope["state"][_STATE] = reservation = BodyReservation(budget)
    return reservation


def reservation_of(scope: Any) -> BodyReservation | None:
    """The reservation of a request; None if the request did not pass the edge."""
    reservation: BodyReservation | None = scope.get("state", {}).get(_STATE)
    return reservation


def _overloaded() -> Overloaded:
    metrics.REFUSALS.add(1, Overloaded.code, "requests")
    return Overloaded(
        "The server is at its limit of concurrent requests. Retry in a moment.",
        reason="requests",
        retry_after=_RETRY_AFTER,
    )

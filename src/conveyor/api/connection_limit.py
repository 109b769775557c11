"""Connection limit: how many client connections a server has open. Each takes a file descriptor and memory, with or
without a key, so their number has a bound.

A few connections above the bound are kept apart for health checks: a load balancer must not take a server that is full
for one that is dead. Any other request there is refused, and further connections are closed at once.
"""

from conveyor.errors import Overloaded
from conveyor.telemetry import metrics

# Connections above the bound that are answered.
SPARE = 32
# Seconds for the head of a request on one of them.
SPARE_HEAD_SECONDS = 5.0
_HEALTH = frozenset({b"/healthz", b"/readyz"})
_RETRY_AFTER = 5


class ConnectionLimit:
    """The connections of one server."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.open = 0

    @property
    def is_reached(self) -> bool:
        """Whether the latest connection is one above the bound."""
        return self.open > self._maximum

    @property
    def is_exceeded(self) -> bool:
        """Whether the latest connection is not even answered."""
        return self.open > self._maximum + SPARE

    def check(self, url: bytes) -> None:
        """Raise Overloaded for a request on a connection above the bound, unless it checks the server's health."""
        if url.partition(b"?")[0] not in _HEALTH:
            raise overloaded()


def overloaded() -> Overloaded:
    metrics.REFUSALS.add(1, Overloaded.code, "connections")
    return Overloaded(
        "The server is at its limit of client connections. Retry in a moment.",
        reason="connections",
        retry_after=_RETRY_AFTER,
    )

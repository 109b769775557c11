"""Connection limit: how many client connections a server has open. Each takes a file descriptor and memory, with or
without a key, so their number has a bound.

A few connections above the bound are kept apart for health checks: a load balancer must not take a server that is full
for one that is dead. Any other request there is refused, and further connections are closed at once.
"""

from typing import Protocol

from conveyor.errors import Overloaded
from conveyor.telemetry import metrics

# Connections above the bound that are answered.
SPARE = 32
# Bytes of responses that wait for their clients, over all connections.
MAX_UNREAD_BYTES = 512 * 1024 * 1024
# Seconds for the head of a request on one of them.
SPARE_HEAD_SECONDS = 5.0
_HEALTH = frozenset({b"/healthz", b"/readyz"})
_RETRY_AFTER = 5


class UnreadConnection(Protocol):
    """A connection on which a response waits for its client."""

    @property
    def unread_bytes(self) -> int:
        """How many bytes of it wait."""

    def cut_off(self) -> None:
        """Forget them, and end the connection."""


class ConnectionLimit:
    """The connections of one server."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self.open = 0
        # The longest waiting first.
        self._unread: dict[UnreadConnection, None] = {}

    def begin_waiting(self, connection: UnreadConnection) -> None:
        """A response waits on this connection. If too much waits by now, those go on which most does; never all."""
        self._unread[connection] = None
        while len(self._unread) > 1 and sum(each.unread_bytes for each in self._unread) > MAX_UNREAD_BYTES:
            longest = max(self._unread, key=lambda each: each.unread_bytes)
            del self._unread[longest]
            longest.cut_off()

    def end_waiting(self, connection: UnreadConnection) -> None:
        """The client has read, or is gone."""
        self._unread.pop(connection, None)

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

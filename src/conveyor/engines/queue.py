"""Queue: messages that are seen by one receiver at a time, until acknowledged. A hint; the rows are the truth."""

from collections.abc import Collection, Sequence
from typing import NewType, Protocol, runtime_checkable

import msgspec

from conveyor.model import Page, RunId

QueueName = NewType("QueueName", str)

CONTROL = QueueName("control")
# The names of all queues of runs begin so, and those of the second kind end so.
RUN_PREFIX = "run:"
_RECOVERY_SUFFIX = ":recovery"


def run_queue(run_id: RunId) -> QueueName:
    """The queue of one run's references."""
    return QueueName(f"{RUN_PREFIX}{run_id}")


def recovery_queue(run_id: RunId) -> QueueName:
    """Beside it: references that come again (retried, parked, reclaimed, stuck). Its name begins with the other's, so
    that an engine that treats the queues of runs in its own way treats both alike."""
    return QueueName(f"{RUN_PREFIX}{run_id}{_RECOVERY_SUFFIX}")


def run_queues(run_id: RunId) -> tuple[QueueName, QueueName]:
    """Both. References move from the first to the second and never back: whoever looks whether they are empty looks
    in this order."""
    return run_queue(run_id), recovery_queue(run_id)


def kind_of(queue: QueueName) -> str:
    """What is counted together: the queues of all runs are one kind, and those beside them another."""
    if queue.startswith(RUN_PREFIX):
        return "recovery" if queue.endswith(_RECOVERY_SUFFIX) else "runs"
    return queue


class Outgoing(msgspec.Struct, frozen=True):
    """A message to send; it becomes visible after `delay` seconds."""

    body: bytes
    delay: float = 0.0


class Delivery(msgspec.Struct, frozen=True):
    """A message as received. `receipt` is good for this delivery only: a later one makes it stale."""

    message_id: str
    receipt: str
    # Deliveries so far, this one included.
    receives: int
    body: bytes
    # Deliveries before this one whose start was marked: each was lost at work.
    lost_starts: int = 0


class Depth(msgspec.Struct, frozen=True):
    """How many messages wait, are held by receivers, or are delayed."""

    ready: int
    held: int
    delayed: int

    @property
    def total(self) -> int:
        return self.ready + self.held + self.delayed


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was given up, with its reason."""

    message_id: str
    queue: QueueName
    body: bytes
    reason: str
    at: float


class Queue(Protocol):
    """At least once, in no promised order."""

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        """Send a batch. Returns the positions that were not taken, to be sent again; empty when all were."""

    async def receive(self, queue: QueueName, limit: int, visibility: float) -> list[Delivery]:
        """Take up to `limit` visible messages; nobody else sees them for `visibility` seconds."""

    async def extend(self, queue: QueueName, receipts: Sequence[str], visibility: float) -> frozenset[str]:
        """Hold messages for `visibility` seconds from now. Returns the receipts that were stale: those are lost."""

    async def mark_started(self, queue: QueueName, receipts: Sequence[str]) -> None:
        """Say that work on these messages begins: if they come again, they were lost at work and not while they
        waited. Only asked for messages that have come before."""

    async def ack(self, queue: QueueName, receipts: Sequence[str]) -> frozenset[str]:
        """Remove messages for good. Returns the receipts that were stale."""

    async def release(self, queue: QueueName, receipts: Sequence[str], delay: float) -> None:
        """Give messages back unprocessed, visible after `delay` seconds, without counting the receive."""

    async def bury(self, queue: QueueName, receipts: Sequence[str], reason: str) -> None:
        """Move messages to the dead letters."""

    async def dead_letters(self, cursor: str | None, limit: int) -> Page[DeadLetter]:
        """What was buried, oldest first."""

    async def letters(self, message_ids: Collection[str]) -> list[DeadLetter]:
        """Those of these dead letters that are there."""

    async def discard(self, message_ids: Collection[str]) -> int:
        """Remove dead letters for good; returns how many."""

    async def redrive(self, message_ids: Collection[str]) -> int:
        """Send dead letters back to the queues that they came from; returns how many."""

    async def depth(self, queue: QueueName) -> Depth:
        """Approximate on engines that only know it so."""

    async def drop(self, queue: QueueName) -> None:
        """Remove a queue and all in it."""


@runtime_checkable
class TellsAge(Protocol):
    """A capability: it is known how long messages wait."""

    async def waiting_since(self, queue: QueueName) -> float | None:
        """Since when the message that waits longest could have been taken; None if none waits."""


class Arrived(msgspec.Struct, frozen=True):
    """A message that somebody else sent, as it came."""

    message_id: str
    receipt: str
    body: bytes
    # Deliveries so far, this one included.
    receives: int
    # When it was sent, where that is known.
    sent_at: float | None = None


class Inbox(Protocol):
    """A queue that others fill. At least once, in no promised order."""

    async def arrived(self, limit: int, visibility: float) -> list[Arrived]:
        """Up to `limit` messages that are there now; nobody else sees them for `visibility` seconds."""

    async def done(self, message: Arrived) -> None:
        """Remove a message for good."""

    async def put_off(self, message: Arrived, delay: float) -> None:
        """Have it come again after `delay` seconds."""

    async def bury(self, message: Arrived, reason: str) -> None:
        """Move it to the dead letters."""


class QueueInbox:
    """An inbox that is a queue of our own."""

    def __init__(self, queue: Queue, name: QueueName) -> None:
        self._queue = queue
        self._name = name

    async def arrived(self, limit: int, visibility: float) -> list[Arrived]:
        got = await self._queue.receive(self._name, limit, visibility)
        return [Arrived(each.message_id, each.receipt, each.body, each.receives) for each in got]

    async def done(self, message: Arrived) -> None:
        await self._queue.ack(self._name, [message.receipt])

    async def put_off(self, message: Arrived, delay: float) -> None:
        await self._queue.extend(self._name, [message.receipt], delay)

    async def bury(self, message: Arrived, reason: str) -> None:
        await self._queue.bury(self._name, [message.receipt], reason)

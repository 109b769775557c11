"""The Queue seam: at-least-once messages with a visibility timeout. A message is a hint; the stored tasks are the
truth."""

from collections.abc import Collection, Sequence
from typing import NewType, Protocol, runtime_checkable

import msgspec

from conveyor.model import Page, RunId

QueueName = NewType("QueueName", str)

CONTROL = QueueName("control")
# Every run queue has the prefix; a recovery queue has the suffix too.
RUN_PREFIX = "run:"
_RECOVERY_SUFFIX = ":recovery"


def run_queue(run_id: RunId) -> QueueName:
    """The queue of a run's task references."""
    return QueueName(f"{RUN_PREFIX}{run_id}")


def recovery_queue(run_id: RunId) -> QueueName:
    """The queue of a run's requeued references: retried, parked, reclaimed, stuck. It has the prefix of run queues, so
    an engine that treats run queues specially treats both alike."""
    return QueueName(f"{RUN_PREFIX}{run_id}{_RECOVERY_SUFFIX}")


def run_queues(run_id: RunId) -> tuple[QueueName, QueueName]:
    """Both queues of a run. References move from the first to the second and never back, so check for emptiness in this
    order."""
    return run_queue(run_id), recovery_queue(run_id)


def home_queue(queue: QueueName) -> QueueName:
    """The run queue of a recovery queue; any other queue itself."""
    return QueueName(queue.removesuffix(_RECOVERY_SUFFIX))


def run_of(queue: QueueName) -> RunId | None:
    """The run whose queue this is; None for other queues."""
    return RunId(home_queue(queue)[len(RUN_PREFIX) :]) if queue.startswith(RUN_PREFIX) else None


def kind_of(queue: QueueName) -> str:
    """The metric label of a queue: all run queues share one, all recovery queues another."""
    if queue.startswith(RUN_PREFIX):
        return "recovery" if queue.endswith(_RECOVERY_SUFFIX) else "runs"
    return queue


class Outgoing(msgspec.Struct, frozen=True):
    """A message to send; it becomes visible after `delay` seconds."""

    body: bytes
    delay: float = 0.0


class Delivery(msgspec.Struct, frozen=True):
    """A received message. `receipt` is valid for this delivery only: a redelivery makes it stale."""

    message_id: str
    receipt: str
    # Deliveries so far, this one included.
    receives: int
    body: bytes
    # Earlier deliveries that were marked as started: each was lost during work.
    lost_starts: int = 0


class Depth(msgspec.Struct, frozen=True):
    """How many messages are ready, in flight, or delayed."""

    ready: int
    held: int
    delayed: int
    # Whether there may be messages that are not counted.
    unknown: bool = False

    @property
    def total(self) -> int:
        return self.ready + self.held + self.delayed

    @property
    def is_empty(self) -> bool:
        """Whether it is known that there is no message."""
        return self.total == 0 and not self.unknown


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was dead-lettered, with the reason."""

    message_id: str
    queue: QueueName
    body: bytes
    reason: str
    at: float


class Queue(Protocol):
    """Delivers each message at least once, in no guaranteed order."""

    async def send(self, queue: QueueName, messages: Sequence[Outgoing]) -> list[int]:
        """Send a batch. Returns the positions that the engine did not accept, for the caller to send again."""

    async def receive(self, queue: QueueName, limit: int, visibility: float) -> list[Delivery]:
        """Receive up to `limit` visible messages; other receivers do not see them for `visibility` seconds."""

    async def extend(self, queue: QueueName, receipts: Sequence[str], visibility: float) -> frozenset[str]:
        """Extend the visibility timeout to `visibility` seconds from now. Returns the stale receipts: the caller has
        lost those messages."""

    async def mark_started(self, queue: QueueName, receipts: Sequence[str]) -> None:
        """Mark work on these messages as started: a redelivery then counts as lost during work, not while waiting.
        Called for redelivered messages only."""

    async def ack(self, queue: QueueName, receipts: Sequence[str]) -> frozenset[str]:
        """Acknowledge messages. Returns the stale receipts."""

    async def release(self, queue: QueueName, receipts: Sequence[str], delay: float) -> None:
        """Return messages unprocessed, visible after `delay` seconds, without counting the receive."""

    async def dead_letter(self, queue: QueueName, receipts: Sequence[str], reason: str) -> None:
        """Dead-letter messages."""

    async def dead_letters(self, cursor: str | None, limit: int) -> Page[DeadLetter]:
        """Dead letters, oldest first."""

    async def find_dead_letters(self, message_ids: Collection[str]) -> list[DeadLetter]:
        """The dead letters with these ids, without those that do not exist."""

    async def discard(self, message_ids: Collection[str]) -> int:
        """Delete dead letters. Returns how many."""

    async def redrive(self, message_ids: Collection[str]) -> int:
        """Redrive dead letters: send each back to its queue. Returns how many."""

    async def depth(self, queue: QueueName) -> Depth:
        """The number of messages by state, of this queue alone; approximate on some engines. `unknown` says that there
        may be more: then only time shows whether a message was lost."""

    async def drop(self, queue: QueueName) -> None:
        """Delete a queue with all its messages."""


@runtime_checkable
class ReportsMessageAge(Protocol):
    """A capability: the engine knows the age of waiting messages."""

    async def waiting_since(self, queue: QueueName) -> float | None:
        """The time at which the oldest ready message became visible; None if no message is ready."""


@runtime_checkable
class NamesQueues(Protocol):
    """A capability: the engine knows which queues have messages."""

    async def next_queue(self, after: QueueName | None) -> QueueName | None:
        """The first queue with messages, ready or not, after this one, in an order of the engine; None at the end."""


@runtime_checkable
class SharesQueues(Protocol):
    """A capability: several runs may share one queue of the engine, which cannot count the messages of each. The depth
    of such a run has what is known of that run alone; the rest is `unknown`."""

    async def shared_depth(self) -> Depth | None:
        """The depth of the queue that several runs share; None if there is none."""


@runtime_checkable
class ReceivesMany(Protocol):
    """A capability: one step receives from many queues."""

    async def receive_many(self, takes: Sequence[tuple[QueueName, int]], visibility: float) -> list[list[Delivery]]:
        """For each queue, of which none is there twice, what `receive` returns with this limit."""


@runtime_checkable
class Hastens(Protocol):
    """A capability: the engine can make delayed messages visible."""

    async def hasten(self, queue: QueueName) -> None:
        """Make the delayed messages of a queue visible now. Messages in flight stay in flight."""

    async def delayed_queues(self, queues: Sequence[QueueName]) -> frozenset[QueueName]:
        """Those of these queues that have delayed messages."""


@runtime_checkable
class Reveals(Protocol):
    """A capability: the engine stores when a message is visible by the clock of its sender, which may be set back."""

    async def reveal(self, queue: QueueName, beyond: float) -> int:
        """Make messages visible now that would be hidden for more than `beyond` seconds from now: a delay is over, a
        lease has expired. Returns how many."""


@runtime_checkable
class KeepsArrivals(Protocol):
    """A capability: messages may arrive here for a receiver that no longer asks. Nobody else gets them meanwhile."""

    def has_arrived(self, queue: QueueName) -> bool:
        """Whether messages of the queue have arrived that no receiver has taken."""

    async def give_back(self, queue: QueueName) -> None:
        """Make such messages visible to others: no receiver here will take them."""


class InboxMessage(msgspec.Struct, frozen=True):
    """A message from another sender, as received."""

    message_id: str
    receipt: str
    body: bytes
    # Deliveries so far, this one included.
    receives: int
    # When it was sent, if the engine knows.
    sent_at: float | None = None


class Inbox(Protocol):
    """A queue that other systems send to. Delivers at least once, in no guaranteed order."""

    async def receive(self, limit: int, visibility: float) -> list[InboxMessage]:
        """Receive up to `limit` visible messages; other receivers do not see them for `visibility` seconds."""

    async def ack(self, message: InboxMessage) -> None:
        """Acknowledge a message."""

    async def delay(self, message: InboxMessage, delay: float) -> None:
        """Redeliver the message after `delay` seconds."""

    async def dead_letter(self, message: InboxMessage, reason: str) -> None:
        """Dead-letter the message."""


class QueueInbox:
    """An inbox on one of Conveyor's own queues."""

    def __init__(self, queue: Queue, name: QueueName) -> None:
        self._queue = queue
        self._name = name

    async def receive(self, limit: int, visibility: float) -> list[InboxMessage]:
        got = await self._queue.receive(self._name, limit, visibility)
        return [InboxMessage(each.message_id, each.receipt, each.body, each.receives) for each in got]

    async def ack(self, message: InboxMessage) -> None:
        await self._queue.ack(self._name, [message.receipt])

    async def delay(self, message: InboxMessage, delay: float) -> None:
        await self._queue.extend(self._name, [message.receipt], delay)

    async def dead_letter(self, message: InboxMessage, reason: str) -> None:
        await self._queue.dead_letter(self._name, [message.receipt], reason)

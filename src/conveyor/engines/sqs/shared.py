"""The shared queue: where runs beyond the limit have their messages, each under its own MessageGroupId.

SQS hands out whatever is next, of any run, fairly among the groups. Who asks for one run keeps what came for others in
a small stash, hidden from everybody else, because the same worker is about to ask for those runs too; what nobody here
asks for lapses and goes elsewhere. Such a message counts as received. What a dropped queue left behind is known by its
tombstone, a row with the time of the drop: messages sent before that are deleted wherever they turn up.
"""

from collections import deque

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import Depth, QueueName
from conveyor.engines.records import Document, DocumentRecords
from conveyor.engines.sqs.address import plain
from conveyor.engines.sqs.calls import MISSING, Calls
from conveyor.engines.sqs.envelope import Envelope, from_text
from conveyor.engines.sqs.polls import Message, Polls
from conveyor.engines.sqs.queues import KEEP_SECONDS, Queues
from conveyor.model import TenantId

KIND = "queue.dropped"

_STASH = 200
# How long what came for others waits here, and how long it is believed that the shared queue is empty or is not.
_STASH_SECONDS = 60.0
_LOOK_SECONDS = 2.0
_TOMBSTONE_SECONDS = 30.0
_ROUNDS = 5
# As many as one call gives: what is too much is kept.
_TEN = 10
_MOST_TOMBSTONES = 10_000

_counts = {
    "ready": "ApproximateNumberOfMessages",
    "held": "ApproximateNumberOfMessagesNotVisible",
    "delayed": "ApproximateNumberOfMessagesDelayed",
}


async def depth_of(calls: Calls, url: str) -> Depth:
    """As SQS counts it. Raises Refused if there is no such queue."""
    answer = await calls.ask("get_queue_attributes", MISSING, QueueUrl=url, AttributeNames=list(_counts.values()))
    return Depth(**{field: int(answer["Attributes"].get(name, 0)) for field, name in _counts.items()})


class Shared:
    """This process's part in it."""

    def __init__(
        self, calls: Calls, queues: Queues, polls: Polls, rows: DocumentRecords, tenant: TenantId, clock: Clock
    ) -> None:
        self._calls = calls
        self._queues = queues
        self._polls = polls
        self._rows = rows
        self._tenant = tenant
        self._clock = clock
        self._stash: dict[QueueName, deque[Message]] = {}
        self._tombstones: dict[QueueName, tuple[float, float]] = {}
        self._seen: tuple[float, Depth] | None = None

    async def depth(self) -> Depth:
        """Of all runs in it together: how many of one there are nobody can tell."""
        now = self._clock.monotonic()
        if self._seen is None or self._seen[0] + _LOOK_SECONDS <= now:
            url = await self._queues.shared()
            self._seen = (now, Depth(0, 0, 0) if url is None else await depth_of(self._calls, url))
        return self._seen[1]

    def sent(self) -> None:
        """Something was just sent: it is not empty."""
        self._seen = None

    async def take(self, queue: QueueName, limit: int, visibility: float) -> list[Message]:
        """Up to `limit` messages of this queue."""
        self._forget_lapsed()
        kept = await self._polls.hold(self._from_stash(queue, limit), visibility)
        for _ in range(_ROUNDS):
            if len(kept) >= limit or (await self.depth()).ready == 0:
                break
            url = await self._queues.shared()
            if url is None:
                break
            taken = await self._polls.now(url, max(_TEN, limit - len(kept)), max(visibility, _STASH_SECONDS))
            if not taken:
                self._seen = (self._clock.monotonic(), Depth(0, 0, 0))
                break
            await self._sort(taken)
            kept += await self._polls.hold(self._from_stash(queue, limit - len(kept)), visibility)
        return kept

    async def drop(self, queue: QueueName) -> None:
        """What it has here is garbage from now on."""
        self._stash.pop(queue, None)
        if await self._queues.shared() is None:
            return
        now = self._clock.now()
        name = plain(queue)
        row = Document(KIND, self._tenant, name, msgspec.json.encode(now), expires_at=now + KEEP_SECONDS)
        await self._rows.create_rows([row])
        while (standing := await self._rows.document(KIND, self._tenant, name)) is not None:
            if msgspec.json.decode(standing.body, type=float) >= now:
                break
            await self._rows.replace_row(msgspec.structs.replace(row, version=standing.version))
        self._tombstones[queue] = (self._clock.monotonic(), now)
        # Somebody may have taken some of it while that was written.
        self._stash.pop(queue, None)

    async def _sort(self, taken: list[Message]) -> None:
        garbage: list[Message] = []
        for message in taken:
            envelope = from_text(message.text)
            # Nobody else sends here: what is not ours is nobody's.
            if envelope is None or await self._dropped(envelope):
                garbage.append(message)
            else:
                self._stash.setdefault(envelope.queue, deque()).append(message)
        if garbage:
            entries = [{"ReceiptHandle": message.handle} for message in garbage]
            await self._calls.each("delete_message_batch", garbage[0].url, entries)

    async def _dropped(self, envelope: Envelope) -> bool:
        known = self._tombstones.get(envelope.queue)
        now = self._clock.monotonic()
        if known is None or known[0] + _TOMBSTONE_SECONDS <= now:
            row = await self._rows.document(KIND, self._tenant, plain(envelope.queue))
            at = 0.0 if row is None else msgspec.json.decode(row.body, type=float)
            # It may have been dropped here while that was read.
            at = max(at, self._tombstones.get(envelope.queue, (0.0, 0.0))[1])
            if len(self._tombstones) >= _MOST_TOMBSTONES:
                self._tombstones.clear()
            known = self._tombstones[envelope.queue] = (now, at)
        return envelope.at <= known[1]

    def _from_stash(self, queue: QueueName, limit: int) -> list[Message]:
        waiting = self._stash.get(queue, deque())
        found = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        if not waiting:
            self._stash.pop(queue, None)
        return found

    def _forget_lapsed(self) -> None:
        """What lapsed, and the oldest of too many: it stays hidden until it lapses too."""
        now = self._clock.monotonic()
        for queue, waiting in list(self._stash.items()):
            while waiting and waiting[0].until <= now:
                waiting.popleft()
            if not waiting:
                del self._stash[queue]
        while sum(map(len, self._stash.values())) > _STASH:
            queue, waiting = next(iter(self._stash.items()))
            waiting.popleft()
            if not waiting:
                del self._stash[queue]

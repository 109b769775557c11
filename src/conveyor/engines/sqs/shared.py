"""The shared queue: it holds the messages of runs above the limit, each run under its own MessageGroupId.

SQS delivers messages of any run, fairly among the groups. A receiver of one run stashes messages of other runs, because
the same worker is likely to receive those runs next; messages that it does not ask for become visible again and go
elsewhere. A stashed message counts as received. A dropped queue has a tombstone, a document with the time of the drop:
messages that were sent before are deleted wherever they appear.
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
# How long messages of other runs stay stashed, and how long the emptiness of the shared queue is cached.
_STASH_SECONDS = 60.0
_LOOK_SECONDS = 2.0
_TOMBSTONE_SECONDS = 30.0
_ROUNDS = 5
# The maximum of one call: the surplus is stashed.
_TEN = 10
_MAX_TOMBSTONES = 10_000

_counts = {
    "ready": "ApproximateNumberOfMessages",
    "held": "ApproximateNumberOfMessagesNotVisible",
    "delayed": "ApproximateNumberOfMessagesDelayed",
}


async def depth_of(calls: Calls, url: str) -> Depth:
    """The count of SQS. Raises SqsRefused if the queue does not exist."""
    answer = await calls.ask("get_queue_attributes", MISSING, QueueUrl=url, AttributeNames=list(_counts.values()))
    return Depth(**{field: int(answer["Attributes"].get(name, 0)) for field, name in _counts.items()})


class Shared:
    """This process's view of the shared queue."""

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
        """The depth of all its runs together: SQS cannot count one run."""
        now = self._clock.monotonic()
        if self._seen is None or self._seen[0] + _LOOK_SECONDS <= now:
            url = await self._queues.shared()
            self._seen = (now, Depth(0, 0, 0) if url is None else await depth_of(self._calls, url))
        return self._seen[1]

    def sent(self) -> None:
        """Note that the shared queue is not empty after a send."""
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
        """Drop a queue: write its tombstone and discard its stash."""
        self._stash.pop(queue, None)
        if await self._queues.shared() is None:
            return
        now = self._clock.now()
        name = plain(queue)
        row = Document(KIND, self._tenant, name, msgspec.json.encode(now), expires_at=now + KEEP_SECONDS)
        await self._rows.create_documents([row])
        while (standing := await self._rows.document(KIND, self._tenant, name)) is not None:
            if msgspec.json.decode(standing.body, type=float) >= now:
                break
            await self._rows.replace_document(msgspec.structs.replace(row, version=standing.version))
        self._tombstones[queue] = (self._clock.monotonic(), now)
        # Another call may have stashed messages while the tombstone was written.
        self._stash.pop(queue, None)

    async def _sort(self, taken: list[Message]) -> None:
        garbage: list[Message] = []
        for message in taken:
            envelope = from_text(message.text)
            # Only Conveyor sends here: delete messages without an envelope.
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
            # The queue may have been dropped here during the read.
            at = max(at, self._tombstones.get(envelope.queue, (0.0, 0.0))[1])
            if len(self._tombstones) >= _MAX_TOMBSTONES:
                self._tombstones.clear()
            known = self._tombstones[envelope.queue] = (now, at)
        return envelope.at <= known[1]

    def _from_stash(self, queue: QueueName, limit: int) -> list[Message]:
        waiting = self._stash.get(queue, deque())
        stashed = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        if not waiting:
            self._stash.pop(queue, None)
        return stashed

    def _forget_lapsed(self) -> None:
        """Evict expired messages, and the oldest of a full stash: SQS redelivers them after their timeout."""
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

"""The shared queue: it holds the messages of runs above the limit, each queue under its own MessageGroupId.

SQS delivers messages of any run, fairly among the groups. So one receiver takes from it for all runs of this process:
it stashes messages of runs that were asked for lately, up to what they asked for, and tells their receivers. Whoever
asks for one queue of a run soon asks for the other, so that both are served. Messages of other runs it offers to the
workers of this process, which may serve one more run: otherwise each would have to find the one worker of a fleet that
asks for it. A message for which its queue has no room becomes visible again after a pause, and one that no worker takes
after a pause that grows with each delivery, so that those of a paused run do not circulate. A stashed message counts as
received. A dropped queue has a tombstone, a document with the time of the drop: messages that were sent before are
deleted wherever they appear.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Depth, QueueName, home_queue
from conveyor.engines.records import Document, DocumentRecords
from conveyor.engines.sqs.address import plain
from conveyor.engines.sqs.calls import MISSING, Calls, SqsRefused
from conveyor.engines.sqs.envelope import Envelope, from_text
from conveyor.engines.sqs.polls import Message, Polls
from conveyor.engines.sqs.queues import KEEP_SECONDS, Queues
from conveyor.errors import ConveyorError
from conveyor.model import TenantId

log = structlog.get_logger()

KIND = "queue.dropped"
# The name of the task that gives stashed messages back in time.
TIDYING = "stash of the shared queue"

# How long after its last receive a run is served here, and messages for it stay stashed.
_SERVED_SECONDS = 10.0
_TOMBSTONE_SECONDS = 30.0
_ROUNDS = 5
# Messages of one round, at least and at most.
_TEN = 10
_HUNDRED = 100
# The pause of a message for which its queue has no room, and the longest of one that nobody asks for here: a run that
# is resumed waits for it.
_FULL_PAUSE = 5.0
_LONGEST_PAUSE = 30.0
_MAX_KNOWN = 10_000

# Ready, held, delayed.
_COUNTS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


async def depth_of(calls: Calls, url: str) -> Depth:
    """The count of SQS. Raises SqsRefused if the queue does not exist."""
    answer = await calls.ask("get_queue_attributes", MISSING, QueueUrl=url, AttributeNames=list(_COUNTS))
    ready, held, delayed = (int(answer["Attributes"].get(name, 0)) for name in _COUNTS)
    return Depth(ready, held, delayed)


class ServedRun(msgspec.Struct):
    """A run that is received from here: when it was last asked for, and for each of its queues how many messages its
    receiver wanted, and those that have arrived."""

    at: float = 0.0
    limits: dict[QueueName, int] = msgspec.field(default_factory=dict)
    stash: dict[QueueName, deque[Message]] = msgspec.field(default_factory=dict)

    def has_room(self, queue: QueueName) -> bool:
        return len(self.stash.get(queue, ())) < max(_TEN, self.limits.get(queue, 0))

    @property
    def wanted(self) -> int:
        return sum(limit for queue, limit in self.limits.items() if queue not in self.stash)

    @property
    def messages(self) -> list[Message]:
        return [message for waiting in self.stash.values() for message in waiting]


class Shared:
    """This process's receiver of the shared queue. `wake` is called with each queue that gets a message; `offer` with
    a queue that nobody asks for and the body of a message of it, and says whether somebody will."""

    def __init__(
        self,
        calls: Calls,
        queues: Queues,
        polls: Polls,
        rows: DocumentRecords,
        tenant: TenantId,
        clock: Clock,
        wake: Callable[[QueueName], None],
        offer: Callable[[QueueName, bytes], bool],
    ) -> None:
        self._calls = calls
        self._queues = queues
        self._polls = polls
        self._rows = rows
        self._tenant = tenant
        self._clock = clock
        self._wake = wake
        self._offer = offer
        # By the run queue. The one that asked last is the last.
        self._runs: dict[QueueName, ServedRun] = {}
        self._tombstones: dict[QueueName, tuple[float, float]] = {}
        # The round that is under way: receivers of several runs wait for the same one.
        self._round: asyncio.Task[int] | None = None
        # Whether a poll has brought messages since the last round took some, and for how long a round receives.
        self._has_arrivals = False
        self._visibility = 0.0
        self._is_closed = False
        # Gives back what is stashed for runs that nobody asks for any more.
        self._tidying: asyncio.Task[None] | None = None

    async def depth(self) -> Depth | None:
        """The depth of all its runs together, as SQS counts; None if there is no shared queue."""
        url = await self._queues.shared()
        if url is None:
            return None
        try:
            return await depth_of(self._calls, url)
        except SqsRefused:
            return None

    def stashed(self, queue: QueueName) -> int:
        """How many messages of a queue have arrived and wait for its receiver."""
        run = self._runs.get(home_queue(queue))
        return 0 if run is None else len(run.stash.get(queue, ()))

    async def give_back(self, queue: QueueName) -> None:
        """Stop serving the run of a queue, and give its messages back."""
        if (run := self._runs.pop(home_queue(queue), None)) is not None:
            await self._polls.give_back(run.messages, self._pause())

    def on_arrival(self) -> None:
        """A poll brought messages: sort them, though whoever began the poll may ask no more."""
        self._has_arrivals = True
        if self._round is None and not self._is_closed:
            self._begin_round()

    async def take(self, queue: QueueName, limit: int, visibility: float) -> list[Message]:
        """Up to `limit` messages of this queue."""
        await self._tidy()
        self._visibility = visibility
        self._serve(queue, limit)
        for _ in range(_ROUNDS):
            if self.stashed(queue) or await asyncio.shield(self._round or self._begin_round()) == 0:
                break
        return await self._polls.hold(self._from_stash(queue, limit), visibility)

    async def drop(self, queue: QueueName) -> None:
        """Drop a queue: write its tombstone and discard its stash."""
        self._discard(queue)
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
        self._discard(queue)

    async def close(self) -> None:
        """Give back what is stashed."""
        self._is_closed = True
        if self._tidying is not None:
            self._tidying.cancel()
            await asyncio.wait([self._tidying])
        if self._round is not None:
            await asyncio.wait([self._round])
        stashed = [message for run in self._runs.values() for message in run.messages]
        self._runs.clear()
        await self._polls.give_back(stashed, lambda _: 0.0)

    def _serve(self, queue: QueueName, limit: int) -> None:
        run = self._runs.setdefault(home_queue(queue), ServedRun())
        run.limits[queue] = limit
        self._touch(queue, run)

    def _touch(self, queue: QueueName, run: ServedRun) -> None:
        """Serve the run for a while from now on."""
        run.at = self._clock.monotonic()
        home = home_queue(queue)
        self._runs.pop(home, None)
        self._runs[home] = run

    def _begin_round(self) -> "asyncio.Task[int]":
        self._round = asyncio.create_task(self._receive())
        self._round.add_done_callback(self._on_round_ended)
        return self._round

    def _on_round_ended(self, ended: "asyncio.Task[int]") -> None:
        self._round = None
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            # Of a round that no receiver waits for, nobody else would hear.
            log.warning("the shared queue was not received from", error=repr(error))
        elif self._has_arrivals and not self._is_closed:
            self._begin_round()

    async def _receive(self) -> int:
        """Take messages for all runs that were asked for. Returns how many there were."""
        url = await self._queues.shared()
        if url is None:
            return 0
        self._has_arrivals = False
        wanted = sum(run.wanted for run in self._runs.values())
        taken = await self._polls.take(url, max(_TEN, min(_HUNDRED, wanted)), self._visibility)
        if taken:
            await self._sort(taken)
        return len(taken)

    async def _sort(self, taken: list[Message]) -> None:
        sorted_out = [(message, from_text(message.text)) for message in taken]
        try:
            await self._read_tombstones({envelope.queue for _, envelope in sorted_out if envelope is not None})
        except ConveyorError:
            await self._polls.give_back(taken, lambda _: _FULL_PAUSE)
            raise
        garbage: list[Message] = []
        full: list[Message] = []
        unasked: list[Message] = []
        served: set[QueueName] = set()
        for message, envelope in sorted_out:
            # Only Conveyor sends here: delete messages without an envelope.
            if envelope is None or self._is_dropped(envelope):
                garbage.append(message)
            elif (run := self._run_of(envelope)) is None:
                unasked.append(message)
            elif run.has_room(envelope.queue):
                self._stash(run, envelope.queue, message)
                served.add(envelope.queue)
            else:
                full.append(message)
        for queue in served:
            self._wake(queue)
        if served and self._tidying is None:
            self._tidying = asyncio.create_task(self._keep_tidy(), name=TIDYING)
        await self._polls.give_back(full, lambda _: _FULL_PAUSE)
        await self._polls.give_back(unasked, self._pause())
        if garbage:
            entries = [{"ReceiptHandle": message.handle} for message in garbage]
            await self._calls.each("delete_message_batch", garbage[0].url, entries)

    def _run_of(self, envelope: Envelope) -> ServedRun | None:
        """The run of a message, if it is served here, or will be."""
        run = self._runs.get(home_queue(envelope.queue))
        if run is not None and self._clock.monotonic() < run.at + _SERVED_SECONDS:
            return run
        if not self._offer(envelope.queue, envelope.body):
            return None
        self._serve(envelope.queue, _TEN)
        return self._runs[home_queue(envelope.queue)]

    def _stash(self, run: ServedRun, queue: QueueName, message: Message) -> None:
        if not run.stash:
            # Its receiver may have left, and gets as long to return as any other.
            self._touch(queue, run)
        run.stash.setdefault(queue, deque()).append(message)

    def _pause(self) -> Callable[[Message], float]:
        """How long each message that nobody asks for stays away. Those that came together come together again: that
        takes fewer calls."""
        part = 0.5 + self._clock.jitter() / 2
        return lambda message: min(_LONGEST_PAUSE, 2.0 ** min(message.count, 10)) * part

    async def _read_tombstones(self, queues: Iterable[QueueName]) -> None:
        for queue in queues:
            known = self._tombstones.get(queue)
            now = self._clock.monotonic()
            if known is not None and now < known[0] + _TOMBSTONE_SECONDS:
                continue
            row = await self._rows.document(KIND, self._tenant, plain(queue))
            at = 0.0 if row is None else msgspec.json.decode(row.body, type=float)
            if len(self._tombstones) >= _MAX_KNOWN:
                self._tombstones.clear()
            # The queue may have been dropped here during the read.
            self._tombstones[queue] = (now, max(at, self._tombstones.get(queue, (0.0, 0.0))[1]))

    def _is_dropped(self, envelope: Envelope) -> bool:
        return envelope.at <= self._tombstones.get(envelope.queue, (0.0, 0.0))[1]

    def _from_stash(self, queue: QueueName, limit: int) -> list[Message]:
        run = self._runs.get(home_queue(queue))
        waiting = deque[Message]() if run is None else run.stash.get(queue, deque())
        stashed = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
        if not waiting:
            self._discard(queue)
        return stashed

    def _discard(self, queue: QueueName) -> None:
        if (run := self._runs.get(home_queue(queue))) is not None:
            run.stash.pop(queue, None)

    async def _keep_tidy(self) -> None:
        """Give stashed messages back in time, although no receiver comes any more."""
        try:
            while any(run.stash for run in self._runs.values()):
                first = next(iter(self._runs.values()))
                await self._clock.sleep(first.at + _SERVED_SECONDS - self._clock.monotonic())
                await self._tidy()
        finally:
            self._tidying = None

    async def _tidy(self) -> None:
        """Stop serving runs that nobody asks for any more, and give their messages back."""
        now = self._clock.monotonic()
        unasked: list[Message] = []
        # The one that asked first is the first.
        while self._runs and next(iter(self._runs.values())).at + _SERVED_SECONDS <= now:
            unasked += self._runs.pop(next(iter(self._runs))).messages
        await self._polls.give_back(unasked, self._pause())

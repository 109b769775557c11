"""Receives messages. A queue that is empty, or that nobody has looked at yet, has one long poll: it answers at once
if there are messages, and otherwise stays open in the background. Until it ends, further receives cost no call and
find nothing; the next one gets what ended the poll. A queue that gave as many as it was asked for is busy: it is
drained with short polls, ten messages per call and several calls at once.

Messages that a poll brought and nobody asks for (the run was paused, or went to another worker) are given back.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.sqs.calls import MISSING, OVER_LIMIT, Calls, EntryVerdict, SqsRefused
from conveyor.errors import EngineFailed

LONGEST_HOLD = 43_200
# Long polls that are open at once: each has a connection.
MAX_OPEN = 256

_AT_ONCE = 10
_PER_CALL = 10
# How long a receive waits for the answer of a poll that it has begun: about the time of a call.
_GLANCE = 0.05
# How soon messages that a poll brought are given back.
_CLAIM_SECONDS = 5.0
# How often a queue is looked at if there is no connection left for a long poll.
_REST_SECONDS = 5.0
_MAX_KNOWN = 10_000


class Message(msgspec.Struct, frozen=True):
    """A message as received, and when SQS redelivers it at the earliest, by the monotonic clock."""

    url: str
    handle: str
    sqs_id: str
    count: int
    text: str
    taken: float
    until: float


def whole(visibility: float) -> int:
    """Whole seconds for SQS, rounded up."""
    return max(0, min(LONGEST_HOLD, math.ceil(visibility)))


class Polls:
    """At most one long poll per queue. `on_arrival` is called with the URL of a queue whose poll brought messages;
    `on_returned` with a message that was received here and handed to nobody, and in how many seconds SQS redelivers
    it."""

    def __init__(
        self,
        calls: Calls,
        clock: Clock,
        wait: int,
        on_arrival: Callable[[str], None],
        on_returned: Callable[[Message, float], None],
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._wait = wait
        self._on_arrival = on_arrival
        self._on_returned = on_returned
        self._open: dict[str, asyncio.Task[None]] = {}
        # What polls brought, or how they failed, until the next receive.
        self._arrived: dict[str, list[Message] | Exception] = {}
        # Tasks that give back what nobody asks for.
        self._givers: dict[str, asyncio.Task[None]] = {}
        self._busy: set[str] = set()
        # Queues whose last poll brought nothing, and when those without a poll may be looked at again.
        self._quiet: set[str] = set()
        self._rests: dict[str, float] = {}

    async def take(self, url: str, limit: int, visibility: float) -> list[Message]:
        """Up to `limit` messages that are visible now. Raises SqsRefused if the queue does not exist."""
        if not self._wait:
            return await self.now(url, limit, visibility)
        if url in self._open:
            return []
        taken = await self._claimed(url, visibility)
        if not taken and url not in self._busy:
            taken = await self._begun(url, limit, visibility)
        if taken and url in self._busy and len(taken) < limit:
            taken += await self._drained(url, limit - len(taken), visibility)
        elif not taken and url in self._busy:
            taken = await self._drained(url, limit, visibility) or await self._begun(url, limit, visibility)
        return taken

    async def hold(self, messages: list[Message], visibility: float) -> list[Message]:
        """Have messages stay in flight for `visibility` seconds, or at least half of it: the receiver extends them
        sooner. Returns those that are still in flight here."""
        now = self._clock.monotonic()
        fine = [message for message in messages if visibility / 2 <= message.until - now <= visibility]
        known = {message.handle for message in fine}
        rest = [message for message in messages if message.handle not in known]
        extended = await self._change(dict.fromkeys(rest, visibility))
        for message in rest:
            if message in extended:
                fine.append(msgspec.structs.replace(message, until=now + visibility))
            else:
                self._on_returned(message, max(0.0, message.until - now))
        return fine

    async def give_back(self, messages: list[Message], pause: Callable[[Message], float]) -> None:
        """Make messages visible again after a pause. One whose queue is gone, or that SQS does not accept, becomes
        visible when its timeout has passed."""
        now = self._clock.monotonic()
        pauses = {message: float(whole(pause(message))) for message in messages if message.until > now}
        changed = await self._change(pauses, once=True)
        for message in messages:
            self._on_returned(message, pauses[message] if message in changed else max(0.0, message.until - now))

    async def give_back_arrived(self, url: str) -> None:
        """Make the messages visible that a poll has brought and nobody has taken."""
        giver = self._givers.pop(url, None)
        if giver is not None:
            giver.cancel()
        if isinstance(arrived := self._arrived.get(url), list):
            del self._arrived[url]
            await self.give_back(arrived, _at_once)

    def has_arrived(self, url: str) -> bool:
        """Whether a poll has brought messages that nobody has taken."""
        return isinstance(self._arrived.get(url), list)

    def leave(self, url: str) -> None:
        """End the long poll of a queue that is deleted."""
        for tasks in (self._open, self._givers):
            task = tasks.pop(url, None)
            if task is not None:
                task.cancel()
        self._arrived.pop(url, None)
        self._busy.discard(url)
        self._quiet.discard(url)

    async def close(self) -> None:
        """End all polls, and give back what they brought. SQS redelivers what it sent just now after its timeout."""
        tasks = [*self._open.values(), *self._givers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        arrived = [message for each in self._arrived.values() if isinstance(each, list) for message in each]
        self._arrived.clear()
        await self.give_back(arrived, _at_once)

    async def now(self, url: str, limit: int, visibility: float) -> list[Message]:
        """Up to `limit` messages, by short polls."""
        taken: list[Message] = []
        while len(taken) < limit:
            left = limit - len(taken)
            sizes = [min(_PER_CALL, left - start) for start in range(0, left, _PER_CALL)][:_AT_ONCE]
            answers = await asyncio.gather(
                *(self._receive(url, size, visibility, 0) for size in sizes), return_exceptions=True
            )
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            got = [message for answer in answers if not isinstance(answer, BaseException) for message in answer]
            taken += got
            # Keep the messages of the other calls if one call fails.
            if errors and not taken:
                raise errors[0]
            # Fewer messages than asked for: the queue is empty, or SQS has not polled all its servers.
            if len(got) < sum(sizes):
                break
        return taken

    async def _change(self, visibilities: Mapping[Message, float], *, once: bool = False) -> set[Message]:
        """Set the visibility timeouts of messages. Returns those for which SQS accepted it. With `once`, a failure is
        not repeated, and counts as refused."""
        changed: set[Message] = set()
        for url in {message.url for message in visibilities}:
            some = [message for message in visibilities if message.url == url]
            entries = [_entry(message, visibilities[message]) for message in some]
            try:
                verdicts = await self._calls.each("change_message_visibility_batch", url, entries, once=once)
            except SqsRefused:
                # The queue is gone.
                continue
            except EngineFailed:
                if not once:
                    raise
                continue
            changed |= {
                message for message, verdict in zip(some, verdicts, strict=True) if verdict is EntryVerdict.DONE
            }
        return changed

    async def _drained(self, url: str, limit: int, visibility: float) -> list[Message]:
        taken = await self.now(url, limit, visibility)
        if len(taken) < limit:
            self._busy.discard(url)
        return taken

    async def _claimed(self, url: str, visibility: float) -> list[Message]:
        arrived = self._arrived.pop(url, None)
        giver = self._givers.pop(url, None)
        if giver is not None:
            giver.cancel()
        if isinstance(arrived, Exception):
            raise arrived
        return await self.hold(arrived or [], visibility)

    async def _begun(self, url: str, limit: int, visibility: float) -> list[Message]:
        """Begin a long poll, and return what it brings at once."""
        if url in self._open:
            return []
        if len(self._open) >= MAX_OPEN:
            return await self._looked(url, limit, visibility)
        poll = asyncio.create_task(self._poll(url, min(_PER_CALL, limit), visibility))
        self._open[url] = poll
        if url not in self._quiet:
            await asyncio.wait({poll}, timeout=_GLANCE)
        return [] if url in self._open else await self._claimed(url, visibility)

    async def _looked(self, url: str, limit: int, visibility: float) -> list[Message]:
        now = self._clock.monotonic()
        if self._rests.get(url, 0.0) > now:
            return []
        if len(self._rests) >= _MAX_KNOWN:
            self._rests.clear()
        self._rests[url] = now + _REST_SECONDS
        return await self.now(url, limit, visibility)

    async def _poll(self, url: str, count: int, visibility: float) -> None:
        try:
            messages = await self._receive(url, count, visibility, self._wait)
        except (SqsRefused, EngineFailed) as error:
            self._arrived[url] = error
            return
        finally:
            if self._open.get(url) is asyncio.current_task():
                del self._open[url]
        (self._quiet.discard if messages else self._quiet.add)(url)
        if messages:
            if len(messages) == count:
                self._busy.add(url)
            self._arrived[url] = messages
            self._givers[url] = asyncio.create_task(self._give_back_unclaimed(url, messages))
            self._on_arrival(url)

    async def _give_back_unclaimed(self, url: str, messages: list[Message]) -> None:
        await self._clock.sleep(_CLAIM_SECONDS)
        if self._arrived.get(url) is messages:
            del self._arrived[url], self._givers[url]
            await self.give_back(messages, _at_once)

    async def _receive(self, url: str, count: int, visibility: float, wait: int) -> list[Message]:
        start = self._clock.monotonic()
        try:
            answer = await self._calls.ask(
                "receive_message",
                OVER_LIMIT,
                MISSING,
                QueueUrl=url,
                MaxNumberOfMessages=count,
                VisibilityTimeout=whole(visibility),
                WaitTimeSeconds=wait,
                MessageSystemAttributeNames=["ApproximateReceiveCount"],
            )
        except SqsRefused as refused:
            if refused.code == OVER_LIMIT:
                # The limit of messages in flight is reached: SQS delivers none until some are acknowledged.
                return []
            raise
        return [_message(url, each, start, visibility) for each in answer.get("Messages", ())]


def _entry(message: Message, visibility: float) -> dict[str, Any]:
    return {"ReceiptHandle": message.handle, "VisibilityTimeout": whole(visibility)}


def _at_once(_: Message) -> float:
    return 0.0


def _message(url: str, received: dict[str, Any], start: float, visibility: float) -> Message:
    return Message(
        url=url,
        handle=received["ReceiptHandle"],
        sqs_id=received["MessageId"],
        count=int(received["Attributes"]["ApproximateReceiveCount"]),
        text=received["Body"],
        taken=start,
        until=start + visibility,
    )

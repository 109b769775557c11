"""Receives messages: short polls for a queue with messages, ten per call and several calls at once.

For an empty queue, a long poll stays open in the background. Until it ends, further receives cost no call and find
nothing. The next receive gets the message that ended the poll.
"""

import asyncio
import math
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.sqs.calls import MISSING, OVER_LIMIT, Calls, SqsRefused

LONGEST_HOLD = 43_200

_AT_ONCE = 10
_PER_CALL = 10
_MAX_WAITING = 64


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
    """At most one long poll per queue."""

    def __init__(self, calls: Calls, clock: Clock, wait: int) -> None:
        self._calls = calls
        self._clock = clock
        self._wait = wait
        self._waiting: dict[str, asyncio.Task[list[Message]]] = {}

    async def take(self, url: str, limit: int, visibility: float) -> list[Message]:
        """Up to `limit` messages that are visible now. Raises SqsRefused if the queue does not exist."""
        waiting = self._waiting.get(url)
        if waiting is not None and not waiting.done():
            return []
        kept: list[Message] = []
        if waiting is not None:
            del self._waiting[url]
            kept = await self.hold(waiting.result(), visibility)
        taken = await self.now(url, limit - len(kept), visibility)
        if not kept and not taken and self._wait:
            self._wait_on(url, visibility)
        return kept + taken

    async def hold(self, messages: list[Message], visibility: float) -> list[Message]:
        """Extend the visibility timeout of messages. Returns those that are still in flight here."""
        kept: list[Message] = []
        for url in {message.url for message in messages}:
            asked = [message for message in messages if message.url == url]
            now = self._clock.monotonic()
            try:
                verdicts = await self._calls.each("change_message_visibility_batch", url, held(asked, visibility))
            except SqsRefused:
                continue
            kept += [
                msgspec.structs.replace(message, until=now + visibility)
                for message, verdict in zip(asked, verdicts, strict=True)
                if verdict.value == "done"
            ]
        return kept

    def leave(self, url: str) -> None:
        """End the long poll of a queue."""
        waiting = self._waiting.pop(url, None)
        if waiting is not None:
            waiting.cancel()

    async def close(self) -> None:
        """End all polls. SQS redelivers messages that they just received after their visibility timeout."""
        tasks = list(self._waiting.values())
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_on(self, url: str, visibility: float) -> None:
        if url in self._waiting:
            # Another caller has just started a poll: replacing it would lose its message.
            return
        if len(self._waiting) >= _MAX_WAITING:
            # End polls of runs that this process no longer receives.
            self._waiting = {each: task for each, task in self._waiting.items() if not task.done()}
        if len(self._waiting) < _MAX_WAITING:
            task = asyncio.create_task(self._receive(url, 1, visibility, self._wait))
            # Retrieve the exception, or asyncio would report it as never retrieved.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._waiting[url] = task

    async def now(self, url: str, limit: int, visibility: float) -> list[Message]:
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


def held(messages: list[Message], visibility: float) -> list[dict[str, Any]]:
    """The batch entries that extend these messages."""
    return [{"ReceiptHandle": message.handle, "VisibilityTimeout": whole(visibility)} for message in messages]


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

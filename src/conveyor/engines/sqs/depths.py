"""Depths: what SQS counts in a queue. SQS counts late, so 0 is unknown until SQS has reported it for `settle`
seconds: a reader of 0 requeues everything. SQS cannot count one run of the shared queue, so its depth is always
unknown.
"""

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import Depth, QueueName
from conveyor.engines.sqs.calls import Calls, SqsRefused
from conveyor.engines.sqs.queues import Queues
from conveyor.engines.sqs.shared import depth_of

# For which part of `settle` a count above 0, and the absence of a queue, are not asked for again.
_CACHED = 1 / 6
_MAX_KNOWN = 10_000


class Depths:
    """The depths that this process has read."""

    def __init__(self, calls: Calls, queues: Queues, clock: Clock, settle: float) -> None:
        self._calls = calls
        self._queues = queues
        self._clock = clock
        self._settle = settle
        self._empty_since: dict[QueueName, float] = {}
        self._counted: dict[QueueName, tuple[float, Depth]] = {}

    async def of(self, queue: QueueName) -> Depth:
        own = await self._own(queue)
        if await self._queues.may_share(queue):
            return msgspec.structs.replace(own, unknown=True)
        return own

    def forget(self, queue: QueueName) -> None:
        """Messages were sent, or the queue was dropped."""
        self._empty_since.pop(queue, None)
        self._counted.pop(queue, None)

    async def _own(self, queue: QueueName) -> Depth:
        now = self._clock.monotonic()
        known = self._counted.get(queue)
        if known is not None and now < known[0]:
            return known[1]
        url = await self._queues.own(queue, memory=self._settle * _CACHED)
        if url is None:
            # A missing queue is empty.
            return Depth(0, 0, 0)
        try:
            depth = await depth_of(self._calls, url)
        except SqsRefused:
            self._queues.forget(queue)
            return Depth(0, 0, 0)
        return self._settled(queue, depth, now)

    def _settled(self, queue: QueueName, depth: Depth, now: float) -> Depth:
        if len(self._counted) >= _MAX_KNOWN:
            self._counted.clear()
        if depth.total:
            self._empty_since.pop(queue, None)
            self._counted[queue] = (now + self._settle * _CACHED, depth)
            return depth
        self._counted.pop(queue, None)
        settled = now - self._empty_since.setdefault(queue, now) >= self._settle
        return Depth(0, 0, 0, unknown=not settled)

"""The SQS queues: found by name, created by the first send, deleted when their run is done.

Each queue has a redrive policy. Conveyor itself dead-letters messages with a reason; the policy catches only messages
that were received a thousand times. A run above the limit has no queue of its own and uses the shared queue. So does a
run whose queue was deleted less than a minute ago, because SQS cannot recreate it so soon. Receivers poll both.
"""

from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import RUN_PREFIX, QueueName
from conveyor.engines.sqs.address import SqsAddress
from conveyor.engines.sqs.calls import DELETED_RECENTLY, EXISTS, MISSING, Calls, SqsRefused

# Dead letters outlive their queue: their age counts from the first send.
KEEP_SECONDS = 10 * 86_400
KEEP_DEAD_SECONDS = 14 * 86_400
MAX_RECEIVES = 1000

# How long a missing queue, and a count of queues, are cached.
_ABSENT_SECONDS = 1.0
_COUNT_SECONDS = 10.0
_MAX_KNOWN = 10_000
_PAGE = 1000


def is_run(queue: QueueName) -> bool:
    """Whether this is a run queue: only run queues may use the shared queue."""
    return queue.startswith(RUN_PREFIX)


class QueuePlace(msgspec.Struct, frozen=True):
    """Where a queue's messages go."""

    url: str
    shared: bool


class Queues:
    """This process's knowledge of the queues in SQS."""

    def __init__(self, calls: Calls, address: SqsAddress, clock: Clock, limit: int) -> None:
        self._calls = calls
        self._address = address
        self._clock = clock
        self._limit = limit
        self._places: dict[QueueName, QueuePlace] = {}
        self._urls: dict[str, str] = {}
        self._absent: dict[str, float] = {}
        self._counted: tuple[float, int] | None = None
        self._policy: str | None = None

    async def own(self, queue: QueueName) -> str | None:
        """The URL of the queue's own SQS queue, if it exists."""
        return await self._find(self._address.name_of(queue))

    async def shared(self) -> str | None:
        """The URL of the shared queue, if it exists."""
        return await self._find(self._address.shared)

    async def dead(self) -> str | None:
        """The URL of the redrive policy's target."""
        return await self._find(self._address.dead)

    async def to_send(self, queue: QueueName) -> QueuePlace:
        """Where to send; created if missing. This process keeps its first choice as long as it knows the queue."""
        place = self._places.get(queue)
        if place is None:
            place = await self._chosen(queue)
            if len(self._places) >= _MAX_KNOWN:
                self._places.clear()
            self._places[queue] = place
        return place

    async def drop(self, queue: QueueName) -> None:
        """Delete the queue's own SQS queue."""
        url = await self.own(queue)
        self.forget(queue)
        if url is not None:
            try:
                await self._calls.ask("delete_queue", MISSING, QueueUrl=url)
            except SqsRefused:
                return

    def forget(self, queue: QueueName) -> None:
        """Forget the cached knowledge of a queue."""
        self._places.pop(queue, None)
        self._urls.pop(self._address.name_of(queue), None)
        self._absent.pop(self._address.name_of(queue), None)

    async def make(self, name: str, kind: str, policy: bool = True) -> str:
        """Create a queue unless it exists. Raises SqsRefused if it was deleted less than a minute ago."""
        attributes = {"MessageRetentionPeriod": str(KEEP_SECONDS if policy else KEEP_DEAD_SECONDS)}
        if policy:
            attributes["RedrivePolicy"] = await self._redrive_policy()
        try:
            answer = await self._calls.ask(
                "create_queue",
                EXISTS,
                DELETED_RECENTLY,
                QueueName=name,
                Attributes=attributes,
                tags={"conveyor": self._address.prefix, "conveyor-queue": kind},
            )
        except SqsRefused as refused:
            if refused.code == DELETED_RECENTLY:
                raise
            # Another version or an operator created it with other attributes.
            answer = await self._calls.ask("get_queue_url", QueueName=name)
        return self._known(name, answer["QueueUrl"])

    async def _chosen(self, queue: QueueName) -> QueuePlace:
        url = await self.own(queue)
        if url is not None:
            return QueuePlace(url, shared=False)
        if is_run(queue):
            if await self._run_queues() >= self._limit:
                return await self._to_shared()
            try:
                return QueuePlace(await self.make(self._address.name_of(queue), "run"), shared=False)
            except SqsRefused:
                return await self._to_shared()
        return QueuePlace(await self.make(self._address.name_of(queue), queue[:100]), shared=False)

    async def _to_shared(self) -> QueuePlace:
        # No policy: receivers of other runs receive these messages too, any number of times.
        url = await self.shared() or await self.make(self._address.shared, "shared", policy=False)
        return QueuePlace(url, shared=True)

    async def _redrive_policy(self) -> str:
        if self._policy is None:
            url = await self.dead() or await self.make(self._address.dead, "dead letters", policy=False)
            answer = await self._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=["QueueArn"])
            rule = {"deadLetterTargetArn": answer["Attributes"]["QueueArn"], "maxReceiveCount": MAX_RECEIVES}
            self._policy = msgspec.json.encode(rule).decode()
        return self._policy

    async def _find(self, name: str) -> str | None:
        now = self._clock.monotonic()
        if name in self._urls or self._absent.get(name, 0.0) > now:
            return self._urls.get(name)
        try:
            answer = await self._calls.ask("get_queue_url", MISSING, QueueName=name)
        except SqsRefused:
            if len(self._absent) >= _MAX_KNOWN:
                self._absent.clear()
            self._absent[name] = now + _ABSENT_SECONDS
            return None
        return self._known(name, answer["QueueUrl"])

    def _known(self, name: str, url: str) -> str:
        if len(self._urls) >= _MAX_KNOWN:
            self._urls.clear()
        self._absent.pop(name, None)
        self._urls[name] = url
        return url

    async def _run_queues(self) -> int:
        """Roughly how many runs have a queue of their own."""
        now = self._clock.monotonic()
        if self._counted is None or self._counted[0] + _COUNT_SECONDS < now:
            self._counted = (now, await self._count())
        at, count = self._counted
        # The caller is about to create one more.
        self._counted = (at, count + 1)
        return count

    async def _count(self) -> int:
        """Count up to the limit."""
        count = 0
        asked: dict[str, Any] = {"QueueNamePrefix": self._address.runs, "MaxResults": _PAGE}
        while count < self._limit:
            answer = await self._calls.ask("list_queues", **asked)
            count += len(answer.get("QueueUrls", ()))
            if not answer.get("NextToken"):
                break
            asked["NextToken"] = answer["NextToken"]
        return count

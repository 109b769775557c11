"""The SQS queues: found by name, created by the first send, deleted when their run is done.

Each queue has a redrive policy. Conveyor itself dead-letters messages with a reason; the policy catches only messages
that were received a thousand times. A run above the limit has no queue of its own and uses the shared queue. So does
a run whose queue was deleted less than a minute ago, because SQS cannot recreate it so soon. A recovery queue is
where its run is; it is created by the first retry, because most runs need none.

The absence of a queue is remembered for a while that grows while a receiver keeps asking. So a receiver finds a
recovery queue that another process has created within 30 seconds, and a run queue within 2, and so the shared queue for
a run without one; a receiver that has not asked lately finds it at once, and so does the process that created it.
"""

import math
from typing import Any

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import RUN_PREFIX, QueueName, home_queue
from conveyor.engines.sqs.address import SqsAddress
from conveyor.engines.sqs.calls import DELETED_RECENTLY, DENIED, EXISTS, MISSING, Calls, SqsRefused
from conveyor.engines.sqs.shared_runs import SharedRuns

log = structlog.get_logger()

# Dead letters outlive their queue: their age counts from the first send.
KEEP_SECONDS = 10 * 86_400
KEEP_DEAD_SECONDS = 14 * 86_400
MAX_RECEIVES = 1000

# How long the absence of a queue is remembered, at first and at most.
_FIRST_ABSENCE = 1.0
_LONGEST_ABSENCE = 30.0
# That of a run queue: the run is about to begin. If the run shares, it has none.
_LONGEST_ABSENCE_OF_RUN = 2.0
_LONGEST_ABSENCE_OF_SHARED = 600.0
# Who did not ask for this long asks anew.
_KEEPS_ASKING = 5.0
# How long a count of queues is cached.
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


class Absence(msgspec.Struct):
    """A queue that was missing at `seen`, is not looked for until `until`, and was last asked for at `asked`."""

    seen: float
    until: float
    asked: float


class Queues:
    """This process's knowledge of the queues in SQS."""

    def __init__(self, calls: Calls, address: SqsAddress, clock: Clock, limit: int, shared_runs: SharedRuns) -> None:
        self._calls = calls
        self._address = address
        self._clock = clock
        self._limit = limit
        self._shared_runs = shared_runs
        self._places: dict[QueueName, QueuePlace] = {}
        self._urls: dict[str, str] = {}
        self._absent: dict[str, Absence] = {}
        self._counted: tuple[float, int] | None = None
        self._policy: str | None = None

    async def own(self, queue: QueueName, memory: float = math.inf) -> str | None:
        """The URL of the queue's own SQS queue, if it exists. Its absence is known for at most `memory` seconds."""
        home = home_queue(queue)
        if self._shared_runs.knows(home):
            longest = _LONGEST_ABSENCE_OF_SHARED
        else:
            longest = _LONGEST_ABSENCE_OF_RUN if queue == home else _LONGEST_ABSENCE
        return await self._find(self._address.name_of(queue), memory, longest)

    async def may_share(self, queue: QueueName) -> bool:
        """Whether the shared queue may have messages of this queue."""
        if not is_run(queue):
            return False
        home = home_queue(queue)
        has_own = await self.own(home) is not None
        # A run without a queue may be the first that shares.
        if await self.shared(math.inf if has_own else _LONGEST_ABSENCE_OF_RUN) is None:
            return False
        # One of an earlier version that shares has no document.
        return await self._shared_runs.has(home) or not has_own

    async def shared(self, memory: float = math.inf) -> str | None:
        """The URL of the shared queue, if it exists. Its absence is known for at most `memory` seconds."""
        return await self._find(self._address.shared, memory)

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

    async def repair(self, url: str) -> None:
        """Give a queue that exists a redrive policy and the time that messages are kept, where they are missing."""
        asked = ["RedrivePolicy", "MessageRetentionPeriod"]
        answer = await self._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=asked)
        present = answer.get("Attributes", {})
        changes: dict[str, str] = {}
        if not present.get("RedrivePolicy"):
            changes["RedrivePolicy"] = await self._redrive_policy()
        if int(present.get("MessageRetentionPeriod", 0)) < KEEP_SECONDS:
            changes["MessageRetentionPeriod"] = str(KEEP_SECONDS)
        if changes:
            await self._calls.ask("set_queue_attributes", QueueUrl=url, Attributes=changes)

    async def _chosen(self, queue: QueueName) -> QueuePlace:
        url = await self.own(queue)
        if url is not None:
            return QueuePlace(url, shared=False)
        if not is_run(queue):
            return QueuePlace(await self.make(self._address.name_of(queue), queue[:100]), shared=False)
        home = home_queue(queue)
        if await self._is_over_limit(queue, home):
            return await self._to_shared(home)
        try:
            return QueuePlace(await self.make(self._address.name_of(queue), "run"), shared=False)
        except SqsRefused:
            return await self._to_shared(home)

    async def _is_over_limit(self, queue: QueueName, home: QueueName) -> bool:
        """Whether the run has to share. One that shares does so for good; one with a queue gets its recovery queue."""
        is_there = await self.shared(_LONGEST_ABSENCE_OF_RUN) is not None
        if is_there and await self._shared_runs.has(home, fresh=True):
            return True
        if queue != home and await self.own(home) is not None:
            return False
        return await self._count_run() >= self._limit

    async def _to_shared(self, home: QueueName) -> QueuePlace:
        # No policy: receivers of other runs receive these messages too, any number of times.
        url = await self.shared() or await self.make(self._address.shared, "shared", policy=False)
        await self._shared_runs.add(home)
        return QueuePlace(url, shared=True)

    async def _redrive_policy(self) -> str:
        if self._policy is None:
            url = await self.dead() or await self.make(self._address.dead, "dead letters", policy=False)
            answer = await self._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=["QueueArn"])
            rule = {"deadLetterTargetArn": answer["Attributes"]["QueueArn"], "maxReceiveCount": MAX_RECEIVES}
            self._policy = msgspec.json.encode(rule).decode()
        return self._policy

    async def _find(self, name: str, memory: float = math.inf, longest: float = _LONGEST_ABSENCE) -> str | None:
        now = self._clock.monotonic()
        if name in self._urls:
            return self._urls[name]
        absence = self._absent.get(name)
        if absence is not None:
            if now - absence.asked > _KEEPS_ASKING:
                absence = None
            elif now < min(absence.until, absence.seen + memory):
                absence.asked = now
                return None
        try:
            answer = await self._calls.ask("get_queue_url", MISSING, QueueName=name)
        except SqsRefused:
            self._remember_absence(name, absence, now, longest)
            return None
        return self._known(name, answer["QueueUrl"])

    def _remember_absence(self, name: str, before: Absence | None, now: float, longest: float) -> None:
        if len(self._absent) >= _MAX_KNOWN:
            self._absent.clear()
        pause = _FIRST_ABSENCE if before is None else min(longest, 2 * (before.until - before.seen))
        self._absent[name] = Absence(seen=now, until=now + pause, asked=now)

    def _known(self, name: str, url: str) -> str:
        if len(self._urls) >= _MAX_KNOWN:
            self._urls.clear()
        self._absent.pop(name, None)
        self._urls[name] = url
        return url

    async def _count_run(self) -> int:
        """Roughly how many runs have a queue of their own, not counting the one that is about to get it."""
        now = self._clock.monotonic()
        if self._counted is None or self._counted[0] + _COUNT_SECONDS < now:
            self._counted = (now, await self._count())
        at, count = self._counted
        self._counted = (at, count + 1)
        return count

    async def _count(self) -> int:
        try:
            return len(await self.runs(self._limit))
        except SqsRefused:
            # Better too many queues than no work at all: count those that this process knows.
            log.warning("ListQueues is denied: this process counts only the run queues that it knows; allow it on `*`")
            return len(self._address.runs_of(self._urls))

    async def runs(self, limit: int) -> set[str]:
        """The runs with a queue of their own, at least up to the limit. Raises SqsRefused if listing is denied."""
        found: set[str] = set()
        asked: dict[str, Any] = {"QueueNamePrefix": self._address.runs, "MaxResults": _PAGE}
        while len(found) < limit:
            answer = await self._calls.ask("list_queues", *DENIED, **asked)
            found |= self._address.runs_of(url.rpartition("/")[2] for url in answer.get("QueueUrls", ()))
            if not answer.get("NextToken"):
                break
            asked["NextToken"] = answer["NextToken"]
        return found

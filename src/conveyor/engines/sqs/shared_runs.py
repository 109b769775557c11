"""Which runs are on the shared queue. A document for each is written before the first message goes there, so that every
process sends all later messages of the run to the same place, also when fewer runs are left."""

import msgspec

from conveyor.clock import Clock
from conveyor.engines.queue import QueueName
from conveyor.engines.records import Document, DocumentRecords
from conveyor.engines.sqs.address import plain
from conveyor.faults import crashpoint
from conveyor.model import TenantId

KIND = "queue.shared"

# As long as a message of the run can be in the shared queue.
_KEEP_SECONDS = 14 * 86_400
# A run with a queue of its own is on both only if two processes chose at the same moment: look again soon, and then
# more and more rarely.
_FIRST_LOOK_SECONDS = 2.0
_LAST_LOOK_SECONDS = 300.0
_MAX_KNOWN = 10_000


class SharedRuns:
    """This process's knowledge of the runs on the shared queue, by the name of the run queue."""

    def __init__(self, rows: DocumentRecords, tenant: TenantId, clock: Clock) -> None:
        self._rows = rows
        self._tenant = tenant
        self._clock = clock
        self._there: set[QueueName] = set()
        # Until when not to look again, and how long that was.
        self._not_there: dict[QueueName, tuple[float, float]] = {}

    def knows(self, queue: QueueName) -> bool:
        """Whether this process knows that the run is on the shared queue."""
        return queue in self._there

    async def has(self, queue: QueueName, fresh: bool = False) -> bool:
        """Whether the run is on the shared queue; with `fresh`, not from memory if it was not there."""
        if queue in self._there:
            return True
        now = self._clock.monotonic()
        until, pause = self._not_there.get(queue, (0.0, _FIRST_LOOK_SECONDS / 2))
        if not fresh and until > now:
            return False
        if await self._rows.document(KIND, self._tenant, plain(queue)) is not None:
            self._remember(queue)
            return True
        if len(self._not_there) >= _MAX_KNOWN:
            self._not_there.clear()
        pause = min(_LAST_LOOK_SECONDS, 2 * pause)
        self._not_there[queue] = (now + pause, pause)
        return False

    async def add(self, queue: QueueName) -> None:
        """Put the run on the shared queue. Safe to repeat."""
        if queue in self._there:
            return
        now = self._clock.now()
        row = Document(KIND, self._tenant, plain(queue), msgspec.json.encode(now), expires_at=now + _KEEP_SECONDS)
        crashpoint("sqs.share.before")
        await self._rows.create_documents([row])
        crashpoint("sqs.share.after")
        self._remember(queue)

    def _remember(self, queue: QueueName) -> None:
        if len(self._there) >= _MAX_KNOWN:
            self._there.clear()
        self._there.add(queue)
        self._not_there.pop(queue, None)

"""The services under a simulated fleet, in memory and on a virtual clock, each with its bill.

`SqsService` is what the real SQS engine calls through its client: queues, visibility timeouts, delays, long polls.
`JobTable`, `DocumentTable` and `TaskTable` stand in for Records and Tasks, and charge what the DynamoDB engine would be
billed for the same intent. A `Process` stands between them and one worker: calls take time, and none returns to a
process that has died.
"""

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from botocore.exceptions import ClientError

from conveyor.engines.tasks import Finished
from conveyor.model import Counts, Job, JobId, RunId, TenantId
from conveyor.states import ENDED, RunState

SQS = "sqs request"
READS = "dynamodb read unit"
WRITES = "dynamodb write unit"
REDIS = "redis call"

# Seconds of one call.
SQS_SECONDS = 0.010
DYNAMODB_SECONDS = 0.005
REDIS_SECONDS = 0.001

# Units of DynamoDB. A consistent read of an item below 4 KB is one unit, an item in a query of an index its share of
# 8 KB. A move of a run is a transaction: the job with three indexes, the notice with one, twice a unit each.
MOVE_WRITES = 12
MOVE_READS = 2
DOCUMENT_WRITES = 2
# What a look at all active jobs reads: before, the whole job in four partitions of an index; now, an entry with the
# key and the revision in sixteen.
BEFORE_JOB_BYTES, BEFORE_PARTITIONS = 936, 4
ENTRY_BYTES, PARTITIONS = 150, 16
_INDEX_UNIT_BYTES = 8192
_EARLY = 1e-6


class Bill:
    """What was called, and what it would cost."""

    def __init__(self) -> None:
        self.units: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, unit: str, call: str, units: float = 1.0) -> None:
        self.units[unit] += units  # type: ignore[assignment]  # halves of a unit are billed
        self.calls[f"{unit.partition(' ')[0]} {call}"] += 1

    def clear(self) -> None:
        self.units.clear()
        self.calls.clear()


class Process:
    """A process of the fleet. Once it is dead, none of its calls has an effect or returns."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_dead = False
        # Tasks that run here, as (run, index).
        self.running: set[tuple[RunId, int]] = set()

    async def spend(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.is_dead:
            await asyncio.get_running_loop().create_future()


class Far:
    """An engine as one process sees it: every call takes `seconds`."""

    def __init__(self, engine: Any, process: Process, seconds: float, bill: Bill | None = None) -> None:
        self._engine = engine
        self._process = process
        self._seconds = seconds
        self._bill = bill

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*given: Any, **named: Any) -> Any:
            await self._process.spend(self._seconds)
            if self._bill is not None:
                self._bill.add(REDIS, name)
            result = await method(*given, **named)
            if self._process.is_dead:
                await self._process.spend(0.0)
            return result

        setattr(self, name, call)
        return call


class _Message:
    __slots__ = ("body", "count", "group", "handle", "is_gone", "turn")

    def __init__(self, body: str, group: str) -> None:
        self.body = body
        self.group = group
        self.count = self.turn = 0
        self.handle = ""
        self.is_gone = False


class _SqsQueue:
    """Messages that are visible, by group and in turn, and those that will be."""

    def __init__(self) -> None:
        self.ready: OrderedDict[str, deque[_Message]] = OrderedDict()
        self.ready_count = 0
        self.later: list[tuple[float, int, int, _Message]] = []
        self.waiters: deque[asyncio.Future[None]] = deque()

    def show(self, message: _Message) -> None:
        self.ready.setdefault(message.group, deque()).append(message)
        self.ready_count += 1
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break

    def promote(self, now: float) -> None:
        while self.later and self.later[0][0] <= now:
            _, _, turn, message = heapq.heappop(self.later)
            if not message.is_gone and message.turn == turn:
                self.show(message)

    def take(self, count: int) -> list[_Message]:
        """Of the groups in turn."""
        taken: list[_Message] = []
        while self.ready and len(taken) < count:
            group, messages = self.ready.popitem(last=False)
            message = messages.popleft()
            self.ready_count -= 1
            if messages:
                self.ready[group] = messages
            if not message.is_gone:
                taken.append(message)
        return taken


class SqsService:
    """The operations of an SQS client that the engine uses. Each call is a request on the bill."""

    def __init__(self, bill: Bill) -> None:
        self._bill = bill
        self._queues: dict[str, _SqsQueue] = {}
        self._in_flight: dict[str, tuple[_SqsQueue, _Message]] = {}
        self._numbers = itertools.count()
        # Messages that were received again.
        self.repeated = 0

    def client(self, process: Process) -> Any:
        return Far(self, process, SQS_SECONDS)

    async def get_queue_url(self, QueueName: str) -> dict[str, Any]:  # as SQS names them, here and below
        self._bill.add(SQS, "GetQueueUrl")
        self._queue(QueueName)
        return {"QueueUrl": QueueName}

    async def create_queue(self, QueueName: str, **_: Any) -> dict[str, Any]:
        self._bill.add(SQS, "CreateQueue")
        self._queues.setdefault(QueueName, _SqsQueue())
        return {"QueueUrl": QueueName}

    async def delete_queue(self, QueueUrl: str) -> dict[str, Any]:
        self._bill.add(SQS, "DeleteQueue")
        self._queues.pop(QueueUrl, None)
        return {}

    async def list_queues(self, QueueNamePrefix: str, **_: Any) -> dict[str, Any]:
        self._bill.add(SQS, "ListQueues")
        return {"QueueUrls": [name for name in self._queues if name.startswith(QueueNamePrefix)]}

    async def get_queue_attributes(self, QueueUrl: str, **_: Any) -> dict[str, Any]:
        self._bill.add(SQS, "GetQueueAttributes")
        queue = self._queue(QueueUrl)
        queue.promote(_now())
        hidden = [message for _, _, turn, message in queue.later if message.turn == turn and not message.is_gone]
        held = sum(message.count > 0 for message in hidden)
        counts = {"": queue.ready_count, "NotVisible": held, "Delayed": len(hidden) - held}
        return {
            "Attributes": {
                "QueueArn": QueueUrl,
                **{f"ApproximateNumberOfMessages{name}": str(count) for name, count in counts.items()},
            }
        }

    async def send_message_batch(self, QueueUrl: str, Entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self._bill.add(SQS, "SendMessageBatch")
        queue = self._queue(QueueUrl)
        for entry in Entries:
            message = _Message(entry["MessageBody"], entry.get("MessageGroupId", ""))
            if delay := entry.get("DelaySeconds", 0):
                self._hide(queue, message, delay)
            else:
                queue.show(message)
        return _all_done(Entries)

    async def receive_message(
        self,
        QueueUrl: str,
        MaxNumberOfMessages: int,
        VisibilityTimeout: int,
        WaitTimeSeconds: int = 0,
        **_: Any,
    ) -> dict[str, Any]:
        self._bill.add(SQS, "ReceiveMessage")
        loop = asyncio.get_running_loop()
        end = _now() + WaitTimeSeconds
        while True:
            queue = self._queue(QueueUrl)
            queue.promote(_now())
            taken = queue.take(MaxNumberOfMessages)
            if taken or _now() >= end:
                return {"Messages": [self._receive(queue, message, VisibilityTimeout) for message in taken]}
            waiter: asyncio.Future[None] = loop.create_future()
            queue.waiters.append(waiter)
            until = min(end, queue.later[0][0]) if queue.later else end
            timer = loop.call_at(until, _wake, waiter)
            try:
                await waiter
            finally:
                timer.cancel()
                if not waiter.done():
                    waiter.cancel()

    async def delete_message_batch(self, QueueUrl: str, Entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self._bill.add(SQS, "DeleteMessageBatch")
        for entry in Entries:
            held = self._in_flight.pop(entry["ReceiptHandle"], None)
            if held is not None and held[1].handle == entry["ReceiptHandle"]:
                held[1].is_gone = True
        return _all_done(Entries)

    async def change_message_visibility_batch(self, QueueUrl: str, Entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
        self._bill.add(SQS, "ChangeMessageVisibilityBatch")
        refused = []
        for entry in Entries:
            queue, message = self._in_flight.get(entry["ReceiptHandle"], (None, None))
            if queue is None or message is None or message.is_gone or message.handle != entry["ReceiptHandle"]:
                refused.append({"Id": entry["Id"], "SenderFault": True, "Code": "ReceiptHandleIsInvalid"})
            else:
                self._hide(queue, message, entry["VisibilityTimeout"])
        done = {each["Id"] for each in refused}
        return {"Successful": [{"Id": e["Id"]} for e in Entries if e["Id"] not in done], "Failed": refused}

    def _queue(self, name: str) -> _SqsQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise ClientError({"Error": {"Code": "QueueDoesNotExist"}}, "any")
        return queue

    def _hide(self, queue: _SqsQueue, message: _Message, seconds: float) -> None:
        message.turn += 1
        if seconds <= 0:
            queue.show(message)
        else:
            heapq.heappush(queue.later, (_now() + seconds, next(self._numbers), message.turn, message))

    def _receive(self, queue: _SqsQueue, message: _Message, visibility: int) -> dict[str, Any]:
        self._in_flight.pop(message.handle, None)
        message.count += 1
        self.repeated += message.count > 1
        message.handle = f"handle-{next(self._numbers)}"
        self._in_flight[message.handle] = (queue, message)
        self._hide(queue, message, visibility)
        return {
            "ReceiptHandle": message.handle,
            "MessageId": f"message-{id(message)}",
            "Attributes": {"ApproximateReceiveCount": str(message.count)},
            "Body": message.body,
        }


class JobTable:
    """JobRecords, as far as workers and the sweeper use them."""

    def __init__(self, bill: Bill, clock: Any, *, is_before: bool) -> None:
        self.by_id: dict[JobId, Job] = {}
        self._bill = bill
        self._clock = clock
        self._is_before = is_before
        # Jobs that a look at all of them has not read yet.
        self._unread: set[JobId] = set()

    def add(self, job: Job) -> None:
        self.by_id[job.job_id] = job
        self._unread.add(job.job_id)

    async def jobs_of(self, keys: Sequence[tuple[TenantId, JobId]]) -> list[Job]:
        self._bill.add(READS, "BatchGetItem", len(keys))
        return [self.by_id[job_id] for _, job_id in keys]

    async def active_jobs(self, buckets: Collection[int] | None = None) -> list[Job]:
        active = [job for job in self.by_id.values() if job.state not in ENDED]
        size, least = (BEFORE_JOB_BYTES, BEFORE_PARTITIONS) if self._is_before else (ENTRY_BYTES, PARTITIONS)
        unread = 0 if self._is_before else len(self._unread)
        self._unread.clear()
        self._bill.add(READS, "Query", max(0.5 * least, len(active) * size / _INDEX_UNIT_BYTES) + unread)
        return active

    async def run(self, job_id: JobId, run_id: RunId) -> Any:
        self._bill.add(READS, "BatchGetItem", MOVE_READS)
        return self.by_id[job_id].run

    async def move_run(
        self, job_id: JobId, run_id: RunId, sources: Collection[RunState], target: RunState, *_: Any
    ) -> bool:
        self._bill.add(READS, "BatchGetItem", MOVE_READS)
        job = self.by_id[job_id]
        if job.state not in sources:
            return False
        self._bill.add(WRITES, "TransactWriteItems", MOVE_WRITES)
        run = msgspec.structs.replace(job.run, state=target, ended_at=self._clock.now())
        self.by_id[job_id] = msgspec.structs.replace(job, state=target, run=run)
        self._unread.add(job_id)
        return True

    async def unswept_jobs(self, limit: int) -> list[Job]:
        self._bill.add(READS, "Query", 0.5 * BEFORE_PARTITIONS)
        return []


class DocumentTable:
    """DocumentRecords, as far as the SQS engine uses them."""

    def __init__(self, bill: Bill) -> None:
        self._bill = bill
        self._rows: dict[tuple[str, str, str], Any] = {}

    async def document(self, kind: str, tenant: str, name: str) -> Any:
        self._bill.add(READS, "BatchGetItem")
        return self._rows.get((kind, tenant, name))

    async def create_documents(self, documents: Iterable[Any]) -> None:
        for each in documents:
            self._bill.add(WRITES, "TransactWriteItems", DOCUMENT_WRITES)
            self._rows.setdefault((each.kind, each.tenant, each.id), each)

    async def replace_document(self, document: Any, *_: Any) -> Any:
        self._bill.add(WRITES, "TransactWriteItems", DOCUMENT_WRITES)
        self._rows[document.kind, document.tenant, document.id] = document
        return document

    async def remove_document(self, document: Any) -> bool:
        self._bill.add(WRITES, "TransactWriteItems", DOCUMENT_WRITES)
        return self._rows.pop((document.kind, document.tenant, document.id), None) is not None


class TaskTable:
    """Tasks, as far as workers and the sweeper use them. A task of a run that it knows is pending until it ends."""

    def __init__(self, bill: Bill, clock: Any) -> None:
        self._bill = bill
        self._clock = clock
        self.ended: dict[RunId, set[int]] = {}
        # When tasks ended that somebody waits for.
        self.awaited: dict[tuple[RunId, int], float | None] = {}

    async def unfinished(self, run: Any, indexes: Sequence[int]) -> frozenset[int]:
        self._bill.add(READS, "BatchGetItem", len(indexes))
        return frozenset(indexes) - self.ended.get(run.run_id, set())

    async def finish(self, run: Any, ends: Sequence[Any]) -> Finished:
        # A unit for each task, one for the counters, and the counters are read back.
        self._bill.add(WRITES, "BatchExecuteStatement", len(ends) + 1)
        ended = self.ended.setdefault(run.run_id, set())
        moved = frozenset(end.index for end in ends) - ended
        ended |= moved
        for index in moved:
            if (run.run_id, index) in self.awaited:
                self.awaited[run.run_id, index] = self._clock.monotonic()
        return Finished(moved, await self.counts(run))

    async def counts(self, run: Any) -> Counts:
        self._bill.add(READS, "BatchGetItem")
        return Counts(succeeded=len(self.ended.get(run.run_id, ())))

    async def recount(self, run: Any) -> Counts:
        return await self.counts(run)


class IngestTable:
    """IngestRecords, as far as the sweeper uses them: nothing is being ingested."""

    def __init__(self, bill: Bill) -> None:
        self._bill = bill

    async def ingested(self, run_id: RunId) -> Any:
        self._bill.add(READS, "Query", 0.5)
        return _Ingested()


class _Ingested(msgspec.Struct):
    done: bool = True


def _now() -> float:
    """The loop calls a timer a little early, and its time stands still then: what it waited for is due."""
    return asyncio.get_running_loop().time() + _EARLY


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _all_done(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"Successful": [{"Id": entry["Id"]} for entry in entries]}

"""The Queue on SQS, through aiobotocore. Dead letters and marked starts are documents: SQS cannot store them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Self

from botocore.config import Config
from botocore.exceptions import BotoCoreError

from conveyor.clock import Clock
from conveyor.engines.aws_session import aws_session
from conveyor.engines.queue import CONTROL, Outgoing, QueueName
from conveyor.engines.records import DocumentRecords
from conveyor.engines.sqs.address import SqsAddress, parse
from conveyor.engines.sqs.calls import Calls, SqsRefused
from conveyor.engines.sqs.polls import MAX_OPEN
from conveyor.engines.sqs.queue import SqsQueue
from conveyor.engines.sqs.queues import KEEP_SECONDS
from conveyor.errors import ConveyorError, EngineFailed

RUN_QUEUE_LIMIT = 500

# Those of long polls, and of all other calls.
_CONNECTIONS = MAX_OPEN + 100
# The maximum number of messages in flight per queue.
_IN_FLIGHT = 120_000
_HOLD = 60.0
_TRIES = 20
_MAX_SKEW = 60.0
_NO_POLICY = "the control queue has no RedrivePolicy: run `conveyor migrate`"


class SqsEngine:
    """All queues under one prefix."""

    def __init__(
        self, calls: Calls, address: SqsAddress, clock: Clock, rows: DocumentRecords, run_queue_limit: int
    ) -> None:
        self._calls = calls
        self._address = address
        self._clock = clock
        self.queue = SqsQueue(calls, address, clock, rows, run_queue_limit)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, clock: Clock, rows: DocumentRecords, run_queue_limit: int = RUN_QUEUE_LIMIT
    ) -> AsyncIterator[Self]:
        """Check the URL and connect. Queues are created on first use."""
        address = parse(url)
        # calls.py retries: the library's retries would hide an unanswered attempt.
        config = Config(
            connect_timeout=5,
            read_timeout=address.wait + 15,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        client: Any = aws_session().create_client(
            "sqs", region_name=address.region, endpoint_url=address.endpoint, config=config
        )
        try:
            opened = await client.__aenter__()
        except BotoCoreError as error:
            raise EngineFailed(f"The SQS client could not be created: {error}") from error
        try:
            engine = cls(Calls(opened, clock), address, clock, rows, run_queue_limit)
            try:
                yield engine
            finally:
                await engine.queue.close()
        finally:
            await client.__aexit__(None, None, None)

    @asynccontextmanager
    async def wakes(self, wake: Callable[[QueueName], None]) -> AsyncIterator[None]:
        """Inside the block, call `wake` with the name of each queue for which a poll has brought messages."""
        self.queue.wake = wake
        try:
            yield
        finally:
            self.queue.wake = lambda _: None

    @contextmanager
    def offers(self, offer: Callable[[QueueName, bytes], bool]) -> Iterator[None]:
        """Inside the block, call `offer` with messages of runs that nobody here serves, which the shared queue brought:
        their queue and body. It returns whether a worker of this process will receive from that queue."""
        self.queue.offer = offer
        try:
            yield
        finally:
            self.queue.offer = lambda queue, body: False

    @asynccontextmanager
    async def returned(self, note: Callable[[QueueName, float], None]) -> AsyncIterator[None]:
        """Inside the block, call `note` with each queue of which SQS redelivers a message that this process received
        and handed to nobody, and in how many seconds. At its end all such messages are given back."""
        self.queue.on_returned = note
        try:
            yield
        finally:
            await self.queue.close()
            self.queue.on_returned = lambda queue, delay: None

    async def migrate(self) -> None:
        """Create the control queue and the dead-letter queue, or give a control queue that exists what it lacks. Safe
        to repeat."""
        place = await self.queue.queues.to_send(CONTROL)
        await self.queue.queues.repair(place.url)

    async def checks(self) -> list[tuple[str, str | None]]:
        """Send a message through a queue of its own, and check the settings of the control queue."""
        checks = [
            ("send, receive and delete a message", await self._round_trip()),
            ("count of run queues", await self._counting()),
        ]
        try:
            url = await self.queue.queues.own(CONTROL)
            if url is None:
                return [*checks, ("control queue", "it does not exist: run `conveyor migrate`")]
            answer = await self._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
        except ConveyorError as error:
            return [*checks, ("control queue", error.message)]
        attributes = answer["Attributes"]
        return [
            *checks,
            ("redrive policy", None if attributes.get("RedrivePolicy") else _NO_POLICY),
            ("retention", _retention(int(attributes.get("MessageRetentionPeriod", 0)))),
            ("clock", _skew(answer, self._clock.now())),
            ("messages in flight", _in_flight(int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0)))),
        ]

    async def _round_trip(self) -> str | None:
        name = QueueName(self._clock.new_id("check"))
        try:
            if await self.queue.send(name, [Outgoing(b"check")]):
                return "SQS did not accept a message"
            for _ in range(_TRIES):
                got = await self.queue.receive(name, 1, _HOLD)
                if got:
                    await self.queue.ack(name, [each.receipt for each in got])
                    return None
                await self._clock.sleep(0.5)
            return "a sent message was not received"
        except ConveyorError as error:
            return error.message
        finally:
            await self._dropped(name)

    async def _counting(self) -> str | None:
        try:
            await self.queue.queues.runs(1)
        except SqsRefused:
            return (
                "sqs:ListQueues is denied: each process counts only the run queues that it knows against the limit. "
                "Allow it on the resource `*`: a prefix of names is not enough."
            )
        except ConveyorError as error:
            return error.message
        return None

    async def _dropped(self, name: QueueName) -> None:
        try:
            await self.queue.drop(name)
        except ConveyorError:
            return


def _retention(seconds: int) -> str | None:
    if seconds >= KEEP_SECONDS:
        return None
    return f"the control queue keeps messages for only {seconds} s: run `conveyor migrate`, which sets {KEEP_SECONDS}"


def _skew(answer: dict[str, Any], now: float) -> str | None:
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if date is None:
        return None
    skew = abs(parsedate_to_datetime(date).timestamp() - now)
    return (
        None
        if skew <= _MAX_SKEW
        else f"this clock and the clock of SQS are {skew:.0f} s apart: synchronize it with NTP"
    )


def _in_flight(count: int) -> str | None:
    if count < _IN_FLIGHT // 2:
        return None
    return f"{count} messages are in flight, and SQS delivers none above {_IN_FLIGHT}: look for stuck workers"

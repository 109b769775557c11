"""An inbox on an SQS queue that another system, such as a state machine, sends to. Messages have no envelope.

`sqs://REGION/NAME?endpoint=…&wait=20`, with the queue's full name. Invalid messages go to the queue's own dead-letter
queue with a reason, or to NAME-dead-letters if it has none.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec
import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from conveyor.clock import Clock
from conveyor.engines.aws_session import aws_session, default_region
from conveyor.engines.queue import InboxMessage
from conveyor.engines.sqs.calls import MISSING, Calls, SqsRefused
from conveyor.engines.sqs.queues import KEEP_DEAD_SECONDS
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.faults import crashpoint

log = structlog.get_logger()

_FORM = "sqs://REGION/NAME"
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
_DEAD = "-dead-letters"
_LONGEST_WAIT = 20
_LONGEST_HOLD = 43_200
_PER_CALL = 10
_CONNECTIONS = 20
# The maximum length of a message attribute.
_MAX_REASON = 1000
# Seconds before the next lookup of a missing queue.
_ABSENT_SECONDS = 5.0


class InboxAddress(NamedTuple):
    """The parts of the URL."""

    region: str
    name: str
    endpoint: str | None = None
    # Seconds of a long poll of an empty queue.
    wait: int = _LONGEST_WAIT


def parse(url: str) -> InboxAddress:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    parts = urlsplit(url)
    name = parts.path.strip("/")
    region = parts.netloc or default_region() or ""
    if parts.scheme != "sqs" or not _REGION.fullmatch(region) or not _NAME.fullmatch(name):
        raise InvalidSetting(f"CONVEYOR_INTAKE must be {_FORM}, or the name of a queue; without REGION, set AWS_REGION")
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - {"endpoint", "wait"}
    if unknown:
        raise InvalidSetting(f"CONVEYOR_INTAKE: unknown option `{min(unknown)}`. Use endpoint or wait.")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        target = urlsplit(endpoint)
        if target.scheme not in {"http", "https"} or not target.hostname or target.username:
            raise InvalidSetting("CONVEYOR_INTAKE: `endpoint` must be an http or https address")
    wait = options.get("wait", str(_LONGEST_WAIT))
    if not wait.isdecimal() or int(wait) > _LONGEST_WAIT:
        raise InvalidSetting(f"CONVEYOR_INTAKE: `wait` must be a number of seconds from 0 to {_LONGEST_WAIT}")
    return InboxAddress(region, name, endpoint, int(wait))


class SqsInbox:
    """Inbox, on one SQS queue."""

    def __init__(self, calls: Calls, address: InboxAddress, clock: Clock) -> None:
        self._calls = calls
        self._address = address
        self._clock = clock
        self._url: str | None = None
        self._absent_until = 0.0
        self._dead: str | None = None
        # A long poll in the background.
        self._waiting: asyncio.Task[list[InboxMessage]] | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, clock: Clock) -> AsyncIterator[Self]:
        """Check the URL and connect. The queue may be created later."""
        address = parse(url)
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
            inbox = cls(Calls(opened, clock), address, clock)
            try:
                yield inbox
            finally:
                await inbox.close()
        finally:
            await client.__aexit__(None, None, None)

    async def close(self) -> None:
        """End the poll. SQS redelivers a message that it just received after its visibility timeout."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    async def receive(self, limit: int, visibility: float) -> list[InboxMessage]:
        url = await self._queue()
        if url is None:
            return []
        count = min(limit, _PER_CALL)
        if self._waiting is not None:
            if not self._waiting.done():
                return []
            waiting, self._waiting = self._waiting, None
            return waiting.result()
        here = await self._receive(url, count, visibility, 0)
        if not here and self._address.wait:
            self._waiting = asyncio.create_task(self._receive(url, count, visibility, self._address.wait))
            # Retrieve the exception, or asyncio would report it as never retrieved.
            self._waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return here

    async def ack(self, message: InboxMessage) -> None:
        url = await self._queue()
        if url is not None:
            entry = {"ReceiptHandle": message.receipt}
            await self._calls.each("delete_message_batch", url, [entry], gone_is_done=True)

    async def delay(self, message: InboxMessage, delay: float) -> None:
        url = await self._queue()
        if url is not None:
            entry = {"ReceiptHandle": message.receipt, "VisibilityTimeout": max(0, min(_LONGEST_HOLD, round(delay)))}
            await self._calls.each("change_message_visibility_batch", url, [entry])

    async def dead_letter(self, message: InboxMessage, reason: str) -> None:
        attribute = {"DataType": "String", "StringValue": _plain(reason)}
        crashpoint("inbox.bury.before")
        await self._calls.ask(
            "send_message",
            QueueUrl=await self._dead_letters(),
            MessageBody=message.body.decode("utf-8", "replace"),
            MessageAttributes={"reason": attribute},
        )
        crashpoint("inbox.bury.between")
        await self.ack(message)

    async def _queue(self) -> str | None:
        if self._url is None and self._absent_until <= self._clock.monotonic():
            self._url = await self._find(self._address.name)
            if self._url is None:
                log.warning("the queue for jobs is not there", queue=self._address.name)
                self._absent_until = self._clock.monotonic() + _ABSENT_SECONDS
        return self._url

    async def _find(self, name: str) -> str | None:
        try:
            answer = await self._calls.ask("get_queue_url", MISSING, QueueName=name)
        except SqsRefused:
            return None
        url: str = answer["QueueUrl"]
        return url

    async def _dead_letters(self) -> str:
        """The queue that the redrive policy names, or a new one."""
        if self._dead is None:
            asked = {"QueueUrl": await self._queue(), "AttributeNames": ["RedrivePolicy"]}
            answer = await self._calls.ask("get_queue_attributes", **asked)
            policy = answer.get("Attributes", {}).get("RedrivePolicy")
            named = msgspec.json.decode(policy)["deadLetterTargetArn"].rpartition(":")[2] if policy else None
            name = named or self._address.name[: 80 - len(_DEAD)] + _DEAD
            self._dead = await self._find(name)
            if self._dead is None:
                keep = {"MessageRetentionPeriod": str(KEEP_DEAD_SECONDS)}
                made = await self._calls.ask("create_queue", QueueName=name, Attributes=keep)
                self._dead = str(made["QueueUrl"])
        return self._dead

    async def _receive(self, url: str, count: int, visibility: float, wait: int) -> list[InboxMessage]:
        try:
            answer = await self._calls.ask(
                "receive_message",
                MISSING,
                QueueUrl=url,
                MaxNumberOfMessages=count,
                VisibilityTimeout=round(visibility),
                WaitTimeSeconds=wait,
                MessageSystemAttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
            )
        except SqsRefused:
            self._url = None
            return []
        return [_arrived(each) for each in answer.get("Messages", ())]


def _arrived(received: dict[str, Any]) -> InboxMessage:
    attributes = received.get("Attributes", {})
    sent = attributes.get("SentTimestamp")
    return InboxMessage(
        message_id=received["MessageId"],
        receipt=received["ReceiptHandle"],
        body=received["Body"].encode(),
        receives=int(attributes.get("ApproximateReceiveCount", 1)),
        sent_at=None if sent is None else int(sent) / 1000,
    )


def _plain(reason: str) -> str:
    """Text that SQS accepts: not empty, and without control characters."""
    return re.sub(r"[\x00-\x1f\x7f]", " ", reason)[:_MAX_REASON] or "no reason"

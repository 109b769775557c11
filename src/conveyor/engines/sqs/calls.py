"""Calls SQS: retries each call for a bounded time, and tracks the result of every entry of a batch.

An unanswered attempt may have been executed. A repeated delete that finds nothing was executed before; a repeated send
may duplicate a message, which at-least-once delivery allows.
"""

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from conveyor.clock import Clock
from conveyor.engines.aws_credentials import aws_credentials
from conveyor.errors import EngineFailed

MISSING = "QueueDoesNotExist"
DELETED_RECENTLY = "QueueDeletedRecently"
EXISTS = "QueueNameExists"
OVER_LIMIT = "OverLimit"
# What IAM answers, by service and age of the endpoint.
DENIED = ("AccessDenied", "AccessDeniedException", "AuthorizationError")

# Older names of the same codes, which SQS still sends.
_SAME = {"NonExistentQueue": MISSING, "QueueAlreadyExists": EXISTS}
_THROTTLES = frozenset(
    {
        "KmsThrottled",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
# The credentials have expired before they were renewed.
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException"})
_PATIENCE = 30.0
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_ENTRIES = 10
# The maximum size of a batch, also on accounts with the older limit.
_BATCH_BYTES = 256 * 1024
_AT_ONCE = 16


class SqsRefused(Exception):
    """SQS refused a call for a reason that the caller handles."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class EntryVerdict(Enum):
    """The result of one entry of a batch."""

    DONE = "done"
    # The entry is invalid: a stale receipt, or a message that SQS cannot send.
    REFUSED = "refused"
    # Not accepted, or unknown.
    OPEN = "open"


class Calls:
    """The client of one region, with retries."""

    def __init__(self, client: Any, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(self, operation: str, *expected: str, **params: Any) -> dict[str, Any]:
        """Make a call. Raises SqsRefused for an expected code, and EngineFailed for all others."""
        return (await self._tried(operation, expected, params))[0]

    async def each(
        self,
        operation: str,
        url: str,
        entries: Sequence[dict[str, Any]],
        once: bool = False,
        gone_is_done: bool = False,
    ) -> list[EntryVerdict]:
        """Send a batch of any size. Returns a verdict per entry. Open entries are retried, unless `once`. With
        `gone_is_done`, an entry that is refused after an unanswered attempt counts as executed by it. Raises
        SqsRefused if the queue does not exist."""
        ledger = _Ledger(len(entries), gone_is_done)
        end = self._clock.monotonic() + _PATIENCE
        pause = _FIRST_PAUSE
        while True:
            await self._round(operation, url, entries, ledger)
            if once or not ledger.open() or self._clock.monotonic() + pause > end:
                return ledger.verdicts
            await self._rest(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _round(self, operation: str, url: str, entries: Sequence[dict[str, Any]], ledger: "_Ledger") -> None:
        parts = _packed(entries, ledger.open())
        answers = await asyncio.gather(
            *(self._part(operation, url, entries, part, ledger) for part in parts), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            # Keep the results of the other parts if one part fails.
            if not isinstance(error, EngineFailed) or len(errors) == len(parts):
                raise error

    async def _part(
        self, operation: str, url: str, entries: Sequence[dict[str, Any]], part: list[int], ledger: "_Ledger"
    ) -> None:
        params = {"QueueUrl": url, "Entries": [{"Id": str(number), **entries[number]} for number in part]}
        async with self._slots:
            answer, doubtful = await self._tried(operation, (MISSING,), params)
        ledger.take(part, answer, doubtful)

    async def _tried(
        self, operation: str, expected: Sequence[str], params: dict[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """The answer, and whether an earlier attempt may have been executed."""
        end = self._clock.monotonic() + _PATIENCE
        pause = _FIRST_PAUSE
        doubtful = False
        failure: Exception
        while True:
            try:
                return await getattr(self._client, operation)(**params), doubtful
            except ClientError as error:
                code = code_of(error)
                if code in expected:
                    raise SqsRefused(code) from error
                lost, failure = _server_fault(error), error
                if code in _EXPIRED:
                    aws_credentials().invalidate()
                elif not lost and code not in _THROTTLES:
                    raise _failed(operation, error) from error
            except (BotoConnectionError, HTTPClientError, ResponseParserError, OSError) as error:
                lost, failure = True, error
            except BotoCoreError as error:
                raise _failed(operation, error) from error
            doubtful = doubtful or lost
            if self._clock.monotonic() + pause > end:
                raise _failed(operation, failure) from failure
            await self._rest(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _rest(self, pause: float) -> None:
        await self._clock.sleep(pause * (0.5 + self._clock.jitter() / 2))


class _Ledger:
    """The state of each entry."""

    def __init__(self, count: int, gone_is_done: bool) -> None:
        self.verdicts = [EntryVerdict.OPEN] * count
        self._gone_is_done = gone_is_done
        # Entries that an unanswered attempt may have executed.
        self._doubtful: set[int] = set()

    def open(self) -> list[int]:
        return [number for number, verdict in enumerate(self.verdicts) if verdict is EntryVerdict.OPEN]

    def take(self, part: list[int], answer: dict[str, Any], doubtful: bool) -> None:
        if doubtful:
            self._doubtful.update(part)
        silent = set(part)
        for entry in answer.get("Successful", ()):
            silent.discard(int(entry["Id"]))
            self.verdicts[int(entry["Id"])] = EntryVerdict.DONE
        for entry in answer.get("Failed", ()):
            number = int(entry["Id"])
            silent.discard(number)
            if entry.get("SenderFault") and _plain_code(entry.get("Code", "")) not in _THROTTLES:
                done = self._gone_is_done and number in self._doubtful
                self.verdicts[number] = EntryVerdict.DONE if done else EntryVerdict.REFUSED
        # An answer may omit an entry: its result is unknown.
        self._doubtful |= silent


def code_of(error: ClientError) -> str:
    return _plain_code(error.response.get("Error", {}).get("Code", ""))


def _plain_code(code: str) -> str:
    last = code.rpartition(".")[2]
    return _SAME.get(last, last)


def _server_fault(error: ClientError) -> bool:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) >= 500


def _failed(operation: str, error: Exception) -> EngineFailed:
    return EngineFailed(f"SQS failed at {operation}: {error}")


def _packed(entries: Sequence[dict[str, Any]], open_ones: list[int]) -> list[list[int]]:
    parts: list[list[int]] = []
    room = 0
    for number in open_ones:
        size = len(entries[number].get("MessageBody", ""))
        if not parts or len(parts[-1]) == _ENTRIES or size > room:
            parts.append([])
            room = _BATCH_BYTES
        parts[-1].append(number)
        room -= size
    return parts

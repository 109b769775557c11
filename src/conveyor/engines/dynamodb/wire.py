"""Calls DynamoDB through aiodynamo, retries transient failures, and translates all other errors.

An attempt that ended in a 500 or a lost connection may have been applied: `Transient.unsure` says so to callers whose
write is not idempotent.
"""

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiodynamo import errors
from aiodynamo.client import Client
from aiodynamo.credentials import Credentials, Key
from aiodynamo.http.types import HttpImplementation, Request, RequestFailed, Response
from aiodynamo.models import StaticDelayRetry
from botocore.exceptions import BotoCoreError
from yarl import URL

from conveyor.clock import Clock
from conveyor.engines.aws_credentials import aws_credentials, missing_credentials
from conveyor.engines.aws_session import service_host
from conveyor.engines.dynamodb.address import DynamoAddress
from conveyor.errors import EngineFailed, EngineRefused

T = TypeVar("T")

# Nothing was applied; a retry may succeed.
_REFUSED_FOR_NOW = (
    errors.Throttled,
    errors.ProvisionedThroughputExceeded,
    errors.RequestLimitExceeded,
    errors.TransactionConflict,
    errors.TransactionInProgress,
    errors.ExpiredToken,
)
# It may have been applied.
_UNKNOWN_OUTCOME = (
    errors.InternalDynamoError,
    errors.ServiceUnavailable,
    aiohttp.ClientError,
    TimeoutError,
    OSError,
    # A body that is not JSON.
    ValueError,
)
# Transient codes of one part of a transaction or a batch.
PASSING_CODES = frozenset(
    {
        "TransactionConflict",
        "ThrottlingError",
        "ProvisionedThroughputExceeded",
        "RequestLimitExceeded",
        "InternalServerError",
    }
)
# The code of a part that is invalid, as an item that is too large is.
INVALID_CODE = "ValidationError"

_LARGE_BODY = 512 * 1024
_SECONDS_FOR_A_CALL = 20.0
_SECONDS_TO_CONNECT = 5.0


class DynamoRefused(Exception):
    """A condition did not hold; this attempt wrote nothing."""

    def __init__(self) -> None:
        super().__init__("concurrent changes kept conflicting with this one")


class Transient(Exception):
    """A transient failure. If `unsure`, the call may have been applied."""

    def __init__(self, why: str, unsure: bool) -> None:
        super().__init__(why)
        self.unsure = unsure


class Patience(msgspec.Struct, frozen=True):
    """The backoff of a call: full jitter up to base * 2**n, at most cap."""

    base: float = 0.025
    cap: float = 3.0
    # Seconds without progress after which the call fails.
    limit: float = 45.0


class Pauses:
    """The pauses between attempts without progress."""

    def __init__(self, clock: Clock, patience: Patience) -> None:
        self._clock = clock
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self.progress()

    def progress(self) -> None:
        """Reset the backoff after progress."""
        self._failures = 0
        self._deadline = self._loop.time() + self._patience.limit

    async def after(self, failure: Exception) -> None:
        """Wait before the next attempt. Raises EngineFailed once the limit is exceeded."""
        if self._loop.time() >= self._deadline:
            raise EngineFailed(f"DynamoDB did not complete a request within {self._patience.limit:g} s: {failure}")
        longest = min(self._patience.cap, self._patience.base * 2 ** min(self._failures, 30))
        self._failures += 1
        # Real time, not the injected clock: a test that stops the clock does not stop the server.
        await asyncio.sleep(longest * self._clock.jitter())


class SharedCredentials(Credentials):
    """The credentials of all AWS clients of the process."""

    async def get_key(self, http: HttpImplementation) -> Key:
        try:
            frozen = await aws_credentials().current()
        except BotoCoreError as error:
            raise EngineFailed(missing_credentials(error)) from error
        return Key(frozen.access_key, frozen.secret_key, frozen.token)

    def invalidate(self) -> bool:
        aws_credentials().invalidate()
        return True

    def is_disabled(self) -> bool:
        return False


class Wire:
    """One client for both tables."""

    def __init__(
        self, session: aiohttp.ClientSession, address: DynamoAddress, clock: Clock, patience: Patience
    ) -> None:
        self._session = session
        self._endpoint = address.endpoint or f"https://{service_host('dynamodb', address.region)}/"
        self._client = Client(
            http=self._exchange,
            credentials=SharedCredentials(),
            region=address.region,
            endpoint=URL(self._endpoint),
            # The client makes one attempt: this module decides about retries.
            throttle_config=StaticDelayRetry(time_limit_secs=-1),
        )
        self._clock = clock
        self._patience = patience

    def pauses(self) -> Pauses:
        return Pauses(self._clock, self._patience)

    async def once(self, action: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """One attempt. Raises DynamoRefused, Transient or EngineFailed."""
        try:
            return await self._client.send_request(action=action, payload=payload)
        except errors.ConditionalCheckFailed as error:
            raise DynamoRefused() from error
        except errors.TransactionCanceled as error:
            raise _cancelled(error) from error
        except _REFUSED_FOR_NOW as error:
            raise Transient(_text(error), unsure=False) from error
        except _UNKNOWN_OUTCOME as error:
            raise Transient(_text(error), unsure=True) from error
        except errors.UnknownError as error:
            if error.status >= 500:
                raise Transient(_text(error), unsure=True) from error
            raise EngineFailed(f"DynamoDB refused {action}: {_text(error)}") from error
        except errors.TableNotFound as error:
            raise EngineFailed("A DynamoDB table does not exist. Run `conveyor migrate`.") from error
        except errors.ValidationException as error:
            raise EngineRefused(f"DynamoDB refused {action}: {_text(error)}") from error
        except (errors.AIODynamoError, RuntimeError) as error:
            raise EngineFailed(f"DynamoDB refused {action}: {_text(error)}") from error

    async def call(self, action: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Retry until it succeeds. For reads, and for idempotent writes."""
        return await self.again(lambda: self.once(action, payload))

    async def again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry an attempt while it raises Transient."""
        pauses = self.pauses()
        while True:
            try:
                return await attempt()
            except Transient as failure:
                await pauses.after(failure)

    async def _exchange(self, request: Request) -> Response:
        """The transport of aiodynamo."""
        # aiohttp writes a large body in pieces only from a file.
        body = request.body
        data = io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body
        try:
            async with self._session.request(request.method, request.url, headers=request.headers, data=data) as answer:
                return Response(answer.status, await answer.read())
        except aiohttp.ClientError as error:
            raise RequestFailed(error) from error

    async def server_date(self) -> str | None:
        """The server's date; the request needs no signature."""
        try:
            async with self._session.get(self._endpoint) as response:
                return response.headers.get("Date")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"{self._endpoint} does not answer: {_text(error)}") from error


def make_session() -> aiohttp.ClientSession:
    """A session with open connections to one endpoint."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_SECONDS_FOR_A_CALL, sock_connect=_SECONDS_TO_CONNECT),
        connector=aiohttp.TCPConnector(limit=128, keepalive_timeout=60),
    )


def _cancelled(error: errors.TransactionCanceled) -> Exception:
    codes = {str(reason.get("Code")) for reason in error.body["CancellationReasons"]} - {"None"}
    if "ConditionalCheckFailed" in codes:
        return DynamoRefused()
    if codes <= PASSING_CODES:
        return Transient(f"transaction cancelled: {', '.join(sorted(codes))}", unsure=False)
    failed = EngineRefused if INVALID_CODE in codes else EngineFailed
    return failed(f"DynamoDB cancelled a transaction: {error.body.get('message') or ', '.join(sorted(codes))}")


def _text(error: BaseException) -> str:
    details = error.args[0] if error.args else None
    if isinstance(details, dict):
        return str(details.get("message") or details.get("Message") or type(error).__name__)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

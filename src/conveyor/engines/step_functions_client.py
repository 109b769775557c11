"""Step Functions through aiobotocore: heartbeats and results for tasks that wait with a token.

`stepfunctions://REGION?endpoint=…`. A call is attempted once: the caller, who knows how long the state machine waits,
decides about retries.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from conveyor.auth.sealing import Seals
from conveyor.engines.aws_session import aws_session, default_region
from conveyor.engines.step_functions import CallOutcome
from conveyor.errors import EngineFailed, InvalidSetting

log = structlog.get_logger()

_FORM = "stepfunctions://REGION"
_REGION = re.compile(r"[a-z0-9-]{1,32}")
_CONNECTIONS = 32
_CONNECT_SECONDS = 5
_READ_SECONDS = 10
# The maximum lengths that Step Functions accepts.
_MAX_ERROR = 256
_MAX_CAUSE = 32_768

# A token that no state machine issued.
_NOBODY = "conveyor-doctor"
_ALLOW = "Allow states:SendTaskHeartbeat, states:SendTaskSuccess and states:SendTaskFailure."

_GONE = frozenset({"TaskTimedOut", "TaskDoesNotExist", "InvalidToken"})
_THROTTLES = frozenset(
    {
        "KmsThrottlingException",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)


class StepFunctionsAddress(NamedTuple):
    """The parts of the URL."""

    region: str
    endpoint: str | None = None


def parse(url: str) -> StepFunctionsAddress:
    """Parse the URL. Raises InvalidSetting with the expected form."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    region = parts.netloc or default_region() or ""
    if parts.scheme != "stepfunctions" or not _REGION.fullmatch(region) or parts.path.strip("/"):
        raise InvalidSetting(f"CONVEYOR_STEP_FUNCTIONS must be {_FORM}; without REGION, set AWS_REGION")
    unknown = options.keys() - {"endpoint"}
    if unknown:
        raise InvalidSetting(f"CONVEYOR_STEP_FUNCTIONS: unknown option `{min(unknown)}`. Use endpoint.")
    endpoint = options.get("endpoint")
    if endpoint is not None:
        target = urlsplit(endpoint)
        if target.scheme not in {"http", "https"} or not target.hostname or target.username:
            raise InvalidSetting("CONVEYOR_STEP_FUNCTIONS: `endpoint` must be an http or https address")
    return StepFunctionsAddress(region, endpoint)


class StepFunctionsClient:
    """StepFunctions, on AWS."""

    def __init__(self, client: Any, seals: Seals) -> None:
        self._client = client
        self._seals = seals

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, keys: Sequence[bytes]) -> AsyncIterator[Self]:
        """Check the URL and create the client. It sends no request to AWS."""
        address = parse(url)
        config = Config(
            connect_timeout=_CONNECT_SECONDS,
            read_timeout=_READ_SECONDS,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
        )
        client: Any = aws_session().create_client(
            "stepfunctions", region_name=address.region, endpoint_url=address.endpoint, config=config
        )
        try:
            opened = await client.__aenter__()
        except BotoCoreError as error:
            raise EngineFailed(f"The Step Functions client could not be created: {error}") from error
        try:
            yield cls(opened, Seals(keys))
        finally:
            await client.__aexit__(None, None, None)

    def seal(self, token: str, name: str) -> str:
        return self._seals.close(token, name)

    async def heartbeat(self, sealed: str, name: str) -> CallOutcome:
        return await self._told("send_task_heartbeat", sealed, name)

    async def succeed(self, sealed: str, name: str, output: str) -> CallOutcome:
        return await self._told("send_task_success", sealed, name, output=output)

    async def fail(self, sealed: str, name: str, error: str, cause: str) -> CallOutcome:
        return await self._told("send_task_failure", sealed, name, error=error[:_MAX_ERROR], cause=cause[:_MAX_CAUSE])

    async def checks(self) -> list[tuple[str, str | None]]:
        """Check the permissions, with a token that no state machine issued."""
        try:
            await self._client.send_task_heartbeat(taskToken=_NOBODY)
        except ClientError as error:
            code = _code(error)
            return [("takes heartbeats", None if code in _GONE else f"It refused one: {code}. {_ALLOW}")]
        except (BotoCoreError, ResponseParserError, OSError) as error:
            return [("answers", f"It does not answer: {error}. Look at the region and the endpoint.")]
        return [("takes heartbeats", "It took one for a token that nobody has: is the endpoint Step Functions?")]

    async def _told(self, operation: str, sealed: str, name: str, **params: str) -> CallOutcome:
        token = self._seals.open(sealed, name)
        if token is None:
            log.error("a task token cannot be unsealed: did CONVEYOR_SIGNING_KEY change?", callback=name)
            return CallOutcome.LATER
        try:
            await getattr(self._client, operation)(taskToken=token, **params)
        except ClientError as error:
            return _verdict(operation, name, error)
        except (BotoConnectionError, HTTPClientError, ResponseParserError, OSError) as error:
            log.warning("Step Functions did not answer", operation=operation, callback=name, error=repr(error))
            return CallOutcome.UNKNOWN
        except BotoCoreError as error:
            log.error("Step Functions could not be asked", operation=operation, callback=name, error=repr(error))
            return CallOutcome.LATER
        return CallOutcome.TAKEN


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "")).rpartition("#")[2]


def _verdict(operation: str, name: str, error: ClientError) -> CallOutcome:
    code = _code(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code in _GONE:
        log.info("nobody waits with this task token", operation=operation, callback=name, code=code)
        return CallOutcome.GONE
    if code in _THROTTLES or status == 429:
        log.debug("Step Functions is busy", operation=operation, callback=name, code=code)
        return CallOutcome.LATER
    if status >= 500:
        log.warning("Step Functions failed", operation=operation, callback=name, code=code, status=status)
        return CallOutcome.UNKNOWN
    log.error("Step Functions refused a call", operation=operation, callback=name, code=code, status=status)
    return CallOutcome.LATER

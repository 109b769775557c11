"""Event targets on AWS: the state machines and event buses of CONVEYOR_EVENT_TARGETS, called with the server's own
credentials.

An execution has the id of the event as its name, so that a repeated call starts no second one. An entry on a bus has
the id in its detail, by which receivers recognize a repetition. A call is attempted once: the deliverer retries.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple, Self
from urllib.parse import parse_qsl, urlsplit

import structlog
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from conveyor.engines.aws_session import aws_session
from conveyor.engines.event_targets import EVENT_BUS, STATE_MACHINE, EventMessage, SendOutcome
from conveyor.errors import EventTargetRefused, InvalidSetting
from conveyor.model import TenantId

log = structlog.get_logger()

# The source of the entries on a bus.
SOURCE = "conveyor"

_EVERY_TENANT = "*"
_FORM = "TENANT=ARN, with the ARN of a state machine or of an event bus"
_ENTRY = re.compile(r"(?P<tenant>[^=\s]+)=(?P<arn>arn:[^?\s]+)(?:\?(?P<options>\S*))?")
_CONNECTIONS = 32
_CONNECT_SECONDS = 5
_READ_SECONDS = 30
_EXISTS = "ExecutionAlreadyExists"
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class ListedTarget(NamedTuple):
    """An entry of the setting."""

    tenant: str
    arn: str
    # stepfunctions or events.
    service: str
    region: str
    endpoint: str | None


class AwsEventTargets:
    """Opens one client for each service, region and endpoint, when it is first needed."""

    def __init__(self, listed: list[ListedTarget], stack: AsyncExitStack) -> None:
        self._listed = listed
        self._stack = stack
        self._clients: dict[tuple[str, str, str | None], Any] = {}
        self._opening = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(cls, setting: str) -> AsyncIterator[Self]:
        """Check the setting. It sends no request. Raises InvalidSetting."""
        listed = [_entry(text) for text in setting.split()]
        async with AsyncExitStack() as stack:
            yield cls(listed, stack)

    def check(self, tenant: TenantId, arn: str) -> None:
        self._find(tenant, arn)

    async def send(self, tenant: TenantId, arn: str, message: EventMessage) -> SendOutcome:
        listed = self._find(tenant, arn)
        try:
            client = await self._client(listed)
            if listed.service == "stepfunctions":
                return await _start(client, arn, message)
            return await _put(client, arn, message)
        except ClientError as error:
            return _refusal(arn, error)
        except (BotoConnectionError, HTTPClientError, ResponseParserError, OSError) as error:
            log.warning("event target did not answer", target=arn, error=repr(error))
            return SendOutcome(error="no_answer")
        except BotoCoreError as error:
            log.error("event target could not be called", target=arn, error=repr(error))
            return SendOutcome(error="call_failed")

    def _find(self, tenant: TenantId, arn: str) -> ListedTarget:
        for listed in self._listed:
            if listed.arn == arn and listed.tenant in (tenant, _EVERY_TENANT):
                return listed
        raise EventTargetRefused

    async def _client(self, listed: ListedTarget) -> Any:
        place = (listed.service, listed.region, listed.endpoint)
        async with self._opening:
            if place not in self._clients:
                config = Config(
                    connect_timeout=_CONNECT_SECONDS,
                    read_timeout=_READ_SECONDS,
                    max_pool_connections=_CONNECTIONS,
                    retries={"total_max_attempts": 1, "mode": "standard"},
                )
                opening = aws_session().create_client(
                    listed.service, region_name=listed.region, endpoint_url=listed.endpoint, config=config
                )
                self._clients[place] = await self._stack.enter_async_context(opening)
            return self._clients[place]


async def _start(client: Any, arn: str, message: EventMessage) -> SendOutcome:
    try:
        answer = await client.start_execution(stateMachineArn=arn, name=message.event_id, input=message.payload)
    except ClientError as error:
        if _code(error) != _EXISTS:
            raise
        return SendOutcome(_status(error.response))
    return SendOutcome(_status(answer))


async def _put(client: Any, arn: str, message: EventMessage) -> SendOutcome:
    entry = {
        "Time": message.at,
        "Source": SOURCE,
        "DetailType": message.event,
        "Detail": message.payload,
        "EventBusName": arn,
    }
    answer = await client.put_events(Entries=[entry])
    (put,) = answer["Entries"]
    if "EventId" in put:
        return SendOutcome(_status(answer))
    code = str(put.get("ErrorCode", ""))
    log.warning("event bus refused an event", target=arn, code=code, message=put.get("ErrorMessage"))
    return SendOutcome(_status(answer), _error_code(code))


def _refusal(arn: str, error: ClientError) -> SendOutcome:
    code = _code(error)
    log.warning("event target refused an event", target=arn, code=code, error=str(error))
    return SendOutcome(_status(error.response), _error_code(code))


def _status(response: Any) -> int | None:
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "")).rpartition("#")[2]


def _error_code(code: str) -> str:
    """The code of AWS in our form: AccessDeniedException is access_denied."""
    name = _WORD.sub("_", code.removesuffix("Exception")).lower()
    return name if re.fullmatch(r"[a-z0-9_]{1,80}", name) else "call_refused"


def _entry(text: str) -> ListedTarget:
    found = _ENTRY.fullmatch(text)
    options = dict(parse_qsl(found["options"] or "")) if found else {}
    machine = STATE_MACHINE.fullmatch(found["arn"]) if found else None
    target = machine or (EVENT_BUS.fullmatch(found["arn"]) if found else None)
    if found is None or target is None or options.keys() - {"endpoint"}:
        raise InvalidSetting(f"CONVEYOR_EVENT_TARGETS: {text!r} is invalid. Use {_FORM}, separated by spaces.")
    endpoint = options.get("endpoint")
    if endpoint is not None and urlsplit(endpoint).scheme not in {"http", "https"}:
        raise InvalidSetting("CONVEYOR_EVENT_TARGETS: `endpoint` must be an http or https address")
    service = "events" if machine is None else "stepfunctions"
    return ListedTarget(found["tenant"], found["arn"], service, target[1], endpoint)

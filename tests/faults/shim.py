"""A shim between the AWS engines and the emulator: an HTTP proxy that breaks calls in the ways of the real services.

Every call passes through the shim's interceptors, each of which may answer it, change it on its way, or let it pass.
What a service does is an interceptor: `DynamoFaults` is DynamoDB's, `S3Faults` that of S3. SQS has a proxy of its
own, in shim_sqs.py.

    async with Shim(aws(), DynamoFaults(random.Random(seed), throttle=0.1)) as shim:
        ... an engine with shim.url as its endpoint
"""

import asyncio
import io
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import aiohttp
from aiohttp import web

DYNAMODB, SQS, S3 = "dynamodb", "sqs", "s3"

_SERVICES = {"DynamoDB_20120810": DYNAMODB, "AmazonSQS": SQS}
# What a proxy must not hand on.
_OWN_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "content-encoding", "accept-encoding"}


@dataclass(frozen=True)
class Call:
    """A request to a service. `action` is "PUT", "GET" and so on for S3."""

    service: str
    action: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def payload(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.body)
        return loaded

    def with_payload(self, payload: dict[str, Any]) -> "Call":
        return replace(self, body=json.dumps(payload).encode())


@dataclass(frozen=True)
class Answer:
    """What the service says."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def payload(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.body)
        return loaded

    def with_payload(self, payload: dict[str, Any]) -> "Answer":
        return replace(self, body=json.dumps(payload).encode())


class Reset(Exception):
    """Raised by an interceptor: the connection is cut, without an answer, as when the service itself does it."""


Forward = Callable[[Call], Awaitable[Answer]]


class Interceptor(Protocol):
    """One that sees every call. `forward` hands it to the next, at last to the service."""

    async def __call__(self, call: Call, forward: Forward) -> Answer: ...


def json_answer(status: int, payload: dict[str, Any]) -> Answer:
    return Answer(status, json.dumps(payload).encode(), {"Content-Type": "application/x-amz-json-1.0"})


def refusal(kind: str, status: int = 400, prefix: str = "com.amazonaws.dynamodb.v20120810#", **more: Any) -> Answer:
    """An error as the JSON protocols put it."""
    return json_answer(status, {"__type": f"{prefix}{kind}", "message": f"injected: {kind}", **more})


class Shim:
    """The proxy. It counts the calls that come in and those that reach the service, by service and action. With
    `keeps_host`, links that were signed for the proxy are valid at the service."""

    def __init__(self, upstream: str, *interceptors: Interceptor, keeps_host: bool = False) -> None:
        self._upstream = upstream
        self._own_headers = _OWN_HEADERS - {"host"} if keeps_host else _OWN_HEADERS
        self.interceptors: list[Interceptor] = list(interceptors)
        self.received: Counter[tuple[str, str]] = Counter()
        self.forwarded: Counter[tuple[str, str]] = Counter()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=256))
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        service, _, action = request.headers.get("X-Amz-Target", "").partition(".")
        call = Call(
            service=_SERVICES.get(service, S3),
            action=action or request.method,
            method=request.method,
            path=str(request.rel_url),
            headers={name: value for name, value in request.headers.items() if name.lower() not in self._own_headers},
            body=await request.read(),
        )
        self.received[call.service, call.action] += 1
        try:
            answer = await self._pass(0, call)
        except (Reset, aiohttp.ClientError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers)

    async def _pass(self, position: int, call: Call) -> Answer:
        if position == len(self.interceptors):
            return await self._send(call)
        return await self.interceptors[position](call, lambda changed: self._pass(position + 1, changed))

    async def _send(self, call: Call) -> Answer:
        self.forwarded[call.service, call.action] += 1
        data = io.BytesIO(call.body) if call.body else None
        async with self._session.request(
            call.method, self._upstream + call.path, headers=call.headers, data=data, allow_redirects=False
        ) as response:
            # The length of what a HEAD does not send is part of its answer.
            own = _OWN_HEADERS - ({"content-length"} if call.method == "HEAD" else set())
            headers = {name: value for name, value in response.headers.items() if name.lower() not in own}
            return Answer(response.status, await response.read(), headers)


_WRITES = {"PutItem", "UpdateItem", "DeleteItem", "TransactWriteItems", "BatchWriteItem", "BatchExecuteStatement"}
_TABLE_CALLS = {"CreateTable", "DescribeTable", "UpdateTable", "UpdateTimeToLive", "DescribeTimeToLive"}


@dataclass
class DynamoFaults:
    """What DynamoDB does to a client on a bad day; each number is the share of calls that it happens to."""

    random: random.Random
    # Refused, nothing applied.
    throttle: float = 0.0
    conflict: float = 0.0
    # Failed, and nobody says whether it was applied.
    error_before: float = 0.0
    error_after: float = 0.0
    reset_before: float = 0.0
    reset_after: float = 0.0
    garbled_after: float = 0.0
    # Some of a batch is left out, or has an error of its own.
    partial: float = 0.0

    @classmethod
    def swarm(cls, seed: int) -> "DynamoFaults":
        """Some of the faults, each at a rate of its own."""
        chance = random.Random(seed)
        names = [name for name in cls.__dataclass_fields__ if name != "random"]
        rates = {name: chance.choice((0.05, 0.15, 0.35)) for name in names if chance.random() < 0.5}
        return cls(chance, **rates)

    def heal(self) -> None:
        for name in self.__dataclass_fields__:
            if name != "random":
                setattr(self, name, 0.0)

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if call.service != DYNAMODB or call.action in _TABLE_CALLS:
            return await forward(call)
        if self._now(self.throttle):
            return refusal(self.random.choice(("ProvisionedThroughputExceededException", "ThrottlingException")))
        if self._now(self.reset_before):
            raise Reset
        if self._now(self.error_before):
            return self._error()
        if call.action in _WRITES and self._now(self.conflict):
            answer = self._conflict(call)
            if answer is not None:
                return answer
        answer = await self._partly(call, forward) if self._now(self.partial) else await forward(call)
        if self._now(self.reset_after):
            raise Reset
        if self._now(self.error_after):
            return self._error()
        if answer.status == 200 and self._now(self.garbled_after):
            return replace(answer, body=answer.body[: len(answer.body) // 2] or b"{")
        return answer

    def _now(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    def _error(self) -> Answer:
        return self.random.choice((refusal("InternalServerError", 500), refusal("ServiceUnavailable", 503)))

    def _conflict(self, call: Call) -> Answer | None:
        if call.action == "TransactWriteItems":
            parts = len(call.payload["TransactItems"])
            reasons: list[dict[str, str]] = [{"Code": "None"} for _ in range(parts)]
            code = self.random.choice(("TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded"))
            reasons[self.random.randrange(parts)] = {"Code": code, "Message": "injected"}
            return refusal("TransactionCanceledException", CancellationReasons=reasons)
        if call.action in ("PutItem", "UpdateItem", "DeleteItem"):
            return refusal("TransactionConflictException")
        return None

    async def _partly(self, call: Call, forward: Forward) -> Answer:
        if call.action == "BatchWriteItem":
            return await self._partly_written(call, forward)
        if call.action == "BatchGetItem":
            return await self._partly_read(call, forward)
        if call.action == "BatchExecuteStatement":
            return await self._partly_executed(call, forward)
        return await forward(call)

    async def _partly_written(self, call: Call, forward: Forward) -> Answer:
        ((table, requests),) = call.payload["RequestItems"].items()
        taken, left = self._divide(requests)
        if taken:
            answer = await forward(call.with_payload({"RequestItems": {table: taken}}))
            if answer.status != 200:
                return answer
        return json_answer(200, {"UnprocessedItems": {table: left} if left else {}})

    async def _partly_read(self, call: Call, forward: Forward) -> Answer:
        ((table, request),) = call.payload["RequestItems"].items()
        taken, left = self._divide(request["Keys"])
        responses: dict[str, Any] = {table: []}
        if taken:
            answer = await forward(call.with_payload({"RequestItems": {table: {**request, "Keys": taken}}}))
            if answer.status != 200:
                return answer
            responses = answer.payload["Responses"]
        unprocessed = {table: {**request, "Keys": left}} if left else {}
        return json_answer(200, {"Responses": responses, "UnprocessedKeys": unprocessed})

    async def _partly_executed(self, call: Call, forward: Forward) -> Answer:
        """Some statements are not carried out; of those that are, some say that nobody knows."""
        statements: list[Any] = call.payload["Statements"]
        chosen = set(self._divide(range(len(statements)))[0])
        answers: list[Any] = []
        if chosen:
            answer = await forward(call.with_payload({"Statements": [statements[each] for each in sorted(chosen)]}))
            if answer.status != 200:
                return answer
            answers = answer.payload["Responses"]
        given = iter(answers)
        responses = []
        for number in range(len(statements)):
            if number not in chosen:
                code = self.random.choice(("ThrottlingError", "ProvisionedThroughputExceeded", "TransactionConflict"))
                responses.append(statement_error(code))
                continue
            response = next(given)
            lost = "Error" not in response and self.random.random() < 0.2
            responses.append(statement_error("InternalServerError") if lost else response)
        return json_answer(200, {"Responses": responses})

    def _divide(self, things: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        share = self.random.choice((0.0, 0.3, 0.7, 0.95))
        taken = [self.random.random() < share for _ in things]
        return (
            [thing for thing, take in zip(things, taken, strict=True) if take],
            [thing for thing, take in zip(things, taken, strict=True) if not take],
        )


def statement_error(code: str) -> dict[str, Any]:
    return {"Error": {"Code": code, "Message": f"injected: {code}"}}


@dataclass
class S3Faults:
    """What S3 does to a client on a bad day; each number is the share of calls that it happens to."""

    random: random.Random
    # Refused, nothing applied.
    slow_down: float = 0.0
    # Failed, and nobody says whether it was applied.
    error_after: float = 0.0
    reset_before: float = 0.0
    reset_after: float = 0.0

    def heal(self) -> None:
        self.slow_down = self.error_after = self.reset_before = self.reset_after = 0.0

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if call.service != S3:
            return await forward(call)
        if self._now(self.slow_down):
            return self._error("SlowDown", 503)
        if self._now(self.reset_before):
            raise Reset
        answer = await forward(call)
        if self._now(self.reset_after):
            raise Reset
        return self._error("InternalError", 500) if self._now(self.error_after) else answer

    def _now(self, share: float) -> bool:
        return share > 0 and self.random.random() < share

    def _error(self, code: str, status: int) -> Answer:
        body = f"<Error><Code>{code}</Code><Message>injected: {code}</Message></Error>"
        return Answer(status, body.encode(), {"Content-Type": "application/xml"})


_PLACEHOLDER = re.compile(r"""['"]?(\w+)['"]?\s*[:=]\s*\?""")


def partition_of(statement: dict[str, Any]) -> str:
    """The partition that a PartiQL statement writes to."""
    names = _PLACEHOLDER.findall(statement["Statement"])
    pk: str = statement["Parameters"][names.index("pk")]["S"]
    return pk


class PartitionCap:
    """A partition takes so many writes in a second, and no more. What is above it is throttled, alone."""

    def __init__(self, writes_per_second: float = 1000.0, now: Callable[[], float] = time.monotonic) -> None:
        self._rate = writes_per_second
        self._now = now
        # Up to a tenth of a second can be saved up.
        self._most = writes_per_second / 10
        self._level: defaultdict[str, float] = defaultdict(lambda: self._most)
        self._filled: defaultdict[str, float] = defaultdict(now)
        self.throttled: Counter[str] = Counter()

    def take(self, pk: str) -> bool:
        now = self._now()
        level = min(self._most, self._level[pk] + (now - self._filled[pk]) * self._rate)
        self._filled[pk] = now
        self._level[pk] = level - 1 if level >= 1 else level
        if level < 1:
            self.throttled[pk] += 1
        return level >= 1

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if call.service != DYNAMODB or call.action not in ("BatchExecuteStatement", "BatchWriteItem"):
            return await forward(call)
        if call.action == "BatchWriteItem":
            return await self._batch_write(call, forward)
        statements: list[Any] = call.payload["Statements"]
        fits = [self.take(partition_of(statement)) for statement in statements]
        answers: list[Any] = []
        if any(fits):
            taken = [statement for statement, fit in zip(statements, fits, strict=True) if fit]
            answer = await forward(call.with_payload({"Statements": taken}))
            if answer.status != 200:
                return answer
            answers = answer.payload["Responses"]
        given = iter(answers)
        responses = [next(given) if fit else statement_error("ThrottlingError") for fit in fits]
        return json_answer(200, {"Responses": responses})

    async def _batch_write(self, call: Call, forward: Forward) -> Answer:
        ((table, requests),) = call.payload["RequestItems"].items()
        taken: list[Any] = []
        left: list[Any] = []
        for request in requests:
            ((_, inner),) = request.items()
            (taken if self.take((inner.get("Item") or inner["Key"])["pk"]["S"]) else left).append(request)
        if taken:
            answer = await forward(call.with_payload({"RequestItems": {table: taken}}))
            if answer.status != 200:
                return answer
        return json_answer(200, {"UnprocessedItems": {table: left} if left else {}})


class Stall:
    """Holds calls that match until it is opened; the others pass."""

    def __init__(self, matches: Callable[[Call], bool]) -> None:
        self._matches = matches
        self.opened = asyncio.Event()
        self.reached = asyncio.Event()

    async def __call__(self, call: Call, forward: Forward) -> Answer:
        if self._matches(call):
            self.reached.set()
            await self.opened.wait()
        return await forward(call)

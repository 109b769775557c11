"""A proxy between the engine and the emulator of SQS, which does what AWS does and the emulator does not.

Always: a delete with a stale handle is answered as done and does nothing; a queue can not be made within a minute of
its deletion; nobody holds a message for more than twelve hours. By chance, from a seed: throttles, errors and broken
connections before and after the call was carried out, batches that are taken in part or answered in part, receives
that come back empty, in silence or with OverLimit, and counts that lag.
"""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientError, ClientSession, web

from tests.servers.aws import aws, server_time

# Kinds of faults after which nobody knows whether the call was carried out.
DOUBTFUL = ("error_after", "reset_after", "unanswered")
# And those after which it is known that it was not.
CLEAN = (
    "throttle",
    "error_before",
    "reset_before",
    "partial",
    "forgotten",
    "silent_empty",
    "over_limit",
    "late_counts",
    "unfound",
)

_DELETED_RECENTLY = 60.0
_LONGEST_HOLD = 43_200


class Shim:
    """`rates` gives each kind of fault its chance; an empty one heals everything."""

    def __init__(self, seed: int) -> None:
        self.rates: dict[str, float] = {}
        self.calls: list[str] = []
        # Actions that IAM denies.
        self.denied: set[str] = set()
        # Calls under way, without those that wait for messages.
        self.busy = 0
        self.faults: list[str] = []
        self.endpoint = ""
        self._random = random.Random(seed)
        self._deleted: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._session: ClientSession

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Its address, for as long as the block runs."""
        app = web.Application(client_max_size=4 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A receive that waits at the emulator is not waited for.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        host, port = site._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
        self.endpoint = f"http://{host}:{port}"
        async with ClientSession() as self._session:
            try:
                yield self.endpoint
            finally:
                await runner.cleanup()

    def _chance(self, kind: str) -> bool:
        happens = self._random.random() < self.rates.get(kind, 0.0)
        if happens:
            self.faults.append(kind)
        return happens

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        action = request.headers.get("X-Amz-Target", "").rpartition(".")[2]
        data = json.loads(await request.read())
        self.calls.append(action)
        waits = action == "ReceiveMessage" and data.get("WaitTimeSeconds", 0) > 0
        self.busy += not waits
        try:
            return await self._answered(action, data, request)
        finally:
            self.busy -= not waits

    async def _answered(self, action: str, data: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if action in self.denied:
            return _error("AccessDenied", 403)
        if self._chance("throttle"):
            return _error("RequestThrottled", 400)
        if self._chance("error_before"):
            return _error("InternalError", 500)
        if self._chance("reset_before"):
            return _cut(request)
        if action == "ReceiveMessage":
            if self._chance("silent_empty"):
                return web.json_response({})
            if self._chance("over_limit"):
                return _error("OverLimit", 403)
        try:
            answer = self._refusal(action, data) or await self._carried_out(action, data, request)
        except ClientError:
            return _cut(request)
        if self._chance("error_after"):
            return _error("InternalError", 500)
        if self._chance("reset_after"):
            return _cut(request)
        return answer

    def _refusal(self, action: str, data: dict[str, Any]) -> web.Response | None:
        now = server_time().now()
        if action == "CreateQueue" and self._deleted.get(data["QueueName"], -1e9) + _DELETED_RECENTLY > now:
            self.faults.append("deleted_recently")
            return _error("QueueDeletedRecently", 400)
        if action == "DeleteQueue":
            self._deleted[data["QueueUrl"].rpartition("/")[2]] = now
        if action == "GetQueueUrl" and self._chance("unfound"):
            return _error("QueueDoesNotExist", 400)
        return None

    async def _carried_out(self, action: str, data: dict[str, Any], request: web.Request) -> web.Response:
        refused: list[dict[str, Any]] = []
        if "Entries" in data:
            refused = [entry for entry in data["Entries"] if self._chance("partial")]
            # Neither carried out nor spoken of again.
            forgotten = [entry for entry in data["Entries"] if self._chance("forgotten")]
            left = [entry for entry in data["Entries"] if entry not in refused and entry not in forgotten]
            data = {**data, "Entries": left}
            refused = [entry for entry in refused if entry not in forgotten]
        failed = [_failed(entry, "InternalError", False) for entry in refused]
        if action == "ChangeMessageVisibilityBatch":
            failed += self._held_too_long(data)
        if "Entries" in data and not data["Entries"]:
            return web.json_response({"Successful": [], "Failed": failed})
        body, status = await self._forwarded(data, request)
        if status != 200:
            return web.json_response(body, status=status, headers=_type_of(body))
        return web.json_response(self._as_aws_does(action, body, failed))

    def _held_too_long(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        now = server_time().now()
        late = [
            entry
            for entry in data["Entries"]
            if self._taken.get(entry["ReceiptHandle"], now) + _LONGEST_HOLD < now + entry["VisibilityTimeout"]
        ]
        data["Entries"] = [entry for entry in data["Entries"] if entry not in late]
        return [_failed(entry, "InvalidParameterValue", True) for entry in late]

    async def _forwarded(self, data: dict[str, Any], request: web.Request) -> tuple[dict[str, Any], int]:
        kept = {"X-Amz-Target", "Content-Type", "Authorization", "X-Amz-Date"}
        headers = {name: value for name, value in request.headers.items() if name in kept}
        async with self._session.post(f"{aws()}{request.path_qs}", json=data, headers=headers) as answer:
            return await answer.json(content_type=None), answer.status

    def _as_aws_does(self, action: str, body: dict[str, Any], failed: list[dict[str, Any]]) -> dict[str, Any]:
        if action == "ReceiveMessage":
            for message in body.get("Messages", ()):
                self._taken[message["ReceiptHandle"]] = server_time().now()
        if action == "GetQueueAttributes" and self._chance("late_counts"):
            counted = {name: value for name, value in body["Attributes"].items() if not name.startswith("Approximate")}
            return {"Attributes": counted}
        if "Successful" not in body:
            return body
        done, refused = body["Successful"], [*body["Failed"], *failed]
        if action == "DeleteMessageBatch":
            stale = [entry for entry in refused if entry["Code"] == "ReceiptHandleIsInvalid"]
            done = [*done, *({"Id": entry["Id"]} for entry in stale)]
            refused = [entry for entry in refused if entry not in stale]
        return {"Successful": [entry for entry in done if not self._chance("unanswered")], "Failed": refused}


def _failed(entry: dict[str, Any], code: str, sender: bool) -> dict[str, Any]:
    return {"Id": entry["Id"], "Code": code, "Message": "injected", "SenderFault": sender}


def _error(code: str, status: int) -> web.Response:
    body = {"__type": code, "message": "injected"}
    return web.json_response(body, status=status, headers=_type_of(body))


def _type_of(body: dict[str, Any]) -> dict[str, str]:
    code = str(body.get("__type", ""))
    return {"x-amzn-query-error": f"AWS.SimpleQueueService.{code};Sender", "x-amzn-errortype": code}


def _cut(request: web.Request) -> web.StreamResponse:
    """The connection breaks."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()

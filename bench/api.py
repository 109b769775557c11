"""Api: the HTTP surface of a system that a measurement has opened, and a client of it with a key."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from bench.child import ROOT, MeasurementFailed


class Api:
    """The API under its address, with a key."""

    def __init__(self, url: str, key: str, client: Any) -> None:
        self.url = url
        self.key = key
        self._client = client

    async def send(self, method: str, path: str, body: object = None) -> bytes:
        request = self._client.request(method, self.url + path).header("authorization", f"Bearer {self.key}")
        if body is not None:
            request = request.header("content-type", "application/json").body_bytes(msgspec.json.encode(body))
        response = await request.build().send()
        answer = bytes(await response.bytes())
        if response.status >= 400:
            raise MeasurementFailed(f"{method} {path} was answered {response.status}: {answer[:200]!r}")
        return answer

    async def json(self, method: str, path: str, body: object = None) -> Any:
        return msgspec.json.decode(await self.send(method, path, body))

    def looks(self, path: str) -> list[tuple[str, float]]:
        """What each look until the run had ended saw, and how long it took, in milliseconds."""
        at = urlsplit(self.url)
        return list(outside("bench.looks", str(at.hostname), str(at.port), self.key, path))


def outside(module: str, *arguments: str) -> Any:
    """What a process of its own finds out, as a user's client is one; it prints JSON."""
    command = [sys.executable, "-m", module, *arguments]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode != 0:
        raise MeasurementFailed(f"{module} ended with code {ended.returncode}")
    return json.loads(ended.stdout)


async def new_key(system: Any, tenant: str) -> str:
    from conveyor.auth.keys import make_key

    # An administrator's: anyone else may not have all rows of a large job counted.
    text, key = make_key(system.clock, tenant, admin=True)
    await system.records.access.create_key(key)
    return text


@asynccontextmanager
async def served_api(system: Any) -> AsyncIterator[Api]:
    """In this process, as `conveyor up` has it."""
    from pyreqwest.client import ClientBuilder

    from bench.belt import TENANT
    from conveyor.api.server import serve
    from conveyor.cli.loop import freeze_loaded_objects

    key = await new_key(system, TENANT)
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(system, "127.0.0.1", 0, stop, url.set_result))
    either: set[asyncio.Future[Any]] = {serving, url}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    try:
        async with ClientBuilder().no_proxy().error_for_status(False).build() as client:
            api = Api(await url, key, client)
            freeze_loaded_objects()
            yield api
    finally:
        stop.set()
        await serving

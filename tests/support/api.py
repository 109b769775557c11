"""A client of a running API, for tests: JSON in and out, and raw bytes where a client would be too polite."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, NamedTuple

from pyreqwest.client import Client, ClientBuilder

from conveyor.api.server import serve
from conveyor.auth.keys import make_key
from conveyor.clock import Clock
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.support.clocks import JumpingClock
from tests.support.places import quick_place


class Answer(NamedTuple):
    """What came back. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Api:
    """A running server, seen by one tenant."""

    def __init__(self, url: str, system: System, key: str, client: Client) -> None:
        self.url = url
        self.system = system
        self.key = key
        self._client = client

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def as_tenant(self, tenant: str, admin: bool = False) -> "Api":
        """The same server with another tenant's key."""
        return Api(self.url, self.system, await new_key(self.system, tenant, admin), self._client)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        auth: bool = True,
    ) -> Answer:
        sent = {"authorization": f"Bearer {self.key}"} if auth else {}
        if body is not None:
            sent["content-type"] = "application/json"
        sent.update(headers or {})
        request = self._client.request(method, self.url + path).headers(sent)
        if body is not None:
            request = request.body_bytes(body)
        response = await request.build().send()
        received = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, received, bytes(await response.bytes()))

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def post(self, path: str, value: Any = None, **options: Any) -> Answer:
        """JSON, or bytes as they are; None is no body at all."""
        body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
        return await self.request("POST", path, body=body, **options)

    async def submit(self, spec: Any, **options: Any) -> Answer:
        return await self.post("/v1/jobs", spec, **options)

    async def upload(self, data: bytes) -> str:
        """Stage a list; its upload_id."""
        promised = await self.post("/v1/uploads", {"size": len(data), "sha256": sha256(data).hexdigest()})
        assert promised.status == 201, promised.body
        stored = await self.put(promised.json["url"], data)
        assert stored.status == 204, stored.body
        upload_id: str = promised.json["upload_id"]
        return upload_id

    async def put(self, url: str, data: bytes, headers: dict[str, str] | None = None) -> Answer:
        """Send a list to its link, without a key."""
        sent = {"content-type": "application/octet-stream", **(headers or {})}
        return await self.request("PUT", url.removeprefix(self.url), body=data, headers=sent, auth=False)


async def new_key(system: System, tenant: str, admin: bool = False) -> str:
    text, key = make_key(system.clock, tenant, admin=admin)
    await system.records.access.create_key(key)
    return text


@asynccontextmanager
async def serving(system: System, host: str = "127.0.0.1") -> AsyncIterator[Api]:
    """A running API on a free port, with a key of tenant `acme`."""
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(system, host, 0, stop, url.set_result))
    await asyncio.wait({running, url}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        async with client() as http:
            yield Api(url.result(), system, await new_key(system, "acme"), http)
    finally:
        stop.set()
        await running


@asynccontextmanager
async def new_server(clock: Clock | None = None, host: str = "127.0.0.1", **settings: Any) -> AsyncIterator[Api]:
    """A running API with data and settings of its own, for a test that takes no fixtures."""
    with quick_place() as place:
        loaded = Settings.load({}, data=place, **settings)
        async with open_system(loaded, clock or JumpingClock()) as system, serving(system, host) as api:
            yield api


def client() -> Client:
    return ClientBuilder().no_proxy().error_for_status(False).follow_redirects(False).build()


async def staged(api: Api, data: bytes) -> str:
    """Upload a list as the answer says: to the API itself, or to the store."""
    promised = await api.post("/v1/uploads", {"size": len(data), "sha256": sha256(data).hexdigest()})
    assert promised.status == 201, promised.body
    async with client() as http:
        request = http.request(promised.json["method"], promised.json["url"]).headers(promised.json["headers"])
        stored = await request.body_bytes(data).build().send()
        assert stored.status in {200, 204}, (stored.status, await stored.text())
    upload_id: str = promised.json["upload_id"]
    return upload_id


async def raw(address: tuple[str, int], *pieces: bytes, pause: float = 0.0, patience: float = 10.0) -> bytes:
    """Send these bytes as they are, and give all that comes back until the server closes or is silent."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
    except ConnectionError:
        pass
    received = bytearray()
    try:
        async with asyncio.timeout(patience):
            while piece := await reader.read(65536):
                received += piece
    except (TimeoutError, ConnectionError):
        pass
    writer.close()
    return bytes(received)


def parsed(received: bytes) -> Answer:
    """The first answer in what came back."""
    head, _, body = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(lines[0].split()[1]), headers, body)

"""The server itself: where it listens, how quickly it answers, and how it stops."""

import asyncio
import dataclasses
import socket
import time

import msgspec
import pytest

from conveyor.api.server import serve
from conveyor.errors import Unavailable
from conveyor.system import System
from tests.support.api import Api, client, new_key, parsed, raw


async def started(system: System, host: str = "127.0.0.1") -> tuple[str, asyncio.Event, "asyncio.Task[None]"]:
    stop = asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(system, host, 0, stop, url.set_result))
    await asyncio.wait({serving, url}, return_when=asyncio.FIRST_COMPLETED)
    return url.result(), stop, serving


async def test_a_port_that_is_taken(system: System) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
            await serve(system, "127.0.0.1", port, asyncio.Event(), lambda _: None)


async def test_a_host_that_is_not_here(system: System) -> None:
    with pytest.raises(Unavailable, match="Cannot listen"):
        await serve(system, "host.invalid", 0, asyncio.Event(), lambda _: None)


async def test_the_url_is_told_and_stopping_frees_the_port(system: System) -> None:
    url, stop, serving = await started(system)
    port = int(url.rpartition(":")[2])
    assert port > 0
    stop.set()
    await asyncio.wait_for(serving, 5)
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_ipv6(system: System) -> None:
    url, stop, serving = await started(system, "::1")
    assert url.startswith("http://[::1]:")
    async with client() as http:
        api = Api(url, system, await new_key(system, "acme"), http)
        assert (await api.get("/v1/jobs")).status == 200
    stop.set()
    await serving


async def test_answers_do_not_wait_for_acknowledgements(server: Api) -> None:
    """With Nagle on, each small answer on a kept connection takes 40 ms."""
    await server.get("/healthz")
    before = time.monotonic()
    for _ in range(50):
        await server.get("/healthz")
    assert time.monotonic() - before < 1.5


async def test_stopping_lets_an_answer_finish(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    url, stop, serving = await started(system)
    asked = asyncio.Event()
    keys = system.records.access.key

    async def slow(key_id: str) -> object:
        asked.set()
        await asyncio.sleep(0.3)
        return await keys(key_id)

    monkeypatch.setattr(system.records.access, "key", slow)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    answering = asyncio.create_task(raw(address, b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n"))
    await asked.wait()
    stop.set()
    assert parsed(await answering).status == 200
    await asyncio.wait_for(serving, 5)


async def test_a_request_that_an_engine_keeps_waiting_is_refused_for_now_at_a_stop(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    settings = msgspec.structs.replace(system.settings, drain_seconds=1)
    url, stop, serving = await started(dataclasses.replace(system, settings=settings))
    monkeypatch.setattr(type(system.records.jobs), "jobs", hang)
    async with client() as http:
        server = Api(url, system, await new_key(system, "acme"), http)
        listing = asyncio.create_task(server.get("/v1/jobs"))
        await asked.wait()
        stop.set()
        answer = await listing
    assert (answer.status, answer.json["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
    await serving


async def test_signals_are_left_alone(system: System) -> None:
    import signal

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    _, stop, serving = await started(system)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    stop.set()
    await serving


async def test_an_idle_connection_stays_as_long_as_the_setting_says(system: System) -> None:
    settings = msgspec.structs.replace(system.settings, keep_alive_seconds=0)
    url, stop, serving = await started(dataclasses.replace(system, settings=settings))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
    # To its end: the server closes the connection by itself.
    assert (await asyncio.wait_for(reader.read(), 30)).startswith(b"HTTP/1.1 200")
    writer.close()
    stop.set()
    await serving
    assert system.settings.keep_alive_seconds > 60

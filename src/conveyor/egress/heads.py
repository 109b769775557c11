"""Heads of responses: status and headers, as they were sent.

The HTTP client shows only ASCII values. The bytes of other values leave it in one way: as a request that carries the
same headers. `read_head` sends such a request to a socket of its own on loopback, and reads the bytes there. Few
responses need it.
"""

import asyncio
import logging
import secrets
from datetime import timedelta
from typing import cast

import msgspec
from pyreqwest.client import Client
from pyreqwest.exceptions import PyreqwestError
from pyreqwest.http import HeaderMap
from pyreqwest.response import Response

# Not structlog's: fetchers import this, and structlog takes longer than the rest of them.
log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_SECONDS = 5.0
_MAX_HEAD = 2 * 1024 * 1024


class ResponseHead(msgspec.Struct, frozen=True, gc=False):
    """Status and headers. `pairs` are all headers in order, `fields` the last of each name, in lower case. Values that
    are not ASCII are decoded as latin-1: each character is one byte."""

    status: int
    pairs: list[tuple[str, str]]
    fields: dict[str, str]


def read_ascii_head(response: Response) -> ResponseHead | None:
    """The head of a response; None if a value is not ASCII. Most heads are read here, without a wait."""
    try:
        # In one call; the items, one by one, take twice as long.
        found = response.headers.dict_multi_value()
    except ValueError:
        return None
    if list not in map(type, found.values()):
        fields = cast("dict[str, str]", found)
        return ResponseHead(response.status, list(fields.items()), fields)
    pairs = [
        (name, value) for name, values in found.items() for value in ([values] if isinstance(values, str) else values)
    ]
    return ResponseHead(response.status, pairs, dict(pairs))


async def read_head(response: Response, client: Client) -> ResponseHead:
    """The head of a response, whatever bytes its values have. `client` may be any client without a proxy."""
    head = read_ascii_head(response)
    if head is not None:
        return head
    headers = response.headers
    names = list(headers.keys())
    values = {name: _ascii_values(headers, name) for name in dict.fromkeys(names)}
    opaque = {name for name, known in values.items() if known is None}
    try:
        sent = await _send_to_self(_only(headers, opaque), client)
    except (OSError, EOFError, TimeoutError, ValueError, PyreqwestError) as error:
        log.warning("headers that are not ASCII cannot be read: %s", error)
        sent = []
    left = {
        name: iter(known if known is not None else [value for own, value in sent if own == name])
        for name, known in values.items()
    }
    pairs = [(name, next(left[name], "")) for name in names]
    return ResponseHead(response.status, pairs, dict(pairs))


def _ascii_values(headers: HeaderMap, name: str) -> list[str] | None:
    try:
        return headers.getall(name)
    except ValueError:
        return None


def _only(headers: HeaderMap, names: set[str]) -> HeaderMap:
    kept = headers.copy()
    for name in {*headers.keys()} - names:
        del kept[name]
    return kept


async def _send_to_self(headers: HeaderMap, client: Client) -> list[tuple[str, str]]:
    """The headers as they are on the wire."""
    arrived: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    # Other processes of this machine reach the socket too.
    path = f"/{secrets.token_hex(16)}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if not arrived.done() and head.startswith(f"GET {path} ".encode()):
                arrived.set_result(head)
            writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
            await writer.drain()
        except (OSError, EOFError, asyncio.LimitOverrunError) as error:
            if not arrived.done():
                arrived.set_exception(error if isinstance(error, OSError) else ValueError(str(error)))
        finally:
            writer.close()

    async with asyncio.timeout(_SECONDS):
        server = await asyncio.start_server(serve, _LOOPBACK, 0, limit=_MAX_HEAD)
        async with server:
            port = server.sockets[0].getsockname()[1]
            request = client.get(f"http://{_LOOPBACK}:{port}{path}").timeout(timedelta(seconds=_SECONDS))
            await request.headers(headers).build().send()
            lines = (await arrived).decode("latin-1").split("\r\n")[1:-2]
    pairs = (line.split(":", 1) for line in lines)
    return [(name.lower(), value.strip(" \t")) for name, value in pairs]

"""Which node serves which slot: one server, the master that Sentinels name, or the masters of a cluster."""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from conveyor.engines.redis.address import RedisAddress, RedisNode

# The timeout of a question about the nodes. There are others to ask.
_QUESTION = 1.0

# The server is unreachable, or loads its data.
UNREACHABLE = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class Topology(Protocol):
    """Finds the nodes."""

    async def masters(self) -> list[RedisNode | None]:
        """The master of each slot, or None where it is unknown. Raises an error of the client."""

    def slot(self, key: str) -> int:
        """The slot of a key: a place in the list."""


def topology_of(address: RedisAddress) -> Topology:
    if address.mode == "cluster":
        return _Cluster(address)
    return _Watched(address) if address.mode == "sentinel" else _Alone(address)


def connect(node: RedisNode, options: dict[str, Any], timeout: float) -> "Redis":
    return Redis(
        host=node.host,
        port=node.port,
        **options,
        # The caller retries: the client's retries would hide which call they belong to.
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout,
        socket_connect_timeout=timeout,
        protocol=2,
    )


class _Alone:
    """One server."""

    def __init__(self, address: RedisAddress) -> None:
        self._node = address.nodes[0]

    async def masters(self) -> list[RedisNode | None]:
        return [self._node]

    def slot(self, key: str) -> int:
        return 0


class _Watched:
    """The master that Sentinels name."""

    def __init__(self, address: RedisAddress) -> None:
        self._service = address.service
        self._sentinels = _Guides(address.nodes, address.sentinel_options())

    async def masters(self) -> list[RedisNode | None]:
        _, answer = await self._sentinels.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if not answer:
            raise exceptions.ConnectionError(f"the Sentinels know no master of the name {self._service!r}")
        host, port = answer
        return [RedisNode(_text(host), int(port))]

    def slot(self, key: str) -> int:
        return 0


class _Cluster:
    """The masters of a cluster, which the hash tag of a key chooses between."""

    def __init__(self, address: RedisAddress) -> None:
        self._seeds = address.nodes
        self._options = address.options()
        self._nodes = _Guides(self._seeds, self._options)

    async def masters(self) -> list[RedisNode | None]:
        asked, ranges = await self._nodes.ask("CLUSTER", "SLOTS")
        masters: list[RedisNode | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, master, *_ in ranges:
            # A node that does not know its own name leaves it out: it is the one that was asked.
            node = RedisNode(_text(master[0]) or asked.host, int(master[1]))
            masters[first : last + 1] = [node] * (last + 1 - first)
        found = sorted({node for node in masters if node is not None})
        # The seeds too: their names may lead to nodes that were added since.
        self._nodes = _Guides((*found, *self._seeds), self._options)
        return masters

    def slot(self, key: str) -> int:
        return int(key_slot(key.encode()))


class _Guides:
    """Nodes of which any one can answer."""

    def __init__(self, nodes: Sequence[RedisNode], options: dict[str, Any]) -> None:
        self._nodes = deque(dict.fromkeys(nodes))
        self._options = options

    async def ask(self, *command: str) -> tuple[RedisNode, Any]:
        """The first answer, and the node that gave it. Another node is asked first the next time: what this one knows
        may be out of date."""
        problem: Exception = exceptions.ConnectionError("no node answers")
        for _ in range(len(self._nodes)):
            node = self._nodes[0]
            self._nodes.rotate(-1)
            client: Any = connect(node, self._options, _QUESTION)
            try:
                return node, await client.execute_command(*command)
            except (exceptions.RedisError, OSError) as error:
                problem = error
            finally:
                # Whoever is cancelled meanwhile leaves no open connection.
                with suppress(Exception):
                    await asyncio.shield(client.aclose())
        raise problem


def _text(value: bytes | str | None) -> str:
    text = value.decode() if isinstance(value, bytes) else value or ""
    return "" if text == "?" else text

"""A Redis, on one node or many, and calls that survive a restart, a failover and slots that move.

Each call goes to the node that serves its keys; the calls to one node share round trips (node_calls.py). The nodes are
found at the start, and again whenever a node is unreachable or sends a call on. A call that is not executed in time
fails.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from redis import exceptions

from conveyor.clock import Clock
from conveyor.engines.redis.address import RedisAddress, RedisNode
from conveyor.engines.redis.node_calls import (
    LONGEST_PAUSE,
    REFUSED,
    Argument,
    NodeCalls,
    RedisCall,
    Script,
    end,
    load_script,
    pause_after,
    say,
)
from conveyor.engines.redis.topology import connect, topology_of

__all__ = ["Argument", "Script", "Server", "load_script", "open_server"]

log = structlog.get_logger()

# The timeout of a call, and of one round trip, in seconds.
PATIENCE = 10.0
_ROUND_TRIP = 3.0
# How often a call is sent on at once, before the nodes are found again.
_MAX_REDIRECTS = 4


class Server:
    """Use `open_server` to create it."""

    def __init__(self, address: RedisAddress, clock: Clock) -> None:
        self._address = address
        self._clock = clock
        self._topology = topology_of(address)
        # The master of each slot; empty until they are found.
        self._masters: list[RedisNode | None] = []
        self._nodes: dict[RedisNode, NodeCalls] = {}
        # Calls whose node is not known, or not ready for them.
        self._unplaced: dict[RedisCall, None] = {}
        self._is_stale = asyncio.Event()
        self._is_stale.set()

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run a script, whose keys have one hash tag. Concurrent calls share one round trip per node. Raises
        EngineFailed."""
        return await self._call(script, (len(keys), *keys, *arguments), self._topology.slot(keys[0]))

    async def command(self, *arguments: Argument) -> Any:
        """Run an idempotent command without keys, on any master."""
        return await self._call(None, arguments, 0)

    async def each(self, *arguments: Argument) -> dict[RedisNode, Any]:
        """Run an idempotent command without keys on every master."""
        # The masters are known once one has answered.
        await self.command("PING")
        nodes = self.masters()
        answers = await asyncio.gather(*(self._call(None, arguments, 0, node) for node in nodes))
        return dict(zip(nodes, answers, strict=True))

    def masters(self) -> list[RedisNode]:
        """The masters that are known."""
        return sorted({node for node in self._masters if node is not None})

    async def _call(
        self, script: Script | None, arguments: tuple[Argument, ...], slot: int, node: RedisNode | None = None
    ) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        call = RedisCall(script, arguments, slot, self._clock.monotonic() + PATIENCE, answer, node)
        self._place(call)
        try:
            return await answer
        finally:
            call.move(None)

    def _place(self, call: RedisCall) -> None:
        """Hand the call to the node that it belongs to."""
        node = call.asking or call.node or (self._masters[call.slot] if self._masters else None)
        if node is None:
            self._set_aside(call)
        else:
            self._calls_to(node).put(call)

    def _set_aside(self, call: RedisCall) -> None:
        """Place the call once the nodes are found again."""
        call.move(self._unplaced)
        self._is_stale.set()

    def _calls_to(self, node: RedisNode) -> NodeCalls:
        if node not in self._nodes:
            client = connect(node, self._address.options(), _ROUND_TRIP)
            self._nodes[node] = NodeCalls(
                node, client, self._clock, self._address.shown, self._redirect, self._is_stale.set, self._place
            )
        return self._nodes[node]

    def _redirect(self, call: RedisCall, error: Exception, by: RedisNode) -> None:
        """A node does not serve the call. It may have named the one that does."""
        call.asking, call.problem = None, say(error)
        call.redirects += 1
        if not isinstance(error, exceptions.AskError) or call.redirects > _MAX_REDIRECTS:
            self._set_aside(call)
            return
        if self._address.mode != "cluster":
            call.fail(f"The Redis at {self._address.shown} is a node of a cluster. Write redis+cluster:// in its URL.")
            return
        # A node that does not know the name of another leaves it out: it has its own.
        node = RedisNode(by.host if error.host in ("", "?") else error.host, error.port)
        if isinstance(error, exceptions.MovedError):
            self._masters[call.slot] = node
            self._is_stale.set()
        else:
            call.asking = node
        self._place(call)

    async def keep_nodes(self) -> None:
        """Find the nodes whenever they may have changed, until cancelled."""
        failures, found_at = 0, self._clock.monotonic()
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            if self._clock.monotonic() - found_at > 2 * LONGEST_PAUSE:
                failures = 0
            problem = await self._find_nodes()
            self._give_up(problem)
            if problem is None:
                await self._place_again()
            else:
                self._is_stale.set()
            found_at = self._clock.monotonic()
            failures += 1
            # Calls that are set aside meanwhile are placed after the pause, which grows while there are any.
            await self._clock.sleep(pause_after(failures, self._clock))

    async def _find_nodes(self) -> str | None:
        try:
            masters = await self._topology.masters()
        except (*REFUSED, exceptions.ResponseError) as error:
            for call in list(self._unplaced):
                call.fail(f"The Redis at {self._address.shown} failed: {say(error)}.")
            return say(error)
        except Exception as error:
            # Whatever it is: this loop must not end.
            return say(error)
        before = self.masters()
        self._masters = masters
        if before and before != self.masters():
            log.info("redis has other masters", server=self._address.shown, masters=[str(n) for n in self.masters()])
        return None

    async def _place_again(self) -> None:
        """Place the calls that wait for a node, or wait at another than theirs."""
        masters = set(self._masters)
        calls = list(self._unplaced)
        for node in [node for node in self._nodes if node not in masters]:
            calls += await self._nodes.pop(node).close()
        for node, there in self._nodes.items():
            calls += [call for call in there.waiting() if (call.node or self._masters[call.slot]) != node]
        for call in calls:
            call.redirects, call.asking = 0, None
            if call.node is not None and call.node not in masters:
                call.fail(f"The Redis at {self._address.shown} has lost the master {call.node}.")
            else:
                self._place(call)

    def _give_up(self, problem: str | None) -> None:
        now = self._clock.monotonic()
        for call in list(self._unplaced):
            call.problem = problem or call.problem
            if call.deadline <= now:
                reason = call.problem or "no node serves its slot"
                call.fail(f"The Redis at {self._address.shown} does not answer: {reason}.")

    async def close(self) -> None:
        calls = list(self._unplaced)
        for node in self._nodes.values():
            calls += await node.close()
        for call in calls:
            call.fail("The connection to the Redis is closed.")


@asynccontextmanager
async def open_server(address: RedisAddress, clock: Clock) -> AsyncIterator[Server]:
    """Connect, yield the server, disconnect."""
    address.check_files()
    server = Server(address, clock)
    keeping = asyncio.create_task(server.keep_nodes(), name="redis nodes")
    try:
        yield server
    finally:
        await end(keeping)
        await server.close()

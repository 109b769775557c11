"""Fetchers without processes, on the clock of a test: what a RemoteLane sends, an executor of the test attempts."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from conveyor.egress.lru import Lru
from conveyor.model import Outcome, TaskRef
from conveyor.process.executors.fetch.fetchers import Fetchers, LeasedReference, Port
from tests.support.small_fleet import Recording

_AHEAD = 48


class LocalFetchers(Fetchers):
    """Takes references ahead of those that run, as fetchers do, and runs no more at once than a lane's width."""

    def __init__(self, executor: Recording) -> None:
        self.executor = executor
        self.members = []
        self.host_seconds = Lru(100)
        self._ports = 0
        self._orders: dict[Port, deque[LeasedReference]] = {}
        self._attempts: dict[Port, dict[asyncio.Task[None], LeasedReference]] = {}

    def target(self, ref: TaskRef) -> str | None:
        return self.executor.target(ref)

    def origin(self, ref: TaskRef) -> str | None:
        return self.executor.origin(ref)

    def capacity(self, port: Port) -> int:
        load = len(self._orders.get(port, ())) + len(self._attempts.get(port, ()))
        return max(0, 2 * port.reach + _AHEAD - load) if port.reach else 0

    def attempts(self, port: Port) -> int:
        return len(self._attempts.get(port, ()))

    def update_width(self, port: Port) -> None:
        self._pump(port)

    def start(self, port: Port, held: Sequence[LeasedReference]) -> None:
        assert len(held) <= self.capacity(port)
        self._orders.setdefault(port, deque()).extend(held)
        self._pump(port)

    def drop(self, port: Port, everything: bool) -> None:
        dropped = list(self._orders.pop(port, ()))
        if everything:
            for task in self._attempts.pop(port, {}):
                task.cancel()
        elif dropped:
            port.on_dropped(dropped)

    async def close(self) -> None:
        pass

    def _pump(self, port: Port) -> None:
        orders, attempts = self._orders.get(port), self._attempts.setdefault(port, {})
        while orders and len(attempts) < max(1, port.reach):
            one = orders.popleft()
            attempts[asyncio.create_task(self._attempt(port, one))] = one

    async def _attempt(self, port: Port, one: Any) -> None:
        outcomes: list[Outcome] = await self.executor.attempt(port.job, [one.ref])
        task = asyncio.current_task()
        assert task is not None
        del self._attempts[port][task]
        port.on_outcomes([one], outcomes)
        self._pump(port)

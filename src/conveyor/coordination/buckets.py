"""Buckets: split housekeeping over processes. Jobs are hashed into a fixed number of buckets, and a process works on
those whose leases it has in the coordinator. Each process counts the others and holds no more than its share, so that
one that starts gets some, and those of one that died go to the others when its leases expire. One process alone has
all.

Every step of housekeeping is idempotent or conditional: buckets save double work and guard nothing. Without the
coordinator, each process works on all of them.
"""

import math
from collections.abc import Callable
from zlib import crc32

import structlog

from conveyor.clock import Clock
from conveyor.coordination.parallel import together
from conveyor.engines.coordinator import Coordinator, Lease
from conveyor.errors import ConveyorError

log = structlog.get_logger()

# As many processes can share the work.
COUNT = 32

_PROCESSES = "housekeepers"
_NO_LIMIT = 1_000_000
# How long a dead process keeps its buckets, and how often a living one renews its leases.
_LEASE_SECONDS = 10.0
_EVERY = 3.0


class Buckets:
    """All buckets: those of a process that shares the work with no other."""

    # The processes that share the work.
    processes = 1

    def owns(self, key: str) -> bool:
        """Whether this process works on the item with this key."""
        return True

    @property
    def leads(self) -> bool:
        """Whether this process does what one process does for all."""
        return True


ALL_BUCKETS = Buckets()


class LeasedBuckets(Buckets):
    """A role: leases buckets for the other roles of its process."""

    def __init__(self, coordinator: Coordinator, clock: Clock) -> None:
        self.name = clock.new_id("buckets")
        self.wake: Callable[[], None] = lambda: None
        self.stopping = False
        self._coordinator = coordinator
        self._leases: dict[int, Lease] = {}
        self._is_away = False
        self.processes = 1

    def owns(self, key: str) -> bool:
        return self._is_away or crc32(key.encode()) % COUNT in self._leases

    @property
    def leads(self) -> bool:
        return self._is_away or 0 in self._leases

    async def tick(self) -> float:
        try:
            await self._share()
        except ConveyorError as error:
            if not self._is_away:
                log.warning("no leases on buckets: this process works on all of them", error=str(error))
            self._is_away, self.processes = True, 1
        else:
            self._is_away = False
        return _EVERY

    async def close(self) -> None:
        """Release everything, so that the other processes need not wait."""
        leases, self._leases = list(self._leases.values()), {}
        try:
            await self._coordinator.acquire(_PROCESSES, self.name, 0, _NO_LIMIT, _LEASE_SECONDS)
            await together(*(self._coordinator.release(lease) for lease in leases))
        except ConveyorError as error:
            log.warning("buckets not released; their leases expire", error=str(error))

    async def _share(self) -> None:
        """Count the processes; keep the leases up to this one's share, and take what it lacks from the free ones."""
        await self._coordinator.acquire(_PROCESSES, self.name, 1, _NO_LIMIT, _LEASE_SECONDS)
        self.processes = max(1, await self._coordinator.permits_in_use(_PROCESSES))
        share = math.ceil(COUNT / self.processes)
        await self._renew()
        await self._release_surplus(share)
        # From a place of its own, so that processes that start together do not all ask for the same.
        first = crc32(self.name.encode())
        free = [number for i in range(COUNT) if (number := (first + i) % COUNT) not in self._leases]
        while free and len(self._leases) < share:
            missing = share - len(self._leases)
            asked, free = free[:missing], free[missing:]
            await together(*(self._lease(number) for number in asked))

    async def _renew(self) -> None:
        async def renew(number: int, lease: Lease) -> None:
            if not await self._coordinator.renew(lease, _LEASE_SECONDS):
                self._leases.pop(number, None)

        await together(*(renew(number, lease) for number, lease in list(self._leases.items())))

    async def _release_surplus(self, share: int) -> None:
        surplus = [self._leases.pop(number) for number in sorted(self._leases)[share:]]
        await together(*(self._coordinator.release(lease) for lease in surplus))

    async def _lease(self, number: int) -> None:
        lease = await self._coordinator.lease(f"{_PROCESSES}:{number}", self.name, _LEASE_SECONDS)
        if lease is not None:
            self._leases[number] = lease

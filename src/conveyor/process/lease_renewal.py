"""LeaseRenewal: keeps the messages that a worker has in flight. It needs the queue and nothing else: whatever else does
not answer, no message is redelivered while its tasks run."""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from conveyor.clock import Clock
from conveyor.engines.queue import Queue, QueueName
from conveyor.process.recorder import LeasedChunk

log = structlog.get_logger()

# Renewals before a lease expires; a failed one is repeated sooner.
_PER_LEASE = 3
_RETRIES_PER_LEASE = 12


class LeaseRenewal:
    """Extends leases three times before they expire, each queue by itself: one that does not answer delays no other."""

    def __init__(
        self, queue: Queue, clock: Clock, lease: float, in_flight: Callable[[], Iterable[LeasedChunk]]
    ) -> None:
        self._queue = queue
        self._clock = clock
        self._lease = lease
        self._in_flight = in_flight
        self._running: asyncio.Task[None] | None = None
        # Queues whose leases are being extended.
        self._extending: dict[QueueName, asyncio.Task[None]] = {}

    def start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="lease renewal")

    async def close(self) -> None:
        tasks = [*self._extending.values(), *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def renew(self) -> None:
        """Extend all leases once."""
        self._extend_all()
        if self._extending:
            await asyncio.wait(list(self._extending.values()))

    async def _run(self) -> None:
        while True:
            await self._clock.sleep(self._lease / _PER_LEASE)
            self._extend_all()

    def _extend_all(self) -> None:
        leased = [chunk for chunk in self._in_flight() if chunk.left > 0 and not chunk.lost]
        for queue, chunks in by_queue(leased).items():
            if queue not in self._extending:
                self._extending[queue] = asyncio.create_task(self._extend(queue, chunks))

    async def _extend(self, queue: QueueName, chunks: list[LeasedChunk]) -> None:
        try:
            by_receipt = {chunk.receipt: chunk for chunk in chunks}
            for receipt in await self._extended(queue, list(by_receipt)):
                # Acknowledged meanwhile, or expired. Either way no task of it may start here.
                by_receipt[receipt].lost = True
        finally:
            del self._extending[queue]

    async def _extended(self, queue: QueueName, receipts: list[str]) -> frozenset[str]:
        """Extend until it succeeds or the next renewal is due. Returns the stale receipts."""
        for _ in range(_RETRIES_PER_LEASE // _PER_LEASE):
            try:
                return await self._queue.extend(queue, receipts, self._lease)
            except Exception as error:
                log.warning("leases not extended; trying again", queue=queue, messages=len(receipts), error=repr(error))
                await self._clock.sleep(self._lease / _RETRIES_PER_LEASE)
        return frozenset()


def by_queue(chunks: Iterable[LeasedChunk]) -> dict[QueueName, list[LeasedChunk]]:
    """Messages by the queue that they are from."""
    queues: dict[QueueName, list[LeasedChunk]] = {}
    for chunk in chunks:
        queues.setdefault(chunk.queue, []).append(chunk)
    return queues

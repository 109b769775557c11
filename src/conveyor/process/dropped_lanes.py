"""DroppedLanes: what is left to do for lanes that a worker has stopped: release their messages once their outcomes are
written, and keep their slots while calls go on."""

from collections.abc import Iterator, Mapping

import structlog

from conveyor.coordination.limits import run_slots
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.queue import Queue
from conveyor.errors import ConveyorError
from conveyor.model import Job, JobKind, RunId
from conveyor.process.executors import Executor
from conveyor.process.lane import Lane
from conveyor.process.lease_renewal import by_queue
from conveyor.process.recorder import LeasedChunk

log = structlog.get_logger()

_NO_LIMIT = 1 << 40


class DroppedLanes:
    """The stopped lanes of one worker. `lanes` are those that work."""

    def __init__(
        self,
        queue: Queue,
        coordinator: Coordinator,
        executors: Mapping[JobKind, Executor],
        lanes: Mapping[RunId, Lane],
        holder: str,
        lease: float,
    ) -> None:
        self._queue = queue
        self._coordinator = coordinator
        self._executors = executors
        self._lanes = lanes
        self._holder = holder
        self._lease = lease
        # Lanes with the unfinished messages that they still lease.
        self._leaving: list[tuple[Lane, list[LeasedChunk]]] = []
        # Runs whose messages are released while calls of them go on (Executor.lingering).
        self._lingering: dict[RunId, Job] = {}
        # Recovered and new tasks that the lanes had taken.
        self.take_counts = (0, 0)

    def __len__(self) -> int:
        return len(self._leaving)

    @property
    def has_lingering(self) -> bool:
        return bool(self._lingering)

    def add(self, lane: Lane, unfinished: list[LeasedChunk]) -> None:
        """A lane was stopped with these messages."""
        recovered, new = lane.take_counts
        self.take_counts = (self.take_counts[0] + recovered, self.take_counts[1] + new)
        self._leaving.append((lane, unfinished))

    def in_flight(self) -> Iterator[LeasedChunk]:
        for _, chunks in self._leaving:
            yield from chunks

    async def release_written(self) -> None:
        """Release messages once all their outcomes are written. Until then their leases show the sweeper that
        references may still be sent to the queues of a finished run."""
        leaving, self._leaving = self._leaving, []
        for lane, chunks in leaving:
            if any(chunk.unwritten for chunk in chunks):
                self._leaving.append((lane, chunks))
                continue
            # A finished one was acknowledged with its last outcome; if that failed, its next receiver does it.
            await self.release([chunk for chunk in chunks if chunk.left > 0])
            for chunk in chunks:
                chunk.lost = True
            if lane.was_fed:
                self._lingering[lane.job.run.run_id] = lane.job

    async def release(self, chunks: list[LeasedChunk]) -> None:
        """Return messages to their queues."""
        for queue, group in by_queue(chunks).items():
            await self._queue.release(queue, [chunk.receipt for chunk in group], 0.0)

    async def keep_slots(self) -> None:
        """Keep the slots of stopped runs until no call of them goes on: a job that replaces another waits for that."""
        for run_id, job in list(self._lingering.items()):
            if run_id in self._lanes:
                # It was resumed: its lane counts its slots.
                self._lingering.pop(run_id, None)
                continue
            count = self._executors[job.kind].lingering(run_id)
            if job.options.extract is not None and JobKind.PYTHON in self._executors:
                count += self._executors[JobKind.PYTHON].lingering(run_id)
            await self._set_slots(run_id, count)
            if count == 0:
                self._lingering.pop(run_id, None)

    async def close(self) -> None:
        """Release everything. The executors close next, and end what lingers."""
        await self.release_written()
        try:
            for run_id in self._lingering:
                await self._set_slots(run_id, 0)
        except ConveyorError as error:
            log.warning("slots not freed; they expire", error=str(error))

    async def _set_slots(self, run_id: RunId, count: int) -> None:
        await self._coordinator.acquire(run_slots(run_id), self._holder, count, _NO_LIMIT, self._lease)

"""Arrivals: messages that the queue engine has received for this process and no lane has taken yet."""

from collections.abc import Iterable

from conveyor.engines.queue import KeepsArrivals, Queue, QueueName, run_queues
from conveyor.model import RunId


class Arrivals:
    """Of an engine that keeps no arrivals there are none."""

    def __init__(self, queue: Queue) -> None:
        self._keeper = queue if isinstance(queue, KeepsArrivals) else None

    def has(self, queue: QueueName) -> bool:
        return self._keeper is not None and self._keeper.has_arrived(queue)

    async def give_back(self, run_ids: Iterable[RunId]) -> None:
        """Let others have the messages of runs that this worker does not serve."""
        if self._keeper is not None:
            for queue in (queue for run_id in run_ids for queue in run_queues(run_id)):
                if self.has(queue):
                    await self._keeper.give_back(queue)

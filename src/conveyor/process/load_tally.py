"""LoadTally: how many tasks one worker finished and attempts it retried, by tenant and minute, until it is shared."""

from collections import Counter
from collections.abc import Iterable

from conveyor.coordination.load_counters import FAILED, MINUTE, RETRIED, SUCCEEDED, add_load
from conveyor.engines.coordinator import Coordinator
from conveyor.model import TenantId
from conveyor.process.recorded_outcomes import RecordedOutcome

_SHARE_SECONDS = 5.0
# Minutes that wait for a coordinator that fails.
_MAX_MINUTES = 10


class LoadTally:
    """One for each worker."""

    def __init__(self, coordinator: Coordinator, worker: str) -> None:
        self._coordinator = coordinator
        self._worker = worker
        self._fresh: dict[int, Counter[tuple[str, TenantId]]] = {}
        # What is being shared, under the number that it is applied once by.
        self._sharing: tuple[int, int, Counter[tuple[str, TenantId]]] | None = None
        self._number = 0

    def add(self, tenant: TenantId, records: Iterable[RecordedOutcome], finished: int, now: float) -> None:
        """Add outcomes of which so many tasks finished. Those without a record succeeded."""
        failed = retried = 0
        for record in records:
            if record.outcome.error is not None:
                if record.delay is None:
                    failed += 1
                else:
                    retried += 1
        failed = min(failed, finished)
        counts = self._fresh.setdefault(int(now // MINUTE), Counter())
        for field, amount in ((SUCCEEDED, finished - failed), (FAILED, failed), (RETRIED, retried)):
            if amount:
                counts[field, tenant] += amount
        while len(self._fresh) > _MAX_MINUTES:
            del self._fresh[min(self._fresh)]

    async def share(self) -> float:
        """Share what is new, in one call for each minute. Returns the seconds until the next time."""
        while self._sharing is not None or any(self._fresh.values()):
            if self._sharing is None:
                minute = min(minute for minute, counts in self._fresh.items() if counts)
                self._number += 1
                self._sharing = (self._number, minute, self._fresh.pop(minute))
            number, minute, counts = self._sharing
            await add_load(self._coordinator, minute, counts, f"{self._worker}:{number}")
            self._sharing = None
        self._fresh.clear()
        return _SHARE_SECONDS

"""Load keeper: a part of the sampler. It takes what workers counted in the last minutes and what waits now, and keeps
it in the documents of the tenants (jobs/load_history.py)."""

from collections import Counter
from collections.abc import Mapping, Sequence

from conveyor.coordination.isolation import Isolation
from conveyor.coordination.load_counters import FIELDS, MINUTE, read_load
from conveyor.jobs.load_history import LoadPoint, add_to_load
from conveyor.model import Job, RunId, TenantId
from conveyor.recover.backlog import RunSample
from conveyor.system import System

# Minutes that are looked at: a worker shares what it counted some seconds later.
_MINUTES = 2
# Tenants whose documents one pass writes.
_TENANTS = 200


class LoadKeeper:
    """Used by the process that leads."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._isolation = Isolation("load", system.clock)

    async def keep(self, jobs: Sequence[Job], runs: Mapping[RunId, RunSample]) -> None:
        """Keep what is known of the last minutes."""
        now = self._system.clock.now()
        minute = int(now // MINUTE)
        seen: dict[TenantId, dict[int, LoadPoint]] = {}
        for number in range(minute - _MINUTES + 1, minute + 1):
            for tenant, counts in (await read_load(self._system.coordinator, number)).items():
                point = LoadPoint(*(counts[field] for field in FIELDS))
                seen.setdefault(tenant, {})[number] = point
        for tenant, (waiting, running) in _waiting(jobs, runs).items():
            points = seen.setdefault(tenant, {})
            point = LoadPoint(0, 0, 0, waiting, running)
            points[minute] = points.get(minute, LoadPoint()).raised_to(point)

        async def write(tenant: TenantId) -> None:
            await add_to_load(self._system.records.documents, tenant, seen[tenant], now)

        self._isolation.forget_others(set(seen))
        await self._isolation.each(sorted(seen)[:_TENANTS], str, write)


def _waiting(jobs: Sequence[Job], runs: Mapping[RunId, RunSample]) -> dict[TenantId, tuple[int, int]]:
    """Tasks that wait and that run, by tenant, of the runs that were sampled."""
    waiting: Counter[TenantId] = Counter()
    running: Counter[TenantId] = Counter()
    for job in jobs:
        sample = runs.get(job.run.run_id)
        if sample is not None:
            running[job.tenant] += sample.running
            waiting[job.tenant] += max(0, sample.unfinished - sample.running)
    return {tenant: (waiting[tenant], running[tenant]) for tenant in {*waiting, *running}}

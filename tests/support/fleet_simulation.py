"""A fleet in one process, without tasks: the worker's own policies (seats, slots, permits) over the ready index, and
runs that are nothing but a number of tasks. A step is a quarter of a second, in which a slot does one task."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

from conveyor.coordination.limits import run_slots
from conveyor.coordination.ready_runs import rebuild
from conveyor.engines.sqlite.coordinator import SqliteCoordinator
from conveyor.model import Job, JobKind, RunId, TenantId
from conveyor.process.dispatch import Demand, deal
from conveyor.process.run_permits import PermitWish, RunPermits
from conveyor.process.seats import Seats
from conveyor.process.slot_times import SlotTimes
from tests.support.clocks import ManualClock

STEP = 0.25
LEASE = 30.0
_BEHIND = 0.5
_QUIET = 1.0


class SimulatedRuns:
    """The jobs as Records know them, and how many tasks of each wait."""

    def __init__(self) -> None:
        self.jobs: dict[RunId, Job] = {}
        self.waiting: Counter[RunId] = Counter()
        self.done: Counter[TenantId] = Counter()
        self.started: dict[RunId, float] = {}
        self.reads = 0

    async def jobs_of(self, keys: Iterable[tuple[TenantId, str]]) -> list[Job]:
        self.reads += 1
        wanted = {job_id for _, job_id in keys}
        return [job for job in self.jobs.values() if job.job_id in wanted]

    async def active_jobs(self) -> list[Job]:
        return list(self.jobs.values())


class SimulatedWorker:
    """What a worker does between two looks."""

    def __init__(self, name: str, slots: int, runs: SimulatedRuns, coordinator: SqliteCoordinator, clock: Any) -> None:
        self.name = name
        self._slots = slots
        self._runs = runs
        self._clock = clock
        self._times = SlotTimes(STEP)
        self.held: dict[RunId, Job] = {}
        self._quiet_since: dict[RunId, float] = {}
        self._help_at: dict[RunId, float] = {}
        self._wanted = 0
        self._permits = RunPermits(coordinator, clock, name, LEASE)
        self._seats = Seats(
            coordinator, cast(Any, runs), cast(Any, None), clock, name, LEASE, list(JobKind), lambda run_id: False
        )

    async def step(self) -> None:
        while True:
            changes = await self._seats.look(free_slots=max(0, self._slots - self._wanted), slots=self._slots)
            unseated = [run_id for run_id in changes.unseated if not self._seats.reclaim(run_id)]
            for run_id in (*changes.closed, *unseated):
                self.held.pop(run_id, None)
            self.held |= {job.run.run_id: job for job in changes.opened}
            self._wanted += len(changes.opened)
            if not changes.is_more:
                break
        await self._work()

    async def _work(self) -> None:
        now = self._clock.monotonic()
        waiting = self._runs.waiting
        self._times.update([(job.tenant, run_id) for run_id, job in self.held.items()], now)
        demands = [self._demand(job, waiting[run_id]) for run_id, job in self.held.items()]
        widths = deal(demands, self._slots)
        granted = await self._permits.acquire(
            {
                run_slots(run_id): PermitWish(widths.get(run_id, 0), job.options.concurrency)
                for run_id, job in self.held.items()
            }
        )
        self._wanted = sum(max(1, each.want) for each in demands)
        for each in demands:
            run_id, permits = each.run_id, granted[run_slots(each.run_id)]
            self._do(run_id, min(permits, waiting[run_id]), now)
            if permits >= widths.get(run_id, 0) < each.want:
                if now >= self._help_at.setdefault(run_id, now + _BEHIND):
                    self._seats.ask_help(run_id)
                    self._help_at[run_id] = now + 5.0
            else:
                self._help_at.pop(run_id, None)
            is_starved = permits == 0 < widths.get(run_id, 0)
            if waiting[run_id] and not is_starved:
                self._quiet_since.pop(run_id, None)
            elif now - self._quiet_since.setdefault(run_id, now) >= _QUIET:
                self._leave(run_id, _QUIET if is_starved else None)

    def _demand(self, job: Job, waiting: int) -> Demand:
        run_id = job.run.run_id
        tenant_served, served = self._times.order(job.tenant, run_id)
        return Demand(
            job.tenant, run_id, min(waiting, job.options.concurrency), served=served, tenant_served=tenant_served
        )

    def _do(self, run_id: RunId, count: int, now: float) -> None:
        if count:
            self._runs.started.setdefault(run_id, now)
            self._runs.waiting[run_id] -= count
            tenant = self.held[run_id].tenant
            self._runs.done[tenant] += count
            self._times.charge(tenant, run_id, count * STEP)

    def _leave(self, run_id: RunId, delay: float | None) -> None:
        self._seats.leave(run_id, delay, was_busy=False)
        self._permits.forget(run_slots(run_id))
        del self.held[run_id], self._quiet_since[run_id]


class SimulatedFleet:
    """So many workers with so many slots each."""

    def __init__(self, workers: int, slots: int) -> None:
        self.clock = ManualClock()
        self.coordinator = SqliteCoordinator(cast(Any, None), self.clock)
        self.runs = SimulatedRuns()
        self.workers = [
            SimulatedWorker(f"worker {n}", slots, self.runs, self.coordinator, self.clock) for n in range(workers)
        ]

    async def add(self, jobs: Sequence[Job], tasks: int) -> None:
        for job in jobs:
            self.runs.jobs[job.run.run_id] = job
            self.runs.waiting[job.run.run_id] = tasks
        await rebuild(self.coordinator, self.runs.jobs.values())

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP)):
            for worker in self.workers:
                await worker.step()
            self.clock.advance(STEP)

    def seats(self) -> Counter[RunId]:
        """How many workers serve each run."""
        return Counter(run_id for worker in self.workers for run_id in worker.held)


def jain_index(shares: Iterable[float]) -> float:
    """1 if all shares are equal, 1/n if one has everything."""
    values = list(shares)
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))

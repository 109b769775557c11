"""The ready index in memory: the embedded system has one process."""

import heapq
import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from math import inf

import msgspec

from conveyor.clock import Clock
from conveyor.engines.ready import (
    MAX_DUE_TIMES,
    Look,
    LookRequest,
    ReadyMark,
    SeatAction,
    SeatedRun,
    SeatNews,
)
from conveyor.model import JobId, RunId, TenantId

_Heap = list[tuple[float, RunId]]

# Due tenants among which one look chooses.
_CANDIDATES = 256


class _Entry(msgspec.Struct):
    """A run. `due_times` are those of its messages, sorted; `recheck_at` is when the last worker wanted it to be looked
    at again; `help_at` is when a worker asked for help."""

    tenant: TenantId
    job_id: JobId
    due_times: list[float]
    pause: float = 0.0
    seats: set[str] = msgspec.field(default_factory=set)
    recheck_at: float = inf
    help_at: float = inf
    is_finished: bool = False


class _Tenant(msgspec.Struct):
    """Heaps of listed runs, with entries that are no longer valid: runs without a worker, and runs whose workers asked
    for help. When the first of them is due. And when the tenant was last served, as a count."""

    runs: _Heap = msgspec.field(default_factory=list)
    helps: _Heap = msgspec.field(default_factory=list)
    first: float = inf
    served: int = 0


class _WorkerSeats(msgspec.Struct):
    """A worker: when its seats expire, and changes of its runs that it may not have seen."""

    expires_at: float = 0.0
    runs: dict[RunId, None] = msgspec.field(default_factory=dict)
    changed: dict[RunId, int] = msgspec.field(default_factory=dict)


class MemoryReadyIndex:
    """A ReadyIndex."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[RunId, _Entry] = {}
        # When each listed run is due, and whether its workers asked for help.
        self._listed: dict[RunId, tuple[float, bool]] = {}
        self._tenants: dict[TenantId, _Tenant] = {}
        # Tenants by the time when their first run is due.
        self._due: list[tuple[float, TenantId]] = []
        self._workers: dict[str, _WorkerSeats] = {}
        self._changes = itertools.count(1)
        self._turns = itertools.count(1)
        self._looks = 0
        self._is_built = False

    async def mark_runs(self, marks: Sequence[ReadyMark], *, is_built: bool = False) -> None:
        now = self._clock.monotonic()
        for mark in marks:
            self._mark(mark, now)
        self._is_built = self._is_built or is_built

    async def hasten_tenant(self, tenant: TenantId) -> None:
        now = self._clock.monotonic()
        for run_id in [run_id for run_id, (at, _) in self._listed.items() if at > now]:
            entry = self._entries[run_id]
            if entry.tenant == tenant:
                _add_due(entry, now, now)
                self._list(run_id, entry)

    async def known_runs(self, run_ids: Collection[RunId]) -> frozenset[RunId]:
        return frozenset(run_id for run_id in run_ids if run_id in self._entries)

    async def look_for_runs(self, request: LookRequest) -> Look:
        now = self._clock.monotonic()
        self._free_seats_of_dead(now, request.visibility)
        worker = self._workers.setdefault(request.holder, _WorkerSeats())
        worker.expires_at = now + request.ttl
        for news in request.news:
            self._apply(news, request.holder, worker, now)
        worker.changed = {run_id: at for run_id, at in worker.changed.items() if at > request.since}
        seats = None
        if len(worker.runs) != request.seat_count:
            seats = [self._seated(run_id) for run_id in worker.runs]
        taken = [self._seat(run_id, request.holder, worker, now) for run_id in self._take(request, now)]
        changed = list(worker.changed)
        seen = max(worker.changed.values(), default=request.since)
        if request.ttl <= 0 and not worker.runs:
            del self._workers[request.holder]
        return Look(taken, changed, seen, self._is_built, seats)

    def _mark(self, mark: ReadyMark, now: float) -> None:
        entry = self._entries.get(mark.run_id)
        if entry is None:
            if not mark.tenant or mark.is_finished:
                return
            entry = self._entries[mark.run_id] = _Entry(mark.tenant, mark.job_id, [])
        if mark.is_changed or mark.is_finished:
            change = next(self._changes)
            for holder in entry.seats:
                self._workers[holder].changed[mark.run_id] = change
        # A message for a run that had finished: it may have been resumed. Whoever takes it looks.
        entry.is_finished = mark.is_finished or (entry.is_finished and mark.delay == inf)
        if mark.delay < inf and not (mark.is_restored and (entry.seats or mark.run_id in self._listed)):
            _add_due(entry, now + mark.delay, now)
            entry.pause = 0.0
        self._list(mark.run_id, entry)

    def _apply(self, news: SeatNews, holder: str, worker: _WorkerSeats, now: float) -> None:
        entry = self._entries.get(news.run_id)
        if entry is None and news.action is SeatAction.CLAIM:
            entry = self._entries[news.run_id] = _Entry(news.tenant, news.job_id, [])
        if entry is None:
            return
        if news.action is SeatAction.CLAIM:
            entry.seats.add(holder)
            worker.runs[news.run_id] = None
        elif news.action is SeatAction.HELP:
            entry.help_at = min(entry.help_at, now)
        else:
            entry.seats.discard(holder)
            worker.runs.pop(news.run_id, None)
            worker.changed.pop(news.run_id, None)
            entry.pause = news.pause
            entry.is_finished = entry.is_finished or news.action is SeatAction.FINISH
            entry.recheck_at = now + news.delay
        self._list(news.run_id, entry)

    def _free_seats_of_dead(self, now: float, visibility: float) -> None:
        for holder in [holder for holder, worker in self._workers.items() if worker.expires_at <= now]:
            for run_id in self._workers.pop(holder).runs:
                entry = self._entries[run_id]
                entry.seats.discard(holder)
                # What waits in the queue is due now; what the dead worker had in flight is visible later.
                for at in (now, now + visibility):
                    _add_due(entry, at, now)
                self._list(run_id, entry)

    def _take(self, request: LookRequest, now: float) -> Iterator[RunId]:
        """Choose runs, of the tenants in turn. Runs that the worker may not take keep their places."""
        left = request.limit
        skipped, unjoined = frozenset(request.skipped), frozenset(request.unjoined)
        by_default = now - request.overdue
        of_unjoined = by_default if request.unjoined_overdue is None else now - request.unjoined_overdue
        aside: list[tuple[TenantId, _Tenant, RunId]] = []
        turn = sorted(self._candidates(max(by_default, of_unjoined)), key=lambda name: self._tenants[name].served)
        while left > 0 and turn:
            names, turn = turn, []
            for name in names:
                if left == 0:
                    break
                tenant, may_join = self._tenants.get(name), name not in unjoined
                latest = by_default if may_join else of_unjoined
                while tenant and (heap := self._earliest(tenant, may_join)) and heap[0][0] <= latest:
                    _, run_id = heapq.heappop(heap)
                    if run_id in skipped or request.holder in self._entries[run_id].seats:
                        aside.append((name, tenant, run_id))
                        continue
                    tenant.served = next(self._turns)
                    turn.append(name)
                    left -= 1
                    yield run_id
                    break
        for name, tenant, run_id in aside:
            self._push(run_id, name, self._tenants.setdefault(name, tenant))

    def _candidates(self, latest: float) -> list[TenantId]:
        """Of the due tenants: all, or of more than _CANDIDATES a quarter each of those that have waited for longest and
        of the newest, and others from a place that changes with every look."""
        count = bisect_right(self._due, latest, key=_time_of)
        if count <= _CANDIDATES:
            return [name for _, name in self._due[:count]]
        quarter = _CANDIDATES // 4
        self._looks += 1
        start = quarter + self._looks * 2 * quarter % (count - _CANDIDATES + 1)
        spans = ((0, quarter), (start, start + 2 * quarter), (count - quarter, count))
        return [name for first, last in spans for _, name in self._due[first:last]]

    def _seat(self, run_id: RunId, holder: str, worker: _WorkerSeats, now: float) -> SeatedRun:
        entry = self._entries[run_id]
        entry.seats.add(holder)
        worker.runs[run_id] = None
        entry.help_at = inf
        entry.due_times = [at for at in entry.due_times if at > now]
        entry.recheck_at = inf
        self._list(run_id, entry)
        return self._seated(run_id)

    def _seated(self, run_id: RunId) -> SeatedRun:
        entry = self._entries[run_id]
        return SeatedRun(run_id, entry.tenant, entry.job_id, entry.pause)

    def _earliest(self, tenant: _Tenant, may_join: bool) -> _Heap:
        """The heap whose first entry is the tenant's run that is due first. Runs with a worker count if they may be
        joined."""
        runs = self._clean(tenant.runs, is_help=False)
        helps = self._clean(tenant.helps, is_help=True) if may_join else []
        return helps if not runs or (helps and helps[0] < runs[0]) else runs

    def _clean(self, heap: _Heap, *, is_help: bool) -> _Heap:
        """Remove invalid entries from the top of a heap."""
        while heap and self._listed.get(heap[0][1]) != (heap[0][0], is_help):
            heapq.heappop(heap)
        return heap

    def _list(self, run_id: RunId, entry: _Entry) -> None:
        """List the run at the time that its entry says, or not at all."""
        at = entry.help_at if entry.seats else min(*entry.due_times[:1], entry.recheck_at, inf)
        if entry.is_finished and not entry.seats:
            del self._entries[run_id]
        if entry.is_finished or at == inf:
            if self._listed.pop(run_id, None) is not None:
                self._list_tenant(entry.tenant)
            return
        is_help = bool(entry.seats)
        if self._listed.get(run_id) == (at, is_help):
            return
        self._listed[run_id] = at, is_help
        self._push(run_id, entry.tenant, self._tenants.setdefault(entry.tenant, _Tenant()))

    def _push(self, run_id: RunId, name: TenantId, tenant: _Tenant) -> None:
        at, is_help = self._listed[run_id]
        heapq.heappush(tenant.helps if is_help else tenant.runs, (at, run_id))
        self._list_tenant(name)

    def _list_tenant(self, name: TenantId) -> None:
        """List the tenant at the time when its first run is due, or not at all."""
        tenant = self._tenants.get(name)
        if tenant is None:
            return
        heap = self._earliest(tenant, may_join=True)
        first = heap[0][0] if heap else inf
        if first != tenant.first:
            if tenant.first < inf:
                del self._due[bisect_left(self._due, (tenant.first, name))]
            if first < inf:
                insort(self._due, (first, name))
            tenant.first = first
        if first == inf:
            del self._tenants[name]


def _time_of(due: tuple[float, TenantId]) -> float:
    return due[0]


def _add_due(entry: _Entry, at: float, now: float) -> None:
    """Add the time of a message. Of too many, one between two that are close together, as seen from now, is dropped;
    the first and the last stay."""
    times = entry.due_times
    if at in times or (at <= now and times and times[0] <= now):
        return
    insort(times, at)
    if len(times) > MAX_DUE_TIMES:
        # A time that has passed is as good as the first.
        spans = (
            0.0 if times[i] <= now else (times[i + 1] - times[i - 1]) / (times[i] - now + 1.0)
            for i in range(1, len(times) - 1)
        )
        del times[min(enumerate(spans, 1), key=lambda span: span[1])[0]]

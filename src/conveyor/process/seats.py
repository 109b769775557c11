"""Seats: the runs that one worker serves. It takes them from the ready index, reads their jobs, and reads those again
that have changed. What it finds goes to the worker, which opens and closes lanes.

A look is one call, whose answer depends on what is due. If the index does not answer for long, the worker reads the
unfinished jobs instead, at a slow pace.
"""

from collections.abc import Callable, Collection, Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.coordination.ready_runs import next_pause, rebuild
from conveyor.engines.coordinator import Coordinator
from conveyor.engines.ready import Look, LookRequest, SeatAction, SeatedRun, SeatNews
from conveyor.engines.records import JobRecords
from conveyor.engines.tasks import Tasks, is_reachable
from conveyor.errors import ConveyorError
from conveyor.model import Job, JobId, JobKind, RunId, TenantId
from conveyor.states import ENDED, WORKABLE

log = structlog.get_logger()

# Runs that one look takes.
TAKE_LIMIT = 64
# How long a run must be overdue before a worker without a free slot takes it: longer if the worker serves more tenants
# than it has slots, or many more runs.
_PATIENCE = 0.25
_RUNS_PER_SLOT = 8
# No run is overdue by so many seconds.
_NEVER = 1e9
# The seats of a worker that died are free after this long, or a lease if that is shorter.
_SEAT_SECONDS = 10.0
# Jobs are read again after this long even if no change was marked: marks may be lost.
_REREAD_SECONDS = 10.0
# How long a worker leaves a run alone that it cannot serve.
_SKIP_SECONDS = 60.0
# How long a worker adopts no run that it had to refuse.
_DECLINE_SECONDS = 5.0
# Runs that a worker remembers after it has left them, and for how long: longer than a poll lasts.
_MAX_LEFT = 1000
_LEFT_SECONDS = 60.0
# One worker rebuilds the index at a time.
_BUILD = "ready:build"
_BUILD_SECONDS = 30.0
# After this long without the index, the worker reads the unfinished jobs, this often.
_AWAY_SECONDS = 10.0
_FALL_BACK_SECONDS = 5.0


class SeatChanges(msgspec.Struct):
    """What a look changed: jobs to serve, jobs that have changed, runs to leave."""

    opened: list[Job] = msgspec.field(default_factory=list)
    changed: list[Job] = msgspec.field(default_factory=list)
    closed: list[RunId] = msgspec.field(default_factory=list)
    # Runs whose seats were lost while nothing was in flight: `reclaim` says whether to leave them.
    unseated: list[RunId] = msgspec.field(default_factory=list)
    # Runs that this worker does not serve though they were due, or had messages for it.
    refused: list[RunId] = msgspec.field(default_factory=list)
    # More runs may be due.
    is_more: bool = False

    def __bool__(self) -> bool:
        """Whether anything has changed."""
        return bool(self.opened or self.changed or self.closed or self.unseated or self.refused)


class Seats:
    """`is_busy` says whether tasks of a run are in flight here."""

    def __init__(
        self,
        coordinator: Coordinator,
        jobs: JobRecords,
        tasks: Tasks,
        clock: Clock,
        holder: str,
        lease: float,
        kinds: Collection[JobKind],
        is_busy: Callable[[RunId], bool],
    ) -> None:
        self._coordinator = coordinator
        self._jobs = jobs
        self._tasks = tasks
        self._clock = clock
        self._holder = holder
        self._lease = lease
        self._kinds = kinds
        self._is_busy = is_busy
        # The jobs of all seats, when each was read, and the pause that its run came with.
        self._held: dict[RunId, Job] = {}
        self._read_at: dict[RunId, float] = {}
        self._pauses: dict[RunId, float] = {}
        # Seats whose jobs could not be read yet.
        self._unread: dict[RunId, SeatedRun] = {}
        self._changed: set[RunId] = set()
        self._news: dict[RunId, SeatNews] = {}
        self._skipped: dict[RunId, float] = {}
        # Runs that were refused, and until when they are not adopted.
        self._declined: dict[RunId, float] = {}
        # Runs that this worker has left, the last one last: a message of them may still arrive here.
        self._left: dict[RunId, tuple[TenantId, JobId, float]] = {}
        self._since = 0
        self._answered_at = clock.monotonic()
        self._fall_back_at = 0.0
        self.is_built = False

    def __len__(self) -> int:
        return len(self._held)

    def is_recheck(self, run_id: RunId) -> bool:
        """Whether the run was taken because it had been quiet for a while, and not for a message."""
        return self._pauses.get(run_id, 0.0) > 0

    def adopt(self, run_id: RunId, tenant: TenantId, job_id: JobId) -> bool:
        """Serve a run of which a message has arrived here, whoever else serves it. False if it could not be served a
        moment ago."""
        if run_id in self._held or run_id in self._unread:
            return True
        if run_id in self._skipped or self._declined.get(run_id, 0.0) > self._clock.monotonic():
            return False
        self._unread[run_id] = SeatedRun(run_id, tenant, job_id)
        self._claim(run_id, tenant, job_id)
        return True

    def reclaim(self, run_id: RunId) -> bool:
        """Claim a lost seat again if tasks of the run have started since the look, or else give it up: another worker
        may have it by now, and if none has, the index knows when the run is due. Returns whether it is claimed."""
        if run_id in self._held and self._is_busy(run_id):
            self._claim(run_id, *_key(self._held[run_id]))
            return True
        self._note_left(run_id)
        self._forget(run_id)
        return False

    def leave(self, run_id: RunId, delay: float | None = None, *, was_busy: bool = True) -> None:
        """Give up the seat. Without a `delay`, the run is looked at again after a pause that grows while it stays
        quiet."""
        pause = next_pause(0.0 if was_busy else self._pauses.get(run_id, 0.0))
        self._note_left(run_id)
        self._forget(run_id)
        news = SeatNews(run_id, SeatAction.LEAVE, pause if delay is None else delay, pause)
        self._news[run_id] = news

    def leave_finished(self, run_id: RunId) -> None:
        """Give up the seat on a run that has finished: what moved the run has marked that in the index."""
        self._forget(run_id)
        self._news[run_id] = SeatNews(run_id, SeatAction.LEAVE)

    def ask_help(self, run_id: RunId) -> None:
        """Let another worker join."""
        if run_id in self._held:
            self._news.setdefault(run_id, SeatNews(run_id, SeatAction.HELP))

    def return_to(self, run_id: RunId) -> None:
        """Serve a run again that this worker has left, whoever else does: it has a message of it in hand."""
        if run_id in self._left:
            self.adopt(run_id, *self._left[run_id][:2])

    async def look(self, *, free_slots: int, slots: int, is_quick: bool = False) -> SeatChanges:
        """Take runs that are due, and read what has changed. `is_quick` says of a worker without a free slot that the
        runs which it serves make room soon."""
        limit = min(TAKE_LIMIT, free_slots or slots)
        try:
            look = await self._ask(limit, free_slots, slots, is_quick=is_quick)
        except ConveyorError as error:
            return await self._fall_back(error)
        self._answered_at = self._clock.monotonic()
        changes = SeatChanges(is_more=len(look.taken) >= limit)
        try:
            await self._take_in(look, changes)
        except ConveyorError as error:
            # What has changed so far is reported in any case: no later look finds it again.
            if not changes:
                raise
            log.warning("runs were looked for in part", error=str(error))
        return changes

    async def rebuild(self, *, is_urgent: bool = False) -> bool:
        """Fill the index from Records, unless another worker does. If it is urgent, all runs are due now."""
        if not await self._coordinator.acquire(_BUILD, self._holder, 1, 1, _BUILD_SECONDS):
            return False
        try:
            await rebuild(self._coordinator, await self._jobs.active_jobs(), is_urgent=is_urgent)
        finally:
            await self._coordinator.acquire(_BUILD, self._holder, 0, 1, _BUILD_SECONDS)
        return True

    async def close(self) -> None:
        """Give up all seats, those too that the worker does not know of."""
        try:
            look = await self._coordinator.look_for_runs(self._request(seat_count=-1))
            seats = {each.run_id for each in look.seats or ()} | self._held.keys()
            news = [SeatNews(run_id, SeatAction.LEAVE, 0.0) for run_id in seats]
            await self._coordinator.look_for_runs(self._request(news=[*self._news.values(), *news], ttl=0.0))
        except ConveyorError as error:
            log.warning("seats not given up; they expire", seats=len(self._held), error=str(error))

    async def _take_in(self, look: Look, changes: SeatChanges) -> None:
        self._reconcile(look, changes)
        self._unread |= {each.run_id: each for each in look.taken}
        self._changed.update(run_id for run_id in look.changed if run_id in self._held)
        await self._read(changes)
        # Only now: a change whose job could not be read is reported again.
        self._since = look.seen
        self.is_built = look.is_built
        if not look.is_built and await self.rebuild():
            changes.is_more = True

    async def _ask(self, limit: int, free_slots: int, slots: int, *, is_quick: bool) -> Look:
        news = dict(self._news)
        request = self._request(news=list(news.values()), limit=limit)
        if not free_slots:
            # Each tenant has a share here. So the worker joins a run only if it serves no other of the tenant; and of
            # runs that nobody serves it takes those of its tenants sooner than other workers do: a tenant with many
            # runs must not have a share of every worker. Where the runs that are here end soon, it waits for that.
            tenants = {job.tenant for job in self._held.values()}
            overdue = _PATIENCE * (1 + len(tenants) / slots)
            of_own = min(overdue, _PATIENCE * (1 + len(self._held) / (_RUNS_PER_SLOT * slots)))
            request = msgspec.structs.replace(
                request,
                overdue=overdue,
                unjoined=tuple(tenants),
                unjoined_overdue=_NEVER if is_quick else of_own,
            )
        look = await self._coordinator.look_for_runs(request)
        self._news = {run_id: each for run_id, each in self._news.items() if news.get(run_id) is not each}
        return look

    def _request(
        self,
        *,
        news: Sequence[SeatNews] = (),
        seat_count: int | None = None,
        ttl: float | None = None,
        limit: int = 0,
    ) -> LookRequest:
        now = self._clock.monotonic()
        self._skipped = {run_id: until for run_id, until in self._skipped.items() if until > now}
        self._declined = {run_id: until for run_id, until in self._declined.items() if until > now}
        while self._left and next(iter(self._left.values()))[2] <= now:
            del self._left[next(iter(self._left))]
        return LookRequest(
            self._holder,
            min(_SEAT_SECONDS, self._lease) if ttl is None else ttl,
            self._lease,
            news,
            len(self._held) + len(self._unread) if seat_count is None else seat_count,
            self._since,
            limit,
            skipped=tuple(self._skipped),
        )

    def _reconcile(self, look: Look, changes: SeatChanges) -> None:
        """The index has other seats than this worker: an answer was lost, or the seats were."""
        if look.seats is None:
            return
        seats = {each.run_id: each for each in look.seats}
        for run_id, seat in seats.items():
            if run_id not in self._held and run_id not in self._news:
                self._unread[run_id] = seat
        for run_id in [run_id for run_id in self._unread if run_id not in seats]:
            del self._unread[run_id]
        for run_id, job in self._held.items():
            if run_id in seats:
                continue
            if self._is_busy(run_id):
                self._claim(run_id, *_key(job))
            else:
                changes.unseated.append(run_id)

    async def _read(self, changes: SeatChanges) -> None:
        """Read the jobs of new seats, of marked changes, and those that were not read for long."""
        now = self._clock.monotonic()
        stale = [run_id for run_id, at in self._read_at.items() if now - at >= _REREAD_SECONDS]
        wanted = {run_id: (seat.tenant, seat.job_id) for run_id, seat in self._unread.items()}
        wanted |= {run_id: _key(self._held[run_id]) for run_id in (*self._changed, *stale) if run_id in self._held}
        if not wanted:
            return
        jobs = {_key(job): job for job in await self._jobs.jobs_of(list(dict.fromkeys(wanted.values())))}
        unread, self._unread = self._unread, {}
        self._changed.difference_update(wanted)
        for run_id, key in wanted.items():
            job = jobs.get(key)
            if run_id in unread:
                self._open(run_id, job, changes, unread[run_id].pause)
            elif run_id in self._held:
                self._follow(run_id, job, changes, now)

    def _open(self, run_id: RunId, job: Job | None, changes: SeatChanges, pause: float = 0.0) -> None:
        if job is None or not self._is_served(run_id, job):
            self._refuse(run_id, job, changes)
            return
        self._held[run_id] = job
        self._pauses[run_id] = pause
        self._read_at[run_id] = self._clock.monotonic()
        changes.opened.append(job)

    def _follow(self, run_id: RunId, job: Job | None, changes: SeatChanges, now: float) -> None:
        if job is None or not self._is_served(run_id, job):
            self._forget(run_id)
            self._refuse(run_id, job, changes)
            changes.closed.append(run_id)
            return
        self._read_at[run_id] = now
        if job != self._held[run_id]:
            self._held[run_id] = job
            changes.changed.append(job)

    def _is_served(self, run_id: RunId, job: Job) -> bool:
        is_latest = job.run.run_id == run_id and job.state in WORKABLE
        return is_latest and job.kind in self._kinds and is_reachable(self._tasks, job.key)

    def _refuse(self, run_id: RunId, job: Job | None, changes: SeatChanges) -> None:
        """Give back a seat on a run that is finished, paused, or for other workers."""
        changes.refused.append(run_id)
        self._declined[run_id] = self._clock.monotonic() + _DECLINE_SECONDS
        if job is None or job.run.run_id != run_id or job.state in ENDED:
            self._news[run_id] = SeatNews(run_id, SeatAction.FINISH)
        elif job.state not in WORKABLE:
            self._news[run_id] = SeatNews(run_id, SeatAction.LEAVE)
        else:
            self._skipped[run_id] = self._clock.monotonic() + _SKIP_SECONDS
            self._news[run_id] = SeatNews(run_id, SeatAction.LEAVE, 0.0)

    def _claim(self, run_id: RunId, tenant: TenantId, job_id: JobId) -> None:
        self._news[run_id] = SeatNews(run_id, SeatAction.CLAIM, tenant=tenant, job_id=job_id)

    def _note_left(self, run_id: RunId) -> None:
        if (job := self._held.get(run_id)) is not None:
            self._left.pop(run_id, None)
            self._left[run_id] = (*_key(job), self._clock.monotonic() + _LEFT_SECONDS)
            if len(self._left) > _MAX_LEFT:
                self._left.pop(next(iter(self._left)))

    def _forget(self, run_id: RunId) -> None:
        for table in (self._held, self._read_at, self._pauses, self._news):
            table.pop(run_id, None)
        self._changed.discard(run_id)

    async def _fall_back(self, error: ConveyorError) -> SeatChanges:
        """The index does not answer. What the worker serves goes on; after a while it serves all runs."""
        now = self._clock.monotonic()
        if now - self._answered_at < _AWAY_SECONDS or now < self._fall_back_at:
            raise error
        self._fall_back_at = now + _FALL_BACK_SECONDS * (0.5 + self._clock.jitter())
        log.warning("the ready index does not answer; reading all unfinished jobs", error=str(error))
        active = {job.run.run_id: job for job in await self._jobs.active_jobs()}
        return self._follow_all(active)

    def _follow_all(self, active: dict[RunId, Job]) -> SeatChanges:
        changes = SeatChanges()
        now = self._clock.monotonic()
        for run_id in list(self._held):
            self._follow(run_id, active.get(run_id), changes, now)
        for run_id, job in active.items():
            if run_id not in self._held and self._is_served(run_id, job):
                self._open(run_id, job, changes)
        self._unread.clear()
        return changes


def _key(job: Job) -> tuple[TenantId, JobId]:
    return job.tenant, job.job_id

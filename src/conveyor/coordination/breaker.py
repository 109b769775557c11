"""Breakers: no task starts at a target that is down, until its breaker half-opens and a few probes succeed. All workers
share them through the coordinator (breaker_states.py).

    closed ── too many attempts of the window failed ──► open ── its time is over ──► half-open
      ▲                                                   ▲                              │
      └── 1, 2, 4 … probes at once succeeded ─────────────┼──────────────────────────────┤
                                                          └── probes failed: twice as long ┘

Workers count attempts only at targets that failed. Of the others they know which answered lately
(answered_targets.py).
"""

from collections.abc import Callable, Collection
from enum import Enum

import msgspec
import structlog

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.coordination.answered_targets import AnsweredTargets
from conveyor.coordination.breaker_states import (
    KEEP_SECONDS,
    KEY,
    LEVELS,
    MAX_RUNS,
    BreakerState,
    States,
    change_states,
    decode_states,
    describe_wait,
    has_capacity,
    log_change,
    split_key,
)
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import RunId, TenantId
from conveyor.settings import Settings

log = structlog.get_logger()

_MAX_SUSPECTS = 10_000
_MAX_TRIES = 5
# The probe of a worker that died expires after this long.
_PROBE_SECONDS = 60.0
# How long a task waits at least that may not probe yet, plus as much jitter.
_PROBE_WAIT = 2.0
# Jitter for tasks that wait for the same moment: this share of the wait, at most this many seconds.
_JITTER = 0.2
MAX_JITTER = 30.0
# How long the report of a wait is kept beyond its `until`, and when it is repeated.
_LINGER = 60.0
_REPEAT_WAIT = 20.0


class Sign(Enum):
    """What an attempt says about its target: it answered; it answered with an error, as it does while it is down but
    also for a few bad inputs; it did not answer."""

    UP = "up"
    ERROR = "error"
    DOWN = "away"


class _Window(msgspec.Struct, frozen=True):
    """Attempts in one half of the window."""

    up: int = 0
    error: int = 0
    away: int = 0


class _Suspect(msgspec.Struct):
    """A target with failures: attempts that were not reported yet, and the counts of both halves of the window."""

    unreported: dict[Sign, int] = msgspec.field(default_factory=dict)
    bucket: int = -1
    before: _Window = _Window()
    now: _Window = _Window()
    failed_at: float = 0.0
    # The last error, and the runs of the attempts that failed.
    error: str = ""
    runs: dict[RunId, None] = msgspec.field(default_factory=dict)


class _ProbeCounts(msgspec.Struct):
    """Results of probes that were not reported yet."""

    up: int = 0
    error: int = 0
    down: int = 0


class Breakers:
    """All breakers, as one worker sees them. Counts stay here until `report`, which the worker calls often."""

    def __init__(
        self,
        coordinator: Coordinator,
        clock: Clock,
        settings: Settings,
        holder: str,
        patience_now: Callable[[], float] | None = None,
    ) -> None:
        """How long a target has been down goes by `patience_now`, by the clock without one: tasks fail by it."""
        self._coordinator = coordinator
        self._clock = clock
        self._patience_now = patience_now or clock.now
        self._settings = settings
        self._holder = holder
        # All states that the coordinator has, and those that are not closed.
        self._states: States = {}
        self._open: States = {}
        # Whether a breaker opened since the last `refresh`, for the first time or after a probe.
        self._has_opened = False
        # Runs that a breaker blocks and does not know yet; and breakers that closed since `take_closed`.
        self._blocked: dict[str, dict[RunId, None]] = {}
        self._closed: States = {}
        self._suspects: dict[str, _Suspect] = {}
        self._answered = AnsweredTargets(coordinator, clock, settings.breaker_window)
        self._probes: dict[str, _ProbeCounts] = {}
        # Probes of this worker. A finished one counts until its result is reported: no other probe takes its place
        # before that.
        self._probing: dict[str, int] = {}
        self._probed: dict[str, int] = {}
        self._waits: dict[RunId, Wait] = {}
        self._published: dict[RunId, tuple[Wait, float]] = {}
        # Whether to report soon.
        self.is_urgent = False

    @property
    def is_watching(self) -> bool:
        """Whether any breaker is open or half-open."""
        return bool(self._open)

    @property
    def is_busy(self) -> bool:
        """Whether to record outcomes even if none of them failed."""
        return bool(self._open or self._suspects or self._probing)

    @property
    def has_suspects(self) -> bool:
        """Whether attempts failed lately, so that successes count too."""
        return bool(self._suspects)

    def state(self, key: str) -> BreakerState | None:
        """Return the target's breaker; None if it is closed."""
        return self._open.get(key)

    def now(self) -> float:
        return self._clock.now()

    def wait_of(self, state: BreakerState) -> float:
        """Return how long a task waits for a breaker that is open, or that it may not probe yet."""
        left = state.until - self._clock.now()
        if left <= 0:
            return _PROBE_WAIT * (1 + self._clock.jitter())
        return left + self._clock.jitter() * min(left * _JITTER, MAX_JITTER)

    def is_open(self, state: BreakerState) -> bool:
        return self._clock.now() < state.until

    def age(self, state: BreakerState) -> float:
        """Return for how long the breaker has not been closed."""
        return self._patience_now() - state.since

    def note_answers(self, key: str, count: int = 1) -> None:
        """Note that a target answered below 500."""
        self._answered.note(key, count)

    def count(self, key: str, sign: Sign, run_id: RunId | None = None, error: str = "") -> None:
        """Count an attempt at a target whose breaker is closed. Answers count only after a failure."""
        if sign is Sign.UP:
            self.note_answers(key)
        suspect = self._suspects.get(key)
        if suspect is None:
            if sign is Sign.UP or len(self._suspects) >= _MAX_SUSPECTS:
                return
            suspect = self._suspects[key] = _Suspect()
        count = suspect.unreported[sign] = suspect.unreported.get(sign, 0) + 1
        if sign is not Sign.UP:
            suspect.failed_at = self._clock.now()
            suspect.error = error or suspect.error
            if run_id is not None and len(suspect.runs) < MAX_RUNS:
                suspect.runs[run_id] = None
            self.is_urgent = self.is_urgent or count >= self._settings.breaker_least

    def record_probe(self, key: str, sign: Sign | None) -> None:
        """Record the result of a probe; None: it says nothing about the target."""
        self._probed[key] = self._probed.get(key, 0) + 1
        if sign is None:
            return
        probes = self._probes.setdefault(key, _ProbeCounts())
        if sign is Sign.UP:
            probes.up += 1
            self.note_answers(key)
        elif sign is Sign.ERROR:
            probes.error += 1
        else:
            probes.down += 1
        self.is_urgent = True

    def report_wait(self, run_id: RunId, key: str, state: BreakerState) -> None:
        """Report with the next `report` that this breaker blocks the run."""
        self._waits.setdefault(run_id, describe_wait(split_key(key)[1], state, self._clock.now()))
        if run_id not in state.runs and len(state.runs) < MAX_RUNS:
            self._blocked.setdefault(key, {})[run_id] = None

    async def acquire_probe(self, key: str) -> bool:
        """Return whether one more task may probe a half-open breaker."""
        state = self._open.get(key)
        if state is None:
            return True
        want = self._probing[key] = self._probing.get(key, 0) + 1
        try:
            if await self._hold(key, want, 1 << state.level) >= want:
                return True
        except ConveyorError as error:
            self._lost(error)
            return True
        except BaseException:
            self._count_probed(key, 1)
            raise
        self._count_probed(key, 1)
        return False

    async def report(self) -> None:
        """Report the counts to the coordinator, with one call for each target that has any."""
        self.is_urgent = False
        try:
            await self._answered.share()
            for key in [key for key, suspect in self._suspects.items() if suspect.unreported]:
                await self._update_window(key)
            for key, probe in list(self._probes.items()):
                await self._apply_probes(key, probe)
            await self._release_probes()
            await self._add_blocked_runs()
            await self._publish_waits()
        except ConveyorError as error:
            self._lost(error)
        self._forget_suspects()

    def take_closed(self) -> States:
        """Return the breakers that closed since the last call, as they were before."""
        closed, self._closed = self._closed, {}
        return closed

    def closed_lately(self, tenant: TenantId, run_id: RunId) -> bool:
        """Return whether a breaker that may have blocked this run closed a moment ago."""
        return any(
            state.is_closed
            and (run_id in state.runs or (len(state.runs) in (0, MAX_RUNS) and split_key(key)[0] == tenant))
            for key, state in self._states.items()
        )

    def blocked_runs(self) -> frozenset[RunId]:
        """Return the runs that breakers are known to block."""
        return frozenset(run_id for state in self._open.values() for run_id in state.runs)

    async def half_open_all(self) -> None:
        """Half-open all breakers: no worker was alive, so nothing is known about their targets now."""
        try:
            await self._half_open_beyond(0.0)
        except ConveyorError as error:
            self._lost(error)

    async def _half_open_beyond(self, seconds: float) -> list[str]:
        """Half-open the breakers that would be open for more than this many seconds from now. Returns which."""
        now = self._clock.now()

        def half_open(states: States) -> tuple[States, list[str]]:
            beyond = {key: state for key, state in states.items() if _is_open_beyond(state, now + seconds)}
            fresh = {
                key: msgspec.structs.replace(state, since=now, until=now, times=1, level=0)
                for key, state in beyond.items()
            }
            return fresh, list(fresh)

        return await change_states(self._coordinator, half_open)

    async def _read_states(self) -> States:
        """All states that the coordinator has. A breaker that is open for longer than any may be was opened by a clock
        that was ahead of this one: it is half-open now."""
        states = decode_states(await self._coordinator.cached(KEY))
        longest = max(self._settings.breaker_longest, self._settings.breaker_seconds) + CLOCK_SLACK
        if not any(_is_open_beyond(state, self._clock.now() + longest) for state in states.values()):
            return states
        keys = await self._half_open_beyond(longest)
        log.error("clock was set back: breakers are half-open", breakers=keys)
        return decode_states(await self._coordinator.cached(KEY))

    async def _publish_waits(self) -> None:
        now = self._clock.now()
        waits, self._waits = self._waits, {}
        for run_id, wait in waits.items():
            last = self._published.get(run_id)
            if last is None or last[0] != wait or now - last[1] >= _REPEAT_WAIT:
                ttl = _LINGER if wait.until is None else max(0.0, wait.until - now) + _LINGER
                await publish_wait(self._coordinator, run_id, wait, ttl)
                self._published[run_id] = wait, now
        if any(now - at >= _REPEAT_WAIT for _, at in self._published.values()):
            self._published = {
                run_id: (wait, at) for run_id, (wait, at) in self._published.items() if now - at < _REPEAT_WAIT
            }

    async def _add_blocked_runs(self) -> None:
        """Store which runs a breaker blocks: it is needed as long as one of them is unfinished."""
        blocked, self._blocked = self._blocked, {}
        for key, runs in blocked.items():
            state = self._open.get(key)
            if state is not None and (new := tuple(run for run in runs if run not in state.runs)):
                known = (*state.runs, *new)[:MAX_RUNS]
                await self._change(key, state, msgspec.structs.replace(state, runs=known))

    async def _release_probes(self) -> None:
        """Release finished probes. All are counted first: a probe whose release fails expires, but one that still
        counts as running would be renewed for ever."""
        probed, self._probed = self._probed, {}
        running = {key: self._count_probed(key, count) for key, count in probed.items()}
        for key, left in running.items():
            await self._hold(key, left, 1 << LEVELS)

    def _count_probed(self, key: str, count: int) -> int:
        left = max(0, self._probing.pop(key, 0) - count)
        if left:
            self._probing[key] = left
        return left

    async def refresh(self, unfinished: Collection[RunId] | None = None) -> bool:
        """Read which breakers are not closed. With the unfinished runs of all tenants, close those that none of them
        needs. Returns whether one opened since the last call, at this worker or another, anew or after a probe."""
        try:
            self._apply(await self._read_states())
            for key, state in list(self._open.items()):
                if unfinished is not None and state.runs and not any(run in unfinished for run in state.runs):
                    await self._change(key, state, state.close(self._clock.now()))
        except ConveyorError as error:
            self._lost(error)
        has_opened, self._has_opened = self._has_opened, False
        return has_opened

    async def renew_probes(self) -> None:
        """Renew probes that take long."""
        for key, count in list(self._probing.items()):
            try:
                await self._hold(key, count, 1 << LEVELS)
            except ConveyorError as error:
                self._lost(error)

    async def _update_window(self, key: str) -> None:
        """Add counts to the window of a closed breaker, and open it if too many attempts failed."""
        suspect, settings = self._suspects[key], self._settings
        unreported, suspect.unreported = suspect.unreported, {}
        if key in self._open:
            # These attempts began before it opened.
            return
        bucket = self._bucket(self._clock.now())
        if suspect.bucket != bucket:
            suspect.before = await self._count_window(key, bucket - 1, {})
            suspect.bucket = bucket
        suspect.now = await self._count_window(key, bucket, unreported)
        if await self._is_down(key, suspect.before, suspect.now):
            now = self._clock.now()
            new = BreakerState(
                now, now + settings.breaker_seconds, runs=tuple(suspect.runs)[:MAX_RUNS], error=suspect.error
            )
            await self._change(key, self._states.get(key), new)

    async def _is_down(self, key: str, before: _Window, now: _Window) -> bool:
        """Return whether too many attempts of the window failed. Answers of 500 and more count as failures only if the
        target gave no other answer."""
        up, error, away = before.up + now.up, before.error + now.error, before.away + now.away
        total = up + error + away
        needed = total * self._settings.breaker_ratio
        if total < self._settings.breaker_least or away + error < needed:
            return False
        if away >= needed:
            return True
        closed = self._states.get(key)
        return up == 0 and not await self._answered.has_answered(key, 0.0 if closed is None else closed.until)

    async def _count_window(self, key: str, bucket: int, unreported: dict[Sign, int]) -> _Window:
        amounts = {sign.value: amount for sign, amount in unreported.items()}
        closed = self._states.get(key)
        name = f"breaker:{key}:{bucket}:{0 if closed is None else closed.until}"
        counts = await self._coordinator.add_counters(name, amounts, self._settings.breaker_window)
        return _Window(counts.get("up", 0), counts.get("error", 0), counts.get("away", 0))

    def _bucket(self, now: float) -> int:
        """Return the half of the window that this time is in."""
        return int(now / (self._settings.breaker_window / 2))

    async def _apply_probes(self, key: str, probe: _ProbeCounts) -> None:
        """Open or raise a half-open breaker. Errors count once all probes of its level had no other answer: until then
        they are kept."""
        state = self._open.get(key)
        has_errors_only = not probe.up and not probe.down
        if state is not None and not self.is_open(state) and has_errors_only and probe.error < 1 << state.level:
            return
        self._probes.pop(key, None)
        if state is None or self.is_open(state):
            return
        settings = self._settings
        failed = probe.down + (0 if probe.up else probe.error)
        total = probe.down + probe.up + probe.error
        if failed and (state.level == 0 or failed >= total * settings.breaker_ratio):
            wait = min(settings.breaker_longest, settings.breaker_seconds * 2.0 ** min(state.times, 60))
            until = self._clock.now() + wait
            again = msgspec.structs.replace(state, until=until, times=state.times + 1, level=0)
            await self._change(key, state, again)
        elif probe.up:
            higher = msgspec.structs.replace(state, level=state.level + 1)
            await self._change(key, state, higher.close(self._clock.now()) if higher.is_closed else higher)

    async def _change(self, key: str, old: BreakerState | None, new: BreakerState) -> None:
        """Replace one breaker's state, unless another worker did so first."""
        for _ in range(_MAX_TRIES):
            raw = await self._coordinator.cached(KEY)
            # One that is stale is as good as closed, and must not stand in the way of the one that opens.
            states = {other: state for other, state in decode_states(raw).items() if not self._is_stale(state)}
            opens = old is None or old.is_closed
            if states.get(key) != old or (opens and not has_capacity(states, key)):
                break
            states |= {key: new}
            if await self._coordinator.swap(KEY, raw, msgspec.json.encode(states), KEEP_SECONDS):
                log_change(key, old, new)
                break
        self._apply(states)

    def _apply(self, states: States) -> None:
        self._states = {key: state for key, state in states.items() if not self._is_stale(state)}
        not_closed = {key: state for key, state in self._states.items() if not state.is_closed}
        for key in self._open.keys() - not_closed.keys():
            # It has closed: the failures that opened it must not open it again.
            self._suspects.pop(key, None)
            self._probes.pop(key, None)
            self._closed[key] = self._open[key]
        if any(key not in self._open or self._open[key].until < state.until for key, state in not_closed.items()):
            self._has_opened = True
        self._open = not_closed

    def _is_stale(self, state: BreakerState) -> bool:
        """Return whether the breaker says nothing any more: no task has tried the target for so long that no run can
        need it; or it closed, and the failures before that have left the window."""
        settings = self._settings
        keep = 2 * settings.breaker_window if state.is_closed else 2 * settings.breaker_longest
        return self._clock.now() > state.until + keep

    def _forget_suspects(self) -> None:
        since = self._clock.now() - self._settings.breaker_window
        if any(suspect.failed_at < since for suspect in self._suspects.values()):
            self._suspects = {key: suspect for key, suspect in self._suspects.items() if suspect.failed_at >= since}

    async def _hold(self, key: str, want: int, limit: int) -> int:
        return await self._coordinator.acquire(f"canary:{key}", self._holder, want, limit, _PROBE_SECONDS)

    def _lost(self, error: ConveyorError) -> None:
        log.warning("all breakers closed: the coordinator does not answer", error=str(error))
        self._states, self._open = {}, {}
        self._probes.clear()


def _is_open_beyond(state: BreakerState, at: float) -> bool:
    return not state.is_closed and at < state.until

"""Breakers: no task starts at a target that is down, until its breaker half-opens and a few probes succeed. All workers
share them through the coordinator. If the coordinator is lost, all breakers close, which costs only attempts.

    closed ── too many attempts of the window failed ──► open ── its time is over ──► half-open
      ▲                                                   ▲                              │
      └── 1, 2, 4 … probes at once succeeded ─────────────┼──────────────────────────────┤
                                                          └── probes failed: twice as long ┘

One value holds all breakers that are open or half-open, of all tenants, so that a worker reads them in one call.
Workers count attempts only at targets that failed: others cost nothing. Each tenant has its own breakers: no
tenant can block a target for another.
"""

import msgspec
import structlog

from conveyor.clock import Clock, iso_text
from conveyor.coordination.waits import Wait, publish_wait
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import RunId, TenantId
from conveyor.settings import Settings
from conveyor.telemetry import metrics

log = structlog.get_logger()

_KEY = "breakers"
_KEEP_SECONDS = 86_400.0
# Levels of a half-open breaker, each with twice as many probes at once. After the last it is closed.
_LEVELS = 6
# Limits on breakers that are not closed, over all and for each tenant. Beyond them a breaker stays closed.
_MAX_OPEN = 1000
_MAX_OF_TENANT = 100
_MAX_SUSPECTS = 10_000
_MAX_TRIES = 5
# The probe of a worker that died expires after this long.
_PROBE_SECONDS = 60.0
# How long a task waits at least that may not probe yet, plus as much jitter.
_PROBE_WAIT = 2.0
# Jitter for tasks that wait for the same moment: this share of the wait, at most this many seconds.
_JITTER = 0.2
_MAX_JITTER = 30.0
# How long the reason for a wait is shown beyond its `until`.
_LINGER = 5.0


class BreakerState(msgspec.Struct, frozen=True, array_like=True):
    """The breaker of a target. It is open up to `until`, then half-open with 2^`level` probes at once. Past the last
    level it was closed at `until`, and failures before that no longer count."""

    since: float
    until: float
    # How often in a row it opened.
    times: int = 1
    level: int = 0


class _Suspect(msgspec.Struct):
    """A target with failures: attempts that were not reported yet, and the counts of both halves of the window."""

    down: int = 0
    up: int = 0
    bucket: int = -1
    before: tuple[int, int] = (0, 0)
    now: tuple[int, int] = (0, 0)
    failed_at: float = 0.0


class _ProbeCounts(msgspec.Struct):
    """Results of probes that were not reported yet."""

    up: int = 0
    down: int = 0


_states = msgspec.json.Decoder(dict[str, BreakerState])


def breaker_key(tenant: TenantId, target: str) -> str:
    return f"{tenant}/{target}"


async def list_breakers(coordinator: Coordinator, clock: Clock, tenant: TenantId) -> list[tuple[str, BreakerState]]:
    """Return the tenant's targets whose breakers are not closed, with the breakers, in order of name."""
    states = _decode(await coordinator.cached(_KEY))
    prefix = breaker_key(tenant, "")
    by_target = {key.removeprefix(prefix): state for key, state in states.items() if key.startswith(prefix)}
    return sorted((target, state) for target, state in by_target.items() if state.level < _LEVELS)


async def count_breakers(coordinator: Coordinator, clock: Clock) -> tuple[int, int]:
    """Count the breakers of all tenants: how many are open, how many half-open."""
    states = [state for state in _decode(await coordinator.cached(_KEY)).values() if state.level < _LEVELS]
    opened = sum(clock.now() < state.until for state in states)
    return opened, len(states) - opened


class Breakers:
    """All breakers, as one worker sees them. Counts stay here until `report`, which the worker calls often."""

    def __init__(self, coordinator: Coordinator, clock: Clock, settings: Settings, holder: str) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._settings = settings
        self._holder = holder
        # All states that the coordinator has, and those that are not closed.
        self._states: dict[str, BreakerState] = {}
        self._open: dict[str, BreakerState] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._probes: dict[str, _ProbeCounts] = {}
        # Probes of this worker. A finished one counts until its result is reported: no other probe takes its place
        # before that.
        self._probing: dict[str, int] = {}
        self._probed: dict[str, int] = {}
        self._waits: dict[RunId, Wait] = {}
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

    def wait_of(self, state: BreakerState) -> float:
        """Return how long a task waits for a breaker that is open, or that it may not probe yet."""
        left = state.until - self._clock.now()
        if left <= 0:
            return _PROBE_WAIT * (1 + self._clock.jitter())
        return left + self._clock.jitter() * min(left * _JITTER, _MAX_JITTER)

    def is_open(self, state: BreakerState) -> bool:
        return self._clock.now() < state.until

    def age(self, state: BreakerState) -> float:
        """Return for how long the breaker has not been closed."""
        return self._clock.now() - state.since

    def count(self, key: str, *, down: bool) -> None:
        """Count an attempt at a target whose breaker is closed. Successes count only after a failure."""
        suspect = self._suspects.get(key)
        if suspect is None:
            if not down or len(self._suspects) >= _MAX_SUSPECTS:
                return
            suspect = self._suspects[key] = _Suspect()
        if down:
            suspect.down += 1
            suspect.failed_at = self._clock.now()
            self.is_urgent = self.is_urgent or suspect.down >= self._settings.breaker_least
        else:
            suspect.up += 1

    def record_probe(self, key: str, *, up: bool | None) -> None:
        """Record the result of a probe; None: it says nothing about the target."""
        self._probed[key] = self._probed.get(key, 0) + 1
        if up is None:
            return
        probes = self._probes.setdefault(key, _ProbeCounts())
        if up:
            probes.up += 1
        else:
            probes.down += 1
        self.is_urgent = True

    def report_wait(self, run_id: RunId, target: str, state: BreakerState) -> None:
        """Report with the next `report` that the run waits for this target."""
        if self.is_open(state):
            detail = f"waiting: breaker open for {target} until {iso_text(state.until)}"
            self._waits.setdefault(run_id, Wait("breaker", detail, state.until))
        else:
            self._waits.setdefault(run_id, Wait("breaker", f"waiting: breaker half-open for {target}"))

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
            for key in [key for key, suspect in self._suspects.items() if suspect.down or suspect.up]:
                await self._update_window(key)
            probes, self._probes = self._probes, {}
            for key, probe in probes.items():
                await self._apply_probes(key, probe)
            await self._release_probes()
            waits, self._waits = self._waits, {}
            for run_id, wait in waits.items():
                ttl = _LINGER if wait.until is None else max(0.0, wait.until - self._clock.now()) + _LINGER
                await publish_wait(self._coordinator, run_id, wait, ttl)
        except ConveyorError as error:
            self._lost(error)
        self._forget_suspects()

    async def _release_probes(self) -> None:
        """Release finished probes. All are counted first: a probe whose release fails expires, but one that still
        counts as running would be renewed for ever."""
        probed, self._probed = self._probed, {}
        running = {key: self._count_probed(key, count) for key, count in probed.items()}
        for key, left in running.items():
            await self._hold(key, left, 1 << _LEVELS)

    def _count_probed(self, key: str, count: int) -> int:
        left = max(0, self._probing.pop(key, 0) - count)
        if left:
            self._probing[key] = left
        return left

    async def refresh(self) -> bool:
        """Read which breakers are not closed. Returns whether one opened since the last call."""
        before = self._open.keys()
        try:
            self._apply(_decode(await self._coordinator.cached(_KEY)))
        except ConveyorError as error:
            self._lost(error)
        return not self._open.keys() <= before

    async def renew_probes(self) -> None:
        """Renew probes that take long."""
        for key, count in list(self._probing.items()):
            try:
                await self._hold(key, count, 1 << _LEVELS)
            except ConveyorError as error:
                self._lost(error)

    async def _update_window(self, key: str) -> None:
        """Add counts to the window of a closed breaker, and open it if too many attempts failed."""
        suspect, settings = self._suspects[key], self._settings
        down, suspect.down = suspect.down, 0
        up, suspect.up = suspect.up, 0
        if key in self._open:
            # These attempts began before it opened.
            return
        bucket = int(self._clock.now() / (settings.breaker_window / 2))
        if suspect.bucket != bucket:
            suspect.before = await self._count_window(key, bucket - 1, 0, 0)
            suspect.bucket = bucket
        suspect.now = await self._count_window(key, bucket, down, up)
        failed = suspect.before[0] + suspect.now[0]
        total = failed + suspect.before[1] + suspect.now[1]
        if total >= settings.breaker_least and failed >= total * settings.breaker_ratio:
            now = self._clock.now()
            await self._change(key, self._states.get(key), BreakerState(now, now + settings.breaker_seconds))

    async def _count_window(self, key: str, bucket: int, down: int, up: int) -> tuple[int, int]:
        amounts = {name: amount for name, amount in (("away", down), ("up", up)) if amount}
        closed = self._states.get(key)
        name = f"breaker:{key}:{bucket}:{0 if closed is None else closed.until}"
        counts = await self._coordinator.add_counters(name, amounts, self._settings.breaker_window)
        return counts.get("away", 0), counts.get("up", 0)

    async def _apply_probes(self, key: str, probe: _ProbeCounts) -> None:
        state = self._open.get(key)
        if state is None or self.is_open(state):
            return
        settings = self._settings
        if probe.down and (state.level == 0 or probe.down >= (probe.down + probe.up) * settings.breaker_ratio):
            wait = min(settings.breaker_longest, settings.breaker_seconds * 2.0 ** min(state.times, 60))
            await self._change(key, state, BreakerState(state.since, self._clock.now() + wait, state.times + 1))
        elif probe.up:
            higher = msgspec.structs.replace(state, level=state.level + 1)
            if higher.level == _LEVELS:
                higher = msgspec.structs.replace(higher, until=self._clock.now())
            await self._change(key, state, higher)

    async def _change(self, key: str, old: BreakerState | None, new: BreakerState) -> None:
        """Replace one breaker's state, unless another worker did so first."""
        for _ in range(_MAX_TRIES):
            raw = await self._coordinator.cached(_KEY)
            states = _decode(raw)
            if states.get(key) != old or (old is None and not _has_capacity(states, key)):
                break
            states = {other: state for other, state in states.items() if not self._is_stale(state)} | {key: new}
            if await self._coordinator.swap(_KEY, raw, msgspec.json.encode(states), _KEEP_SECONDS):
                _log(key, old, new)
                break
        self._apply(states)

    def _apply(self, states: dict[str, BreakerState]) -> None:
        self._states = {key: state for key, state in states.items() if not self._is_stale(state)}
        not_closed = {key: state for key, state in self._states.items() if state.level < _LEVELS}
        for key in self._open.keys() - not_closed.keys():
            # It has closed: the failures that opened it must not open it again.
            self._suspects.pop(key, None)
        self._open = not_closed

    def _is_stale(self, state: BreakerState) -> bool:
        """Return whether no task has tried the target for so long that no run can need the breaker."""
        return self._clock.now() > state.until + 2 * self._settings.breaker_longest

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


def _decode(raw: bytes | None) -> dict[str, BreakerState]:
    try:
        return _states.decode(raw) if raw else {}
    except msgspec.MsgspecError:
        # Written by another version.
        return {}


def _has_capacity(states: dict[str, BreakerState], key: str) -> bool:
    tenant = key.partition("/")[0] + "/"
    return len(states) < _MAX_OPEN and sum(other.startswith(tenant) for other in states) < _MAX_OF_TENANT


def _log(key: str, old: BreakerState | None, new: BreakerState) -> None:
    tenant, _, target = key.partition("/")
    if new.level == _LEVELS:
        metrics.BREAKER_CHANGES.add(1, "closed")
        log.info("breaker closed", tenant=tenant, target=target)
    elif old is None or new.since != old.since or new.times != old.times:
        metrics.BREAKER_CHANGES.add(1, "open")
        log.warning("breaker opened", tenant=tenant, target=target, until=iso_text(new.until), times=new.times)

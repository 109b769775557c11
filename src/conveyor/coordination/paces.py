"""Paces: the paces of all hosts that one worker sends requests to, and what workers share of them.

The coordinator keeps one value for each tenant: what each worker found for a host, and until when the host is paused.
A worker that is new to a host begins with its part of that, and all workers keep a pause. Losing the value costs a slow
start.
"""

from collections import OrderedDict
from collections.abc import Collection

import msgspec

from conveyor.clock import CLOCK_SLACK, Clock
from conveyor.coordination.pace import MAX_PAUSE, HostPace
from conveyor.engines.coordinator import Coordinator
from conveyor.model import TenantId

# Hosts that a worker keeps, and for how many seconds without a request.
_MAX_HOSTS = 4000
_IDLE_SECONDS = 600.0
_DROP_SECONDS = 60.0
# How long the shared value is kept, and how long after its last report a worker counts.
KEEP_SECONDS = 3600.0
_LIVE_SECONDS = 10.0
# Hosts of a tenant that are shared; the ones used last.
MAX_SHARED = 200
_MAX_TRIES = 10


class PacePart(msgspec.Struct, frozen=True, array_like=True):
    """What one worker found for a host, and how many requests it makes there at once."""

    limit: float
    in_flight: int
    at: float


class PaceState(msgspec.Struct, frozen=True, array_like=True):
    """The pace of a tenant at a host over all workers. Times are wall-clock times."""

    limit: float
    latency: float
    at: float
    paused_until: float = 0.0
    # Whether it is what the host bears; else it may be only what was asked for.
    is_settled: bool = False
    parts: dict[str, PacePart] = {}

    def live_parts(self, now: float) -> dict[str, PacePart]:
        return {name: part for name, part in self.parts.items() if abs(now - part.at) <= _LIVE_SECONDS}

    def pause_left(self, now: float) -> float:
        """Return for how many more seconds the host is paused. A time further away than any pause was set by a clock
        that was ahead of this one."""
        left = self.paused_until - now
        return left if 0 < left <= MAX_PAUSE + CLOCK_SLACK else 0.0


PaceStates = dict[str, PaceState]
_states = msgspec.json.Decoder(PaceStates)


async def list_paces(coordinator: Coordinator, tenant: TenantId) -> PaceStates:
    """Return the paces of a tenant's hosts, by host."""
    return _decode(await coordinator.cached(_key(tenant)))


class Paces:
    """For one worker."""

    def __init__(self, coordinator: Coordinator, clock: Clock, worker: str) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._worker = worker
        self._hosts: OrderedDict[tuple[str, str], HostPace] = OrderedDict()
        self._shared: dict[TenantId, PaceStates] = {}
        # Hosts whose in flight count was shared and is not 0.
        self._busy: set[tuple[str, str]] = set()
        self._drop_at = 0.0

    def __len__(self) -> int:
        return len(self._hosts)

    def of(self, tenant: TenantId, host: str) -> HostPace:
        """Return the pace of a host."""
        key = (tenant, host)
        pace = self._hosts.get(key)
        if pace is None:
            pace = self._hosts[key] = HostPace(tenant, host)
            pace.used_at = self._clock.monotonic()
            self._adopt(pace, self._shared.get(tenant, {}).get(host))
            if len(self._hosts) > _MAX_HOSTS:
                self._drop_oldest()
        return pace

    async def share(self, tenants: Collection[TenantId]) -> None:
        """Share what changed with other workers, and learn what they share about these tenants."""
        self._drop_idle()
        changed: dict[TenantId, list[HostPace]] = {}
        for key, pace in self._hosts.items():
            if pace.is_changed or pace.lanes.in_flight or key in self._busy:
                changed.setdefault(TenantId(pace.tenant), []).append(pace)
        for tenant in {*tenants, *changed}:
            await self._share_tenant(tenant, changed.get(tenant, []))
        self._shared = {tenant: states for tenant, states in self._shared.items() if tenant in tenants}

    async def _share_tenant(self, tenant: TenantId, changed: list[HostPace]) -> None:
        known = [pace for pace in changed if not pace.is_new or pace.paused_until]
        for _ in range(_MAX_TRIES):
            raw = await self._coordinator.cached(_key(tenant))
            states = _decode(raw)
            new = self._merged(states, known)
            if not known or await self._coordinator.swap(_key(tenant), raw, msgspec.json.encode(new), KEEP_SECONDS):
                break
        for pace in changed:
            pace.is_changed = False
            (self._busy.add if pace.lanes.in_flight else self._busy.discard)((pace.tenant, pace.host))
        self._shared[tenant] = states
        for host, state in states.items():
            if (own := self._hosts.get((tenant, host))) is not None:
                self._adopt(own, state)

    def _merged(self, states: PaceStates, known: list[HostPace]) -> PaceStates:
        """The shared states with this worker's part of them."""
        now, here = self._clock.now(), self._clock.monotonic()
        merged = dict(states)
        for pace in sorted(known, key=lambda pace: pace.used_at)[-MAX_SHARED:]:
            old = merged.pop(pace.host, None)
            parts = {} if old is None else old.live_parts(now)
            parts[self._worker] = PacePart(round(pace.limit, 2), pace.lanes.in_use, now)
            pause = max(pace.paused_until - here, 0.0 if old is None else old.pause_left(now))
            merged[pace.host] = PaceState(
                limit=round(sum(part.limit for part in parts.values()), 2),
                latency=pace.latency,
                at=now,
                paused_until=now + pause if pause > 0 else 0.0,
                is_settled=pace.is_settled or (len(parts) > 1 and old is not None and old.is_settled),
                parts=parts,
            )
        return dict(list(merged.items())[-MAX_SHARED:])

    def _adopt(self, pace: HostPace, state: PaceState | None) -> None:
        """Keep a pause that another worker shared, and begin with a part of what is known."""
        if state is None:
            return
        now, here = self._clock.now(), self._clock.monotonic()
        others = [part for name, part in state.live_parts(now).items() if name != self._worker]
        if pace.is_new:
            # Without others, half of what earlier jobs had: the host may have less to spare now.
            limit = sum(part.limit for part in others) / (len(others) + 1) if others else state.limit / 2
            if state.is_settled:
                pace.adopt(limit, state.limit)
            elif others:
                pace.adopt(limit)
        left = state.pause_left(now)
        if left > 0 and left > pace.paused_until - here + 1:
            pace.pause(here + left)

    def _drop_idle(self) -> None:
        now = self._clock.monotonic()
        if now < self._drop_at:
            return
        self._drop_at = now + _DROP_SECONDS
        for key, pace in list(self._hosts.items()):
            if pace.is_idle and now - pace.used_at >= _IDLE_SECONDS and now >= pace.paused_until:
                self._drop(key)

    def _drop_oldest(self) -> None:
        """Drop the hosts that were added first and are idle; those in use stay."""
        for key, pace in list(self._hosts.items())[: _MAX_HOSTS // 4]:
            if pace.is_idle:
                self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        self._hosts.pop(key).is_dropped = True
        self._busy.discard(key)


def _decode(raw: bytes | None) -> PaceStates:
    try:
        return _states.decode(raw) if raw else {}
    except msgspec.MsgspecError:
        # Written by another version.
        return {}


def _key(tenant: TenantId) -> str:
    return f"paces:{tenant}"

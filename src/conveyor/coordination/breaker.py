"""Breakers: a target that fails is left alone for a while, then tried by a few, then by all again. Shared by all
workers through the coordinator; losing that closes them all and costs nothing but attempts.

    closed ── too many of the window's attempts failed ──► open ── its time is over ──► half-open
      ▲                                                      ▲                             │
      └── 1, 2, 4 … at once went well ───────────────────────┼─────────────────────────────┤
                                                             └── they failed: twice as long ┘

Which are not closed stands in one value for all tenants, so that a worker learns of all of them in one read. Counts are
kept only of targets that failed: those that go well cost nothing. A tenant's breakers are its own: nobody can close a
target to others.
"""

import msgspec
import structlog

from conveyor.clock import Clock, iso_text
from conveyor.coordination.waits import Wait, say_waiting
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import ConveyorError
from conveyor.model import RunId, TenantId
from conveyor.settings import Settings
from conveyor.telemetry import metrics

log = structlog.get_logger()

_KEY = "breakers"
_KEEP_SECONDS = 86_400.0
# Levels of release, each twice as many at once; after the last it is closed.
_LEVELS = 6
# Most that are open, in all and of one tenant: what is over stays closed.
_MOST_OPEN = 1000
_MOST_OF_TENANT = 100
_MOST_SUSPECTS = 10_000
_TRIES = 5
# A canary whose worker died frees its place after this long.
_CANARY_SECONDS = 60.0
# How long those wait for which there is no place yet: at least, and at most as much again.
_NEXT_LOOK = 2.0
# Those that waited for one moment come back spread over this part of the wait, and so many seconds at most.
_SPREAD = 0.2
_MOST_SPREAD = 30.0
# How long a reason is shown beyond the time that it names.
_LINGER = 5.0


class Open(msgspec.Struct, frozen=True, array_like=True):
    """A target that is not closed. Up to `until` nothing goes there, then canaries; `level` says how many at once. Past
    the last level it was closed, at `until`: what failed before does not count any more."""

    since: float
    until: float
    # Times in a row that it was found down.
    times: int = 1
    level: int = 0


class _Suspect(msgspec.Struct):
    """What is known here of a target that failed: attempts that were not yet told, and the last half of the window."""

    away: int = 0
    up: int = 0
    bucket: int = -1
    before: tuple[int, int] = (0, 0)
    now: tuple[int, int] = (0, 0)
    failed_at: float = 0.0


class _Probes(msgspec.Struct):
    """What canaries came to that was not yet told."""

    up: int = 0
    away: int = 0


_states = msgspec.json.Decoder(dict[str, Open])


def breaker_key(tenant: TenantId, target: str) -> str:
    return f"{tenant}/{target}"


async def breakers_of(coordinator: Coordinator, clock: Clock, tenant: TenantId) -> list[tuple[str, Open]]:
    """The tenant's targets that are not closed, with their breakers, in order of name."""
    doc = _decoded(await coordinator.cached(_KEY))
    mine = breaker_key(tenant, "")
    found = {key.removeprefix(mine): state for key, state in doc.items() if key.startswith(mine)}
    return sorted((target, state) for target, state in found.items() if state.level < _LEVELS)


async def breaker_counts(coordinator: Coordinator, clock: Clock) -> tuple[int, int]:
    """How many breakers of all tenants are open, and half-open."""
    states = [state for state in _decoded(await coordinator.cached(_KEY)).values() if state.level < _LEVELS]
    opened = sum(clock.now() < state.until for state in states)
    return opened, len(states) - opened


class Breakers:
    """All breakers, as one worker sees them. What is counted stays here until `tell`, which the worker calls often."""

    def __init__(self, coordinator: Coordinator, clock: Clock, settings: Settings, holder: str) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._settings = settings
        self._holder = holder
        # What the coordinator has, and those of it that are not closed.
        self._doc: dict[str, Open] = {}
        self._open: dict[str, Open] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._probes: dict[str, _Probes] = {}
        # Canaries that this worker has out. Those that are back count until it is told what they came to: before that
        # no other takes their place.
        self._out: dict[str, int] = {}
        self._back: dict[str, int] = {}
        self._waits: dict[RunId, Wait] = {}
        # So much is to be told that it should be soon.
        self.urgent = False

    @property
    def watching(self) -> bool:
        """Whether anything is open or half-open."""
        return bool(self._open)

    @property
    def busy(self) -> bool:
        """Whether outcomes matter, even if none of them is a failure."""
        return bool(self._open or self._suspects or self._out)

    @property
    def suspecting(self) -> bool:
        """Whether anything failed of late, so that what goes well counts too."""
        return bool(self._suspects)

    def found(self, key: str) -> Open | None:
        """The target's breaker, unless it is closed."""
        return self._open.get(key)

    def wait_of(self, state: Open) -> float:
        """How long a task waits whose target is open, or has no place for it yet."""
        left = state.until - self._clock.now()
        if left <= 0:
            return _NEXT_LOOK * (1 + self._clock.jitter())
        return left + self._clock.jitter() * min(left * _SPREAD, _MOST_SPREAD)

    def is_open(self, state: Open) -> bool:
        return self._clock.now() < state.until

    def age(self, state: Open) -> float:
        """How long it has not been closed."""
        return self._clock.now() - state.since

    def count(self, key: str, *, away: bool) -> None:
        """An attempt at a target that is closed. What goes well counts only once something did not."""
        suspect = self._suspects.get(key)
        if suspect is None:
            if not away or len(self._suspects) >= _MOST_SUSPECTS:
                return
            suspect = self._suspects[key] = _Suspect()
        if away:
            suspect.away += 1
            suspect.failed_at = self._clock.now()
            self.urgent = self.urgent or suspect.away >= self._settings.breaker_least
        else:
            suspect.up += 1

    def probed(self, key: str, *, up: bool | None) -> None:
        """A canary is back; None: what it came to says nothing of the target."""
        self._back[key] = self._back.get(key, 0) + 1
        if up is None:
            return
        probes = self._probes.setdefault(key, _Probes())
        if up:
            probes.up += 1
        else:
            probes.away += 1
        self.urgent = True

    def waits(self, run_id: RunId, target: str, state: Open) -> None:
        """Have the run say what it waits for."""
        if self.is_open(state):
            detail = f"waiting: breaker open for {target} until {iso_text(state.until)}"
            self._waits.setdefault(run_id, Wait("breaker", detail, state.until))
        else:
            self._waits.setdefault(run_id, Wait("breaker", f"waiting: breaker half-open for {target}"))

    async def enter(self, key: str) -> bool:
        """Whether one more canary may go to a target that is half-open."""
        state = self._open.get(key)
        if state is None:
            return True
        want = self._out[key] = self._out.get(key, 0) + 1
        try:
            if await self._hold(key, want, 1 << state.level) >= want:
                return True
        except ConveyorError as error:
            self._lost(error)
            return True
        except BaseException:
            self._count_back(key, 1)
            raise
        self._count_back(key, 1)
        return False

    async def tell(self) -> None:
        """Tell the coordinator what was counted: one call for each target of which there is news."""
        self.urgent = False
        try:
            for key in [key for key, suspect in self._suspects.items() if suspect.away or suspect.up]:
                await self._judge(key)
            probes, self._probes = self._probes, {}
            for key, probe in probes.items():
                await self._judge_probes(key, probe)
            await self._let_go()
            waits, self._waits = self._waits, {}
            for run_id, wait in waits.items():
                ttl = _LINGER if wait.until is None else max(0.0, wait.until - self._clock.now()) + _LINGER
                await say_waiting(self._coordinator, run_id, wait, ttl)
        except ConveyorError as error:
            self._lost(error)
        self._forget_suspects()

    async def _let_go(self) -> None:
        """Free the places of canaries that are back. All are counted first: a place that could not be freed expires,
        but one that still counts as taken would be renewed for ever."""
        back, self._back = self._back, {}
        places = {key: self._count_back(key, count) for key, count in back.items()}
        for key, left in places.items():
            await self._hold(key, left, 1 << _LEVELS)

    def _count_back(self, key: str, count: int) -> int:
        left = max(0, self._out.pop(key, 0) - count)
        if left:
            self._out[key] = left
        return left

    async def look(self) -> bool:
        """See which targets are not closed. True if one is now that was not before."""
        before = self._open.keys()
        try:
            self._take(_decoded(await self._coordinator.cached(_KEY)))
        except ConveyorError as error:
            self._lost(error)
        return not self._open.keys() <= before

    async def keep(self) -> None:
        """Hold on to the places of canaries that take long."""
        for key, count in list(self._out.items()):
            try:
                await self._hold(key, count, 1 << _LEVELS)
            except ConveyorError as error:
                self._lost(error)

    async def _judge(self, key: str) -> None:
        """Add to the window of a target that is closed, and open it if too much of that failed."""
        suspect, settings = self._suspects[key], self._settings
        away, suspect.away = suspect.away, 0
        up, suspect.up = suspect.up, 0
        if key in self._open:
            # Attempts from before it was opened.
            return
        bucket = int(self._clock.now() / (settings.breaker_window / 2))
        if suspect.bucket != bucket:
            suspect.before = await self._counted(key, bucket - 1, 0, 0)
            suspect.bucket = bucket
        suspect.now = await self._counted(key, bucket, away, up)
        failed = suspect.before[0] + suspect.now[0]
        total = failed + suspect.before[1] + suspect.now[1]
        if total >= settings.breaker_least and failed >= total * settings.breaker_ratio:
            now = self._clock.now()
            await self._change(key, self._doc.get(key), Open(now, now + settings.breaker_seconds))

    async def _counted(self, key: str, bucket: int, away: int, up: int) -> tuple[int, int]:
        amounts = {name: amount for name, amount in (("away", away), ("up", up)) if amount}
        closed = self._doc.get(key)
        name = f"breaker:{key}:{bucket}:{0 if closed is None else closed.until}"
        found = await self._coordinator.tally(name, amounts, self._settings.breaker_window)
        return found.get("away", 0), found.get("up", 0)

    async def _judge_probes(self, key: str, probe: _Probes) -> None:
        state = self._open.get(key)
        if state is None or self.is_open(state):
            return
        settings = self._settings
        if probe.away and (state.level == 0 or probe.away >= (probe.away + probe.up) * settings.breaker_ratio):
            wait = min(settings.breaker_longest, settings.breaker_seconds * 2.0 ** min(state.times, 60))
            await self._change(key, state, Open(state.since, self._clock.now() + wait, state.times + 1))
        elif probe.up:
            higher = msgspec.structs.replace(state, level=state.level + 1)
            if higher.level == _LEVELS:
                higher = msgspec.structs.replace(higher, until=self._clock.now())
            await self._change(key, state, higher)

    async def _change(self, key: str, old: Open | None, new: Open) -> None:
        """Replace what is known of one target, unless somebody else did already."""
        for _ in range(_TRIES):
            raw = await self._coordinator.cached(_KEY)
            doc = _decoded(raw)
            if doc.get(key) != old or (old is None and not _has_room(doc, key)):
                break
            doc = {each: state for each, state in doc.items() if not self._is_stale(state)} | {key: new}
            if await self._coordinator.swap(_KEY, raw, msgspec.json.encode(doc), _KEEP_SECONDS):
                _log(key, old, new)
                break
        self._take(doc)

    def _take(self, doc: dict[str, Open]) -> None:
        self._doc = {key: state for key, state in doc.items() if not self._is_stale(state)}
        found = {key: state for key, state in self._doc.items() if state.level < _LEVELS}
        for key in self._open.keys() - found.keys():
            # What it was opened for is no reason to open it again.
            self._suspects.pop(key, None)
        self._open = found

    def _is_stale(self, state: Open) -> bool:
        """Nobody has tried it for long: there is nothing left to do there."""
        return self._clock.now() > state.until + 2 * self._settings.breaker_longest

    def _forget_suspects(self) -> None:
        since = self._clock.now() - self._settings.breaker_window
        if any(suspect.failed_at < since for suspect in self._suspects.values()):
            self._suspects = {key: each for key, each in self._suspects.items() if each.failed_at >= since}

    async def _hold(self, key: str, want: int, most: int) -> int:
        return await self._coordinator.hold(f"canary:{key}", self._holder, want, most, _CANARY_SECONDS)

    def _lost(self, error: ConveyorError) -> None:
        log.warning("breakers are closed: the coordinator does not answer", error=str(error))
        self._doc, self._open = {}, {}
        self._probes.clear()


def _decoded(raw: bytes | None) -> dict[str, Open]:
    try:
        return _states.decode(raw) if raw else {}
    except msgspec.MsgspecError:
        # Another version's.
        return {}


def _has_room(doc: dict[str, Open], key: str) -> bool:
    tenant = key.partition("/")[0] + "/"
    return len(doc) < _MOST_OPEN and sum(each.startswith(tenant) for each in doc) < _MOST_OF_TENANT


def _log(key: str, old: Open | None, new: Open) -> None:
    tenant, _, target = key.partition("/")
    if new.level == _LEVELS:
        metrics.BREAKER_CHANGES.add(1, "closed")
        log.info("target answers again", tenant=tenant, target=target)
    elif old is None or new.since != old.since or new.times != old.times:
        metrics.BREAKER_CHANGES.add(1, "open")
        log.warning("target is down", tenant=tenant, target=target, until=iso_text(new.until), times=new.times)

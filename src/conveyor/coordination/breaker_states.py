"""The breakers of all tenants as the coordinator stores them: one value with those that are open or half-open, so that
a worker reads them in one call, and those that closed a moment ago.

Each tenant has its own breakers: no tenant can block a target for another. If the coordinator is lost, all breakers
close, which costs only attempts.
"""

from collections.abc import Callable, Collection
from typing import TypeVar

import msgspec
import structlog

from conveyor.clock import Clock, iso_text
from conveyor.coordination.waits import Wait, waiting
from conveyor.engines.coordinator import Coordinator
from conveyor.errors import Unavailable
from conveyor.model import Job, RunId, TenantId
from conveyor.telemetry import metrics

log = structlog.get_logger()

# The key of the value, and how long it is kept after the last change.
KEY = "breakers"
KEEP_SECONDS = 86_400.0
# Levels of a half-open breaker, each with twice as many probes at once. After the last it is closed.
LEVELS = 6
# The code of a run that waits for a breaker.
WAIT_CODE = "breaker"
# Limits on breakers that are not closed, over all and for each tenant. Beyond them a breaker stays closed.
_MAX_OPEN = 1000
_MAX_OF_TENANT = 100
# Runs that a breaker knows by their id.
MAX_RUNS = 20
_MAX_TRIES = 50


class BreakerState(msgspec.Struct, frozen=True, array_like=True):
    """The breaker of a target. It is open up to `until`, then half-open with 2^`level` probes at once. Past the last
    level it was closed at `until`, and failures before that no longer count."""

    since: float
    until: float
    # How often in a row it opened.
    times: int = 1
    level: int = 0
    # Runs that opened it or that it blocks, up to MAX_RUNS. Empty if an earlier version opened it.
    runs: tuple[RunId, ...] = ()
    # The error that opened it.
    error: str = ""

    @property
    def is_closed(self) -> bool:
        return self.level >= LEVELS

    def close(self, now: float) -> "BreakerState":
        return msgspec.structs.replace(self, until=now, level=LEVELS)


States = dict[str, BreakerState]
T = TypeVar("T")

_states = msgspec.json.Decoder(States)


def breaker_key(tenant: TenantId, target: str) -> str:
    """The name of a tenant's breaker of a target."""
    return f"{tenant}/{target}"


def split_key(key: str) -> tuple[TenantId, str]:
    """The tenant and the target of a breaker."""
    tenant, _, target = key.partition("/")
    return TenantId(tenant), target


def decode_states(raw: bytes | None) -> States:
    try:
        return _states.decode(raw) if raw else {}
    except msgspec.MsgspecError:
        # Written by another version.
        return {}


def has_capacity(states: States, key: str) -> bool:
    """Return whether one more breaker of this tenant may open."""
    tenant = key.partition("/")[0] + "/"
    opened = [other for other, state in states.items() if not state.is_closed]
    return len(opened) < _MAX_OPEN and sum(other.startswith(tenant) for other in opened) < _MAX_OF_TENANT


async def list_breakers(coordinator: Coordinator, tenant: TenantId | None) -> list[tuple[TenantId, str, BreakerState]]:
    """Return tenant, target and breaker of those that are not closed, in this order: of one tenant, or of all."""
    states = decode_states(await coordinator.cached(KEY))
    found = [(*split_key(key), state) for key, state in states.items() if not state.is_closed]
    return sorted((one for one in found if tenant in (None, one[0])), key=lambda one: one[:2])


async def count_breakers(coordinator: Coordinator, clock: Clock) -> tuple[int, int]:
    """Count the breakers of all tenants: how many are open, how many half-open."""
    states = [state for state in decode_states(await coordinator.cached(KEY)).values() if not state.is_closed]
    opened = sum(clock.now() < state.until for state in states)
    return opened, len(states) - opened


async def reset_breakers(
    coordinator: Coordinator, clock: Clock, tenant: TenantId | None, targets: Collection[str] | None = None
) -> list[tuple[TenantId, str]]:
    """Close breakers of one tenant, or of all: those of some targets, or every one. Returns tenants and targets of
    those that were not closed. Workers see it within a fraction of a second."""

    def close(states: States) -> tuple[States, list[str]]:
        keys = [
            key
            for key, state in states.items()
            if not state.is_closed
            and tenant in (None, split_key(key)[0])
            and (targets is None or split_key(key)[1] in targets)
        ]
        return {key: states[key].close(clock.now()) for key in keys}, sorted(keys)

    return [split_key(key) for key in await change_states(coordinator, close)]


async def change_states(
    coordinator: Coordinator, change: Callable[[States], tuple[States, T]], max_tries: int = _MAX_TRIES
) -> T:
    """Apply a change to the stored breakers: it gets all of them, and returns the new ones and a result. Raises
    Unavailable if others change them all the time."""
    for _ in range(max_tries):
        raw = await coordinator.cached(KEY)
        states = decode_states(raw)
        new, result = change(states)
        if not new or await coordinator.swap(KEY, raw, msgspec.json.encode(states | new), KEEP_SECONDS):
            for key, state in new.items():
                log_change(key, states.get(key), state)
            return result
    raise Unavailable("The breakers change too often. Try again.")


def describe_wait(target: str, state: BreakerState, now: float) -> Wait:
    """Return why a run waits that this breaker blocks."""
    error = state.error or None
    because = f" ({error})" if error else ""
    if now < state.until:
        detail = f"waiting: breaker open for {target} until {iso_text(state.until)}{because}"
        return Wait(WAIT_CODE, detail, state.until, target, error)
    return Wait(WAIT_CODE, f"waiting: breaker half-open for {target}{because}", None, target, error)


async def current_wait(coordinator: Coordinator, clock: Clock, job: Job) -> Wait | None:
    """Return why the job's run waits. A report about a breaker counts only while that breaker is not closed."""
    wait = await waiting(coordinator, job.run.run_id)
    if wait is None or wait.code != WAIT_CODE or wait.target is None:
        return wait
    state = decode_states(await coordinator.cached(KEY)).get(breaker_key(job.tenant, wait.target))
    if state is None or state.is_closed or not job.options.breaker.enabled:
        return None
    return describe_wait(wait.target, state, clock.now())


def log_change(key: str, old: BreakerState | None, new: BreakerState) -> None:
    """Log and count a breaker that opened or closed."""
    tenant, target = split_key(key)
    if new.is_closed:
        metrics.BREAKER_CHANGES.add(1, "closed")
        log.info("breaker closed", tenant=tenant, target=target)
    elif old is None or new.since != old.since or new.times != old.times:
        metrics.BREAKER_CHANGES.add(1, "open")
        log.warning(
            "breaker opened", tenant=tenant, target=target, until=iso_text(new.until), times=new.times, error=new.error
        )

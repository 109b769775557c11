"""Gate: checks a job's tasks against the breakers of their targets, for one worker, and records what attempts say about
the targets.

A task's target is the `upstream` that the job names. Without one it is the origin of its URL (scheme, host and port),
and also the gateway that the attempt goes through, which is to blame for `gateway_failed`. The gate picks it from the
job's pool of gateways (gateway_pool.py): one whose breaker is closed. The job waits for them only if none is.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from conveyor.coordination.breaker import Breakers, Sign
from conveyor.coordination.breaker_states import BreakerState, breaker_key
from conveyor.egress.routes import operator_gateway
from conveyor.model import Job, Outcome, TaskError, TaskRef
from conveyor.process.gateway_pool import GatewayPool, make_pool
from conveyor.process.retry import is_outage

# The longest wait of a very small job if the queue cannot hasten its tasks, and how many tasks make it a second longer.
_SHORT_WAIT = 5.0
# Where the host of a URL in an input may begin, and how many origins a gate remembers.
_AUTHORITY = len('"https://')
_MAX_ORIGINS = 2000
_TASKS_A_SECOND = 2_000
# How long no task asks for a probe of a half-open gateway after one was refused, while others are closed.
_REFUSED_SECONDS = 0.5


class GatedRef(Protocol):
    """A reference that passes the gate. `probes` are the half-open breakers that it probes, `gateway` is the place of
    its gateway in the job's pool."""

    ref: TaskRef
    probes: tuple[str, ...]
    gateway: int


class Blocking(NamedTuple):
    """A breaker that blocks a task, and for how many more seconds the task waits for it."""

    key: str
    state: BreakerState
    patience: float


class Gate:
    """`origin` names the target of a reference; `gateway` is the operator's, for jobs that have none. If the queue
    cannot hasten tasks that wait, none waits longer than `max_wait` seconds at a time; a small job's less long."""

    def __init__(
        self,
        breakers: Breakers,
        job: Job,
        origin: Callable[[TaskRef], str | None],
        gateway: str | None = None,
        max_wait: float = inf,
    ) -> None:
        self._breakers = breakers
        self._origin = origin
        self._operator_gateway = operator_gateway(gateway)
        self._max_wait = max_wait
        # Breakers of origins, by how inputs with them begin.
        self._origin_keys: dict[str, str | None] = {}
        self._job = job
        # Probes without an outcome, and until when no probe of a gateway is asked for.
        self._probing: dict[int, GatedRef] = {}
        self._refused_until = 0.0
        self._pool: GatewayPool | None = None
        self.follow(job)

    def follow(self, job: Job) -> None:
        """Apply the job's changed options."""
        if self._pool is None or job.options.gateway != self._job.options.gateway:
            self._pool = make_pool(job.options.gateway or self._operator_gateway, zlib.crc32(job.run.run_id.encode()))
        self._job = job
        self._upstream = job.options.upstream
        # With an upstream, the gateways have no breakers.
        self._gateways = () if self._pool is None or self._upstream is not None else self._pool.names
        self._enabled = job.options.breaker.enabled
        # Each wait costs a few calls for a message, so those of many tasks are longer.
        total = job.run.total
        is_short = total > 0 and self._max_wait < inf
        self._longest_wait = min(self._max_wait, _SHORT_WAIT + total / _TASKS_A_SECOND) if is_short else self._max_wait

    @property
    def is_watching(self) -> bool:
        """Whether any breaker is open or half-open, of this job or another."""
        return self._enabled and self._breakers.is_watching

    @property
    def is_recording(self) -> bool:
        """Whether to record outcomes even if none of them failed."""
        return self._enabled and self._breakers.is_busy

    @property
    def is_urgent(self) -> bool:
        """Whether the worker should report to the breakers at once: many attempts failed."""
        return self._breakers.is_urgent

    def open_until(self) -> float | None:
        """Return when the breaker half-opens that all of the job's tasks depend on; None if none blocks them all.

        Once the job's patience is over, it blocks none: the tasks go through the gate, where they fail.
        """
        shared = [f"upstream:{self._upstream}"] if self._upstream is not None else self._gateways
        blocked = self._first_open(shared) if self.is_watching else None
        if blocked is None or blocked.patience <= 0:
            return None
        self._breakers.report_wait(self._job.run.run_id, blocked.key, blocked.state)
        return blocked.state.until

    def hold_time(self, refs: Sequence[TaskRef]) -> float | None:
        """Return for how many seconds none of these tasks can start; None if one may, or its patience is over."""
        if not self.is_watching:
            return None
        waits = [0.0]
        for ref in refs:
            wait = self.check(ref)
            if wait is None or isinstance(wait, TaskError) or wait == 0:
                return None
            waits.append(wait)
        return max(waits) or None

    def check(self, ref: TaskRef) -> float | TaskError | None:
        """0: the task may start. A number: it waits this many seconds. An error: its patience is over. None: a breaker
        is half-open, call `acquire_probe`."""
        check: float | None = 0.0
        for targets in (self._own_targets(ref), self._gateways):
            if not targets:
                continue
            blocked = self._first_open(targets)
            if blocked is None:
                check = None if self._wants_probe(targets) else check
                continue
            if blocked.patience <= 0:
                return self._down(targets, blocked.state)
            self._breakers.report_wait(self._job.run.run_id, blocked.key, blocked.state)
            return min(blocked.patience, self._breakers.wait_of(blocked.state), self._longest_wait)
        return check

    async def acquire_probe(self, entry: GatedRef) -> float:
        """Return 0 if the task may probe its half-open breakers, or how many seconds it waits."""
        refused = None
        for target in self._own_targets(entry.ref):
            refused = refused or await self._probe(entry, self._key(target))
        refused = refused or await self._probe_gateway(entry)
        if refused is None:
            return 0.0
        key, state = refused
        self.release([entry])
        self._breakers.report_wait(self._job.run.run_id, key, state)
        return min(self._breakers.wait_of(state), self._longest_wait)

    def assign_gateways(self, entries: Sequence[GatedRef]) -> None:
        """Pick a gateway of the job's pool for each reference that starts now, but for those that probe one."""
        pool = self._pool
        if pool is None or len(pool.members) == 1:
            return
        members = pool.members
        if self._gateways and self.is_watching:
            members = tuple(place for place in members if self._state(pool.names[place]) is None) or members
        for entry in entries:
            if entry.probes and self._gateways and self._key(pool.names[entry.gateway]) in entry.probes:
                continue
            host = _host_of(self._origin(entry.ref)) if pool.is_sticky else None
            entry.gateway = pool.take(members) if host is None else pool.of_host(host, members)

    def record(self, entries: Sequence[GatedRef], outcomes: Sequence[Outcome]) -> None:
        """Learn from outcomes. While nothing fails, this only looks at each outcome's error."""
        if not self._enabled:
            return
        breakers = self._breakers
        if not breakers.is_busy and all(outcome.error is None for outcome in outcomes):
            pairs = zip(entries, outcomes, strict=True)
            self.note_answers([entry for entry, outcome in pairs if _is_answered(outcome)])
            return
        answers = []
        for entry, outcome in zip(entries, outcomes, strict=True):
            sign = self._sign(entry.ref, outcome)
            if entry.probes:
                for key in entry.probes:
                    breakers.record_probe(key, self._probe_result(entry, key, sign, outcome))
                self._end_probe(entry)
            elif sign is Sign.UP and not breakers.has_suspects:
                answers.append(entry)
            elif sign is not None:
                error = "" if outcome.error is None else outcome.error.code
                for target in self._blamed_targets(entry, outcome, sign):
                    breakers.count(self._key(target), sign, self._job.run.run_id, error)
        self.note_answers(answers)

    def note_answers(self, answers: Sequence[GatedRef]) -> None:
        """Note which targets answered. Most lists name one host many times in a row: it is looked up once."""
        if not self._enabled:
            return
        if self._upstream is not None:
            if answers:
                self._breakers.note_answers(self._key(f"upstream:{self._upstream}"), len(answers))
            return
        if self._gateways:
            for name, answered in Counter([self._gateway_of(entry) for entry in answers]).items():
                self._breakers.note_answers(self._key(name), answered)
        key, prefix, count = None, "\0", 0
        for entry in answers:
            if entry.ref.input.startswith(prefix):
                count += 1
                continue
            if key is not None:
                self._breakers.note_answers(key, count)
            key, prefix = self._answered_key(entry.ref)
            count = 1
        if key is not None:
            self._breakers.note_answers(key, count)

    def release(self, entries: Sequence[GatedRef]) -> None:
        """Free the probes of references that say nothing about their targets."""
        for entry in entries:
            for key in entry.probes:
                self._breakers.record_probe(key, None)
            self._end_probe(entry)

    def mark_alive(self, entries: Sequence[GatedRef]) -> None:
        """Record the targets of long attempts as up."""
        for entry in entries:
            for key in entry.probes:
                self._breakers.record_probe(key, Sign.UP)
            self._end_probe(entry)

    def close(self) -> None:
        """Free all probes of the lane."""
        self.release(list(self._probing.values()))

    def _patience(self, state: BreakerState) -> float:
        """Return how many more seconds the job's tasks wait for a target that is down."""
        return self._job.options.breaker.patience - self._breakers.age(state)

    def _end_probe(self, entry: GatedRef) -> None:
        if entry.probes:
            entry.probes = ()
            self._probing.pop(id(entry), None)

    def _answered_key(self, ref: TaskRef) -> tuple[str | None, str]:
        """Return the breaker of a task's origin, and with what the inputs of other tasks of that origin begin."""
        # The authority of a URL ends at the first slash after the two of its scheme, if not before.
        text = ref.input
        prefix = text[: text.find("/", _AUTHORITY) + 1] if text.startswith('"http') else ""
        if prefix in self._origin_keys:
            return self._origin_keys[prefix], prefix
        origin = self._origin(ref)
        key = None if origin is None else self._key(origin)
        if not prefix:
            return key, "\0"
        if len(self._origin_keys) >= _MAX_ORIGINS:
            self._origin_keys.clear()
        self._origin_keys[prefix] = key
        return key, prefix

    def _sign(self, ref: TaskRef, outcome: Outcome) -> Sign | None:
        """Return what the outcome says about the target; None if it says nothing."""
        error = outcome.error
        if error is None:
            return Sign.UP if _is_answered(outcome) else None
        if is_outage(outcome):
            if self._is_elsewhere(ref, outcome):
                return Sign.UP
            return Sign.ERROR if error.code.startswith("http_") else Sign.DOWN
        if self._upstream is not None and error.code == "handler_raised":
            return Sign.ERROR
        return Sign.UP if outcome.http_status is not None else None

    def _is_elsewhere(self, ref: TaskRef, outcome: Outcome) -> bool:
        """Return whether another host is to blame: the target answered, with a redirect or a link to it."""
        origin = None if self._upstream is not None or outcome.final_url is None else self._origin(ref)
        own, last = _host_of(origin), _host_of(outcome.final_url)
        return own is not None and last is not None and own != last

    def _blamed_targets(self, entry: GatedRef, outcome: Outcome, sign: Sign) -> list[str]:
        """Return the targets that the outcome is about: the gateway or the host, if one of them failed."""
        if not self._gateways:
            return self._own_targets(entry.ref)
        if sign is Sign.UP:
            return [*self._own_targets(entry.ref), self._gateway_of(entry)]
        return [self._gateway_of(entry)] if _is_gateway_failure(outcome) else self._own_targets(entry.ref)

    def _probe_result(self, entry: GatedRef, key: str, sign: Sign | None, outcome: Outcome) -> Sign | None:
        """Return what the outcome of a probe says about this breaker's target."""
        if sign is None or sign is Sign.UP or not self._gateways:
            return sign
        if key == self._key(self._gateway_of(entry)):
            return Sign.DOWN if _is_gateway_failure(outcome) else Sign.UP
        return None if _is_gateway_failure(outcome) else sign

    def _own_targets(self, ref: TaskRef) -> list[str]:
        """Return what the task depends on, beside a gateway."""
        target = self._origin(ref) if self._upstream is None else f"upstream:{self._upstream}"
        return [] if target is None else [target]

    def _gateway_of(self, entry: GatedRef) -> str:
        # The pool may have changed since it was picked.
        return self._gateways[entry.gateway if entry.gateway < len(self._gateways) else 0]

    def _first_open(self, targets: Sequence[str]) -> Blocking | None:
        """Return the breaker that half-opens first, if all of these are open. The task waits for as long as it would
        for the last one that opened."""
        opened: list[Blocking] = []
        for target in targets:
            state = self._state(target)
            if state is None or not self._breakers.is_open(state):
                return None
            opened.append(Blocking(self._key(target), state, self._patience(state)))
        if not opened:
            return None
        first = min(opened, key=lambda each: each.state.until)
        return first._replace(patience=max(each.patience for each in opened))

    def _wants_probe(self, targets: Sequence[str]) -> bool:
        """Whether to ask for a probe of one of these: in any case if none is closed."""
        states = [self._state(target) for target in targets]
        if not any(state is not None and not self._breakers.is_open(state) for state in states):
            return False
        return None not in states or self._breakers.now() >= self._refused_until

    async def _probe(self, entry: GatedRef, key: str) -> tuple[str, BreakerState] | None:
        """Let the task probe a breaker, unless it is closed. Returns the breaker if it may not."""
        state = self._breakers.state(key)
        if state is None:
            return None
        if self._breakers.is_open(state) or not await self._breakers.acquire_probe(key):
            return key, state
        # At once: should the call for the next breaker fail, `release` frees this probe.
        entry.probes = (*entry.probes, key)
        self._probing[id(entry)] = entry
        return None

    async def _probe_gateway(self, entry: GatedRef) -> tuple[str, BreakerState] | None:
        """Let the task probe a half-open gateway of the pool. If it may not, a closed one takes it; without one, it
        waits for the breaker that is returned."""
        refused: tuple[str, BreakerState] | None = None
        for place, name in enumerate(self._gateways):
            state = self._state(name)
            if state is None:
                continue
            blocked = await self._probe(entry, self._key(name))
            if blocked is None:
                entry.gateway = place
                return None
            if refused is None or blocked[1].until < refused[1].until:
                refused = blocked
        if refused is not None and any(self._state(name) is None for name in self._gateways):
            self._refused_until = self._breakers.now() + _REFUSED_SECONDS
            return None
        return refused

    def _down(self, targets: Sequence[str], state: BreakerState) -> TaskError:
        """Return the error of a task whose patience is over."""
        seconds = self._job.options.breaker.patience
        because = f": {state.error}" if state.error else ""
        names = targets[0] if len(targets) == 1 else f"all {len(targets)} gateways of the pool"
        was = "was" if len(targets) == 1 else "were"
        return TaskError("target_down", f"{names} {was} down for more than {seconds:g} seconds{because}")

    def _state(self, target: str) -> BreakerState | None:
        return self._breakers.state(self._key(target))

    def _key(self, target: str) -> str:
        return breaker_key(self._job.tenant, target)


def _is_gateway_failure(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == "gateway_failed"


def _host_of(url: str | None) -> str | None:
    try:
        return urlsplit(url).hostname if url else None
    except ValueError:
        return None


def _is_answered(outcome: Outcome) -> bool:
    """Return whether the target of a task without an error answered. A task that waits has the status it got."""
    return outcome.spends_attempt or outcome.http_status is not None

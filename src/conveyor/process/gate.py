"""Gate: checks a job's tasks against the breakers of their targets, for one worker, and records what attempts say about
the targets.

A task's target is the `upstream` that the job names. Without one it is the origin of its URL (scheme, host and port),
and also the gateway that the job goes through, which is to blame for `gateway_failed`.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol
from urllib.parse import urlsplit

from conveyor.coordination.breaker import Breakers, Sign
from conveyor.coordination.breaker_states import BreakerState, breaker_key
from conveyor.egress.origins import plain_origin
from conveyor.model import Gateway, Job, Outcome, TaskError, TaskRef
from conveyor.process.retry import is_outage

# The longest wait of a very small job if the queue cannot hasten its tasks, and how many tasks make it a second longer.
_SHORT_WAIT = 5.0
# Where the host of a URL in an input may begin, and how many origins a gate remembers.
_AUTHORITY = len('"https://')
_MAX_ORIGINS = 2000
_TASKS_A_SECOND = 2_000


class GatedRef(Protocol):
    """A reference that passes the gate. `probes` are the half-open breakers that it probes."""

    ref: TaskRef
    probes: tuple[str, ...]


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
        self._operator_gateway = gateway
        self._max_wait = max_wait
        # Breakers of origins, by how inputs with them begin.
        self._origin_keys: dict[str, str | None] = {}
        # Probes without an outcome.
        self._probing: dict[int, GatedRef] = {}
        self.follow(job)

    def follow(self, job: Job) -> None:
        """Apply the job's changed options."""
        self._job = job
        self._upstream = job.options.upstream
        self._gateway = None if self._upstream else _gateway_name(job.options.gateway, self._operator_gateway)
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
        shared = self._shared_target()
        state = None if shared is None or not self.is_watching else self._breakers.state(self._key(shared))
        if shared is None or state is None or not self._breakers.is_open(state) or self._patience(state) <= 0:
            return None
        self._breakers.report_wait(self._job.run.run_id, self._key(shared), state)
        return state.until

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
        for target in self._targets(ref):
            key = self._key(target)
            state = self._breakers.state(key)
            if state is None:
                continue
            if not self._breakers.is_open(state):
                check = None
                continue
            patience = self._patience(state)
            if patience <= 0:
                seconds = self._job.options.breaker.patience
                because = f": {state.error}" if state.error else ""
                return TaskError("target_down", f"{target} was down for more than {seconds:g} seconds{because}")
            self._breakers.report_wait(self._job.run.run_id, key, state)
            return min(patience, self._breakers.wait_of(state), self._longest_wait)
        return check

    async def acquire_probe(self, entry: GatedRef) -> float:
        """Return 0 if the task may probe its half-open breakers, or how many seconds it waits."""
        for target in self._targets(entry.ref):
            key = self._key(target)
            state = self._breakers.state(key)
            if state is None:
                continue
            if self._breakers.is_open(state) or not await self._breakers.acquire_probe(key):
                self.release([entry])
                self._breakers.report_wait(self._job.run.run_id, key, state)
                return min(self._breakers.wait_of(state), self._longest_wait)
            # At once: should the call for the next breaker fail, `release` frees this probe.
            entry.probes = (*entry.probes, key)
            self._probing[id(entry)] = entry
        return 0.0

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
                    breakers.record_probe(key, self._probe_result(key, sign, outcome))
                self._end_probe(entry)
            elif sign is Sign.UP and not breakers.has_suspects:
                answers.append(entry)
            elif sign is not None:
                error = "" if outcome.error is None else outcome.error.code
                for target in self._blamed_targets(entry.ref, outcome, sign):
                    breakers.count(self._key(target), sign, self._job.run.run_id, error)
        self.note_answers(answers)

    def note_answers(self, answers: Sequence[GatedRef]) -> None:
        """Note which targets answered. Most lists name one host many times in a row: it is looked up once."""
        if not self._enabled:
            return
        shared = self._shared_target()
        if shared is not None and answers:
            self._breakers.note_answers(self._key(shared), len(answers))
        if self._upstream is not None:
            return
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

    def _blamed_targets(self, ref: TaskRef, outcome: Outcome, sign: Sign) -> list[str]:
        """Return the targets that the outcome is about: the gateway or the host, if one of them failed."""
        if self._gateway is None or sign is Sign.UP:
            return self._targets(ref)
        if _is_gateway_failure(outcome):
            return [self._gateway]
        return [target for target in self._targets(ref) if target != self._gateway]

    def _probe_result(self, key: str, sign: Sign | None, outcome: Outcome) -> Sign | None:
        """Return what the outcome of a probe says about this breaker's target."""
        if sign is None or sign is Sign.UP or self._gateway is None:
            return sign
        if key == self._key(self._gateway):
            return Sign.DOWN if _is_gateway_failure(outcome) else Sign.UP
        return None if _is_gateway_failure(outcome) else sign

    def _targets(self, ref: TaskRef) -> list[str]:
        if self._upstream is not None:
            return [f"upstream:{self._upstream}"]
        return [target for target in (self._origin(ref), self._gateway) if target is not None]

    def _shared_target(self) -> str | None:
        return f"upstream:{self._upstream}" if self._upstream is not None else self._gateway

    def _key(self, target: str) -> str:
        return breaker_key(self._job.tenant, target)


def _is_gateway_failure(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == "gateway_failed"


def _gateway_name(gateway: Gateway | None, operator_gateway: str | None) -> str | None:
    url = operator_gateway if gateway is None else gateway.proxy or gateway.url
    origin = plain_origin(url) if url else None
    return None if origin is None else f"gateway:{origin}"


def _host_of(url: str | None) -> str | None:
    try:
        return urlsplit(url).hostname if url else None
    except ValueError:
        return None


def _is_answered(outcome: Outcome) -> bool:
    """Return whether the target of a task without an error answered. A task that waits has the status it got."""
    return outcome.spends_attempt or outcome.http_status is not None

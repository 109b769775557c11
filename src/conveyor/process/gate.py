"""Gate: checks a job's tasks against the breakers of their targets, for one worker, and records what attempts say about
the targets.

A task's target is the `upstream` that the job names. Without one it is the task's host, and also the gateway that the
job goes through, which is to blame for `gateway_failed`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from conveyor.coordination.breaker import Breakers, BreakerState, breaker_key
from conveyor.model import Gateway, Job, Outcome, TaskError, TaskRef
from conveyor.process.retry import is_outage


class GatedRef(Protocol):
    """A reference that passes the gate. `probes` are the half-open breakers that it probes."""

    ref: TaskRef
    probes: tuple[str, ...]


class Gate:
    """`target` names the host of a reference; `gateway` is the operator's, for jobs that have none."""

    def __init__(
        self, breakers: Breakers, job: Job, target: Callable[[TaskRef], str | None], gateway: str | None = None
    ) -> None:
        self._breakers = breakers
        self._target = target
        self._operator_gateway = gateway
        # Probes without an outcome.
        self._probing: dict[int, GatedRef] = {}
        self.follow(job)

    def follow(self, job: Job) -> None:
        """Apply the job's changed options."""
        self._job = job
        self._upstream = job.options.upstream
        self._gateway = None if self._upstream else _gateway_name(job.options.gateway, self._operator_gateway)
        self._enabled = job.options.breaker.enabled

    @property
    def is_watching(self) -> bool:
        """Whether any breaker is open or half-open, of this job or another."""
        return self._enabled and self._breakers.is_watching

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
        if state is None or not self._breakers.is_open(state) or self._patience(state) <= 0:
            return None
        return state.until

    def check(self, ref: TaskRef) -> float | TaskError | None:
        """0: the task may start. A number: it waits this many seconds. An error: its patience is over. None: a breaker
        is half-open, call `acquire_probe`."""
        check: float | None = 0.0
        for target in self._targets(ref):
            state = self._breakers.state(self._key(target))
            if state is None:
                continue
            if not self._breakers.is_open(state):
                check = None
                continue
            patience = self._patience(state)
            if patience <= 0:
                seconds = self._job.options.breaker.patience
                return TaskError("target_down", f"{target} was down for more than {seconds:g} seconds")
            self._breakers.report_wait(self._job.run.run_id, target, state)
            return min(patience, self._breakers.wait_of(state))
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
                self._breakers.report_wait(self._job.run.run_id, target, state)
                return self._breakers.wait_of(state)
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
            return
        for entry, outcome in zip(entries, outcomes, strict=True):
            up = self._is_up(entry.ref, outcome)
            if entry.probes:
                for key in entry.probes:
                    breakers.record_probe(key, up=self._probe_result(key, up, outcome))
                self._end_probe(entry)
            elif up is not None and (breakers.has_suspects or not up):
                for target in self._blamed_targets(entry.ref, outcome):
                    breakers.count(self._key(target), down=not up)

    def release(self, entries: Sequence[GatedRef]) -> None:
        """Free the probes of references that say nothing about their targets."""
        for entry in entries:
            for key in entry.probes:
                self._breakers.record_probe(key, up=None)
            self._end_probe(entry)

    def mark_alive(self, entries: Sequence[GatedRef]) -> None:
        """Record the targets of long attempts as up."""
        for entry in entries:
            for key in entry.probes:
                self._breakers.record_probe(key, up=True)
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

    def _is_up(self, ref: TaskRef, outcome: Outcome) -> bool | None:
        """Return whether the target was up; None if the outcome does not tell."""
        if outcome.error is None:
            # A task that waits for a target that has answered has its status.
            return True if outcome.spends_attempt or outcome.http_status is not None else None
        if is_outage(outcome):
            return self._is_elsewhere(ref, outcome)
        if self._upstream is not None and outcome.error.code == "handler_raised":
            return False
        return True if outcome.http_status is not None else None

    def _is_elsewhere(self, ref: TaskRef, outcome: Outcome) -> bool:
        """Return whether another host is to blame: the target answered, with a redirect or a link to it."""
        if self._upstream is not None or outcome.final_url is None:
            return False
        host = self._target(ref)
        return host is not None and (urlsplit(outcome.final_url).hostname or "").rstrip(".") != host.strip("[]")

    def _blamed_targets(self, ref: TaskRef, outcome: Outcome) -> list[str]:
        """Return the targets that the outcome is about: the gateway or the host, if one of them failed."""
        if self._gateway is None or not is_outage(outcome):
            return self._targets(ref)
        if _is_gateway_failure(outcome):
            return [self._gateway]
        return [target for target in self._targets(ref) if target != self._gateway]

    def _probe_result(self, key: str, up: bool | None, outcome: Outcome) -> bool | None:
        """Return what the outcome of a probe says about this breaker's target."""
        if up is not False or self._gateway is None:
            return up
        if key == self._key(self._gateway):
            return not _is_gateway_failure(outcome)
        return None if _is_gateway_failure(outcome) else False

    def _targets(self, ref: TaskRef) -> list[str]:
        if self._upstream is not None:
            return [f"upstream:{self._upstream}"]
        return [target for target in (self._target(ref), self._gateway) if target is not None]

    def _shared_target(self) -> str | None:
        return f"upstream:{self._upstream}" if self._upstream is not None else self._gateway

    def _key(self, target: str) -> str:
        return breaker_key(self._job.tenant, target)


def _is_gateway_failure(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == "gateway_failed"


def _gateway_name(gateway: Gateway | None, operator_gateway: str | None) -> str | None:
    url = operator_gateway if gateway is None else gateway.proxy or gateway.url
    try:
        host = urlsplit(url).hostname if url else None
    except ValueError:
        return None
    return f"gateway:{host}" if host else None

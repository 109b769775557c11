"""Gate: the way of one job's tasks to their targets, as one worker sees it. Says whether a task may go now, and learns
from what attempts came to whether a target is there.

A task's target is the `upstream` that the job names; without one, its host, and beside it the gateway that the job goes
through, which has the blame for `gateway_failed`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from conveyor.coordination.breaker import Breakers, Open, breaker_key
from conveyor.model import Gateway, Job, Outcome, TaskError, TaskRef
from conveyor.process.retry import is_outage


class GatedRef(Protocol):
    """A reference on its way. `canaries` are the breakers that it tries for all others."""

    ref: TaskRef
    canaries: tuple[str, ...]


class Gate:
    """`target` names the host of a reference; `gateway` is the operator's, for jobs that have none."""

    def __init__(
        self, breakers: Breakers, job: Job, target: Callable[[TaskRef], str | None], gateway: str | None = None
    ) -> None:
        self._breakers = breakers
        self._target = target
        self._operators = gateway
        # Canaries on their way.
        self._out: dict[int, GatedRef] = {}
        self.follow(job)

    def follow(self, job: Job) -> None:
        """Take over changed options."""
        self._job = job
        self._upstream = job.options.upstream
        self._gateway = None if self._upstream else _gateway_name(job.options.gateway, self._operators)
        self._enabled = job.options.breaker.enabled

    @property
    def watching(self) -> bool:
        """Whether any target is not closed, of this job or another."""
        return self._enabled and self._breakers.watching

    @property
    def urgent(self) -> bool:
        """Whether so much failed that the worker should not wait to tell it."""
        return self._breakers.urgent

    def closed_until(self) -> float | None:
        """When all of the job can go on, if none of it can now: what they all depend on is down. Not once that was down
        for as long as its tasks have patience: then they end."""
        wide = self._wide()
        state = None if wide is None or not self.watching else self._breakers.found(self._key(wide))
        if state is None or not self._breakers.is_open(state) or self._patience(state) <= 0:
            return None
        return state.until

    def verdict(self, ref: TaskRef) -> float | TaskError | None:
        """0: it may go. Above: it waits so long. An error: it has waited long enough. None: it is to ask `enter`."""
        verdict: float | None = 0.0
        for target in self._targets(ref):
            state = self._breakers.found(self._key(target))
            if state is None:
                continue
            if not self._breakers.is_open(state):
                verdict = None
                continue
            patience = self._patience(state)
            if patience <= 0:
                seconds = self._job.options.breaker.patience
                return TaskError("target_down", f"{target} was down for more than {seconds:g} seconds")
            self._breakers.waits(self._job.run.run_id, target, state)
            return min(patience, self._breakers.wait_of(state))
        return verdict

    async def enter(self, passing: GatedRef) -> float:
        """For a task to a target that is half-open: 0 if it may go as a canary, or how long it waits."""
        for target in self._targets(passing.ref):
            key = self._key(target)
            state = self._breakers.found(key)
            if state is None:
                continue
            if self._breakers.is_open(state) or not await self._breakers.enter(key):
                self.gone([passing])
                self._breakers.waits(self._job.run.run_id, target, state)
                return self._breakers.wait_of(state)
            # At once: should the next breaker not answer, this one's place is known to be taken.
            passing.canaries = (*passing.canaries, key)
            self._out[id(passing)] = passing
        return 0.0

    def saw(self, passed: Sequence[GatedRef], outcomes: Sequence[Outcome]) -> None:
        """Learn from attempts. Where nothing fails and nothing failed of late, that is one look at each outcome."""
        if not self._enabled:
            return
        breakers = self._breakers
        if not breakers.busy and all(outcome.error is None for outcome in outcomes):
            return
        for one, outcome in zip(passed, outcomes, strict=True):
            up = self._is_up(outcome)
            if one.canaries:
                for key in one.canaries:
                    breakers.probed(key, up=self._says_of(key, up, outcome))
                self._landed(one)
            elif up is not None and (breakers.suspecting or not up):
                for target in self._concerned(one.ref, outcome):
                    breakers.count(self._key(target), away=not up)

    def gone(self, passed: Sequence[GatedRef]) -> None:
        """These came to nothing that would say anything."""
        for one in passed:
            for key in one.canaries:
                self._breakers.probed(key, up=None)
            self._landed(one)

    def close(self) -> None:
        """The lane is given up, with all that is on its way."""
        self.gone(list(self._out.values()))

    def moving(self, passed: Sequence[GatedRef]) -> None:
        """These go on for so long already that their targets must be there."""
        for one in passed:
            for key in one.canaries:
                self._breakers.probed(key, up=True)
            self._landed(one)

    def _patience(self, state: Open) -> float:
        """How much longer the job's tasks wait for a target that is down."""
        return self._job.options.breaker.patience - self._breakers.age(state)

    def _landed(self, one: GatedRef) -> None:
        if one.canaries:
            one.canaries = ()
            self._out.pop(id(one), None)

    def _is_up(self, outcome: Outcome) -> bool | None:
        """Whether the target was there; None if the outcome does not say."""
        if outcome.error is None:
            return True if outcome.spend else None
        if is_outage(outcome):
            return False
        if self._upstream is not None and outcome.error.code == "handler_raised":
            return False
        return True if outcome.http_status is not None else None

    def _concerned(self, ref: TaskRef, outcome: Outcome) -> list[str]:
        """Whom the outcome of an attempt speaks of: a gateway answers for a host that is down."""
        if self._gateway is None or not is_outage(outcome):
            return self._targets(ref)
        if _is_gateways(outcome):
            return [self._gateway]
        return [each for each in self._targets(ref) if each != self._gateway]

    def _says_of(self, key: str, up: bool | None, outcome: Outcome) -> bool | None:
        """The same for a canary of one of them."""
        if up is not False or self._gateway is None:
            return up
        if key == self._key(self._gateway):
            return not _is_gateways(outcome)
        return None if _is_gateways(outcome) else False

    def _targets(self, ref: TaskRef) -> list[str]:
        if self._upstream is not None:
            return [f"upstream:{self._upstream}"]
        host = self._target(ref)
        return [each for each in (host, self._gateway) if each is not None]

    def _wide(self) -> str | None:
        return f"upstream:{self._upstream}" if self._upstream is not None else self._gateway

    def _key(self, target: str) -> str:
        return breaker_key(self._job.tenant, target)


def _is_gateways(outcome: Outcome) -> bool:
    return outcome.error is not None and outcome.error.code == "gateway_failed"


def _gateway_name(gateway: Gateway | None, operators: str | None) -> str | None:
    url = operators if gateway is None else gateway.proxy or gateway.url
    try:
        host = urlsplit(url).hostname if url else None
    except ValueError:
        return None
    return f"gateway:{host}" if host else None

"""The machine: everything that clients, operators, targets and bad luck do to a system, in any order.

An example is a short program of these rules, of which Hypothesis leaves some out of each; draws.py has what they are
given. At the end everything must come to its end, see checks.py.
"""

from collections.abc import Coroutine
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule

from conveyor.errors import ConveyorError
from conveyor.model import JobId
from conveyor.states import ENDED, RunState
from tests.machine import checks
from tests.machine.drain import drain
from tests.machine.draws import (
    PAUSE,
    RESUME,
    Ending,
    Swarm,
    Tasks,
    Wanted,
    adjustments,
    beginnings,
    calls,
    changes,
    keys,
    much_wanted,
    roles,
    tasks_of,
    then,
    wanted,
)
from tests.machine.profile import Profile
from tests.machine.seams import AFTER, BEFORE, NEW, SLOW, Arm
from tests.machine.targets import FAILING, GATEWAY_HOST, HOSTS, REFUSED, SILENT
from tests.machine.world import World

closed_jobs = Bundle("closed_jobs")
open_jobs = Bundle("open_jobs")
jobs = st.one_of(closed_jobs, open_jobs)


class Machine(RuleBasedStateMachine):
    """See the module."""

    # For measurements: what is left out of every example.
    without: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.swarm = Swarm([], [], [])
        self.broken = False
        self.steps = 0
        self.paused = False
        self.scheduled = False
        self.ending: Ending | None = None

    @initialize(target=closed_jobs, begin=st.runner().flatmap(lambda machine: beginnings(machine.without)))
    def begin(self, begin: tuple[Profile, Swarm, list[Wanted], Ending | None]) -> Any:
        profile, self.swarm, first, self.ending = begin
        self.world = World(profile)
        self.world.loop.on_rest = partial(checks.check_at_rest, self.world)
        made = [self._ask(self.there.submit(job.spec, job.tasks.urls, None, prefer_async=False)) for job in first]
        return multiple(*(job.job_id for job in made if job is not None))

    # Jobs.

    @rule(target=closed_jobs, job=wanted, key=keys, late=st.booleans(), after=then)
    def submit(self, job: Wanted, key: str | None, late: bool, after: float) -> Any:
        key = None if key is None else f"{key}-{len(self.there.pledges)}"
        return self._made(self.there.submit(job.spec, job.tasks.urls, key, prefer_async=late), after)

    @rule(target=closed_jobs, job=wanted, after=then)
    def stage(self, job: Wanted, after: float) -> Any:
        return self._made(self.there.stage(job.spec, job.tasks.urls), after)

    @rule(target=open_jobs, job=wanted, idle=st.sampled_from([1, 3, 600]), after=then)
    def open_job(self, job: Wanted, idle: float, after: float) -> Any:
        return self._made(self.there.open_job({"idle_timeout": idle, **job.spec}), after)

    @rule(job=open_jobs, tasks=tasks_of("fetch"), last=st.sampled_from([False, False, True]), key=keys, after=then)
    def add(self, job: JobId, tasks: Tasks, last: bool, key: str | None, after: float) -> None:
        self._add(job, tasks, last, key, after)

    # Under a second name: an open job without tasks is of little use.
    @rule(job=open_jobs, tasks=tasks_of("fetch"), after=then)
    def add_more(self, job: JobId, tasks: Tasks, after: float) -> None:
        self._add(job, tasks, False, None, after)

    @rule(job=open_jobs, pauses=st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.2, 2.0]), min_size=1, max_size=6))
    def trickle(self, job: JobId, pauses: list[float]) -> None:
        """Batches that come about as late as the job's idle timeout lets them."""
        for part in pauses:
            known = self._ask(self.there.job(job))
            if known is None or known.state is not RunState.INGESTING:
                return
            self._add(job, Tasks(2, ["quick"], 1), False, None, part * min(known.options.idle_timeout, 8.0))

    def _add(self, job: JobId, tasks: Tasks, last: bool, key: str | None, after: float) -> None:
        if self.there.pledges[job].kind == "download":
            tasks = Tasks(2, ["file"], tasks.hosts)
        key = None if key is None else f"{key}-{self.there.clock.new_id('key')}"
        self._ask(self.there.add(job, tasks.urls, key, last=last), after)

    @rule(job=open_jobs, after=then)
    def close(self, job: JobId, after: float) -> None:
        self._ask(self.there.close_job(job), after)

    @rule(job=jobs, after=then)
    def pause(self, job: JobId, after: float) -> None:
        self.paused = True
        self._ask(self.there.pause(self._live(job)), after)

    @precondition(lambda self: self.paused)
    @rule(job=jobs, after=then)
    def resume(self, job: JobId, after: float) -> None:
        self._ask(self.there.resume(job), after)

    # One rule: where jobs are stopped as often as they are made, little happens.
    @rule(job=jobs, delete=st.booleans(), after=then)
    def stop(self, job: JobId, delete: bool, after: float) -> None:
        self._ask(self.there.delete(job) if delete else self.there.cancel(self._live(job)), after)

    @rule(job=jobs, options=changes, after=then)
    def change(self, job: JobId, options: dict[str, Any], after: float) -> None:
        self._ask(self.there.change(self._live(job), options), after)

    @rule(target=closed_jobs, job=much_wanted, steps=adjustments, pause=st.sampled_from([0.1, 0.3, 0.6]))
    def submit_and_adjust(self, job: Wanted, steps: list[int | str], pause: float) -> Any:
        """A job that its owner does not leave alone while it runs."""
        made = self._ask(self.there.submit(job.spec, job.tasks.urls, None, prefer_async=False), pause)
        if made is None:
            return multiple()
        for step in steps:
            if step == PAUSE:
                self._ask(self.there.pause(made.job_id), pause)
            elif step == RESUME:
                self._ask(self.there.resume(made.job_id), pause)
            else:
                self._ask(self.there.change(made.job_id, {"concurrency": step}), pause)
        return made.job_id

    @rule(target=closed_jobs, job=jobs, by=wanted, after=then)
    def replace(self, job: JobId, by: Wanted, after: float) -> Any:
        return self._made(self.there.replace(self._live(job), by.spec, by.tasks.urls), after)

    @precondition(lambda self: self.world is not None and (self.world.faults.fired or self.world.crashed))
    @rule(after=then)
    def redrive(self, after: float) -> None:
        self._ask(self.there.redrive(), after)

    @rule(job=jobs, select=st.sampled_from(["failed", "all"]), after=then)
    def rerun(self, job: JobId, select: str, after: float) -> None:
        self._ask(self.there.rerun(job, select, {}), after)

    @rule(job=jobs, form=st.sampled_from(["jsonl", "csv", "zip"]), after=then)
    def export(self, job: JobId, form: str, after: float) -> None:
        self._ask(self.there.export(job, form), after)

    @rule(job=wanted, after=then)
    def schedule(self, job: Wanted, after: float) -> None:
        self.scheduled = True
        self._ask(self.there.schedule(job.spec, job.tasks.urls[:10]), after)

    @precondition(lambda self: self.scheduled)
    @rule()
    def unschedule(self) -> None:
        self.scheduled = False
        self._ask(self.there.unschedule())

    # Time, targets and bad luck.

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0, 3.0, 8.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self._do(self.there.advance(seconds))

    @rule(seconds=st.floats(0.0, 2.0))
    def wait_a_little(self, seconds: float) -> None:
        self._do(self.there.advance(seconds))

    @rule(host=st.sampled_from([*HOSTS, GATEWAY_HOST]), how=st.sampled_from([REFUSED, FAILING, SILENT]), after=then)
    def take_down(self, host: str, how: str, after: float) -> None:
        self.there.targets.take_down(host, how)
        self._do(self.there.advance(after))

    @precondition(lambda self: self.world is not None and self.world.targets.down)
    @rule()
    def bring_up(self) -> None:
        self.there.targets.down.clear()

    @precondition(lambda self: self.world is not None and self.world.targets.failed)
    @rule(after=then)
    def reset_breakers(self, after: float) -> None:
        self._ask(self.there.reset_breakers(), after)

    @rule(role=roles, crash=st.booleans(), after=then)
    def restart(self, role: str, crash: bool, after: float) -> None:
        self._do(self.there.restart(role, crash=crash and "crash" not in self.without), after)

    @rule(number=st.integers(0, 1), after=then)
    def kill_fetcher(self, number: int, after: float) -> None:
        if "crash" not in self.without:
            self._do(self.there.kill_fetcher(number), after)

    @rule(
        call=st.just(NEW) | calls,
        nth=st.integers(1, 5),
        when=st.sampled_from([BEFORE, AFTER, SLOW]),
    )
    def fail(self, call: str, nth: int, when: str) -> None:
        if "fail" not in self.without:
            self.there.faults.arm(Arm(call, nth, when))

    # How it is done.

    @property
    def there(self) -> World:
        assert self.world is not None
        return self.world

    def _live(self, job: JobId) -> JobId:
        """This job, or the newest that has not ended in the place of one that has: it can be changed."""
        live = [other.job_id for other in self.there.run(self.there.jobs()) if other.state not in ENDED]
        return job if job in live or not live else max(live)

    def _made(self, asking: Coroutine[Any, Any, Any], after: float) -> Any:
        job = self._ask(asking, after)
        return multiple() if job is None else job.job_id

    def _ask(self, asking: Coroutine[Any, Any, Any], after: float = 0.0) -> Any:
        """What a client asks for may be refused, and may fail where a call was armed to."""

        async def ask() -> Any:
            try:
                return await asking
            except ConveyorError as error:
                if error.status >= 500 and not self.there.faults.fired and error.message != "The job is gone.":
                    raise
                return None

        return self._do(ask(), after)

    def _do(self, doing: Coroutine[Any, Any, Any], after: float = 0.0) -> Any:
        self.steps += 1
        try:
            result = self.there.run(doing)
            if after:
                self.there.run(self.there.advance(after))
            self.there.run(self.there.replace_dead())
            checks.check_step(self.there)
        except BaseException:
            self.broken = True
            raise
        return result

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if not self.broken:
                world = self.world
                world.run(drain(world, self.ending))
                world.run(checks.settle(world))
                world.run(checks.check_ended(world))
        finally:
            self.world.close()

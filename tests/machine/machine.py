"""The machine: everything that clients, operators, targets and bad luck do to a system, in any order.

An example is a short program of these rules. Hypothesis leaves some rules out of each, and `Swarm` some options and
kinds of jobs: what is rare together in all that there is, is frequent in some examples. At the end everything must come
to its end, see checks.py.
"""

from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule

from conveyor.errors import ConveyorError
from conveyor.model import JobId
from tests.machine import checks
from tests.machine.nodes import ROLES
from tests.machine.seams import AFTER, BEFORE, CALLS, NEW, SLOW, Arm, Latency
from tests.machine.targets import BEHAVIOURS, FAILING, FILES, GATEWAY, HOSTS, REFUSED, SILENT, url
from tests.machine.world import Profile, World

KINDS = ("fetch", "python", "download")
OPTIONS: dict[str, list[Any]] = {
    "concurrency": [1, 2, 5, 64],
    "rate_per_host": [0.5, 2.0, 20.0],
    "concurrency_per_host": [1, 2],
    "attempts": [1, 2, 3],
    "backoff": [{"base": 0.2, "rate": 2, "cap": 1.0}, {"base": 0.0, "rate": 1, "cap": 0.0}],
    "task_deadline": [1, 3, 8],
    "deadline": [3, 20],
    "breaker": [{"enabled": False}, {"patience": 0}, {"patience": 4}, {"patience": 20}],
    "upstream": ["one", "two"],
    "outage": [{"quick_tries": 1, "delay": 2.0}],
    "timeout": [0.2, 1.0, 4.0],
    "failure_threshold": [{"failed": 1}, {"failed": 4}, {"ratio": 0.5, "after": 1}],
    "priority": [-1, 5],
    "chunk_size": [1, 3, 10],
    "idle_timeout": [1, 3, 8],
    "stuck_after": [2, 10],
    "retry_statuses": [[], [404]],
    "retry_errors": [["connect_failed"]],
    "gateway": [{"url": GATEWAY}],
}
LIVE = sorted(set(OPTIONS) - {"chunk_size"})
LATENCIES = [Latency(), Latency(0.5, 0.0, 0.02), Latency(0.1, 0.0, 1.0), Latency(0.03, 0.0, 3.0)]
# Calls between taking a reference and handing it over are few among many: they are asked for more often.
HOT = [
    "coordinator.acquire",
    "coordinator.reserve",
    "coordinator.cached",
    "queue.mark_started",
    "queue.mark_started",
    "queue.receive",
    "queue.extend",
    "queue.send",
    "queue.ack",
    "queue.release",
    "tasks.finish",
    "tasks.unfinished",
    "jobs.active_jobs",
    "ingests.seal",
    "ingests.append_range",
    "blobs.put",
]

closed_jobs = Bundle("closed_jobs")
open_jobs = Bundle("open_jobs")
jobs = st.one_of(closed_jobs, open_jobs)
roles = st.sampled_from(["worker"] * 4 + ["ingester", "sweeper"] + [*ROLES])


class Tasks(NamedTuple):
    """So many tasks, which do this in turn, at so many hosts in turn."""

    count: int
    behaviours: list[str]
    hosts: int

    @property
    def urls(self) -> list[str]:
        return [
            url(HOSTS[number % self.hosts], self.behaviours[number % len(self.behaviours)], number)
            for number in range(self.count)
        ]


class Wanted(NamedTuple):
    """A job as it is drawn."""

    kind: str
    tasks: Tasks
    options: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """Patience is short, or a target that never comes back would be waited for."""
        handler = {"handler": "any"} if self.kind == "python" else {}
        return {"kind": self.kind, "timeout": 2.0, "breaker": {"patience": 8}, **handler, **self.options}


class Swarm(NamedTuple):
    """What jobs of an example are made of."""

    kinds: list[str]
    options: list[str]
    without: frozenset[str] = frozenset()


def options_of(swarm: Swarm, names: Iterable[str] = OPTIONS) -> st.SearchStrategy[dict[str, Any]]:
    """Any of those that the example has, each with any of its values."""
    return st.fixed_dictionaries(
        {}, optional={name: st.sampled_from(OPTIONS[name]) for name in swarm.options if name in names}
    )


def tasks_of(kind: str, without: frozenset[str] = frozenset()) -> st.SearchStrategy[Tasks]:
    """Files are few, and large."""
    counts, behaviours = ([1, 2, 4], FILES) if kind == "download" else ([60, 1, 3, 10, 25, 40], BEHAVIOURS)
    left = [behaviour for behaviour in behaviours if behaviour not in without]
    hosts = st.sampled_from([1, 1, 2])
    return st.builds(Tasks, st.sampled_from(counts), st.lists(st.sampled_from(left), min_size=1, max_size=3), hosts)


def wanted_of(swarm: Swarm) -> st.SearchStrategy[Wanted]:
    return st.sampled_from(swarm.kinds).flatmap(
        lambda kind: st.builds(Wanted, st.just(kind), tasks_of(kind, swarm.without), options_of(swarm))
    )


# What is drawn for a rule depends on the example: nothing is drawn that it does not have.
wanted = st.runner().flatmap(lambda machine: wanted_of(machine.swarm))
changes = st.runner().flatmap(lambda machine: options_of(machine.swarm, LIVE))
keys = st.sampled_from([None, None, "one", "two"])
# Time that passes after a step.
then = st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0, 8.0])


@st.composite
def beginnings(draw: st.DrawFn, without: frozenset[str]) -> tuple[Profile, Swarm, list[Wanted]]:
    profile = Profile(
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(LATENCIES)),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([1, 5])),
    )
    swarm = Swarm(
        draw(st.lists(st.sampled_from([kind for kind in KINDS if kind not in without]), min_size=1, unique=True)),
        draw(st.lists(st.sampled_from([name for name in OPTIONS if name not in without]), min_size=3, unique=True)),
        without,
    )
    return profile, swarm, draw(st.lists(wanted_of(swarm), max_size=2))


class Machine(RuleBasedStateMachine):
    """See the module."""

    # For measurements: what is left out of every example.
    without: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.swarm = Swarm([], [])
        self.broken = False
        self.steps = 0
        self.paused = False
        self.scheduled = False
        self.end_down = False

    @initialize(
        target=closed_jobs,
        begin=st.runner().flatmap(lambda machine: beginnings(machine.without)),
        end_down=st.sampled_from([False, False, True]),
    )
    def begin(self, begin: tuple[Profile, Swarm, list[Wanted]], end_down: bool) -> Any:
        profile, self.swarm, first = begin
        self.end_down = end_down
        self.world = World(profile)
        made = [self._ask(self.there.submit(job.spec, job.tasks.urls, None, prefer_async=False)) for job in first]
        return multiple(*(job.job_id for job in made))

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
        self._ask(self.there.pause(job), after)

    @precondition(lambda self: self.paused)
    @rule(job=jobs, after=then)
    def resume(self, job: JobId, after: float) -> None:
        self._ask(self.there.resume(job), after)

    @rule(job=jobs, after=then)
    def cancel(self, job: JobId, after: float) -> None:
        self._ask(self.there.cancel(job), after)

    @rule(job=jobs, after=then)
    def delete(self, job: JobId, after: float) -> None:
        self._ask(self.there.delete(job), after)

    @rule(job=jobs, options=changes, after=then)
    def change(self, job: JobId, options: dict[str, Any], after: float) -> None:
        self._ask(self.there.change(job, options), after)

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

    @rule(host=st.sampled_from([*HOSTS, "gateway.test"]), how=st.sampled_from([REFUSED, FAILING, SILENT]), after=then)
    def take_down(self, host: str, how: str, after: float) -> None:
        self.there.targets.take_down(host, how)
        self._do(self.there.advance(after))

    @precondition(lambda self: self.world is not None and self.world.targets.down)
    @rule()
    def bring_up(self) -> None:
        self.there.targets.down.clear()

    @rule(role=roles, after=then)
    def restart(self, role: str, after: float) -> None:
        self._do(self.there.restart(role, crash=False), after)

    @rule(role=roles, after=then)
    def crash(self, role: str, after: float) -> None:
        if "crash" not in self.without:
            self._do(self.there.restart(role, crash=True), after)

    @rule(
        call=st.just(NEW) | st.sampled_from(HOT) | st.sampled_from(CALLS),
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
            checks.check_step(self.there)
            self.there.run(checks.check_at_work(self.there))
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
                world.run(checks.drain(world, down=self.end_down))
                world.run(checks.settle(world))
                world.run(checks.check_ended(world))
        finally:
            self.world.close()

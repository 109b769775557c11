"""The machine: everything that clients, operators, targets and bad luck do to a system, in any order.

An example is a short program of these rules. Hypothesis leaves some rules out of each (swarm testing), and so do
`features`: which options jobs have, which kinds there are, and how slow the stores are. At the end everything must
come to its end, see checks.py.
"""

from collections.abc import Coroutine
from typing import Any

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
LATENCIES = [Latency(), Latency(0.5, 0.0, 0.02), Latency(0.25, 0.0, 2.0), Latency(0.05, 0.0, 4.0)]
# Calls between taking a reference and handing it over are few among many: they are asked for more often.
HOT = [
    "coordinator.hold",
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
    "records.active_jobs",
    "records.seal",
    "records.append_range",
    "blobs.put",
]

closed_jobs = Bundle("closed_jobs")
open_jobs = Bundle("open_jobs")
jobs = st.one_of(closed_jobs, open_jobs)
roles = st.sampled_from(["worker"] * 4 + ["ingester", "sweeper"] + [*ROLES])
some_hosts = st.sampled_from([1, 1, 2])
inputs = st.tuples(
    st.sampled_from([60, 1, 3, 10, 25, 40]),
    st.lists(st.sampled_from(BEHAVIOURS), min_size=1, max_size=3),
    some_hosts,
)
files = st.tuples(st.integers(1, 4), st.lists(st.sampled_from(FILES), min_size=1, max_size=3), some_hosts)
given_options = st.fixed_dictionaries({}, optional={name: st.sampled_from(OPTIONS[name]) for name in sorted(OPTIONS)})
keys = st.sampled_from([None, None, "one", "two"])
# Time that passes after a step.
then = st.sampled_from([0.0, 0.05, 0.3, 1.0, 3.0, 8.0])


def urls(count: int, behaviours: list[str], hosts: int) -> list[str]:
    return [url(HOSTS[number % hosts], behaviours[number % len(behaviours)], number) for number in range(count)]


class Machine(RuleBasedStateMachine):
    """See the module."""

    # For measurements: what is left out of every example.
    without: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.broken = False
        self.steps = 0
        self.paused = False
        self.scheduled = False
        self.end_down = False
        self.features: frozenset[str] = frozenset()

    @initialize(
        target=closed_jobs,
        first=st.lists(st.tuples(st.integers(0, 2), inputs, files, given_options), max_size=2),
        seed=st.integers(0, 1000),
        latency=st.sampled_from(LATENCIES),
        workers=st.sampled_from([1, 1, 2]),
        grain=st.sampled_from([1, 5]),
        features=st.frozensets(st.sampled_from(sorted(OPTIONS)), min_size=3),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
        end_down=st.sampled_from([False, False, True]),
    )
    def begin(
        self,
        seed: int,
        latency: Latency,
        workers: int,
        grain: int,
        features: frozenset[str],
        kinds: list[str],
        end_down: bool,
        first: list[Any],
    ) -> Any:
        self.features = features - self.without
        self.kinds = [kind for kind in kinds if kind not in self.without] or ["python"]
        self.end_down = end_down
        self.world = World(Profile(seed, latency, workers, grain))
        specs = [self._spec(*each) for each in first]
        made = [self._ask(self.there.submit(spec, given, None, prefer_async=False)) for spec, given in specs]
        return multiple(*(job.job_id for job in made))

    # Jobs.

    @rule(
        target=closed_jobs,
        kind=st.integers(0, 2),
        tasks=inputs,
        file=files,
        options=given_options,
        key=keys,
        late=st.booleans(),
        after=then,
    )
    def submit(
        self, kind: int, tasks: Any, file: Any, options: dict[str, Any], key: str | None, late: bool, after: float
    ) -> Any:
        spec, given = self._spec(kind, tasks, file, options)
        key = None if key is None else f"{key}-{len(self.there.pledges)}"
        return self._made(self.there.submit(spec, given, key, prefer_async=late), after)

    @rule(target=closed_jobs, kind=st.integers(0, 2), tasks=inputs, file=files, options=given_options, after=then)
    def stage(self, kind: int, tasks: Any, file: Any, options: dict[str, Any], after: float) -> Any:
        spec, given = self._spec(kind, tasks, file, options)
        return self._made(self.there.stage(spec, given), after)

    @rule(
        target=open_jobs, kind=st.integers(0, 2), options=given_options, idle=st.sampled_from([1, 3, 600]), after=then
    )
    def open_job(self, kind: int, options: dict[str, Any], idle: float, after: float) -> Any:
        spec, _ = self._spec(kind, (1, ["ok"], 1), (1, ["file"], 1), options)
        return self._made(self.there.open_job({"idle_timeout": idle, **spec}), after)

    @rule(job=open_jobs, tasks=inputs, file=files, last=st.sampled_from([False, False, True]), key=keys, after=then)
    def add(self, job: JobId, tasks: Any, file: Any, last: bool, key: str | None, after: float) -> None:
        given = self._urls(self.there.pledges[job].kind, tasks, file)
        key = None if key is None else f"{key}-{self.there.clock.new_id('key')}"
        self._ask(self.there.add(job, given, key, last=last), after)

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

    @rule(job=jobs, options=given_options, after=then)
    def change(self, job: JobId, options: dict[str, Any], after: float) -> None:
        chosen = self._chosen(options)
        self._ask(self.there.change(job, {name: value for name, value in chosen.items() if name in LIVE}), after)

    @rule(job=jobs, select=st.sampled_from(["failed", "all"]), after=then)
    def rerun(self, job: JobId, select: str, after: float) -> None:
        self._ask(self.there.rerun(job, select, {}), after)

    @rule(job=jobs, form=st.sampled_from(["jsonl", "csv", "zip"]), after=then)
    def export(self, job: JobId, form: str, after: float) -> None:
        self._ask(self.there.export(job, form), after)

    @rule(kind=st.integers(0, 2), tasks=inputs, file=files, options=given_options, after=then)
    def schedule(self, kind: int, tasks: Any, file: Any, options: dict[str, Any], after: float) -> None:
        spec, given = self._spec(kind, tasks, file, options)
        self.scheduled = True
        self._ask(self.there.schedule(spec, given[:10]), after)

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

    def _chosen(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those that this example has. Patience is short, or a target that never comes back would be waited for."""
        chosen = {name: value for name, value in options.items() if name in self.features}
        return {"breaker": {"patience": 8}, **chosen}

    def _spec(self, kind: int, tasks: Any, file: Any, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        name = self.kinds[kind % len(self.kinds)]
        spec = {"kind": name, "timeout": 2.0, **self._chosen(options)}
        if name == "python":
            spec["handler"] = "any"
        return spec, self._urls(name, tasks, file)

    def _urls(self, kind: str, tasks: Any, file: Any) -> list[str]:
        count, behaviours, hosts = file if kind == "download" else tasks
        left = [behaviour for behaviour in behaviours if behaviour not in self.without]
        return urls(count, left or ["ok"], hosts)

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

"""What is drawn for an example of the machine: its jobs and their options, its troubles, the time between its steps.

`Swarm` leaves some options and kinds of jobs out of each example: what is rare together in all that there is, is
frequent in some examples.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.machine.nodes import ROLES
from tests.machine.profile import Capacity, Profile
from tests.machine.seams import CALLS, CLIENT, Latency, Trouble
from tests.machine.targets import BEHAVIOURS, FILES, GATEWAY, GATEWAY_HOST, HOSTS, SECOND_GATEWAY, url

# The kinds of jobs of an example: most that goes on in a worker goes on in lanes of fetches.
MIXES = [["fetch"], ["fetch"], ["fetch", "python"], ["fetch", "python", "download"], ["python"], ["download"]]
OPTIONS: dict[str, list[Any]] = {
    "concurrency": [1, 2, 5, 64],
    "rate_per_host": [0.5, 2.0, 20.0],
    "concurrency_per_host": [1, 2],
    "pace": ["auto", "fixed"],
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
    "gateway": [
        {"url": GATEWAY},
        {"pool": [{"url": GATEWAY, "weight": 3}, {"url": SECOND_GATEWAY}]},
        {"pool": [{"url": GATEWAY}, {"url": SECOND_GATEWAY}], "sticky": "host"},
    ],
}
# Options that bear on one another: in some examples they are all that there is. Limits of hosts are in some only: with
# them few orders wait at fetchers.
FAMILIES = [
    ["concurrency", "priority", "timeout"],
    ["concurrency", "pace", "timeout", "attempts", "backoff", "breaker", "task_deadline"],
    ["concurrency", "attempts", "backoff", "retry_statuses"],
    ["concurrency", "concurrency_per_host", "rate_per_host", "task_deadline", "timeout", "attempts", "backoff"],
    ["concurrency_per_host", "task_deadline", "timeout", "backoff"],
    ["breaker", "upstream", "gateway", "outage", "attempts", "timeout", "rate_per_host"],
    ["idle_timeout", "chunk_size", "deadline", "failure_threshold"],
]
LIVE = sorted(set(OPTIONS) - {"chunk_size"})
# What is done to a job that runs: it gets this concurrency, is paused, or resumed.
PAUSE, RESUME = "pause", "resume"
ADJUSTMENTS = [1, 2, 5, 64, PAUSE, RESUME]
# What is down at the end: a gateway too, or alone.
ENDS = [HOSTS, HOSTS, (*HOSTS, GATEWAY_HOST), (GATEWAY_HOST,)]
# Seconds between steps: in some examples much is done to jobs while they run, in others most have ended by then.
PAUSES = [[0.0, 0.05, 0.3], [0.0, 0.05, 0.3, 1.0, 3.0, 8.0]]
_UNSET = object()
LATENCIES = [Latency(), Latency(0.5, 0.0, 0.02), Latency(0.1, 0.0, 1.0), Latency(0.03, 0.0, 3.0)]
# Calls between taking a reference and handing it over are few among many: they are asked for more often.
HOT = [
    "coordinator.acquire",
    "coordinator.reserve",
    "coordinator.cached",
    "queue.mark_started",
    "queue.mark_started",
    "queue.receive",
    "queue.receive_many",
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
# Those that are made for a reference before it starts.
STARTS = ["coordinator.acquire", "coordinator.reserve", "coordinator.cached", "queue.mark_started"]

# Roles that may be far from everything. A worker that is loses its leases.
FAR = (CLIENT, "ingester", "sweeper", "monitor")

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


class Ending(NamedTuple):
    """At the end these hosts are down for good, and this job comes. Most others have ended by then."""

    down: tuple[str, ...]
    job: Wanted


class Swarm(NamedTuple):
    """What jobs of an example are made of, and how long clients wait between what they do."""

    kinds: list[str]
    options: list[str]
    pauses: list[float]
    without: frozenset[str] = frozenset()


def options_of(swarm: Swarm, names: Iterable[str] = OPTIONS) -> st.SearchStrategy[dict[str, Any]]:
    """Most of those that the example has, each with any of its values: what it has meets in one job."""
    drawn = {name: st.sampled_from([_UNSET, *OPTIONS[name]]) for name in swarm.options if name in names}
    return st.fixed_dictionaries(drawn).map(
        lambda options: {name: value for name, value in options.items() if value is not _UNSET}
    )


def tasks_of(kind: str, without: frozenset[str] = frozenset()) -> st.SearchStrategy[Tasks]:
    """Files are few, and large."""
    counts, behaviours = ([1, 2, 4], FILES) if kind == "download" else ([60, 1, 3, 10, 25, 40], BEHAVIOURS)
    left = [behaviour for behaviour in behaviours if behaviour not in without]
    hosts = st.sampled_from([1, 1, 2])
    return st.builds(Tasks, st.sampled_from(counts), st.lists(st.sampled_from(left), min_size=1, max_size=5), hosts)


def wanted_of(swarm: Swarm) -> st.SearchStrategy[Wanted]:
    return st.sampled_from(swarm.kinds).flatmap(
        lambda kind: st.builds(Wanted, st.just(kind), tasks_of(kind, swarm.without), options_of(swarm))
    )


def _with_many_tasks(job: Wanted) -> Wanted:
    return job if job.kind == "download" else job._replace(tasks=job.tasks._replace(count=60))


# What is drawn for a rule depends on the example: nothing is drawn that it does not have.
wanted = st.runner().flatmap(lambda machine: wanted_of(machine.swarm))
changes = st.runner().flatmap(lambda machine: options_of(machine.swarm, LIVE))
# Jobs that take a while.
much_wanted = wanted.map(_with_many_tasks)
adjustments = st.lists(st.sampled_from(ADJUSTMENTS), min_size=1, max_size=5)
keys = st.sampled_from([None, None, "one", "two"])
# Time that passes after a step.
then = st.runner().flatmap(lambda machine: st.sampled_from(machine.swarm.pauses))


calls = st.sampled_from(HOT) | st.sampled_from(CALLS)
some_calls = st.lists(calls, max_size=6, unique=True)
far_roles = st.lists(st.sampled_from(FAR), min_size=1, max_size=2, unique=True)
troubles = (
    st.just(Trouble())
    | st.builds(Trouble, slow=some_calls, flaky=some_calls, far=st.just(()), fresh=st.just(False))
    | st.builds(Trouble, slow=st.just(()), flaky=some_calls, far=far_roles, fresh=st.just(False))
    | st.just(Trouble(fresh=True))
    | st.just(Trouble(flaky=STARTS))
    | st.just(Trouble(meanwhile=True))
)
# In half of the examples everything fits; in the others jobs get in each other's way, or shares do not come out even.
capacities = st.sampled_from([Capacity(1), Capacity(1), Capacity(2)]) | st.builds(
    Capacity,
    st.sampled_from([1, 1, 2]),
    st.sampled_from([8, 3, 24]),
    st.sampled_from([2, 1, 3]),
    st.sampled_from([0, 0, 5]),
)
# A fetcher, or a worker that runs a handler, dies over an attempt: after so many others.
deaths = st.just(()) | st.lists(st.sampled_from([0, 1, 3, 8, 20]), min_size=1, max_size=3)


def options_among(names: list[str]) -> st.SearchStrategy[list[str]]:
    families = [[name for name in family if name in names] for family in FAMILIES]
    return st.lists(st.sampled_from(names), min_size=3, unique=True) | st.sampled_from(families)


@st.composite
def beginnings(draw: st.DrawFn, without: frozenset[str]) -> tuple[Profile, Swarm, list[Wanted], Ending | None]:
    """Also the first jobs; and the end, unless all targets are up then."""
    profile = Profile(
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(LATENCIES)),
        draw(capacities),
        draw(st.sampled_from([1, 5])),
        draw(troubles),
        () if "crash" in without else draw(deaths),
    )
    swarm = Swarm(
        draw(st.sampled_from([mix for mix in MIXES if without.isdisjoint(mix)])),
        draw(options_among([name for name in OPTIONS if name not in without])),
        draw(st.sampled_from(PAUSES)),
        without,
    )
    first = draw(st.lists(wanted_of(swarm), min_size=1, max_size=2))
    ending = st.builds(Ending, st.sampled_from(ENDS), wanted_of(swarm).map(_with_many_tasks))
    return profile, swarm, first, draw(st.none() | ending)

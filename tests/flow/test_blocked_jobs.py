"""Jobs that wait for a breaker: what they say, and that they go on at once after a reset and after a restart."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.accept.control import Control
from conveyor.accept.option_changes import change_options
from conveyor.coordination.breaker_states import current_wait, list_breakers, reset_breakers
from conveyor.engines.queue import Depth
from conveyor.model import Backoff, Breaking, Job, Outcome, TaskError, TaskRef
from conveyor.states import RunState, TaskStatus
from tests.support.make_jobs import ACME
from tests.support.small_fleet import Fleet, Recording, failure, open_fleet, success

# Longer than the worker needs to see that a breaker was reset, and far shorter than any wait of one.
AT_ONCE = 3.0


def host(ref: TaskRef) -> str:
    """The inputs here are "host number"."""
    return ref.input.strip('"').partition(" ")[0]


class Site:
    """Tells the executor which hosts are down."""

    def __init__(self) -> None:
        self.down = {"bad"}
        self.code = "connect_failed"

    async def act(self, job: Job, ref: TaskRef) -> Outcome:
        return failure(self.code) if host(ref) in self.down else success()


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def fleet(site: Site) -> AsyncIterator[Fleet]:
    async with open_fleet() as made:
        made.executor = Recording(made.clock, site.act, target=host)
        yield made


def inputs(count: int = 200) -> list[str]:
    return [f"bad {number}" for number in range(count)]


async def is_blocked(fleet: Fleet, job: Job) -> bool:
    return await current_wait(fleet.system.coordinator, fleet.clock, job) is not None


async def blocked(fleet: Fleet, count: int = 200, **options: Any) -> Job:
    """A job whose tasks all wait for a breaker that was probed twice, and is open for two minutes."""
    long = Backoff(base=3600, cap=3600, jitter=False)
    job = await fleet.submit(inputs(count), concurrency=8, chunk_size=20, **{"backoff": long, "attempts": 2, **options})

    async def was_probed_twice() -> bool:
        found = await list_breakers(fleet.system.coordinator, ACME)
        return bool(found) and found[0][2].times == 3

    await fleet.until(was_probed_twice, within=200)
    await fleet.passing(5)
    return job


async def finished_at_once(fleet: Fleet, job: Job, tried: int, within: float = AT_ONCE) -> None:
    """All tasks but those that had failed, and wait for their backoff."""
    began = fleet.clock.now()
    await fleet.until(lambda: has_succeeded(fleet, job, job.run.total - tried), within=within)
    assert fleet.clock.now() <= began + within + 0.5


async def has_at_least(fleet: Fleet, job: Job, count: int) -> bool:
    return (await fleet.counts(job)).succeeded >= count


async def has_succeeded(fleet: Fleet, job: Job, count: int) -> bool:
    return (await fleet.counts(job)).succeeded == count


async def test_after_a_reset(fleet: Fleet, site: Site) -> None:
    fleet.start(fleet.worker())
    job = await blocked(fleet)
    tried = len(fleet.executor.starts)
    assert tried < 60
    site.down.clear()
    await fleet.passing(5)
    assert len(fleet.executor.starts) == tried, "nobody tries it before its time"
    await reset_breakers(fleet.system.coordinator, fleet.clock, ACME)
    assert not await is_blocked(fleet, job)
    await finished_at_once(fleet, job, tried)
    # What had failed keeps to its backoff.
    await fleet.passing(100)
    assert (await fleet.counts(job)).succeeded == 200 - tried
    await fleet.ended(job, within=8000)
    tasks = await fleet.check(job)
    assert {task.status for task in tasks.values()} == {TaskStatus.SUCCEEDED}
    assert sorted(task.attempts for task in tasks.values()) == [1] * (200 - tried) + [2] * tried


async def test_after_a_restart(fleet: Fleet, site: Site) -> None:
    first = fleet.start(fleet.worker())
    job = await blocked(fleet)
    tried = len(fleet.executor.starts)
    await fleet.stop(first)
    site.down.clear()
    fleet.start(fleet.worker())
    # One by one at first: that it was down is known, that it is back is not.
    await finished_at_once(fleet, job, tried, within=20)


async def test_after_it_was_resumed(fleet: Fleet, site: Site) -> None:
    """It was paused when the breaker closed, and for so long after that nobody knows of it any more."""
    fleet.start(fleet.worker())
    job = await blocked(fleet)

    async def waits_long() -> bool:
        found = await list_breakers(fleet.system.coordinator, ACME)
        return bool(found) and found[0][2].times == 6

    await fleet.until(waits_long, within=2000)
    await fleet.passing(5)
    tried = len(fleet.executor.starts)
    control = Control(fleet.system)
    await control.pause(await fleet.job(job.job_id))
    await fleet.passing(5)
    site.down.clear()
    await reset_breakers(fleet.system.coordinator, fleet.clock, ACME)
    await fleet.passing(200)
    assert (await fleet.depth(job)).delayed > 0
    await control.resume(await fleet.job(job.job_id))
    await finished_at_once(fleet, job, tried)


async def test_a_second_worker_changes_nothing(fleet: Fleet, site: Site) -> None:
    fleet.start(fleet.worker())
    job = await blocked(fleet)
    tried = len(fleet.executor.starts)
    fleet.start(fleet.worker())
    await fleet.passing(20)
    assert len(fleet.executor.starts) == tried
    assert await is_blocked(fleet, job)


async def test_after_the_job_was_told_to_ignore_breakers(fleet: Fleet, site: Site) -> None:
    fleet.start(fleet.worker())
    job = await blocked(fleet)
    tried = len(fleet.executor.starts)
    site.down.clear()
    await change_options(fleet.system, job, {"breaker": {"enabled": False}})
    await finished_at_once(fleet, job, tried)
    assert not await is_blocked(fleet, await fleet.job(job.job_id))


async def test_all_of_a_job_that_names_an_upstream(fleet: Fleet, site: Site) -> None:
    """Its messages stay in the queue, so that no task could say it: the job says so all the same, for as long as it
    waits."""
    fleet.start(fleet.worker())
    first = await blocked(fleet, upstream="erp")
    second = await fleet.submit(inputs(50), upstream="erp", concurrency=8)
    await fleet.passing(2)
    assert await fleet.depth(second) == Depth(1, 0, 0), "its messages are left where they are"
    for _ in range(4):
        for job in (first, second):
            wait = await current_wait(fleet.system.coordinator, fleet.clock, job)
            assert wait is not None
            assert (wait.target, wait.error) == ("upstream:erp", "connect_failed")
        await fleet.passing(60)
    site.down.clear()
    await reset_breakers(fleet.system.coordinator, fleet.clock, ACME, ["upstream:erp"])
    assert not await is_blocked(fleet, second)
    # All but those that were probes, and failed.
    await fleet.until(lambda: has_at_least(fleet, second, 47), within=AT_ONCE)


async def test_gone_with_the_jobs_that_need_it(fleet: Fleet, site: Site) -> None:
    fleet.start(fleet.worker())
    job = await blocked(fleet)
    assert await list_breakers(fleet.system.coordinator, ACME)
    await fleet.move(job, RunState.CANCELLED)
    await fleet.passing(1)
    assert await list_breakers(fleet.system.coordinator, ACME) == []
    tried = len(fleet.executor.starts)
    site.down.clear()
    later = await fleet.submit(inputs(30))
    await fleet.ended(later, within=5)
    assert len(fleet.executor.starts) == tried + 30


async def test_the_pages_of_a_site_that_fail_are_no_outage(fleet: Fleet, site: Site) -> None:
    """All pages but the first answer 500: the target is up, and the others are fetched."""

    async def act(job: Job, ref: TaskRef) -> Outcome:
        await fleet.clock.sleep(0.05)
        if ref.index < 20:
            return success()
        return Outcome(TaskStatus.FAILED, http_status=500, error=TaskError("http_500", "the target answered 500"))

    fleet.executor.act = act
    fleet.start(fleet.worker())
    job = await fleet.submit(inputs(400), attempts=1, concurrency=8)
    await fleet.ended(job, within=20)
    counts = await fleet.counts(job)
    assert (counts.succeeded, counts.failed) == (20, 380)
    assert not any(entry["event"] == "breaker opened" for entry in fleet.logs)


async def test_patience_is_kept(fleet: Fleet, site: Site) -> None:
    fleet.start(fleet.worker())
    job = await fleet.submit(inputs(), breaker=Breaking(patience=60), concurrency=8)
    began = fleet.clock.now()
    await fleet.ended(job, within=75)
    assert fleet.clock.now() - began >= 55
    tasks = await fleet.check(job)
    errors = [task.detail.error for task in tasks.values() if task.error_code == "target_down"]
    (message,) = {error.message for error in errors if error is not None}
    assert message == "bad was down for more than 60 seconds: connect_failed"

"""The feeder: what it decides on a delivered chunk, and what it then does with the message and the tasks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from conveyor.coordination.breaker import Breakers
from conveyor.coordination.limits import TargetLimits
from conveyor.engines.queue import Delivery, Outgoing, QueueName, recovery_queue, run_queue
from conveyor.engines.records import Document
from conveyor.errors import EngineFailed
from conveyor.jobs.chunks import encode
from conveyor.model import PROGRESS, Chunk, InputJson, Job, JobKind, TaskProgress, TaskRef, progress_id
from conveyor.process.body_store import BodyStore
from conveyor.process.breakdown_parts import BreakdownParts
from conveyor.process.chunk_decision import ChunkDecision, can_be_superseded, decide
from conveyor.process.feeder import Feeder
from conveyor.process.gate import Gate
from conveyor.process.lane import Lane, LaneTools
from conveyor.process.load_tally import LoadTally
from conveyor.process.recorder import LeasedChunk, Recorder
from conveyor.process.trial import Trial
from conveyor.states import TaskStatus
from tests.support.dead_letters import dead_letters
from tests.support.small_fleet import Fleet, open_fleet

LIMIT = 3
REFS = [TaskRef(index, InputJson("1")) for index in range(3)]
ANY_RUN: Any = None


def delivery(*, receives: int = 1, lost_starts: int = 0) -> Delivery:
    return Delivery("message", "receipt", receives, b"", lost_starts)


@pytest.mark.parametrize(
    ("refs", "lost_starts", "chunk", "superseded", "decision"),
    [
        pytest.param(3, 0, {}, False, ChunkDecision.FEED, id="first delivery"),
        pytest.param(0, 9, {"lost": "poison"}, True, ChunkDecision.ACKNOWLEDGE, id="all tasks finished"),
        pytest.param(1, 0, {"lost": "poison"}, True, ChunkDecision.DEAD_LETTER, id="poison task"),
        pytest.param(1, 9, {}, True, ChunkDecision.ACKNOWLEDGE, id="requeued by the monitor"),
        pytest.param(3, LIMIT - 2, {}, False, ChunkDecision.FEED, id="starts left"),
        pytest.param(3, LIMIT - 1, {}, False, ChunkDecision.TRY, id="last start"),
        pytest.param(1, 0, {"alone": True}, False, ChunkDecision.TRY, id="split before"),
        pytest.param(3, LIMIT, {}, False, ChunkDecision.SPLIT, id="too many lost starts"),
        pytest.param(1, LIMIT, {}, False, ChunkDecision.SPLIT, id="too many, one task"),
        pytest.param(1, LIMIT - 1, {"alone": True}, False, ChunkDecision.TRY_EXCLUSIVELY, id="last start alone"),
        pytest.param(1, LIMIT, {"alone": True}, False, ChunkDecision.DEAD_LETTER, id="too many alone"),
    ],
)
def test_decisions(
    refs: int, lost_starts: int, chunk: dict[str, Any], superseded: bool, decision: ChunkDecision
) -> None:
    given = Chunk(ANY_RUN, REFS, **chunk)
    found = decide(JobKind.FETCH, delivery(lost_starts=lost_starts), given, REFS[:refs], LIMIT, superseded=superseded)
    assert found is decision


def test_a_limit_of_one_leaves_no_start_for_a_trial() -> None:
    chunk = Chunk(ANY_RUN, REFS)
    assert decide(JobKind.FETCH, delivery(), chunk, REFS, 1, superseded=False) is ChunkDecision.FEED
    again = delivery(lost_starts=1)
    assert decide(JobKind.FETCH, again, chunk, REFS, 1, superseded=False) is ChunkDecision.SPLIT


def test_documents_and_not_messages_count_the_lost_starts_of_long_tasks() -> None:
    chunk = Chunk(ANY_RUN, REFS[:1])
    lost = delivery(receives=9, lost_starts=9)
    assert decide(JobKind.DOWNLOAD, lost, chunk, REFS[:1], LIMIT, superseded=False) is ChunkDecision.FEED


def test_only_a_redelivered_single_task_can_be_superseded() -> None:
    chunk = Chunk(ANY_RUN, REFS)
    assert can_be_superseded(delivery(receives=2), chunk, REFS[:1])
    assert not can_be_superseded(delivery(), chunk, REFS[:1])
    assert not can_be_superseded(delivery(receives=2), chunk, REFS)
    assert not can_be_superseded(delivery(receives=2), Chunk(ANY_RUN, REFS, lost="poison"), REFS[:1])


class StillLane(Lane):
    """A lane that starts nothing."""

    def set_width(self, width: int) -> None:
        self.width = width

    async def _drain(self, grace: float) -> None:
        pass

    @property
    def indexes(self) -> list[int]:
        return [entry.ref.index for entry in self._waiting]


class Bench:
    """A feeder on the parts of a fleet, and the lane of one run."""

    def __init__(self, fleet: Fleet, job: Job) -> None:
        system, clock = fleet.system, fleet.clock
        self.fleet = fleet
        self.job = job
        self.queue = run_queue(job.run.run_id)
        self.ticks = 0
        self.feeder = Feeder(
            system.settings, clock, system.records, system.tasks, system.queue, fleet.lifecycle, self._tick
        )
        self.lane = self.new_lane()

    def new_lane(self) -> StillLane:
        system, clock = self.fleet.system, self.fleet.clock
        bodies = BodyStore(system.blobs, system.tasks, clock)
        tools = LaneTools(
            owner=Any,  # type: ignore[arg-type]  # nothing starts
            recorder=Recorder(
                system.records.documents,
                system.tasks,
                system.queue,
                bodies,
                self.fleet.lifecycle,
                system.coordinator,
                clock,
                BreakdownParts(system.records.documents, clock, "worker", LoadTally(system.coordinator, "worker")),
                0.0,
            ),
            limits=TargetLimits(system.coordinator, self.job, "worker"),
            gate=Gate(Breakers(system.coordinator, clock, system.settings, "worker"), self.job, lambda ref: None),
            clock=clock,
        )
        return StillLane(self.job, lambda ref: None, tools)

    def _tick(self) -> None:
        self.ticks += 1

    async def send(self, chunk: Chunk, queue: QueueName | None = None) -> None:
        await self.fleet.system.queue.send(queue or self.queue, [encode(chunk)])

    async def deliver(self, **changes: Any) -> list[Delivery]:
        """What the run's queue delivers, as if it had been delivered before."""
        got = await self.fleet.system.queue.receive(self.queue, 10, 30.0)
        return [msgspec.structs.replace(delivery, **changes) for delivery in got]

    async def admit(self, deliveries: list[Delivery]) -> None:
        await self.feeder._admit(self.lane, self.queue, deliveries, recovered=False)

    async def in_queue(self) -> tuple[int, int, int]:
        depth = await self.fleet.system.queue.depth(self.queue)
        return depth.ready, depth.held, depth.delayed

    async def dead_letters(self) -> list[str]:
        undecoded = (await self.fleet.system.queue.dead_letters(None, 10)).items
        listed = await dead_letters(self.fleet.system, self.job.tenant)
        return [letter.reason for letter in undecoded] + [letter["reason"] for letter in listed]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """Three tasks, of which one message carries the references."""
    async with open_fleet(max_lost_starts=LIMIT) as fleet:
        yield Bench(fleet, await fleet.submit(3))


async def test_a_lane_without_throughput_gets_one_chunk(bench: Bench) -> None:
    await bench.feeder.fill([bench.lane])
    assert bench.lane.indexes == [0, 1, 2]
    (chunk,) = bench.lane.chunks.values()
    assert (chunk.left, chunk.suspect, chunk.recovered) == (3, False, False)
    now = bench.fleet.clock.monotonic()
    assert bench.lane.next_poll == now + 1.0, "it has the whole run"
    assert bench.lane.next_recovery == now + 1.0, "its recovery queue was empty"


async def test_a_lane_polls_on_until_it_has_the_whole_run() -> None:
    async with open_fleet(max_lost_starts=LIMIT) as fleet:
        bench = Bench(fleet, await fleet.submit(3, chunk_size=2))
        await bench.feeder.fill([bench.lane])
        assert (bench.lane.indexes, bench.lane.has_whole_run, bench.lane.next_poll) == ([0, 1], False, 0.0)
        await bench.feeder._fill_lane(bench.lane, 0, 1)
        assert (bench.lane.indexes, bench.lane.has_whole_run) == ([0, 1, 2], True)
        assert bench.lane.poll_pause > 0


async def test_a_redelivered_chunk_is_not_counted_again(bench: Bench) -> None:
    await bench.admit(await bench.deliver(receives=2))
    assert bench.lane.indexes == [0, 1, 2]
    assert (bench.lane.received, bench.lane.has_whole_run) == (0, False)


async def test_recovered_references_come_first(bench: Bench) -> None:
    await bench.send(Chunk(bench.job.key, [TaskRef(2, InputJson("2"), 2)]), recovery_queue(bench.job.run.run_id))
    await bench.feeder.fill([bench.lane])
    assert bench.lane.indexes == [2, 0, 1, 2]
    assert sorted(chunk.recovered for chunk in bench.lane.chunks.values()) == [False, True]


async def test_nothing_is_received_beyond_the_bytes_that_a_worker_may_lease(bench: Bench) -> None:
    bench.feeder._leased_bytes = 2 * bench.fleet.system.settings.worker_held_bytes
    await bench.feeder.fill([bench.lane])
    assert bench.lane.indexes == []
    bench.feeder.count_leased_bytes([bench.lane])
    await bench.feeder.fill([bench.lane])
    assert bench.lane.indexes == [0, 1, 2]


async def test_finished_tasks_are_not_fed(bench: Bench) -> None:
    deliveries = await bench.deliver()
    bench.feeder._tasks = Finished(bench.fleet.system.tasks, {0, 1})  # type: ignore[assignment]
    await bench.admit(deliveries)
    assert bench.lane.indexes == [2]
    (chunk,) = bench.lane.chunks.values()
    assert chunk.left == 1


async def test_a_chunk_without_unfinished_tasks_is_acknowledged(bench: Bench) -> None:
    deliveries = await bench.deliver()
    bench.feeder._tasks = Finished(bench.fleet.system.tasks, {0, 1, 2})  # type: ignore[assignment]
    await bench.admit(deliveries)
    assert bench.lane.indexes == []
    assert await bench.in_queue() == (0, 0, 0)


async def test_a_worker_ticks_again_when_all_that_it_received_was_finished() -> None:
    async with open_fleet(max_lost_starts=LIMIT) as fleet:
        bench = Bench(fleet, await fleet.submit(3, chunk_size=2))
        bench.feeder._tasks = Finished(bench.fleet.system.tasks, {0, 1, 2})  # type: ignore[assignment]
        bench.lane.next_recovery = 1e12
        await bench.feeder.fill([bench.lane])
        assert bench.ticks == 1
        bench.lane.next_recovery = 1e12
        await bench.feeder.fill([bench.lane])
        assert (bench.ticks, bench.lane.has_whole_run) == (1, True)


async def test_messages_are_released_if_the_store_fails(bench: Bench) -> None:
    bench.feeder._tasks = Failing()  # type: ignore[assignment]
    bench.lane.next_recovery = 1e12
    with pytest.raises(EngineFailed):
        await bench.feeder.fill([bench.lane])
    assert await bench.in_queue() == (1, 0, 0)
    (delivery,) = await bench.deliver()
    assert (delivery.receives, delivery.lost_starts) == (1, 0), "it is no lost start"


async def test_a_message_that_is_not_a_chunk_is_dead_lettered(bench: Bench) -> None:
    await bench.fleet.system.queue.send(bench.queue, [Outgoing(b"nonsense")])
    await bench.admit(await bench.deliver())
    assert bench.lane.indexes == [0, 1, 2]
    (reason,) = await bench.dead_letters()
    assert reason.startswith("The message is not a chunk")


async def test_a_chunk_with_too_many_lost_starts_is_split(bench: Bench) -> None:
    await bench.admit(await bench.deliver(receives=4, lost_starts=LIMIT))
    assert bench.lane.indexes == []
    assert await bench.in_queue() == (3, 0, 0)


async def test_one_chunk_at_a_time_is_on_trial(bench: Bench) -> None:
    await bench.admit(await bench.deliver(receives=4, lost_starts=LIMIT))
    await bench.admit(await bench.deliver())
    assert len(bench.lane.indexes) == 1
    assert await bench.in_queue() == (0, 1, 2)
    (first,) = bench.lane.chunks.values()
    assert first.suspect
    first.left = 0
    bench.fleet.clock.advance(1.0)
    await bench.admit(await bench.deliver())
    assert len(bench.lane.indexes) == 2


async def one_on_its_last_start(bench: Bench) -> tuple[LeasedChunk, LeasedChunk]:
    """A chunk that runs, and the last start of a task that waits for it."""
    await bench.admit(await bench.deliver(receives=4, lost_starts=LIMIT))
    first, last, _ = await bench.deliver()
    await bench.admit([first])
    (running,) = bench.lane.chunks.values()
    running.suspect = False
    bench.feeder._trial = Trial(bench.fleet.clock)
    await bench.admit([msgspec.structs.replace(last, receives=4, lost_starts=LIMIT - 1)])
    (_, waiting) = bench.lane.chunks.values()
    assert len(bench.lane.indexes) == 1, "it waits until nothing else is in flight"
    await bench.send(Chunk(bench.job.key, [TaskRef(2, InputJson("2"))]))
    return running, waiting


async def test_the_last_start_of_a_task_has_its_worker_to_itself(bench: Bench) -> None:
    running, waiting = await one_on_its_last_start(bench)
    lanes = [bench.lane, idle := bench.new_lane()]
    await bench.feeder.fill(lanes)
    running.left = 0
    await bench.feeder.fill(lanes)
    assert len(bench.lane.indexes) == 2
    await bench.feeder.fill(lanes)
    assert idle.indexes == [], "nothing was received before it and beside it"
    waiting.left = 0
    await bench.feeder.fill(lanes)
    assert idle.indexes != []


async def test_a_last_start_waits_and_keeps_its_worker_for_a_bounded_time(bench: Bench) -> None:
    await one_on_its_last_start(bench)
    lanes = [bench.lane, idle := bench.new_lane()]
    bench.fleet.clock.advance(30.0)
    await bench.feeder.fill(lanes)
    assert len(bench.lane.indexes) == 2, "an attempt beside it takes long"
    assert idle.indexes == []
    bench.fleet.clock.advance(30.0)
    await bench.feeder.fill(lanes)
    assert idle.indexes != [], "and so does its own"


async def test_a_last_start_goes_with_its_lane(bench: Bench) -> None:
    await one_on_its_last_start(bench)
    other = bench.new_lane()
    await bench.feeder.fill([other])
    assert other.indexes, "the worker receives again"


async def test_a_task_that_loses_its_workers_alone_is_dead_lettered(bench: Bench) -> None:
    await bench.admit(await bench.deliver(receives=4, lost_starts=LIMIT))
    await bench.admit(await bench.deliver(receives=4, lost_starts=LIMIT))
    assert await bench.dead_letters() == [f"The worker was lost {LIMIT} times while it ran this task alone."] * 3
    tasks = await bench.fleet.tasks(bench.job)
    assert {(task.status, task.error_code) for task in tasks.values()} == {(TaskStatus.FAILED, "worker_lost")}
    assert (await bench.fleet.job(bench.job.job_id)).state.name == "COMPLETED"


async def test_a_poison_task_is_dead_lettered_for_the_reason_in_its_message(bench: Bench) -> None:
    deliveries = await bench.deliver()
    await bench.fleet.system.queue.ack(bench.queue, [delivery.receipt for delivery in deliveries])
    await bench.send(
        Chunk(bench.job.key, [TaskRef(1, InputJson("1"))], alone=True, lost="It never moves.", code="stuck")
    )
    await bench.admit(await bench.deliver())
    assert await bench.dead_letters() == ["It never moves."]
    tasks = await bench.fleet.tasks(bench.job)
    assert [tasks[index].error_code for index in range(3)] == [None, "stuck", None]


async def test_a_superseded_message_is_acknowledged(bench: Bench) -> None:
    deliveries = await bench.deliver()
    await bench.fleet.system.queue.ack(bench.queue, [delivery.receipt for delivery in deliveries])
    job, clock = bench.job, bench.fleet.clock
    progress = TaskProgress(job.run.run_id, 1, 1, "", clock.now(), turn=2)
    name = progress_id(job.run.run_id, 1)
    document = Document(PROGRESS, job.tenant, name, msgspec.json.encode(progress), job_id=job.job_id)
    await bench.fleet.system.records.documents.create_documents([document])
    for turn in (1, 2):
        await bench.send(Chunk(job.key, [TaskRef(1, InputJson("1"))], turn=turn))
    await bench.admit(await bench.deliver(receives=2))
    assert bench.lane.indexes == [1]
    (chunk,) = bench.lane.chunks.values()
    assert chunk.generation == 2
    assert await bench.in_queue() == (0, 1, 0)


class Finished:
    """Stands before Tasks: some tasks are finished."""

    def __init__(self, tasks: Any, finished: set[int]) -> None:
        self._tasks = tasks
        self._finished = finished

    async def unfinished(self, run: Any, indexes: list[int]) -> set[int]:
        found: set[int] = set(await self._tasks.unfinished(run, indexes))
        return found - self._finished


class Failing:
    """A store that does not answer."""

    async def unfinished(self, run: Any, indexes: list[int]) -> set[int]:
        await asyncio.sleep(0)
        raise EngineFailed("for a moment")

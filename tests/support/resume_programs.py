"""Programs of pauses and resumes: some runs, some workers, and who pauses which run when. At the end every run is
resumed, and must soon have finished: `late` says which has not. `on_simulated_sqs` runs a program on a fleet of
processes on a virtual clock, `on_fleet` on a real system on a clock that is moved."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from bench import fleet_world
from conveyor.engines.queue import QueueName
from conveyor.lifecycle import Lifecycle
from conveyor.model import Backoff, Job, Outcome, TaskRef
from conveyor.process.worker import Worker
from conveyor.states import ENDED, RunState
from tests.support.small_fleet import Fleet, failure, success

LEASE = 30.0
# The tasks that are left after the last resume take a few seconds, and so do looks and polls.
SLACK = 10.0
# The poll of a worker that died may take messages along for so long. Nobody says when those are visible again, and a
# worker looks at a quiet run once in so long.
POLL, RECHECK = 20.0, 60.0
TASK_SECONDS = (0.02, 0.3)


class Move(msgspec.Struct, frozen=True):
    """After `wait` seconds a run is paused, or resumed; if it was resumed for `blink` seconds, then paused again."""

    wait: float
    run: int
    blink: float | None = None


class Program(msgspec.Struct, frozen=True):
    """`runs` are numbers of tasks; `paused` of them are accepted as paused, the others before or after the workers
    start. `rest` seconds after the last move `dead` workers die, and all runs are resumed."""

    workers: int
    runs: Sequence[int]
    paused: int
    is_early: bool
    moves: Sequence[Move]
    rest: float
    dead: int = 0
    # Whether workers hear of messages; else they find them by looking.
    is_told: bool = True

    @property
    def bound(self) -> float:
        return LEASE + SLACK + (POLL + RECHECK if self.dead else 0.0)


moves = st.builds(
    Move,
    wait=st.sampled_from([0.0, 0.01, 0.1, 0.3, 1.0, 1.2, 3.0, 10.0, 11.0, 35.0]),
    run=st.integers(0, 3),
    blink=st.sampled_from([None, 0.0, 0.02, 0.1, 0.3, 1.1]),
)


@st.composite
def programs(draw: st.DrawFn, longest: int = 30) -> Program:
    runs = draw(st.lists(st.sampled_from([1, 3, 11, 25]), min_size=1, max_size=4))
    workers = draw(st.integers(1, 3))
    return Program(
        workers=workers,
        runs=runs,
        paused=draw(st.integers(0, len(runs))),
        is_early=draw(st.booleans()),
        moves=draw(st.lists(moves, max_size=longest)),
        rest=draw(st.sampled_from([0.0, 0.1, 1.1, 6.0, 40.0, 150.0])),
        dead=draw(st.integers(0, workers - 1)),
        is_told=draw(st.booleans()),
    )


class Stage(msgspec.Struct):
    """What a program needs of the system that it runs on."""

    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    submit: Callable[[int, int, RunState], Awaitable[Job]]
    job: Callable[[Job], Awaitable[Job]]
    move: Callable[[Job, RunState], Awaitable[None]]
    start: Callable[[int], None]
    kill: Callable[[int], Awaitable[None]]


async def late(program: Program, stage: Stage) -> dict[str, str]:
    """Run a program. Returns the runs that have not finished in time, and their states."""
    if program.is_early:
        stage.start(program.workers)
    states = [RunState.PAUSED] * program.paused + [RunState.RUNNING] * len(program.runs)
    jobs = [await stage.submit(number, tasks, states[number]) for number, tasks in enumerate(program.runs)]
    if not program.is_early:
        stage.start(program.workers)
    for move in program.moves:
        await stage.sleep(move.wait)
        job = await stage.job(jobs[move.run % len(jobs)])
        if job.state is RunState.RUNNING:
            await stage.move(job, RunState.PAUSED)
        elif job.state is RunState.PAUSED:
            await stage.move(job, RunState.RUNNING)
            if move.blink is not None:
                await stage.sleep(move.blink)
                job = await stage.job(job)
                if job.state is RunState.RUNNING:
                    await stage.move(job, RunState.PAUSED)
    await stage.sleep(program.rest)
    await stage.kill(program.dead)
    for job in [await stage.job(job) for job in jobs]:
        if job.state is RunState.PAUSED:
            await stage.move(job, RunState.RUNNING)
    end = stage.now() + program.bound
    while unfinished := [job for job in [await stage.job(job) for job in jobs] if job.state not in ENDED]:
        if stage.now() >= end:
            return {job.run.run_id: str(job.state) for job in unfinished}
        await stage.sleep(0.25)
    return {}


def on_simulated_sqs(program: Program, queue_limit: int) -> dict[str, str]:
    """On workers that are processes of their own, with long polls; `queue_limit` of the runs have a queue of their
    own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_world, "SHORTEST", TASK_SECONDS[0])
        patch.setattr(fleet_world, "LONGEST", TASK_SECONDS[1])
        result: dict[str, str] = fleet_world.on_virtual_loop(_simulated, program=program, queue_limit=queue_limit)
        return result


async def _simulated(program: Program, queue_limit: int, loop: Any) -> dict[str, str]:
    world = fleet_world.World(program.workers, loop, queue_limit)
    lifecycle = Lifecycle(world.api.records, world.tasks, world.clock)  # type: ignore[arg-type]  # as far as it is used

    async def submit(number: int, tasks: int, state: RunState) -> Job:
        job: Job = fleet_world.fleet_job(world, number, len(program.runs), total=tasks, state=state)
        await world.submit(job, tasks)
        return job

    async def move(job: Job, target: RunState) -> None:
        await lifecycle.move(job, target, "by hand", await world.tasks.counts(job.key))

    async def job_of(job: Job) -> Job:
        return world.jobs.by_id[job.job_id]

    async def kill(count: int) -> None:
        # Workers; two processes stand before them.
        for process in world.processes[2 : 2 + count]:
            process.is_dead = True

    stage = Stage(
        now=world.clock.monotonic,
        sleep=asyncio.sleep,
        submit=submit,
        job=job_of,
        move=move,
        start=lambda _: world.start(),
        kill=kill,
    )
    try:
        return await late(program, stage)
    finally:
        await world.close()


async def on_fleet(program: Program, fleet: Fleet) -> dict[str, str]:
    """On workers of one process that share all engines. Every other task fails at first."""

    async def act(job: Job, ref: TaskRef) -> Outcome:
        await fleet.clock.sleep(TASK_SECONDS[ref.index % 2])
        return failure() if ref.index % 2 and ref.attempt == 1 else success()

    fleet.executor.act = act
    backoff = Backoff(base=2.0, cap=2.0, jitter=False)

    async def submit(number: int, tasks: int, state: RunState) -> Job:
        job = await fleet.submit(tasks, chunk_size=5, backoff=backoff, retry_errors=["handler_raised"])
        if state is RunState.PAUSED:
            await fleet.move(job, state)
        return job

    async def job_of(job: Job) -> Job:
        return await fleet.job(job.job_id)

    async def move(job: Job, target: RunState) -> None:
        await fleet.lifecycle.move(job, target, "by hand", await fleet.counts(job))

    workers = [fleet.worker() for _ in range(program.workers)]

    def start(_: int) -> None:
        for role in (*workers, fleet.sweeper):
            fleet.start(role)

    async def kill(_: int) -> None:
        """A process dies with all its workers: nobody would be left."""

    stage = Stage(
        now=fleet.clock.monotonic, sleep=fleet.passing, submit=submit, job=job_of, move=move, start=start, kill=kill
    )
    async with listening(fleet, workers) if program.is_told else nullcontext():
        return await late(msgspec.structs.replace(program, dead=0), stage)


@asynccontextmanager
async def listening(fleet: Fleet, workers: Sequence[Worker]) -> AsyncIterator[None]:
    """The workers hear of messages, as in a real process."""
    system = fleet.system

    def heard(queue: QueueName) -> None:
        for worker in workers:
            worker.on_message(queue)

    def offered(queue: QueueName, body: bytes) -> bool:
        return any(worker.on_offer(queue, body) for worker in workers)

    system.ready_marks.listeners += [worker.on_ready for worker in workers]
    async with AsyncExitStack() as stack:
        if system.offers is not None:
            stack.enter_context(system.offers(offered))
        if system.wakes is not None:
            await stack.enter_async_context(system.wakes(heard))
        yield

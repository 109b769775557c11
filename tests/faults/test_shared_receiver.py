"""The receiver of the shared queue: what it gets for a run reaches the run's worker, or goes back and says when."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.engines.queue import QueueName, recovery_queue
from conveyor.errors import EngineFailed
from conveyor.jobs.chunks import send_all
from conveyor.model import RunId
from tests.faults.test_sqs import HOLD, RUN_A, RUN_B, RUN_C, Site, bodies, opened
from tests.faults.test_sqs_polls import WAIT, arrived, eventually
from tests.support.clocks import ManualClock

RETRIES_A = recovery_queue(RunId("a"))
SERVED = 10.0
LONGEST = 30.0


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with opened(clock=ManualClock()) as given:
        yield given


async def settled(condition: Any = None) -> None:
    """Let what was begun beside the test come to its end: until the condition holds, or for a while without one."""
    for _ in range(200 if condition is None else 10_000):
        await asyncio.sleep(0.001)
        if condition is not None and condition():
            return
    assert condition is None, "it did not come to it"


def listening(queue: Any) -> list[tuple[QueueName, float]]:
    """What goes back, and when it is visible."""
    returned: list[tuple[QueueName, float]] = []
    queue.on_returned = lambda name, delay: returned.append((name, delay))
    return returned


class TestBothQueuesOfARun:
    async def test_who_asks_for_retries_gets_new_references_next(self, site: Site) -> None:
        """A worker asks for the retries of a run first: that receive takes messages of the run queue, too."""
        queue = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(3), site.clock)
        assert await queue.receive(RETRIES_A, 1, HOLD) == []
        assert len(await queue.receive(RUN_A, 10, HOLD)) == 3, "without a pause"

    async def test_and_the_other_way_round(self, site: Site) -> None:
        queue = await site.process(limit=0)
        await send_all(queue, RETRIES_A, bodies(3), site.clock)
        assert await queue.receive(RUN_A, 1, HOLD) == []
        assert len(await queue.receive(RETRIES_A, 10, HOLD)) == 3

    async def test_dropping_one_leaves_the_other(self, site: Site) -> None:
        queue: Any = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(1, "new"), site.clock)
        await send_all(queue, RETRIES_A, bodies(1, "retry"), site.clock)
        assert await queue.receive(RUN_B, 1, HOLD) == []
        site.clock.advance(3)
        assert len(await queue.receive(RETRIES_A, 1, HOLD)) == 1
        await queue.drop(RETRIES_A)
        assert queue.has_arrived(RUN_A)
        assert [each.body for each in await queue.receive(RUN_A, 1, HOLD)] == [b"new0"]


class TestWhatGoesBack:
    async def test_says_when_it_is_visible_if_nobody_asks_for_it(self, site: Site) -> None:
        queue = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(1), site.clock)
        assert await queue.receive(RUN_B, 1, HOLD) == []
        ((name, delay),) = returned
        assert name == RUN_A
        site.clock.advance(delay - 0.5)
        assert await queue.receive(RUN_A, 1, HOLD) == []
        site.clock.advance(0.5)
        assert len(await queue.receive(RUN_A, 1, HOLD)) == 1

    async def test_is_away_for_no_longer_than_a_lease(self, site: Site) -> None:
        queue = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(1), site.clock)
        for _ in range(12):
            assert await queue.receive(RUN_B, 1, HOLD) == []
            site.clock.advance(returned[-1][1])
        delays = [delay for _, delay in returned]
        assert len(delays) == 12
        assert max(delays[:3]) < min(delays[6:]), "it grows"
        assert max(delays) <= LONGEST

    async def test_says_so_if_its_run_has_no_room(self, site: Site) -> None:
        queue = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(30), site.clock)
        assert len(await queue.receive(RUN_A, 1, HOLD)) == 1
        for name in (RUN_B, RUN_C):
            assert await queue.receive(name, 20, HOLD) == []
        assert set(returned) == {(RUN_A, 5.0)}

    async def test_says_so_if_a_poll_brought_it_and_nobody_took_it(self, site: Site) -> None:
        queue: Any = await site.process(wait=WAIT)
        sender = await site.process()
        returned = listening(queue)
        await sender.send(RUN_A, bodies(1, "first"))
        await arrived(queue, RUN_A, 1)
        assert await queue.receive(RUN_A, 10, HOLD) == []
        await sender.send(RUN_A, bodies(1))
        await settled(lambda: queue.has_arrived(RUN_A))

        def has_returned() -> bool:
            # Step by step: the wait for somebody to take it may begin after a step.
            site.clock.advance(1)
            return bool(returned)

        await settled(has_returned)
        assert returned == [(RUN_A, 0.0)]

    async def test_says_so_if_its_process_ends(self, site: Site) -> None:
        engine = await site.engine(limit=0)
        queue = engine.queue
        returned: list[tuple[QueueName, float]] = []
        async with engine.returned(lambda name, delay: returned.append((name, delay))):
            await send_all(queue, RUN_A, bodies(3), site.clock)
            assert await queue.receive(RETRIES_A, 10, HOLD) == []
        assert returned == [(RUN_A, 0.0)] * 3

    async def test_says_so_if_sqs_does_not_accept_it(self, site: Site) -> None:
        """Then it is visible after its timeout."""
        queue = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(1), site.clock)
        site.shim.rates = {"partial": 1.0}
        assert await queue.receive(RUN_B, 1, HOLD) == []
        assert returned == [(RUN_A, HOLD)]

    async def test_goes_back_if_the_records_do_not_answer(self, site: Site) -> None:
        """Nobody knows whether its run was dropped."""
        queue: Any = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(2), site.clock)
        await queue.receive(RUN_C, 1, HOLD)
        returned.clear()
        site.clock.advance(100)
        rows = queue._shared._rows

        class Away:
            async def document(self, *_: object) -> None:
                raise EngineFailed("away")

        queue._shared._rows = Away()
        with pytest.raises(EngineFailed):
            await queue.receive(RUN_A, 10, HOLD)
        assert returned == [(RUN_A, 5.0)] * 2
        queue._shared._rows = rows
        site.clock.advance(5)
        assert len(await queue.receive(RUN_A, 10, HOLD)) == 2


class TestStash:
    async def test_it_has_arrived_for_a_receiver_that_left(self, site: Site) -> None:
        """The receive of another run brought it."""
        engine = await site.engine(limit=0)
        queue, woken = engine.queue, list[QueueName]()
        await send_all(queue, RUN_C, bodies(1), site.clock)
        assert await queue.receive(RUN_A, 1, HOLD) == []
        async with engine.wakes(woken.append):
            await send_all(queue, RUN_A, bodies(1), site.clock)
            assert await queue.receive(RUN_B, 1, HOLD) == []
            assert woken == [RUN_A]
            assert queue.has_arrived(RUN_A)
            assert not queue.has_arrived(RUN_B)

    async def test_it_goes_back_though_nobody_receives_any_more(self, site: Site) -> None:
        queue: Any = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_A, bodies(3), site.clock)
        assert len(await queue.receive(RUN_A, 1, HOLD)) == 1
        assert queue.has_arrived(RUN_A)
        site.clock.advance(SERVED)
        await settled(lambda: len(returned) == 2)
        assert not queue.has_arrived(RUN_A)
        assert all(0 < delay <= 2.0 for _, delay in returned)

    async def test_a_receiver_that_left_long_ago_has_time_to_return(self, site: Site) -> None:
        """Its last receive was just short of the time for which a run is served."""
        queue: Any = await site.process(limit=0)
        returned = listening(queue)
        await send_all(queue, RUN_C, bodies(1), site.clock)
        assert await queue.receive(RUN_A, 1, HOLD) == []
        site.clock.advance(SERVED - 0.1)
        returned.clear()
        await send_all(queue, RUN_A, bodies(1), site.clock)
        assert await queue.receive(RUN_B, 1, HOLD) == []
        site.clock.advance(SERVED - 0.1)
        await settled()
        assert (RUN_A, 2.0) not in returned
        assert len(await queue.receive(RUN_A, 1, HOLD)) == 1

    async def test_a_run_that_is_not_served_any_more_is_offered(self, site: Site) -> None:
        """A poll that was begun long ago brings the message, and nobody has received since."""
        queue: Any = await site.process(limit=0, wait=WAIT)
        sender = await site.process(limit=0)
        await sender.send(RUN_A, bodies(1, "first"))
        await arrived(queue, RUN_A, 1)
        assert await queue.receive(RUN_A, 1, HOLD) == []
        site.clock.advance(SERVED + 1)
        offered: list[QueueName] = []

        def offer(name: QueueName, body: bytes) -> bool:
            offered.append(name)
            return True

        queue.offer = offer
        await sender.send(RUN_A, bodies(1))

        async def is_here() -> bool:
            return bool(queue.has_arrived(RUN_A))

        await eventually(is_here)
        assert offered == [RUN_A]

    async def test_a_poll_whose_receiver_is_gone_is_sorted_at_once(self, site: Site) -> None:
        """Another run began the poll and has finished: nobody receives for it any more."""
        queue: Any = await site.process(limit=0, wait=WAIT)
        sender = await site.process(limit=0)
        await sender.send(RUN_B, bodies(1))
        await arrived(queue, RUN_B, 1)
        assert await queue.receive(RUN_B, 1, HOLD) == []
        returned = listening(queue)
        await sender.send(RUN_A, bodies(1))
        await settled(lambda: bool(returned))
        assert [name for name, _ in returned] == [RUN_A]


class TestWhereARunIs:
    async def test_the_first_run_that_shares_is_found_soon(self, site: Site) -> None:
        """A receiver has looked for the shared queue in vain, more and more rarely."""
        queue, sender = await site.process(limit=1), await site.process(limit=1)
        await sender.send(RUN_A, bodies(1))
        for _ in range(4 * 100):
            await queue.receive(RUN_A, 1, HOLD)
            site.clock.advance(0.25)
        await sender.send(RUN_B, bodies(1))
        for _ in range(4 * 2 + 1):
            if await queue.receive(RUN_B, 1, HOLD):
                return
            site.clock.advance(0.25)
        raise AssertionError("not found within two seconds")

    async def test_a_run_that_two_processes_put_in_two_places_is_found_in_both(self, site: Site) -> None:
        """One counted the last queue below the limit, and the other did not."""
        full: Any = await site.process(limit=0)
        free = await site.process(limit=10)
        await full.send(RUN_C, bodies(1))
        rows = full.queues._shared_runs._rows

        class Slow:
            """The other process makes the queue and receives from it, before this one has said that the run shares."""

            def __getattr__(self, name: str) -> Any:
                return getattr(rows, name)

            async def create_documents(self, given: Any) -> None:
                await free.send(RUN_A, bodies(1, "own"))
                assert len(await free.receive(RUN_A, 1, HOLD)) == 1
                await rows.create_documents(given)

        full.queues._shared_runs._rows = Slow()
        await full.send(RUN_A, bodies(1, "shared"))
        for _ in range(4 * 10):
            if got := await free.receive(RUN_A, 10, HOLD):
                assert [each.body for each in got] == [b"shared0"]
                return
            site.clock.advance(0.25)
        raise AssertionError("not found within ten seconds")

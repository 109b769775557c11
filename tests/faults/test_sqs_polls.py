"""What the Queue on SQS asks for while little happens, and that nothing waits for long behind what it remembers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.engines.queue import Delivery, Queue, QueueName, recovery_queue, run_queue
from conveyor.engines.sqs import polls
from conveyor.jobs.chunks import send_all
from conveyor.model import RunId
from tests.faults.test_sqs import HOLD, ONE, RUN_A, RUN_B, RUN_C, Site, bodies, drained, opened
from tests.support.clocks import ManualClock

RETRIES_A = recovery_queue(RunId("a"))
WAIT = 20


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """The clock stands still: a poll ends with a message, or when it is advanced."""
    async with opened(clock=ManualClock()) as given:
        yield given


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll of a queue with messages is waited for, however slow the machine is."""
    monkeypatch.setattr(polls, "_GLANCE", 0.5)


async def arrived(queue: Queue, name: QueueName, count: int) -> list[Delivery]:
    got: list[Delivery] = []
    async with asyncio.timeout(30):
        while len(got) < count:
            got += await queue.receive(name, 10, HOLD)
            await asyncio.sleep(0)
    return got


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110  (what is waited for is at a server)
            await asyncio.sleep(0)


async def idle(queue: Any, names: list[QueueName], site: Site, cycles: int) -> Counter[str]:
    """What receivers that keep looking ask for, from one end of the polls to the next, so many times."""
    site.shim.calls.clear()

    async def has_ended() -> bool:
        site.clock.advance(0.25)
        return not queue._polls._open

    for _ in range(cycles):
        for _ in range(50):
            for name in names:
                assert await queue.receive(name, 10, HOLD) == []
        await eventually(has_ended)
    return Counter(site.shim.calls)


class TestEmptyQueue:
    async def test_it_has_one_poll_and_no_other_calls(self, site: Site) -> None:
        queue = await site.process(wait=WAIT)
        await queue.send(ONE, bodies(3))
        got = await arrived(queue, ONE, 3)
        await queue.ack(ONE, [each.receipt for each in got])
        assert await idle(queue, [ONE], site, 5) == {"ReceiveMessage": 5}

    async def test_a_message_ends_the_poll_and_wakes_the_receiver(self, site: Site) -> None:
        engine = await site.engine(wait=WAIT)
        sender = await site.process()
        woken: asyncio.Queue[QueueName] = asyncio.Queue()
        await sender.send(RUN_A, bodies(1, "first"))
        await arrived(engine.queue, RUN_A, 1)
        async with engine.wakes(woken.put_nowait):
            assert await engine.queue.receive(RUN_A, 10, HOLD) == []
            while not woken.empty():
                woken.get_nowait()
            await sender.send(RUN_A, bodies(1))
            async with asyncio.timeout(30):
                assert await woken.get() == RUN_A
        assert [each.body for each in await engine.queue.receive(RUN_A, 10, HOLD)] == [b"m0"]

    async def test_a_busy_queue_is_drained_by_tens(self, site: Site) -> None:
        queue = await site.process(wait=WAIT)
        await send_all(queue, ONE, bodies(60), site.clock)
        site.shim.calls.clear()
        assert len(await queue.receive(ONE, 50, HOLD)) == 50
        assert Counter(site.shim.calls) == {"ReceiveMessage": 5}

    async def test_what_nobody_asks_for_goes_back(self, site: Site) -> None:
        """The lane was closed while its poll was open."""
        queue, other = await site.process(wait=WAIT), await site.process()
        await other.send(ONE, bodies(1, "first"))
        await arrived(queue, ONE, 1)
        assert await queue.receive(ONE, 10, HOLD) == []
        await other.send(ONE, bodies(1))

        async def brought() -> bool:
            return bool(queue._polls._arrived)  # type: ignore[attr-defined]

        await eventually(brought)
        assert await other.receive(ONE, 10, HOLD) == []
        await asyncio.sleep(0)
        site.clock.advance(6)
        assert [each.body for each in await arrived(other, ONE, 1)] == [b"m0"]

    async def test_a_process_that_ends_gives_back_what_its_polls_brought(self, site: Site) -> None:
        queue: Any = await site.process(wait=WAIT)
        other = await site.process()
        await other.send(ONE, bodies(1, "first"))
        await arrived(queue, ONE, 1)
        assert await queue.receive(ONE, 10, HOLD) == []
        await other.send(ONE, bodies(1))

        async def brought() -> bool:
            return bool(queue._polls._arrived)

        await eventually(brought)
        await queue.close()
        assert [each.body for each in await other.receive(ONE, 10, HOLD)] == [b"m0"]

    async def test_polls_are_bounded_and_the_rest_is_looked_at_now_and_then(
        self, site: Site, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(polls, "MAX_OPEN", 1)
        monkeypatch.setattr(polls, "_GLANCE", 0.0)
        queue, sender = await site.process(wait=WAIT), await site.process()
        for name in (RUN_A, RUN_B):
            await sender.send(name, bodies(1, name))
            await drained(sender, name, site.clock)
        site.shim.calls.clear()
        for _ in range(40):
            for name in (RUN_A, RUN_B):
                assert await queue.receive(name, 10, HOLD) == []
            site.clock.advance(0.25)
        assert Counter(site.shim.calls)["ReceiveMessage"] <= 4, "one poll, and a look each five seconds"
        await sender.send(RUN_B, bodies(1))
        site.clock.advance(5)
        assert len(await queue.receive(RUN_B, 10, HOLD)) == 1

    async def test_a_failed_poll_is_told_once(self, site: Site) -> None:
        queue, other = await site.process(wait=WAIT), await site.process()
        await other.send(RUN_A, bodies(1))
        await arrived(queue, RUN_A, 1)
        assert await queue.receive(RUN_A, 10, HOLD) == []
        await other.drop(RUN_A)
        site.clock.advance(WAIT + 1)
        for _ in range(3):
            # The queue is gone: that is an empty queue.
            assert await queue.receive(RUN_A, 10, HOLD) == []


class TestRememberedAbsence:
    async def test_a_recovery_queue_that_never_was_is_seldom_looked_for(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(RUN_A, bodies(1))
        await drained(queue, RUN_A, site.clock)
        site.shim.calls.clear()
        for _ in range(4 * 300):
            assert await queue.receive(RETRIES_A, 10, HOLD) == []
            site.clock.advance(0.25)
        assert set(site.shim.calls) == {"GetQueueUrl"}
        assert len(site.shim.calls) <= 30, "one in 30 seconds for it, and one for the shared queue, in 300 seconds"

    async def test_a_retry_of_another_process_is_found_within_30_seconds(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await other.send(RUN_A, bodies(1))
        for _ in range(4 * 300):
            await queue.receive(RETRIES_A, 10, HOLD)
            site.clock.advance(0.25)
        await other.send(RETRIES_A, bodies(1, "retry"))
        for _ in range(4 * 30 + 1):
            site.clock.advance(0.25)
            if got := await queue.receive(RETRIES_A, 10, HOLD):
                assert got[0].body == b"retry0"
                return
        raise AssertionError("not found within 30 seconds")

    async def test_a_receiver_that_comes_back_finds_it_at_once(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await other.send(RUN_A, bodies(1))
        for _ in range(4 * 300):
            await queue.receive(RETRIES_A, 10, HOLD)
            site.clock.advance(0.25)
        await other.send(RETRIES_A, bodies(1, "retry"))
        site.clock.advance(6)
        assert len(await queue.receive(RETRIES_A, 10, HOLD)) == 1

    async def test_the_process_that_sends_finds_it_at_once(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(RUN_A, bodies(1))
        for _ in range(100):
            await queue.receive(RETRIES_A, 10, HOLD)
            site.clock.advance(0.25)
        await queue.send(RETRIES_A, bodies(1))
        assert len(await queue.receive(RETRIES_A, 10, HOLD)) == 1

    async def test_a_sweeper_is_not_told_of_an_emptiness_that_it_only_remembers(self, site: Site) -> None:
        queue, other = await site.process(settle=0), await site.process()
        assert (await queue.depth(RETRIES_A)).is_empty
        await other.send(RETRIES_A, bodies(1))
        assert (await queue.depth(RETRIES_A)).total == 1


class TestLimit:
    async def test_runs_are_counted_and_not_queues(self, site: Site) -> None:
        first: Any = await site.process(limit=4)
        for name in "abc":
            await first.send(run_queue(RunId(name)), bodies(1))
            await first.send(recovery_queue(RunId(name)), bodies(1))
        later: Any = await site.process(limit=4)
        await later.send(run_queue(RunId("d")), bodies(1))
        assert await later.shared_depth() is None
        last: Any = await site.process(limit=4)
        await last.send(run_queue(RunId("e")), bodies(1))
        assert (await last.shared_depth()).ready == 1

    async def test_a_recovery_queue_is_where_its_run_is(self, site: Site) -> None:
        queue: Any = await site.process(limit=1)
        for name in "ab":
            await queue.send(run_queue(RunId(name)), bodies(1))
            await queue.send(recovery_queue(RunId(name)), bodies(1))
        places = [(await queue.queues.to_send(recovery_queue(RunId(name)))).shared for name in "ab"]
        assert places == [False, True]

    async def test_a_run_that_shares_goes_on_to_share(self, site: Site) -> None:
        """Else a count of its own queue would say that it is empty while the shared one has messages of it."""
        queue, later = await site.process(limit=1), await site.process(limit=1)
        await queue.send(RUN_A, bodies(1))
        await queue.send(RUN_B, bodies(1))
        await queue.drop(RUN_A)
        site.clock.advance(61)
        await later.send(RUN_B, bodies(1, "later"))
        await later.send(RUN_C, bodies(1))
        places = [(await later.queues.to_send(name)).shared for name in (RUN_B, RUN_C)]  # type: ignore[attr-defined]
        assert places == [True, False]
        assert sorted(await drained(later, RUN_B, site.clock)) == [b"later0", b"m0"]
        assert (await later.depth(RUN_B)).unknown
        assert not (await later.depth(RUN_C)).unknown

    async def test_a_process_that_may_not_list_queues_works_all_the_same(self, site: Site) -> None:
        site.shim.denied = {"ListQueues"}
        engine = await site.engine(limit=2)
        queue = engine.queue
        for name in (RUN_A, RUN_B, RUN_C):
            assert await queue.send(name, bodies(1)) == []
        assert (await queue.shared_depth()) is not None, "what it made itself counts"
        found = dict(await engine.checks())
        assert "sqs:ListQueues is denied" in (found["count of run queues"] or "")


class TestSharedReceiver:
    async def test_runs_that_share_have_one_poll(self, site: Site) -> None:
        queue, sender = await site.process(limit=0, wait=WAIT), await site.process(limit=0)
        names = [run_queue(RunId(f"r{number}")) for number in range(20)]
        for name in names:
            await sender.send(name, bodies(1, name))
        found: Counter[bytes] = Counter()
        async with asyncio.timeout(60):
            while len(found) < 20:
                for name in names:
                    some = await queue.receive(name, 3, HOLD)
                    found.update(each.body for each in some)
                    await queue.ack(name, [each.receipt for each in some])
                site.clock.advance(0.5)
        calls = await idle(queue, names, site, 3)
        assert calls["ReceiveMessage"] <= 3
        assert set(calls) <= {"ReceiveMessage", "GetQueueUrl"}

    async def test_the_queue_that_a_sharing_run_does_not_have_is_seldom_looked_for(self, site: Site) -> None:
        queue, sender = await site.process(limit=0), await site.process(limit=0)
        await sender.send(RUN_A, bodies(1))
        await drained(queue, RUN_A, site.clock)
        site.shim.calls.clear()
        for _ in range(4 * 300):
            await queue.receive(RUN_A, 10, HOLD)
            site.clock.advance(0.25)
        assert Counter(site.shim.calls)["GetQueueUrl"] <= 9

    async def test_one_poll_wakes_the_run_that_it_brought_a_message_for(self, site: Site) -> None:
        engine, sender = await site.engine(limit=0, wait=WAIT), await site.process(limit=0)
        await sender.send(RUN_C, bodies(1))
        assert await arrived(engine.queue, RUN_C, 1)
        woken: list[QueueName] = []
        async with engine.wakes(woken.append):
            for name in (RUN_B, RUN_A):
                assert await engine.queue.receive(name, 10, HOLD) == []
            await sender.send(RUN_B, bodies(1))

            async def heard() -> bool:
                return bool(woken)

            await eventually(heard)
            assert woken == [RUN_B]
            assert engine.queue.has_arrived(RUN_B)
            assert len(await engine.queue.receive(RUN_B, 10, HOLD)) == 1
            assert not engine.queue.has_arrived(RUN_B)

    async def test_messages_of_a_run_that_is_not_served_do_not_circulate(self, site: Site) -> None:
        """A paused run has a thousand messages in the shared queue."""
        queue = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(30, "paused"), site.clock)
        await send_all(queue, RUN_B, bodies(1), site.clock)
        received = 0
        site.shim.calls.clear()
        for _ in range(120):
            received += len(await queue.receive(RUN_B, 10, HOLD))
            site.clock.advance(1)
            given_back = Counter(site.shim.calls)["ChangeMessageVisibilityBatch"]
            assert given_back <= 60, "about six times each in two minutes, ten in a call"
        assert received >= 1

    async def test_a_run_with_a_backlog_does_not_keep_others_out(self, site: Site) -> None:
        queue = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(100, "a"), site.clock)
        await send_all(queue, RUN_B, bodies(1, "b"), site.clock)
        assert len(await queue.receive(RUN_A, 1, HOLD)) == 1
        for _ in range(20):
            if got := await queue.receive(RUN_B, 1, HOLD):
                assert got[0].body == b"b0"
                return
            site.clock.advance(0.1)
        raise AssertionError("kept out")

    async def test_a_process_that_ends_gives_back_what_it_stashed(self, site: Site) -> None:
        one, other = await site.process(limit=0), await site.process(limit=0)
        await send_all(one, RUN_A, bodies(5, "a"), site.clock)
        assert len(await one.receive(RUN_A, 1, HOLD)) == 1
        await one.close()  # type: ignore[attr-defined]
        assert len(await other.receive(RUN_A, 10, HOLD)) == 4

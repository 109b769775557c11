"""The Queue seam, over every engine behind it."""

import asyncio
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.queue import (
    CONTROL,
    Delivery,
    Depth,
    Hastens,
    NamesQueues,
    Outgoing,
    Queue,
    QueueName,
    ReceivesMany,
    ReportsMessageAge,
    Reveals,
    SharesQueues,
    recovery_queue,
    run_queue,
)
from conveyor.errors import BadCursor
from conveyor.model import RunId
from tests.support.clocks import ManualClock

ONE = QueueName("one")
TWO = QueueName("two")
HOLD = 30.0


def bodies(count: int, start: int = 0) -> list[Outgoing]:
    return [Outgoing(b"message %d" % number) for number in range(start, start + count)]


async def drain(queue: Queue, name: QueueName, limit: int = 10, hold: float = HOLD) -> list[Delivery]:
    """Receive until there is nothing to see, without giving anything back."""
    got: list[Delivery] = []
    while some := await queue.receive(name, limit, hold):
        assert len(some) <= limit
        got += some
    return got


async def take(queue: Queue, name: QueueName = ONE, hold: float = HOLD) -> Delivery:
    (delivery,) = await queue.receive(name, 1, hold)
    return delivery


class TestSendAndReceive:
    async def test_what_is_sent_is_received_once(self, queue: Queue) -> None:
        assert await queue.send(ONE, bodies(25)) == []
        got = await drain(queue, ONE)
        assert Counter(each.body for each in got) == Counter(one.body for one in bodies(25))
        assert {each.receives for each in got} == {1}
        assert len({each.message_id for each in got}) == 25
        assert len({each.receipt for each in got}) == 25

    async def test_bodies_are_any_bytes(self, queue: Queue) -> None:
        texts = [b"", b"\0\xff" * 10, b"x" * 250_000]
        await queue.send(ONE, [Outgoing(text) for text in texts])
        assert sorted(each.body for each in await drain(queue, ONE)) == sorted(texts)

    async def test_nothing_sent_nothing_received(self, queue: Queue) -> None:
        assert await queue.send(ONE, []) == []
        assert await queue.receive(ONE, 10, HOLD) == []
        assert await queue.depth(ONE) == Depth(0, 0, 0)

    async def test_queues_do_not_mix(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(3))
        await queue.send(run_queue(RunId("one")), bodies(2))
        assert len(await drain(queue, TWO)) == 0
        assert len(await drain(queue, CONTROL)) == 0
        assert len(await drain(queue, run_queue(RunId("one")))) == 2
        assert len(await drain(queue, ONE)) == 3

    async def test_receivers_never_share_a_message(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(300))
        taken = await asyncio.gather(*(drain(queue, ONE, limit) for limit in (1, 3, 7, 10, 10, 10)))
        assert Counter(each.body for got in taken for each in got) == Counter(one.body for one in bodies(300))

    async def test_receives_at_the_same_time_get_what_each_asked_for(self, queue: Queue, clock: ManualClock) -> None:
        names = [run_queue(RunId(f"run{number}")) for number in range(4)]
        for number, name in enumerate(names):
            await queue.send(name, bodies(3, 10 * number))
        wanted = [(name, limit, hold) for name in names for limit, hold in ((1, HOLD), (2, 2 * HOLD))]
        got = await asyncio.gather(*(queue.receive(*each) for each in wanted))
        for (name, limit, _), deliveries in zip(wanted, got, strict=True):
            known = {one.body for one in bodies(3, 10 * names.index(name))}
            assert len(deliveries) <= limit
            assert {each.body for each in deliveries} <= known
        everything = [each.receipt for deliveries in got for each in deliveries]
        assert len(set(everything)) == len(everything)
        clock.advance(HOLD + 1)
        longer = [len(deliveries) for (_, limit, _), deliveries in zip(wanted, got, strict=True) if limit == 2]
        assert [len(await drain(queue, name)) for name in names] == [3 - count for count in longer]

    async def test_one_step_receives_from_many_queues(self, queue: Queue, clock: ManualClock) -> None:
        if not isinstance(queue, ReceivesMany):
            # Of the engines in this suite, SQS has no such call.
            assert type(queue).__name__ == "SqsQueue"
            return
        names = [run_queue(RunId(f"run{number}")) for number in range(5)]
        for number, name in enumerate(names[:4]):
            await queue.send(name, bodies(3, 10 * number))
        await queue.send(names[4], [Outgoing(b"later", 60.0)])
        (held,) = await queue.receive(names[3], 1, HOLD)
        got = await queue.receive_many([(name, 2 + number % 2) for number, name in enumerate(names)], HOLD)
        assert [len(deliveries) for deliveries in got] == [2, 3, 2, 2, 0]
        for number, deliveries in enumerate(got):
            assert {each.body for each in deliveries} <= {one.body for one in bodies(3, 10 * number)}
            assert all((each.receives, each.lost_starts) == (1, 0) for each in deliveries)
        assert held.body not in {each.body for each in got[3]}
        assert await queue.receive_many([(name, 9) for name in (names[1], names[4])], HOLD) == [[], []]
        for name, deliveries in zip(names, got, strict=True):
            assert await queue.ack(name, [each.receipt for each in deliveries]) == frozenset()
        assert [(await queue.depth(name)).total for name in names] == [1, 0, 1, 1, 1]
        clock.advance(HOLD + 1)
        again = await queue.receive_many([(name, 9) for name in names], HOLD)
        assert [[each.receives for each in deliveries] for deliveries in again] == [[1], [], [1], [2], []]

    async def test_many(self, queue: Queue) -> None:
        """2,500 messages through two receivers, each acknowledged."""
        sent = bodies(2500)
        for start in range(0, 2500, 625):
            assert await queue.send(ONE, sent[start : start + 625]) == []
        assert await queue.depth(ONE) == Depth(2500, 0, 0)
        seen: Counter[bytes] = Counter()

        async def receiver() -> None:
            while got := await queue.receive(ONE, 500, HOLD):
                seen.update(each.body for each in got)
                assert await queue.ack(ONE, [each.receipt for each in got]) == frozenset()

        await asyncio.gather(receiver(), receiver())
        assert seen == Counter(one.body for one in sent)
        assert await queue.depth(ONE) == Depth(0, 0, 0)


class TestVisibility:
    async def test_a_held_message_is_seen_by_nobody(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        await take(queue)
        clock.advance(HOLD - 1)
        assert await queue.receive(ONE, 10, HOLD) == []

    async def test_it_comes_again_when_the_hold_lapses(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        receipts = set()
        for receives in range(1, 6):
            delivery = await take(queue)
            assert delivery.receives == receives
            assert delivery.body == b"message 0"
            receipts.add(delivery.receipt)
            clock.advance(HOLD)
        assert len(receipts) == 5

    async def test_the_id_stays_over_deliveries(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        first = await take(queue)
        clock.advance(HOLD)
        assert (await take(queue)).message_id == first.message_id

    async def test_a_delayed_message_waits(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, [Outgoing(b"now"), Outgoing(b"later", 5.0), Outgoing(b"much later", 60.0)])
        assert [each.body for each in await drain(queue, ONE)] == [b"now"]
        clock.advance(4.9)
        assert await queue.receive(ONE, 10, HOLD) == []
        clock.advance(0.2)
        assert [each.body for each in await drain(queue, ONE, hold=1000)] == [b"later"]
        clock.advance(55)
        assert b"much later" in [each.body for each in await drain(queue, ONE)]

    async def test_extending_keeps_it(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue)
        for _ in range(5):
            clock.advance(HOLD - 1)
            assert await queue.extend(ONE, [delivery.receipt], HOLD) == frozenset()
            assert await queue.receive(ONE, 10, HOLD) == []
        clock.advance(HOLD)
        assert (await take(queue)).receives == 2

    async def test_the_hold_counts_from_the_extension(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue, hold=1000)
        assert await queue.extend(ONE, [delivery.receipt], 5) == frozenset()
        clock.advance(5)
        assert (await take(queue)).receives == 2


class TestStaleReceipts:
    async def test_a_later_delivery_makes_a_receipt_stale(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        old = await take(queue)
        clock.advance(HOLD)
        new = await take(queue)
        assert await queue.extend(ONE, [old.receipt], 1000) == frozenset({old.receipt})
        assert await queue.ack(ONE, [old.receipt]) == frozenset({old.receipt})
        await queue.release(ONE, [old.receipt], 0)
        await queue.dead_letter(ONE, [old.receipt], "not mine")
        assert await queue.receive(ONE, 10, HOLD) == []
        assert (await queue.dead_letters(None, 10)).items == []
        assert await queue.depth(ONE) == Depth(0, 1, 0)
        clock.advance(HOLD - 1)
        assert await queue.ack(ONE, [new.receipt]) == frozenset()
        assert await queue.depth(ONE) == Depth(0, 0, 0)

    async def test_a_receipt_that_was_given_back_never_counts_again(self, queue: Queue, clock: ManualClock) -> None:
        """The receive is not counted, and yet the next delivery is another one."""
        await queue.send(ONE, bodies(1))
        old = await take(queue)
        await queue.release(ONE, [old.receipt], 0)
        new = await take(queue)
        assert new.receipt != old.receipt
        assert await queue.extend(ONE, [old.receipt], 1000) == frozenset({old.receipt})
        await queue.release(ONE, [old.receipt], 0)
        await queue.dead_letter(ONE, [old.receipt], "not mine")
        assert await queue.ack(ONE, [old.receipt]) == frozenset({old.receipt})
        assert await queue.depth(ONE) == Depth(0, 1, 0)
        assert await queue.ack(ONE, [new.receipt]) == frozenset()

    async def test_an_acknowledged_message_is_gone(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue)
        assert await queue.ack(ONE, [delivery.receipt]) == frozenset()
        assert await queue.ack(ONE, [delivery.receipt]) == frozenset({delivery.receipt})
        assert await queue.extend(ONE, [delivery.receipt], HOLD) == frozenset({delivery.receipt})
        await queue.release(ONE, [delivery.receipt], 0)
        clock.advance(10 * HOLD)
        assert await queue.receive(ONE, 10, HOLD) == []

    async def test_a_batch_names_only_what_was_stale(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(6))
        got = await drain(queue, ONE)
        done, kept = got[:2], got[2:]
        await queue.ack(ONE, [each.receipt for each in done])
        receipts = [each.receipt for each in got]
        assert await queue.extend(ONE, receipts, HOLD) == {each.receipt for each in done}
        assert await queue.ack(ONE, receipts) == {each.receipt for each in done}
        assert await queue.depth(ONE) == Depth(0, 0, 0)
        assert len(kept) == 4

    async def test_a_receipt_counts_on_its_own_queue_only(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue)
        assert await queue.ack(TWO, [delivery.receipt]) == frozenset({delivery.receipt})
        assert await queue.extend(TWO, [delivery.receipt], HOLD) == frozenset({delivery.receipt})
        assert await queue.depth(ONE) == Depth(0, 1, 0)

    async def test_no_receipts_is_no_work(self, queue: Queue) -> None:
        assert await queue.ack(ONE, []) == frozenset()
        assert await queue.extend(ONE, [], HOLD) == frozenset()
        await queue.release(ONE, [], 0)
        await queue.dead_letter(ONE, [], "nothing")


class TestRelease:
    async def test_it_is_visible_at_once_and_not_counted(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(1))
        for _ in range(4):
            delivery = await take(queue)
            assert delivery.receives == 1
            await queue.release(ONE, [delivery.receipt], 0)

    async def test_only_lapses_are_counted(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        await take(queue)
        clock.advance(HOLD)
        delivery = await take(queue)
        assert delivery.receives == 2
        await queue.release(ONE, [delivery.receipt], 0)
        assert (await take(queue)).receives == 2

    async def test_with_a_delay(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue)
        await queue.release(ONE, [delivery.receipt], 5)
        assert await queue.depth(ONE) == Depth(0, 0, 1)
        clock.advance(4)
        assert await queue.receive(ONE, 1, HOLD) == []
        clock.advance(1)
        assert (await take(queue)).receives == 1


class TestStarts:
    async def test_only_marked_starts_that_were_lost_count(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        for lost_starts, mark in [(0, False), (0, True), (1, False), (1, True), (2, False)]:
            delivery = await take(queue)
            assert delivery.lost_starts == lost_starts
            if mark:
                await queue.mark_started(ONE, [delivery.receipt])
            clock.advance(HOLD)

    async def test_marking_again_is_the_same_start(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        delivery = await take(queue)
        for _ in range(3):
            await queue.mark_started(ONE, [delivery.receipt])
        clock.advance(HOLD)
        assert (await take(queue)).lost_starts == 1

    async def test_a_start_that_was_given_back_was_not_lost(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        for _ in range(3):
            delivery = await take(queue)
            assert delivery.lost_starts == 0
            await queue.mark_started(ONE, [delivery.receipt])
            await queue.release(ONE, [delivery.receipt], 0)
        delivery = await take(queue)
        await queue.mark_started(ONE, [delivery.receipt])
        clock.advance(HOLD)
        delivery = await take(queue)
        assert delivery.lost_starts == 1
        await queue.release(ONE, [delivery.receipt], 0)
        assert (await take(queue)).lost_starts == 1, "what was lost before stays lost"

    async def test_a_stale_receipt_marks_nothing(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        old = await take(queue)
        clock.advance(HOLD)
        await take(queue)
        await queue.mark_started(ONE, [old.receipt])
        clock.advance(HOLD)
        assert (await take(queue)).lost_starts == 0

    async def test_a_dead_letter_that_is_sent_again_starts_anew(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(1))
        await queue.mark_started(ONE, [(await take(queue)).receipt])
        clock.advance(HOLD)
        await queue.dead_letter(ONE, [(await take(queue)).receipt], "why")
        (letter,) = (await queue.dead_letters(None, 10)).items
        await queue.redrive([letter.message_id])
        assert (await take(queue)).lost_starts == 0


class TestDeadLetters:
    async def test_a_buried_message_is_a_dead_letter(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, bodies(2))
        delivery = await take(queue)
        clock.advance(3)
        await queue.dead_letter(ONE, [delivery.receipt], "it kills its worker ü")
        (letter,) = (await queue.dead_letters(None, 10)).items
        assert (letter.queue, letter.body, letter.reason) == (ONE, delivery.body, "it kills its worker ü")
        assert letter.at == pytest.approx(clock.now())
        clock.advance(10 * HOLD)
        assert [each.body for each in await drain(queue, ONE)] == [b"message 1"]

    async def test_they_come_oldest_first_in_pages(self, queue: Queue, clock: ManualClock) -> None:
        for number in range(7):
            await queue.send(ONE, bodies(1, number))
            delivery = await take(queue)
            clock.advance(1)
            await queue.dead_letter(ONE, [delivery.receipt], f"reason {number}")
        got, cursor = [], None
        while True:
            page = await queue.dead_letters(cursor, 3)
            got += page.items
            cursor = page.next_cursor
            if cursor is None:
                break
            assert len(page.items) == 3
        assert [letter.reason for letter in got] == [f"reason {number}" for number in range(7)]

    async def test_redrive_sends_them_back_where_they_came_from(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(3))
        await queue.send(TWO, bodies(1, 100))
        for name in (ONE, TWO):
            await queue.dead_letter(name, [each.receipt for each in await drain(queue, name)], "why")
        letters = (await queue.dead_letters(None, 10)).items
        assert len(letters) == 4
        chosen = [letter for letter in letters if letter.body in (b"message 1", b"message 100")]
        assert await queue.redrive([letter.message_id for letter in chosen]) == 2
        assert [(each.body, each.receives) for each in await drain(queue, ONE)] == [(b"message 1", 1)]
        assert [(each.body, each.receives) for each in await drain(queue, TWO)] == [(b"message 100", 1)]
        assert {letter.body for letter in (await queue.dead_letters(None, 10)).items} == {b"message 0", b"message 2"}
        assert await queue.redrive([letter.message_id for letter in chosen]) == 0
        assert await queue.redrive(["nothing", "", "99999999999999999999", "-1"]) == 0
        assert await queue.redrive([]) == 0

    async def test_one_of_two_at_once_redrives(self, queue: Queue) -> None:
        await queue.send(ONE, bodies(1))
        await queue.dead_letter(ONE, [(await take(queue)).receipt], "why")
        (letter,) = (await queue.dead_letters(None, 10)).items
        assert sorted(await asyncio.gather(*(queue.redrive([letter.message_id]) for _ in range(5)))) == [0, 0, 0, 0, 1]
        assert len(await drain(queue, ONE)) == 1

    @pytest.mark.parametrize("cursor", ["x", "-1", "", "9" * 40])
    async def test_a_bad_cursor_is_refused(self, queue: Queue, cursor: str) -> None:
        with pytest.raises(BadCursor):
            await queue.dead_letters(cursor, 10)


class TestDepthAndDrop:
    async def test_depth_follows_a_message(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, [*bodies(3), Outgoing(b"later", 100.0)])
        assert await queue.depth(ONE) == Depth(3, 0, 1)
        got = await queue.receive(ONE, 2, HOLD)
        assert await queue.depth(ONE) == Depth(1, 2, 1)
        await queue.ack(ONE, [got[0].receipt])
        assert await queue.depth(ONE) == Depth(1, 1, 1)
        clock.advance(HOLD)
        assert await queue.depth(ONE) == Depth(2, 0, 1)
        clock.advance(70)
        assert await queue.depth(ONE) == Depth(3, 0, 0)

    async def test_queues_with_messages_are_named(self, queue: Queue) -> None:
        """Where the engine knows them."""
        if not isinstance(queue, NamesQueues):
            return
        assert await queue.next_queue(None) is None
        names = [ONE, run_queue(RunId("run_a")), recovery_queue(RunId("run_a")), run_queue(RunId("run_b"))]
        for name in names:
            await queue.send(name, [Outgoing(b"now"), Outgoing(b"later", 50.0)])
        await take(queue)
        seen: list[QueueName] = []
        while (name_or_end := await queue.next_queue(seen[-1] if seen else None)) is not None:
            seen.append(name_or_end)
        assert sorted(seen) == sorted(names)
        await queue.drop(seen[-1])
        assert await queue.next_queue(seen[-2]) is None

    async def test_age_is_that_of_the_message_that_waits_longest(self, queue: Queue, clock: ManualClock) -> None:
        """Where the engine knows it."""
        if not isinstance(queue, ReportsMessageAge):
            return
        assert await queue.waiting_since(ONE) is None
        began = clock.now()
        await queue.send(ONE, [Outgoing(b"later", 50.0)])
        assert await queue.waiting_since(ONE) is None
        clock.advance(10)
        await queue.send(ONE, [Outgoing(b"now")])
        clock.advance(60)
        assert await queue.waiting_since(ONE) == began + 10
        await take(queue)
        assert await queue.waiting_since(ONE) == began + 50
        await take(queue)
        assert await queue.waiting_since(ONE) is None
        clock.advance(HOLD + 5)
        assert await queue.waiting_since(ONE) == began + 70 + HOLD

    async def test_queues_that_are_dropped_at_once_are_empty_and_no_other(self, queue: Queue) -> None:
        gone = [QueueName(f"gone {number}") for number in range(5)]
        for name in (*gone, ONE):
            await queue.send(name, bodies(2))
        await asyncio.gather(*(queue.drop(name) for name in (*gone, gone[0])))
        assert [(await queue.depth(name)).total for name in (*gone, ONE)] == [0, 0, 0, 0, 0, 2]

    async def test_a_dropped_queue_is_empty(self, queue: Queue, clock: ManualClock) -> None:
        await queue.send(ONE, [*bodies(3), Outgoing(b"later", 5.0)])
        await queue.send(TWO, bodies(2))
        held = await take(queue)
        await queue.drop(ONE)
        clock.advance(10 * HOLD)
        assert await queue.receive(ONE, 10, HOLD) == []
        assert await queue.depth(ONE) == Depth(0, 0, 0)
        assert await queue.ack(ONE, [held.receipt]) == frozenset({held.receipt})
        assert (await queue.depth(TWO)).ready == 2
        await queue.drop(ONE)
        await queue.drop(QueueName("never was"))
        await queue.send(ONE, bodies(1))
        assert len(await drain(queue, ONE)) == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 3), st.sampled_from([0.0, 5.0])),
        st.tuples(st.just("receive"), st.integers(1, 3), st.sampled_from([5.0, 20.0])),
        st.tuples(st.just("receive"), st.just(10), st.just(20.0)),
        st.tuples(st.sampled_from(["ack", "release", "extend", "dead_letter"]), st.integers(0, 5), st.just(20.0)),
        st.tuples(st.just("wait"), st.integers(1, 25), st.just(0.0)),
    ),
    min_size=5,
    max_size=30,
)


class Story:
    """One queue, and what a test knows of its messages."""

    def __init__(self, queue: Queue, clock: ManualClock) -> None:
        self.queue = queue
        self.clock = clock
        self.name = QueueName(clock.new_id("q"))
        self.sent = self.ended = 0
        # Message to the receipt of its last delivery and the end of that hold.
        self.holds: dict[str, tuple[str, float]] = {}
        self.receipts: list[str] = []

    async def send(self, count: int, delay: float) -> None:
        await self.queue.send(self.name, [Outgoing(b"%d" % self.sent, delay) for _ in range(count)])
        self.sent += count

    async def receive(self, limit: int, hold: float) -> None:
        now = self.clock.now()
        for delivery in await self.queue.receive(self.name, limit, hold):
            assert delivery.receipt not in self.receipts
            _, until = self.holds.get(delivery.message_id, ("", 0.0))
            assert until <= now, "held by two at once"
            self.holds[delivery.message_id] = (delivery.receipt, now + hold)
            self.receipts.append(delivery.receipt)

    async def wait(self, seconds: int, _: float) -> None:
        self.clock.advance(seconds)

    async def extend(self, which: int, hold: float) -> None:
        receipt, owner = self._choose(which)
        if receipt is not None:
            stale = await self.queue.extend(self.name, [receipt], hold)
            self._check(receipt, owner, not stale)
            if owner is not None and not stale:
                self.holds[owner] = (receipt, self.clock.now() + hold)

    async def ack(self, which: int, _: float) -> None:
        receipt, owner = self._choose(which)
        if receipt is not None:
            took = not await self.queue.ack(self.name, [receipt])
            self._check(receipt, owner, took)
            self._gone(owner, took)

    async def dead_letter(self, which: int, _: float) -> None:
        receipt, owner = self._choose(which)
        if receipt is not None:
            before = await self._total()
            await self.queue.dead_letter(self.name, [receipt], "why")
            took = await self._total() < before
            self._check(receipt, owner, took)
            self._gone(owner, took)

    async def release(self, which: int, _: float) -> None:
        receipt, owner = self._choose(which)
        if receipt is not None:
            before = await self.queue.depth(self.name)
            await self.queue.release(self.name, [receipt], 0)
            took = (await self.queue.depth(self.name)).ready > before.ready
            if owner is None or self.holds[owner][1] > self.clock.now():
                self._check(receipt, owner, took)
            if owner is not None:
                del self.holds[owner]

    async def check(self) -> None:
        assert await self._total() == self.sent - self.ended

    def _choose(self, which: int) -> tuple[str | None, str | None]:
        """One of all receipts so far, and the message that it holds if it is the last of its message."""
        if not self.receipts:
            return None, None
        receipt = self.receipts[which % len(self.receipts)]
        return receipt, next((each for each, (known, _) in self.holds.items() if known == receipt), None)

    def _check(self, receipt: str, owner: str | None, took: bool) -> None:
        # Whether an end counts after the hold lapsed and before the next delivery is up to the engine.
        if owner is None:
            assert not took, f"stale receipt {receipt} counted"
        elif self.holds[owner][1] > self.clock.now():
            assert took, f"live receipt {receipt} did not count"

    def _gone(self, owner: str | None, took: bool) -> None:
        if took and owner is not None:
            del self.holds[owner]
            self.ended += 1

    async def _total(self) -> int:
        depth = await self.queue.depth(self.name)
        return depth.ready + depth.held + depth.delayed


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_no_message_is_lost_or_held_twice(
    queue: Queue, clock: ManualClock, steps: list[tuple[str, int, float]]
) -> None:
    """Any order of sends, receives, ends and time: a message is acknowledged or buried once, or it is still there."""
    story = Story(queue, clock)
    for step, number, value in steps:
        await getattr(story, step)(number, value)
        await story.check()


class TestHastening:
    async def test_delayed_messages_become_visible(self, queue: Queue, clock: ManualClock) -> None:
        if not isinstance(queue, Hastens):
            # SQS has no call for it: workers delay its messages for less long.
            return
        await queue.send(ONE, [Outgoing(b"held", 5)])
        clock.advance(5)
        held = await take(queue)
        await queue.send(ONE, [Outgoing(b"late %d" % number, 100.0 + number) for number in range(30)])
        await queue.send(ONE, [Outgoing(b"now")])
        await queue.send(TWO, [Outgoing(b"another", 100)])
        await queue.release(ONE, [(await take(queue)).receipt], 200)
        assert await queue.delayed_queues([ONE, TWO, CONTROL]) == {ONE, TWO}
        await queue.hasten(ONE)
        assert await queue.depth(ONE) == Depth(31, 1, 0)
        assert await queue.delayed_queues([ONE, TWO]) == {TWO}
        got = await drain(queue, ONE)
        assert Counter(each.body for each in got) == Counter([b"now", *(b"late %d" % number for number in range(30))])
        assert await queue.ack(ONE, [held.receipt]) == frozenset()
        assert await queue.receive(TWO, 1, HOLD) == []
        await queue.hasten(ONE)
        assert await queue.depth(ONE) == Depth(0, 31, 0), "what is in flight stays in flight"


class TestRevealing:
    async def test_what_a_clock_that_was_set_back_hides_is_visible(self, queue: Queue, clock: ManualClock) -> None:
        if not isinstance(queue, Reveals):
            # SQS has a clock of its own.
            return
        await queue.send(ONE, bodies(2))
        held = await take(queue)
        await queue.send(TWO, bodies(1))
        clock.step(-7200)
        await queue.send(ONE, [Outgoing(b"delayed", 50)])
        assert await queue.receive(ONE, 10, HOLD) == []
        assert await queue.reveal(ONE, 100) == 2
        assert await queue.extend(ONE, [held.receipt], HOLD) == frozenset(), "its receiver may renew the lease"
        assert [each.body for each in await queue.receive(ONE, 10, HOLD)] == [b"message 1"]
        assert await queue.reveal(ONE, 100) == 0
        assert await queue.depth(ONE) == Depth(0, 2, 1)
        assert await queue.receive(TWO, 10, HOLD) == []

    async def test_a_lease_from_before_counts_as_expired(self, queue: Queue, clock: ManualClock) -> None:
        if not isinstance(queue, Reveals):
            return
        await queue.send(ONE, bodies(1))
        held = await take(queue)
        clock.step(-7200)
        assert await queue.reveal(ONE, 100) == 1
        assert (await take(queue)).receives == 2
        assert await queue.ack(ONE, [held.receipt]) == {held.receipt}


class TestDepthOfOneQueue:
    async def test_it_is_known_and_counts_no_other(self, queue: Queue) -> None:
        await queue.send(run_queue(RunId("one")), bodies(3))
        await queue.send(run_queue(RunId("two")), bodies(2))
        assert await queue.depth(run_queue(RunId("one"))) == Depth(3, 0, 0)
        assert (await queue.depth(run_queue(RunId("three")))).is_empty

    async def test_an_engine_that_can_share_has_no_shared_queue_below_its_limit(self, queue: Queue) -> None:
        await queue.send(run_queue(RunId("one")), bodies(3))
        if isinstance(queue, SharesQueues):
            assert await queue.shared_depth() is None

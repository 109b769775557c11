"""The Queue on SQS under what AWS does: nothing sent is lost, and nothing ended comes again for a clean fault.

`CONVEYOR_SQS_CASES` asks for more seeds.
"""

import asyncio
import itertools
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conveyor import faults
from conveyor.engines.queue import CONTROL, Depth, Outgoing, Queue, QueueName, SharesQueues, run_queue
from conveyor.engines.records import Records
from conveyor.engines.sqlite import SqliteEngine
from conveyor.engines.sqs import SqsEngine
from conveyor.engines.sqs.address import parse, plain
from conveyor.engines.sqs.calls import _packed
from conveyor.engines.sqs.dead_letter_documents import DeadLetterDocuments
from conveyor.engines.sqs.envelope import from_text, to_text, wrap
from conveyor.engines.sqs.shared import TIDYING
from conveyor.errors import EngineFailed, InvalidSetting
from conveyor.jobs.chunks import send_all
from conveyor.model import RunId, TenantId
from tests.faults.shim_sqs import CLEAN, DOUBTFUL, Shim
from tests.servers.sqs import together, url_of
from tests.support.clocks import ManualClock
from tests.support.places import quick_place

CASES = int(os.environ.get("CONVEYOR_SQS_CASES", "20"))
HOLD = 30.0
ONE = QueueName("one")
RUN_A, RUN_B, RUN_C = (run_queue(RunId(name)) for name in "abc")


class HastyClock(ManualClock):
    """Nobody waits: who sleeps has slept. Only what is to happen beside the calls waits for the test."""

    async def sleep(self, seconds: float) -> None:
        task = asyncio.current_task()
        if task is not None and task.get_name() == TIDYING:
            await super().sleep(seconds)
            return
        self.advance(max(0.0, seconds))
        await asyncio.sleep(0)


class Site:
    """Processes that share queues and records, behind one shim."""

    def __init__(self, place: Path, clock: ManualClock, shim: Shim, records: Records, stack: AsyncExitStack) -> None:
        self.place = place
        self.clock = clock
        self.shim = shim
        self.records = records
        self.letters = DeadLetterDocuments(records.documents, TenantId(f"~{parse(url_of(place)).prefix}"), clock)
        self._stack = stack

    async def process(self, limit: int = 500, **options: object) -> Queue:
        """One more process; it is left as a crash leaves it."""
        return (await self.engine(limit, **options)).queue

    async def engine(self, limit: int = 500, **options: object) -> SqsEngine:
        url = url_of(self.place, self.shim.endpoint, **options)
        return await self._stack.enter_async_context(SqsEngine.open(url, self.clock, self.records.documents, limit))


@asynccontextmanager
async def opened(seed: int = 0, clock: ManualClock | None = None) -> AsyncIterator[Site]:
    clock = clock or HastyClock(seed=seed)
    with quick_place() as place, together(clock):
        async with SqliteEngine.open(place, clock) as beside, AsyncExitStack() as stack:
            shim = Shim(seed)
            await stack.enter_async_context(shim.running())
            yield Site(place, clock, shim, beside.records, stack)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with opened() as given:
        yield given


def bodies(count: int, label: str = "m") -> list[Outgoing]:
    return [Outgoing(f"{label}{number}".encode()) for number in range(count)]


async def drained(queue: Queue, name: QueueName, clock: ManualClock) -> list[bytes]:
    """Everything, acknowledged; what others hold lapses first."""
    clock.advance(10 * HOLD)
    got: list[bytes] = []
    while some := await queue.receive(name, 10, HOLD):
        got += [each.body for each in some]
        await queue.ack(name, [each.receipt for each in some])
    return got


class Story:
    """Two processes, three queues, and a seed that decides what happens next."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.limit = self.random.choice([500, 500, 1, 0])
        self.names = [CONTROL, RUN_A, RUN_B]
        self.processes: list[Queue] = []
        self.sent: dict[QueueName, set[bytes]] = {name: set() for name in self.names}
        # Ended by a receipt that was not stale.
        self.ended: Counter[bytes] = Counter()
        self.again: list[bytes] = []
        # Every other story has clean faults only: after those, nothing that was ended may come again.
        chosen = CLEAN if seed % 2 else (*CLEAN, *DOUBTFUL)
        self.kinds = [kind for kind in chosen if self.random.random() < 0.5]

    @property
    def clean(self) -> bool:
        return not set(self.kinds) & set(DOUBTFUL)

    async def run(self) -> None:
        self.processes = [await self.site.process(self.limit) for _ in range(2)]
        self.site.shim.rates = {kind: self.random.choice([0.02, 0.1, 0.25]) for kind in self.kinds}
        for _ in range(self.random.randint(8, 16)):
            step = self.random.choices([self._send, self._work, self._wait, self._crash], [2, 7, 1, 1])[0]
            self.site.clock.advance(self.random.uniform(0, 3))
            try:
                await step()
            except EngineFailed:
                # Out of patience: whoever asked tries again, and does not know what came of it.
                self.kinds.append("gave_up")
        self.site.shim.rates = {}

    async def _send(self) -> None:
        name = self.random.choice(self.names)
        label = f"{name}/{sum(map(len, self.sent.values()))}/"
        delay = self.random.choice([0.0, 0.0, 7.0, 2000.0])
        batch = [Outgoing(one.body, delay) for one in bodies(self.random.randint(1, 23), label)]
        await send_all(self._one(), name, batch, self.site.clock)
        self.sent[name] |= {one.body for one in batch}

    async def _work(self) -> None:
        queue, name = self._one(), self.random.choice(self.names)
        got = await queue.receive(name, self.random.randint(1, 12), HOLD)
        self.again += [each.body for each in got if self.ended[each.body]]
        if self.random.random() < 0.2:
            # Too slow: somebody else has it by then, perhaps.
            self.site.clock.advance(HOLD + 1)
            if self.random.random() < 0.5:
                await self._other(queue).receive(name, 10, HOLD)
        while got:
            some = [got.pop() for _ in range(self.random.randint(1, len(got)))]
            await self._end(queue, name, {each.receipt: each.body for each in some})

    async def _end(self, queue: Queue, name: QueueName, some: dict[str, bytes]) -> None:
        match self.random.randint(0, 6):
            case 0:
                await queue.release(name, list(some), self.random.choice([0.0, 3.0]))
            case 1:
                before = await self._letters()
                await queue.dead_letter(name, list(some), "why")
                self.ended.update(await self._letters() - before)
            case 2:
                await queue.mark_started(name, list(some))
                await queue.extend(name, list(some), HOLD)
            case 3:
                pass
            case _:
                stale = await queue.ack(name, list(some))
                self.ended.update(body for receipt, body in some.items() if receipt not in stale)

    async def _letters(self) -> Counter[bytes]:
        found = await self.site.letters.page(None, 1000)
        return Counter(letter.body for letter in found.items)

    async def _wait(self) -> None:
        self.site.clock.advance(self.random.choice([1.0, 10.0, 40.0, 1000.0]))

    async def _crash(self) -> None:
        which = self.random.randrange(len(self.processes))
        self.processes[which] = await self.site.process(self.limit)

    def _one(self) -> Queue:
        return self.random.choice(self.processes)

    def _other(self, queue: Queue) -> Queue:
        return next(each for each in self.processes if each is not queue)

    async def rest(self) -> Counter[bytes]:
        """What is still there, by a new process to which nothing happens: in the queues, and given up."""
        queue = await self.site.process(self.limit)
        found: Counter[bytes] = Counter()
        for _ in range(4):
            # A long delay is waited for in several steps.
            self.site.clock.advance(950)
            for name in self.names:
                found.update(await drained(queue, name, self.site.clock))
        await queue.dead_letters(None, 1)
        return found + await self._letters()


@pytest.mark.parametrize("seed", range(CASES))
async def test_nothing_is_lost(seed: int) -> None:
    async with opened(seed) as site:
        story = Story(site, seed)
        await story.run()
        there = await story.rest()
        sent = set().union(*story.sent.values())
        lost = sent - set(there) - set(story.ended)
        assert not lost, f"seed {seed}: {len(lost)} of {len(sent)} lost under {story.kinds}"
        if story.clean and "gave_up" not in story.kinds:
            assert not story.again, f"seed {seed}: ended, and came again under {story.kinds}: {story.again}"
            assert max(story.ended.values(), default=0) <= 1


class Died(BaseException):
    """What stands for the end of a process."""


POINTS = [
    "queue.send.before",
    "queue.send.after",
    "queue.receive.after",
    "queue.ack.before",
    "queue.ack.after",
    "queue.bury.before",
    "sqs.bury.between",
    "queue.bury.after",
    "sqs.replace.before",
    "sqs.replace.between",
    "sqs.replace.after",
    "sqs.redrive.before",
    "sqs.redrive.between",
    "sqs.drop.before",
    "sqs.drop.after",
]
# Passed only by a run that shares.
SHARED_POINTS = ["sqs.share.before", "sqs.share.after"]


@pytest.fixture
def disarmed() -> Iterator[None]:
    yield
    faults.arm(None)


@pytest.mark.usefixtures("disarmed")
@pytest.mark.parametrize(
    ("point", "limit"), [*itertools.product(POINTS, (500, 0)), *((point, 0) for point in SHARED_POINTS)]
)
async def test_a_process_dies_at(site: Site, point: str, limit: int) -> None:
    """One life of messages, cut at each point: whoever comes next finds all that were not ended."""
    sent, ended, passed = set[bytes](), set[bytes](), list[str]()

    def hook(name: str) -> None:
        passed.append(name)
        if name == point:
            raise Died

    async def live(queue: Queue) -> None:
        await queue.send(RUN_B, bodies(3, "dropped"))
        for start in range(2):
            await send_all(queue, RUN_A, bodies(6, f"{start}-"), site.clock)
            sent.update(one.body for one in bodies(6, f"{start}-"))
        got = await queue.receive(RUN_A, 12, HOLD)
        receipts = [each.receipt for each in got]
        ended.update(each.body for each in got[:4])
        await queue.ack(RUN_A, receipts[:4])
        await queue.release(RUN_A, receipts[4:7], 0)
        await queue.dead_letter(RUN_A, receipts[7:10], "why")
        letters = (await queue.dead_letters(None, 10)).items
        assert await queue.redrive([letters[0].message_id]) == 1
        await queue.drop(RUN_B)

    faults.arm(hook)
    with pytest.raises(Died):
        await live(await site.process(limit))
    assert passed[-1] == point
    faults.arm(None)
    heir = await site.process(limit)
    site.clock.advance(120)
    found = Counter(await drained(heir, RUN_A, site.clock))
    letters = (await heir.dead_letters(None, 100)).items
    found.update(letter.body for letter in letters)
    assert sent - ended <= set(found)
    doubled = {body: count for body, count in found.items() if count > 1}
    assert len(doubled) <= 3, "at most what was between two steps"
    assert await heir.redrive([letter.message_id for letter in letters]) == len(letters)


class TestBatches:
    async def test_what_was_not_taken_is_named(self, site: Site) -> None:
        queue = await site.process()
        site.shim.rates = {"partial": 0.5}
        unsent = await queue.send(ONE, bodies(40))
        assert 0 < len(unsent) < 40
        site.shim.rates = {}
        there = await drained(queue, ONE, site.clock)
        assert sorted(there) == sorted(one.body for number, one in enumerate(bodies(40)) if number not in unsent)

    async def test_an_entry_that_the_answer_leaves_out_was_not_taken(self, site: Site) -> None:
        queue = await site.process()
        site.shim.rates = {"unanswered": 1.0}
        assert await queue.send(ONE, bodies(5)) == [0, 1, 2, 3, 4]

    async def test_a_delete_whose_answer_was_lost_was_not_stale(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(ONE, bodies(10))
        got = await queue.receive(ONE, 10, HOLD)
        site.shim.rates = {"error_after": 0.7}
        assert await queue.ack(ONE, [each.receipt for each in got]) == frozenset()
        site.shim.rates = {}
        assert await queue.depth(ONE) == Depth(0, 0, 0)

    async def test_a_stale_receipt_is_known_though_the_delete_is_answered_as_done(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await queue.send(ONE, bodies(1))
        (old,) = await queue.receive(ONE, 1, HOLD)
        site.clock.advance(HOLD + 1)
        (new,) = await other.receive(ONE, 1, HOLD)
        assert await queue.ack(ONE, [old.receipt]) == {old.receipt}
        assert await other.ack(ONE, [new.receipt]) == frozenset()

    async def test_a_batch_is_cut_by_number_and_by_size(self) -> None:
        entries = [{"MessageBody": "x" * size} for size in (1, 200_000, 100_000, 50_000, 300_000, 1)]
        assert _packed(entries, list(range(6))) == [[0, 1], [2, 3], [4], [5]]
        assert [len(part) for part in _packed([{}] * 25, list(range(25)))] == [10, 10, 5]

    async def test_a_message_that_will_never_be_taken_is_an_error(self, site: Site) -> None:
        queue = await site.process()
        noise = random.Random(1).randbytes(300_000)
        with pytest.raises(EngineFailed, match="does not accept a message of"):
            await queue.send(ONE, [Outgoing(noise)])

    async def test_patience_ends(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(ONE, bodies(1))
        site.shim.rates = {"throttle": 1.0}
        start = site.clock.monotonic()
        with pytest.raises(EngineFailed, match="receive_message"):
            await queue.receive(ONE, 1, HOLD)
        assert 10 < site.clock.monotonic() - start < 60


class TestReceive:
    async def test_over_limit_is_an_empty_receive(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(ONE, bodies(1))
        site.shim.rates = {"over_limit": 1.0}
        assert await queue.receive(ONE, 10, HOLD) == []

    async def test_a_queue_that_never_was_is_not_made_by_asking(self, site: Site) -> None:
        queue = await site.process()
        assert await queue.receive(RUN_A, 10, HOLD) == []
        assert "CreateQueue" not in site.shim.calls

    async def test_a_message_of_somebody_else_is_a_dead_letter(self, site: Site) -> None:
        engine = await site.engine()
        queue = engine.queue
        place = await queue.queues.to_send(ONE)
        await queue._calls.ask("send_message", QueueUrl=place.url, MessageBody="not ours")
        assert await queue.receive(ONE, 10, HOLD) == []
        (letter,) = (await queue.dead_letters(None, 10)).items
        assert (letter.queue, letter.body) == (ONE, b"not ours")

    async def test_a_message_of_a_newer_release_is_left_alone(self, site: Site) -> None:
        engine = await site.engine()
        queue = engine.queue
        place = await queue.queues.to_send(ONE)
        text = '{"v":2,"queue":"one","at":1.0,"something":"new"}'
        await queue._calls.ask("send_message", QueueUrl=place.url, MessageBody=text)
        assert await queue.receive(ONE, 10, HOLD) == []
        assert await queue.depth(ONE) == Depth(0, 1, 0)

    async def test_a_message_of_the_first_release_is_read(self, site: Site) -> None:
        """What is in flight survives a deploy: this text stays readable for ever."""
        engine = await site.engine()
        queue = engine.queue
        place = await queue.queues.to_send(ONE)
        text = (
            '{"v":1,"queue":"one","at":1800000000.0,"id":"first","before":2,"lost":1,"deflated":"eAHLSM3JyQcABiwCFQ=="}'
        )
        await queue._calls.ask("send_message", QueueUrl=place.url, MessageBody=text)
        (got,) = await queue.receive(ONE, 10, HOLD)
        assert (got.message_id, got.receives, got.lost_starts, got.body) == ("first", 3, 1, b"hello")


async def test_what_a_fresh_process_cannot_know_is_neither_delayed_nor_absent() -> None:
    """It asks for the first time: whether a queue is empty for long, and whose the messages of the shared queue are."""
    async with opened() as site:
        queue = await site.process(settle=60)
        await queue.send(RUN_A, bodies(1))
        await drained(queue, RUN_A, site.clock)
        fresh = await site.process(settle=60)
        assert await fresh.depth(RUN_A) == Depth(0, 0, 0, unknown=True)
        sharing = await site.process(limit=0)
        await sharing.send(RUN_B, [Outgoing(b"later", 600.0), Outgoing(b"now")])
        (held,) = await sharing.receive(RUN_B, 1, HOLD)
        fresh = await site.process(limit=0)
        assert await fresh.depth(RUN_B) == Depth(0, 0, 0, unknown=True)
        assert isinstance(fresh, SharesQueues)
        assert await fresh.shared_depth() == Depth(0, 1, 1)
        assert held.body == b"now"


async def test_without_a_shared_queue_it_has_no_depth() -> None:
    async with opened() as site:
        queue = await site.process()
        await queue.send(RUN_A, bodies(1))
        assert isinstance(queue, SharesQueues)
        assert await queue.shared_depth() is None


class TestTime:
    async def test_a_long_delay_is_waited_for_in_steps(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(ONE, [Outgoing(b"later", 3600.0)])
        for _ in range(35):
            assert await queue.receive(ONE, 10, HOLD) == []
            site.clock.advance(100)
        assert await queue.receive(ONE, 10, HOLD) == []
        site.clock.advance(101)
        (got,) = await queue.receive(ONE, 10, HOLD)
        assert (got.body, got.receives) == (b"later", 1)

    async def test_nobody_holds_for_more_than_twelve_hours(self, site: Site) -> None:
        queue = await site.process()
        await queue.send(ONE, bodies(1))
        (got,) = await queue.receive(ONE, 1, 3600)
        held = 0
        while await queue.extend(ONE, [got.receipt], 3600) == frozenset():
            site.clock.advance(1200)
            held += 1200
            assert held <= 43_200
        assert held > 11.5 * 3600
        assert await queue.ack(ONE, [got.receipt]) == {got.receipt}
        site.clock.advance(3600)
        (again,) = await queue.receive(ONE, 1, HOLD)
        assert again.receives == 2

    async def test_an_empty_queue_is_called_so_after_a_while(self, site: Site) -> None:
        """SQS counts late: who read 0 too soon would send everything again."""
        queue = await site.process(settle=60)
        assert await queue.depth(RUN_A) == Depth(0, 0, 0), "no queue has no messages"
        await queue.send(RUN_A, bodies(5))
        site.shim.rates = {"late_counts": 1.0}
        assert await queue.depth(RUN_A) == Depth(0, 0, 0, unknown=True)
        site.clock.advance(30)
        site.shim.rates = {}
        assert await queue.depth(RUN_A) == Depth(5, 0, 0)
        await drained(queue, RUN_A, site.clock)
        assert await queue.depth(RUN_A) == Depth(0, 0, 0, unknown=True)
        site.clock.advance(61)
        assert await queue.depth(RUN_A) == Depth(0, 0, 0)


class TestQueues:
    async def test_a_queue_that_was_just_deleted_is_stood_in_for(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await queue.send(RUN_A, bodies(3, "old"))
        await queue.drop(RUN_A)
        site.clock.advance(1)
        await send_all(queue, RUN_A, bodies(25, "new"), site.clock)
        assert "deleted_recently" in site.shim.faults
        assert sorted(await drained(other, RUN_A, site.clock)) == sorted(one.body for one in bodies(25, "new"))

    async def test_a_queue_dropped_by_another_is_made_again(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await queue.send(RUN_A, bodies(1))
        await other.drop(RUN_A)
        site.clock.advance(100)
        await send_all(queue, RUN_A, bodies(2, "new"), site.clock)
        assert sorted(await drained(other, RUN_A, site.clock)) == [b"new0", b"new1"]

    async def test_giving_back_does_not_make_a_dropped_queue_again(self, site: Site) -> None:
        queue, other = await site.process(), await site.process()
        await queue.send(RUN_A, bodies(1))
        (got,) = await queue.receive(RUN_A, 1, HOLD)
        await other.drop(RUN_A)
        site.shim.calls.clear()
        await queue.release(RUN_A, [got.receipt], 0)
        assert "CreateQueue" not in site.shim.calls

    async def test_every_queue_has_a_redrive_policy_and_tags(self, site: Site) -> None:
        engine = await site.engine()
        await engine.migrate()
        await engine.queue.send(RUN_A, bodies(1))
        for name in (CONTROL, RUN_A):
            url = await engine.queue.queues.own(name)
            found = await engine._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
            assert '"maxReceiveCount":1000' in found["Attributes"]["RedrivePolicy"]
            tags = (await engine._calls.ask("list_queue_tags", QueueUrl=url))["Tags"]
            assert tags["conveyor"] == parse(url_of(site.place)).prefix

    async def test_the_shared_queue_has_no_redrive_policy_and_keeps_messages_longest(self, site: Site) -> None:
        """Receivers of other runs receive its messages too, any number of times."""
        engine = await site.engine()
        await engine.migrate()
        queues = engine.queue.queues
        place = await queues._to_shared(RUN_A)
        kept = {}
        for name, url in (("shared", place.url), ("dead", await queues.dead()), ("control", await queues.own(CONTROL))):
            found = await engine._calls.ask("get_queue_attributes", QueueUrl=url, AttributeNames=["All"])
            assert ("RedrivePolicy" in found["Attributes"]) == (name == "control")
            kept[name] = int(found["Attributes"]["MessageRetentionPeriod"]) // 86_400
        assert kept == {"shared": 14, "dead": 14, "control": 10}

    async def test_what_the_policy_moves_is_a_dead_letter(self, site: Site) -> None:
        engine = await site.engine()
        queue = engine.queue
        await queue.send(ONE, bodies(1))
        dead = await queue.queues.dead()
        text = to_text(wrap(ONE, b"worn out", site.clock.now()))
        await engine._calls.ask("send_message", QueueUrl=dead, MessageBody=text)
        (letter,) = (await queue.dead_letters(None, 10)).items
        assert (letter.queue, letter.body) == (ONE, b"worn out")
        assert "1000 times" in letter.reason
        assert await queue.redrive([letter.message_id]) == 1
        assert sorted(await drained(queue, ONE, site.clock)) == [b"m0", b"worn out"]

    async def test_checks_find_nothing_wrong(self, site: Site) -> None:
        engine = await site.engine()
        assert ("control queue", "it does not exist: run `conveyor migrate`") in await engine.checks()
        site.clock.advance(2)
        await engine.migrate()
        found = dict(await engine.checks())
        # The test's clock is not that of the proxy, which answers with the machine's own.
        assert "apart" in (found.pop("clock") or "")
        assert set(found.values()) == {None}

    async def test_checks_say_what_failed(self, site: Site) -> None:
        engine = await site.engine()
        site.shim.rates = {"error_before": 1.0}
        assert all("SQS failed" in (wrong or "") for _, wrong in await engine.checks())


class TestSharedQueue:
    """More runs than queues."""

    async def test_the_overflow_shares_and_does_not_mix(self, site: Site) -> None:
        sender, receiver = await site.process(limit=1), await site.process(limit=1)
        for name in (RUN_A, RUN_B, RUN_C):
            await send_all(sender, name, bodies(30, name), site.clock)
        # Control and the shared one are there too.
        made = {QueueName(name) for name in (RUN_A, RUN_B, RUN_C) if await sender.queues.own(name)}  # type: ignore[attr-defined]
        assert made == {RUN_A}
        site.clock.advance(3)
        for name in (RUN_C, RUN_A, RUN_B):
            assert sorted(await drained(receiver, name, site.clock)) == sorted(one.body for one in bodies(30, name))

    async def test_receivers_of_different_runs_do_not_take_from_each_other(self, site: Site) -> None:
        queue = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(20, "a"), site.clock)
        await send_all(queue, RUN_B, bodies(20, "b"), site.clock)
        got: dict[QueueName, list[bytes]] = {RUN_A: [], RUN_B: []}
        for _ in range(40):
            # What one has no room for comes again a little later.
            site.clock.advance(1)
            for name, found in got.items():
                some = await queue.receive(name, 3, HOLD)
                found += [each.body for each in some]
                assert await queue.ack(name, [each.receipt for each in some]) == frozenset()
        assert sorted(got[RUN_A]) == sorted(one.body for one in bodies(20, "a"))
        assert sorted(got[RUN_B]) == sorted(one.body for one in bodies(20, "b"))

    async def test_what_nobody_asks_for_goes_elsewhere(self, site: Site) -> None:
        one, other = await site.process(limit=0), await site.process(limit=0)
        await send_all(one, RUN_A, bodies(5, "a"), site.clock)
        await send_all(one, RUN_B, bodies(1, "b"), site.clock)
        assert [each.body for each in await one.receive(RUN_B, 10, HOLD)] == [b"b0"]
        site.clock.advance(61)
        assert len(await drained(other, RUN_A, site.clock)) == 5

    async def test_what_nobody_asks_for_is_offered_and_waits_for_who_takes_it(self, site: Site) -> None:
        queue: Any = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(5, "a"), site.clock)
        await send_all(queue, RUN_B, bodies(1, "b"), site.clock)
        offered: list[tuple[QueueName, bytes]] = []

        def offer(name: QueueName, body: bytes) -> bool:
            offered.append((name, body))
            return True

        queue.offer = offer
        assert [each.body for each in await queue.receive(RUN_B, 10, HOLD)] == [b"b0"]
        assert [name for name, _ in offered] == [RUN_A], "once for a queue"
        assert offered[0][1].startswith(b"a")
        assert len(await queue.receive(RUN_A, 10, HOLD)) == 5, "without a pause"

    async def test_what_was_offered_and_is_not_taken_goes_elsewhere(self, site: Site) -> None:
        one, other = await site.process(limit=0), await site.process(limit=0)
        queue: Any = one
        queue.offer = lambda name, body: True
        await send_all(one, RUN_A, bodies(5, "a"), site.clock)
        await send_all(one, RUN_B, bodies(1, "b"), site.clock)
        assert [each.body for each in await one.receive(RUN_B, 10, HOLD)] == [b"b0"]
        site.clock.advance(11)
        await one.receive(RUN_B, 10, HOLD)
        site.clock.advance(61)
        assert len(await drained(other, RUN_A, site.clock)) == 5

    async def test_what_a_dropped_run_left_goes_away(self, site: Site) -> None:
        one, other = await site.process(limit=0), await site.process(limit=0)
        await send_all(one, RUN_A, bodies(50, "a"), site.clock)
        await send_all(one, RUN_B, bodies(5, "b"), site.clock)
        await one.drop(RUN_A)
        # One call clears a part of them away, and may come back with nothing.
        assert await drained(other, RUN_B, site.clock) == []
        assert sorted(await drained(other, RUN_B, site.clock)) == sorted(each.body for each in bodies(5, "b"))
        site.clock.advance(100)
        assert await other.receive(RUN_B, 10, HOLD) == []
        assert await other.shared_depth() == Depth(0, 0, 0), "they are gone, not only out of sight"  # type: ignore[attr-defined]
        await send_all(one, RUN_A, bodies(2, "new"), site.clock)
        site.clock.advance(3)
        assert sorted(await drained(other, RUN_A, site.clock)) == [b"new0", b"new1"]

    async def test_what_is_taken_while_a_run_is_dropped_goes_away_too(self, site: Site) -> None:
        queue: Any = await site.process(limit=0)
        await send_all(queue, RUN_A, bodies(5, "a"), site.clock)
        await send_all(queue, RUN_B, bodies(5, "b"), site.clock)
        rows = queue._shared._rows

        class Slow:
            """Another run's messages are asked for before the tombstone is written, and those of both come."""

            def __getattr__(self, name: str) -> Any:
                return getattr(rows, name)

            async def create_documents(self, given: Any) -> None:
                assert await queue.receive(RUN_B, 10, HOLD)
                await rows.create_documents(given)

        queue._shared._rows = Slow()
        await queue.drop(RUN_A)
        assert await queue.receive(RUN_A, 10, HOLD) == []

    async def test_the_depth_of_one_run_is_unknown_and_that_of_all_is_counted(self, site: Site) -> None:
        queue: Any = await site.process(limit=0)
        assert await queue.shared_depth() is None
        await send_all(queue, RUN_A, bodies(5, "a"), site.clock)
        assert await queue.depth(RUN_A) == await queue.depth(RUN_B) == Depth(0, 0, 0, unknown=True)
        assert await queue.shared_depth() == Depth(5, 0, 0)

    async def test_marks_and_gifts_back_work_there_too(self, site: Site) -> None:
        queue = await site.process(limit=0)
        await queue.send(RUN_A, bodies(1))
        (got,) = await queue.receive(RUN_A, 1, HOLD)
        await queue.release(RUN_A, [got.receipt], 0)
        (got,) = await queue.receive(RUN_A, 1, HOLD)
        assert (got.receives, got.lost_starts) == (1, 0)
        await queue.mark_started(RUN_A, [got.receipt])
        site.clock.advance(HOLD + 1)
        (got,) = await queue.receive(RUN_A, 1, HOLD)
        assert (got.receives, got.lost_starts) == (2, 1)
        await queue.dead_letter(RUN_A, [got.receipt], "why")
        (letter,) = (await queue.dead_letters(None, 10)).items
        assert letter.queue == RUN_A


class TestNames:
    @pytest.mark.parametrize("name", ["control", "run:run_01h", "a" * 200, "ä/ö", "run-run_01h", "", "x y"])
    def test_every_name_is_one_that_sqs_takes(self, name: str) -> None:
        address = parse("sqs://eu-west-1/" + "p" * 30)
        made = address.name_of(QueueName(name))
        assert len(made) <= 80
        assert all(char.isascii() and (char.isalnum() or char in "-_") for char in made)

    def test_no_two_queues_have_one_name(self) -> None:
        names = ["run:x", "run-x", "run_x", "run.x", "runx", "dead-letters", "shared-runs", "x" * 100, "x" * 101]
        address = parse("sqs://eu-west-1/p")
        made = {address.name_of(QueueName(name)) for name in names}
        assert len(made) == len(names)
        assert not made & {address.dead, address.shared}
        assert plain(QueueName("run:x")).startswith("run-x-")

    @pytest.mark.parametrize(
        "url",
        [
            "",
            "sqs://",
            "sqs://eu-west-1",
            "sqs://eu-west-1/",
            "sqs://eu-west-1/a/b",
            "sqs://eu-west-1/with.dot",
            "sqs://eu-west-1/" + "p" * 31,
            "sqs://user@eu-west-1/p",
            "sqs://eu-west-1/p?wait=21",
            "sqs://eu-west-1/p?wait=x",
            "sqs://eu-west-1/p?settle=-1",
            "sqs://eu-west-1/p?settle=nan",
            "sqs://eu-west-1/p?endpoint=ftp://x",
            "sqs://eu-west-1/p?unknown=1",
            "redis://eu-west-1/p",
        ],
    )
    def test_a_bad_url_is_refused(self, url: str) -> None:
        with pytest.raises(InvalidSetting, match="CONVEYOR_QUEUE"):
            parse(url)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"a":"\\u00e9"}', b"\0\xff", b"x" * 5000, bytes(range(256)), b"\x7f"])
def test_a_body_comes_back_as_it_was(body: bytes) -> None:
    text = to_text(wrap(ONE, body, 1.5))
    given: Any = from_text(text)
    assert given.body == body
    assert all(char in "\t\n\r" or " " <= char < "\ufffe" for char in text), "no character that SQS refuses"

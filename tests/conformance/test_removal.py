"""What the seams forget when they are told to: dead letters of the Queue, leases of the Coordinator."""

from conveyor.engines.coordinator import Coordinator, ingest_lease
from conveyor.engines.queue import DeadLetter, Outgoing, Queue, QueueName
from conveyor.model import RunId

ONE, TWO = QueueName("control"), QueueName("run:1")
UNKNOWN = ["999", "", "x", "-1", "1.0", "9" * 40]


async def buried(queue: Queue, count: int = 5) -> list[DeadLetter]:
    for number in range(count):
        name = ONE if number % 2 else TWO
        await queue.send(name, [Outgoing(b"body %d" % number)])
        (delivery,) = await queue.receive(name, 1, 30)
        await queue.dead_letter(name, [delivery.receipt], f"reason {number}")
    return (await queue.dead_letters(None, 100)).items


class TestLetters:
    async def test_they_are_found_by_id(self, queue: Queue) -> None:
        letters = await buried(queue)
        # All of the same moment, so in no promised order.
        assert sorted(letter.body for letter in letters) == [b"body %d" % number for number in range(5)]
        wanted = [letters[3], letters[1]]
        found = await queue.find_dead_letters([letter.message_id for letter in wanted] + UNKNOWN)
        assert {letter.message_id: letter for letter in found} == {letter.message_id: letter for letter in wanted}
        assert await queue.find_dead_letters([]) == []

    async def test_they_are_discarded_for_good(self, queue: Queue) -> None:
        letters = await buried(queue)
        gone = [letters[0].message_id, letters[4].message_id]
        assert await queue.discard([*gone, *gone, *UNKNOWN]) == 2
        assert await queue.discard(gone) == 0
        assert (await queue.dead_letters(None, 100)).items == letters[1:4]
        assert await queue.redrive(gone) == 0
        assert await queue.receive(TWO, 10, 30) == []

    async def test_unknown_ids_are_not_redriven(self, queue: Queue) -> None:
        letters = await buried(queue)
        assert await queue.redrive([letters[0].message_id, *UNKNOWN]) == 1
        assert len((await queue.dead_letters(None, 100)).items) == 4

    async def test_dropping_a_queue_leaves_its_letters(self, queue: Queue) -> None:
        """A run ends and its queue goes; what was given up of it stays to be seen."""
        letters = await buried(queue)
        await queue.drop(TWO)
        assert (await queue.dead_letters(None, 100)).items == letters


class TestLeases:
    async def test_those_of_one_run_are_forgotten(self, coordinator: Coordinator) -> None:
        run, other = RunId("run_1"), RunId("run_2")
        names = [ingest_lease(run), ingest_lease(run, 0), ingest_lease(run, 12), ingest_lease(other), "sweeper"]
        for name in names:
            assert await coordinator.lease(name, "me", 60) is not None
        await coordinator.forget_leases(ingest_lease(run))
        granted = [await coordinator.lease(name, "you", 60) is not None for name in names]
        assert granted == [True, True, True, False, False]

    async def test_forgetting_nothing(self, coordinator: Coordinator) -> None:
        await coordinator.lease("ingest:run_1", "me", 60)
        for prefix in ("ingest:run_2", "ingest:run_1:0", "ngest", "ingest:run_[0-9]", "ingest:*", "ingest:run_?"):
            await coordinator.forget_leases(prefix)
        assert await coordinator.lease("ingest:run_1", "you", 60) is None

    async def test_one_that_is_forgotten_is_lost_to_its_holder(self, coordinator: Coordinator) -> None:
        lease = await coordinator.lease("ingest:run_1", "me", 60)
        assert lease is not None
        await coordinator.forget_leases("ingest:run_1")
        assert not await coordinator.renew(lease, 60)
        await coordinator.release(lease)

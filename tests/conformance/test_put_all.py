"""Objects that are put together: they are objects like all others, under keys that the store may make longer."""

import asyncio
import os
from pathlib import Path

import pytest

from conveyor.engines import local_logs
from conveyor.engines.blobs import Blobs
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.engines.local_log_entries import can_punch
from conveyor.errors import EngineFailed, NotFound
from tests.conformance.test_blobs import collect, keys

KIB = 1024


def folder(job: int) -> str:
    return f"results/acme/job_{job}/run_1"


async def test_each_is_an_object(blobs: Blobs) -> None:
    given = [(f"{folder(number)}/seg_{number}", f"body {number} ".encode() * (number + 1)) for number in range(5)]
    stored = await blobs.put_all(given)
    assert len(set(stored)) == 5
    for key, (name, data) in zip(stored, given, strict=True):
        assert key.startswith(name)
        assert await blobs.get(key) == data
        assert await blobs.get(key, 5, 3) == data[5:8]
        assert await blobs.get(key, len(data), 3) == b""
        assert await blobs.get(key, 3, 10**6) == data[3:]
        assert await blobs.size(key) == len(data)
        assert await collect(blobs.stream(key, 2)) == data[2:]


async def test_none_and_empty_ones(blobs: Blobs) -> None:
    assert await blobs.put_all([]) == []
    stored = await blobs.put_all([("results/acme/job_1/seg_1", b""), ("plain", b"x"), ("a/b", b"y")])
    assert [await blobs.get(key) for key in stored] == [b"", b"x", b"y"]


async def test_they_are_listed_with_the_others(blobs: Blobs) -> None:
    await blobs.put(f"{folder(1)}/body_9", b"alone")
    stored = await blobs.put_all([(f"{folder(job)}/seg_1", b"x" * job) for job in (1, 2)])
    assert await keys(blobs, "results") == sorted([f"{folder(1)}/body_9", *stored])
    assert await keys(blobs, folder(1)) == sorted([f"{folder(1)}/body_9", stored[0]])
    assert await keys(blobs, "results/acme/job_2") == [stored[1]]
    assert await keys(blobs, "results/other") == []
    assert await keys(blobs, "") == sorted([f"{folder(1)}/body_9", *stored])


async def test_a_delete_takes_one(blobs: Blobs) -> None:
    stored = await blobs.put_all([(f"{folder(1)}/seg_{number}", b"x" * 9000) for number in range(3)])
    await blobs.delete([stored[1], f"{folder(1)}/nothing"])
    await blobs.delete([stored[1]])
    assert [await blobs.get(key) is None for key in stored] == [False, True, False]
    assert await blobs.size(stored[1]) is None
    with pytest.raises(NotFound):
        await anext(blobs.stream(stored[1]))
    assert await keys(blobs, folder(1)) == sorted([stored[0], stored[2]])


async def test_a_prefix_is_deleted_in_bounded_steps(blobs: Blobs) -> None:
    theirs = await blobs.put_all([(f"{folder(1)}/seg_{number}", b"x" * 100) for number in range(5)])
    others = await blobs.put_all([(f"{folder(10)}/seg_1", b"keep"), ("results/other/job_1/seg", b"keep too")])
    await blobs.put(f"{folder(1)}/body_1", b"alone")
    gone = [await blobs.delete_prefix("results/acme/job_1", 2) for _ in range(5)]
    assert gone == [2, 2, 2, 0, 0]
    assert [await blobs.get(key) for key in theirs] == [None] * 5
    assert [await blobs.get(key) for key in others] == [b"keep", b"keep too"]


async def test_many_at_once(blobs: Blobs) -> None:
    """Batches of several writers, in several folders of several tenants."""

    async def batch(number: int) -> list[tuple[str, bytes]]:
        given = [(f"results/tenant_{number % 3}/job_{job}/seg_{number}", os.urandom(50 + number)) for job in range(10)]
        return list(zip(await blobs.put_all(given), [data for _, data in given], strict=True))

    for stored in await asyncio.gather(*(batch(number) for number in range(12))):
        for key, data in stored:
            assert await blobs.get(key) == data


# What only the local directory has.


def logs_of(root: Path) -> list[Path]:
    return sorted((root / ".logs").rglob("*.log"))


async def test_one_tenant_has_one_log(place: Path) -> None:
    blobs = LocalBlobs(place)
    for number in range(5):
        await blobs.put_all([(f"{folder(job)}/seg_{number}", b"x") for job in range(20)])
    assert len(logs_of(place)) == 1
    await blobs.put_all([("results/other/job_1/seg", b"x")])
    assert len(logs_of(place)) == 2


async def test_deleted_space_is_given_back(place: Path) -> None:
    blobs = LocalBlobs(place)
    stored = await blobs.put_all([(f"{folder(job)}/seg", os.urandom(512 * KIB)) for job in range(4)])
    (log,) = logs_of(place)
    os.sync()
    before = log.stat().st_blocks
    await blobs.delete_prefix("results/acme/job_1", 10)
    os.sync()
    assert log.stat().st_size > 2000 * KIB, "offsets stay"
    if can_punch(place):
        assert log.stat().st_blocks < before * 0.8
    assert [await blobs.get(key) is None for key in stored] == [False, True, False, False]


async def test_a_log_without_live_objects_is_removed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_logs, "LOG_BYTES", 10 * KIB)
    blobs = LocalBlobs(place)
    for job in (1, 2, 3):
        await blobs.put_all([(f"{folder(job)}/seg", b"x" * 11 * KIB)])
    assert len(logs_of(place)) == 3, "a full log is followed by another"
    await blobs.delete_prefix("results/acme/job_2", 10)
    assert len(logs_of(place)) == 2


async def test_a_log_that_is_written_to_is_removed_too(place: Path) -> None:
    blobs = LocalBlobs(place)
    await blobs.put_all([(f"{folder(1)}/seg", b"x")])
    await blobs.delete_prefix("results/acme/job_1", 10)
    assert logs_of(place) == []
    stored = await blobs.put_all([(f"{folder(1)}/seg", b"y")])
    assert await blobs.get(stored[0]) == b"y"


async def test_a_log_that_gets_its_last_object_while_it_is_removed_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delete has read that no object is left; then the log becomes full, and nobody has it open."""
    blobs = LocalBlobs(place)
    await blobs.put_all([(f"{folder(1)}/seg", b"x")])
    monkeypatch.setattr(local_logs, "LOG_BYTES", 1)
    logs, stored = blobs._logs, list[str]()
    close = logs._close

    def filled(path: Path, size: int) -> bool:
        stored.extend(logs.append("results/acme", [(f"{folder(2)}/seg", b"y")]))
        return close(path, size)

    monkeypatch.setattr(logs, "_close", filled)
    assert await blobs.delete_prefix("results/acme/job_1", 10) == 1
    assert await blobs.get(stored[0]) == b"y"


async def test_writers_and_deletes_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are closed because they are full, or empty, while others are about to append to them."""
    monkeypatch.setattr(local_logs, "LOG_BYTES", 4 * KIB)
    blobs = LocalBlobs(place)

    async def work(number: int) -> None:
        for turn in range(20):
            (key,) = await blobs.put_all([(f"{folder(number)}/seg_{turn}", b"x" * KIB)])
            assert await blobs.get(key) == b"x" * KIB
            if turn % 2:
                assert await blobs.delete_prefix(f"results/acme/job_{number}", 10) == 2

    await asyncio.gather(*(work(number) for number in range(8)))
    assert await keys(blobs, "results") == []
    assert logs_of(place) == []


async def test_the_log_of_another_process_stays(place: Path) -> None:
    """Several processes may share the directory: one removes no log that another one appends to."""
    writer, other = LocalBlobs(place), LocalBlobs(place)
    await writer.put_all([(f"{folder(1)}/seg", b"x")])
    assert await other.delete_prefix("results/acme/job_1", 10) == 1
    (key,) = await writer.put_all([(f"{folder(2)}/seg", b"y")])
    assert len(logs_of(place)) == 1
    assert await other.get(key) == b"y"


async def test_the_logs_of_a_dead_process_are_read_and_removed(place: Path) -> None:
    dead = LocalBlobs(place)
    stored = await dead.put_all([(f"{folder(job)}/seg", b"x%d" % job) for job in (1, 2)])
    dead.close()
    blobs = LocalBlobs(place)
    assert [await blobs.get(key) for key in stored] == [b"x1", b"x2"]
    more = await blobs.put_all([(f"{folder(3)}/seg", b"x3")])
    assert len(logs_of(place)) == 2
    await blobs.delete_prefix("results/acme/job_1", 10)
    await blobs.delete_prefix("results/acme/job_2", 10)
    assert len(logs_of(place)) == 1
    assert await keys(blobs, "results") == more


@pytest.mark.parametrize("cut", [1, 10, 160, 190])
async def test_a_torn_end_is_no_object(place: Path, cut: int) -> None:
    """A machine that stopped in the middle of a write leaves a part of an entry that no row points to."""
    first = LocalBlobs(place)
    whole, torn = [(await first.put_all([(f"{folder(job)}/seg", bytes([job]) * 150)]))[0] for job in (1, 2)]
    first.close()
    (log,) = logs_of(place)
    os.truncate(log, log.stat().st_size - cut)
    blobs = LocalBlobs(place)
    assert await blobs.get(whole) == b"\1" * 150
    assert await blobs.get(torn) is None
    assert await keys(blobs, "results") == [whole]
    assert await blobs.delete_prefix("results/acme/job_1", 10) == 1
    assert logs_of(place) == []


async def test_a_foreign_place_is_not_found(place: Path) -> None:
    """A key names a log and an offset: what is there must be the object of that key."""
    blobs = LocalBlobs(place)
    mine, theirs = await blobs.put_all([(f"{folder(1)}/seg", b"mine"), (f"{folder(2)}/seg", b"theirs")])
    forged = f"{folder(1)}/seg={theirs.partition('=')[2]}"
    assert await blobs.get(forged) is None
    assert await blobs.get(f"{mine}1") is None
    assert await blobs.get(mine.replace("acme", "other")) is None


async def test_after_a_failed_write_nothing_follows_it(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobs(place)
    kept = await blobs.put_all([(f"{folder(1)}/seg", b"kept")])

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(local_logs, "sync", full)
        with pytest.raises(EngineFailed):
            await blobs.put_all([(f"{folder(2)}/seg", b"lost")])
    after = await blobs.put_all([(f"{folder(3)}/seg", b"after")])
    assert len(logs_of(place)) == 2
    assert [await blobs.get(key) for key in kept + after] == [b"kept", b"after"]

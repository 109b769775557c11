"""Sorted lists of an export: merged a few at a time, from any checkpoint, in bounded memory."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.export import sorted_lists, sorting, spool
from conveyor.export.sorting import Sorting, merge_lists, sorted_streams
from conveyor.export.spool import SortedSpool
from conveyor.model import RunId, Task, task_id
from conveyor.read.walk import Position, merged
from conveyor.states import TaskStatus

FAN_IN = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sorting, "FAN_IN", FAN_IN)
    patch.setattr(sorting, "_SPOOL_BYTES", 3_000)
    patch.setattr(sorting, "_READ_BYTES", 600)


def make_key(number: int, attempt: int) -> str:
    return f"exports/acme/sorted/{number:06d}-{attempt}"


def make_task(run: str, index: int) -> Task:
    return Task(task_id(RunId(run), index), index, msgspec.Raw(b'"%d"' % index), TaskStatus.PENDING)


async def stored(blobs: LocalBlobs, chance: random.Random, runs: dict[str, int], objects: int) -> Sorting:
    """So many objects for each run, each with some of its tasks, in order of index."""
    written: list[tuple[int, int]] = []
    for place, (run, tasks) in enumerate(runs.items()):
        shares: list[list[int]] = [[] for _ in range(objects)]
        for index in range(tasks):
            chance.choice(shares).append(index)
        for share in filter(None, shares):
            lines = [msgspec.json.encode(make_task(run, index)) + b"\n" for index in share]
            await blobs.put(make_key(len(written), 1), b"".join(lines))
            written.append((place, 1))
    return Sorting(len(runs), 0, None, written)


async def in_order(blobs: LocalBlobs, state: Sorting) -> list[tuple[int, str]]:
    found = []
    async for batch in merged(sorted_streams(blobs, state, Position(), make_key), -1):
        found += [(task.index, task.task_id) for task in batch.tasks]
    return found


@pytest.mark.parametrize("objects", [1, 4, 5, 17, 70])
async def test_all_tasks_are_there_in_order_and_few_lists_are_left(tmp_path: Path, objects: int) -> None:
    blobs, chance = LocalBlobs(tmp_path), random.Random(objects)
    state = await stored(blobs, chance, {"run": 700}, objects)
    before = len(state.objects)
    async for checkpoint in merge_lists(blobs, state, 1, make_key):
        state = checkpoint
    assert len(state.sorted_lists()) <= FAN_IN
    assert await in_order(blobs, state) == [(index, task_id(RunId("run"), index)) for index in range(700)]
    if objects <= FAN_IN:
        assert len(state.objects) == before, "few lists are left alone"


async def test_every_checkpoint_can_be_resumed_by_another_attempt(tmp_path: Path) -> None:
    blobs, chance = LocalBlobs(tmp_path), random.Random(7)
    state = await stored(blobs, chance, {"run": 400}, 18)
    checkpoints = [state]
    # As the row has them.
    checkpoints += [
        msgspec.json.decode(msgspec.json.encode(checkpoint), type=Sorting)
        async for checkpoint in merge_lists(blobs, state, 1, make_key)
    ]
    assert any(each.merging is not None and each.merging.written for each in checkpoints), "in the middle of a merge"
    whole = await in_order(blobs, checkpoints[-1])
    assert [index for index, _ in whole] == list(range(400))
    for attempt, resumed in enumerate(checkpoints, start=2):
        after = resumed
        async for checkpoint in merge_lists(blobs, resumed, attempt, make_key):
            after = checkpoint
        assert await in_order(blobs, after) == whole


async def test_the_lists_of_several_runs_stay_apart(tmp_path: Path) -> None:
    """The newest is first: what it has hides what the others have."""
    blobs, chance = LocalBlobs(tmp_path), random.Random(3)
    runs = {"third": 40, "second": 90, "first": 300, "zeroth": 5, "earlier": 5, "earliest": 5}
    state = await stored(blobs, chance, runs, 9)
    async for checkpoint in merge_lists(blobs, state, 1, make_key):
        state = checkpoint
    lists = state.sorted_lists()
    assert len(lists) == len(runs), "one for each of more runs than are merged at once"
    assert sorted(map(state.run_of, lists)) == list(range(len(runs)))
    assert [index for index, _ in await in_order(blobs, state)] == list(range(300))


async def merges_read_few_lists_at_once() -> None:
    """However many there are, few have a part of theirs in memory."""
    most = 0

    class CountedStream(sorted_lists.LineStream):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            alive.append(self)

    class CountedTasks(sorted_lists.SortedStream):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            alive.append(self)

    alive: list[object] = []
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "LineStream", CountedStream)
        patch.setattr(sorting, "SortedStream", CountedTasks)
        blobs = LocalBlobs(Path(directory))
        state = await stored(blobs, random.Random(1), {"run": 2000}, 100)
        merge = state.merging
        async for checkpoint in merge_lists(blobs, state, 1, make_key):
            state = checkpoint
            if state.merging is None or merge is None or state.merging.inputs != merge.inputs:
                most, merge = max(most, len(alive)), state.merging
                alive.clear()
        await in_order(blobs, state)
        assert max(most, len(alive)) <= sorting.FAN_IN


async def test_merges_read_few_lists_at_once() -> None:
    await merges_read_few_lists_at_once()


def spool_opens_few_files() -> None:
    with pytest.MonkeyPatch.context() as patch, SortedSpool(None) as spooled:
        patch.setattr(spool, "SPILL_BYTES", 100)
        patch.setattr(spool, "FAN_IN", 4)
        chance = random.Random(5)
        lines = [b"%06d\n" % chance.randrange(100_000) for _ in range(3000)]
        for line in lines:
            spooled.add(line)
        assert sum(map(len, spooled._levels)) <= 3 * len(spooled._levels) <= 12
        assert list(spooled) == sorted(lines)


def test_a_spool_opens_few_files() -> None:
    spool_opens_few_files()

"""Each durable step by itself: when it returns, its effect is on the disk, whatever is lost of the rest."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from conveyor.auth.durable_file import write_durably
from conveyor.engines.data_directory import make_data_directory
from conveyor.engines.local_blobs import LocalBlobs
from tests.powerloss.disk import Disk, Image, Punch, Survival, keep_all, keep_none, keep_torn
from tests.powerloss.recorder import Recorder
from tests.support.places import quick_place

_ALL_LOST = Survival(keep_none, lambda changes: [])


class Powered:
    """A place with power. `fail` says what is on the disk if it fails now, and all is lost that was not synced."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.record = Recorder(place)

    def fail(self) -> Image:
        disk = Disk(self.record.operations, self.record.directories)
        disk.advance(self.record.position)
        return disk.image(_ALL_LOST)

    def started_again(self, see: Callable[[LocalBlobs], Coroutine[Any, Any, Any]]) -> Any:
        """What blobs that are opened on that disk show."""
        image = self.fail()
        with quick_place() as place:
            image.write(place)
            return asyncio.run(see(LocalBlobs(place / "blobs")))


def recorded(steps: Callable[[Powered], None]) -> None:
    with quick_place() as place:
        powered = Powered(place)
        with powered.record.recording():
            steps(powered)


async def keys(blobs: LocalBlobs) -> list[str]:
    return sorted([info.key async for info in blobs.listing("results/acme")])


def test_an_object_that_was_put_is_there() -> None:
    def steps(powered: Powered) -> None:
        asyncio.run(LocalBlobs(powered.place / "blobs").put("results/acme/job_1/run_1/body_1", b"body"))
        assert powered.started_again(lambda blobs: blobs.get("results/acme/job_1/run_1/body_1")) == b"body"

    recorded(steps)


def test_objects_that_were_put_together_are_there() -> None:
    def steps(powered: Powered) -> None:
        blobs = LocalBlobs(powered.place / "blobs")
        objects = [(f"results/acme/job_1/run_1/seg_{number}", b"%d" % number * 3000) for number in range(3)]
        for key in asyncio.run(blobs.put_all(objects)):
            number = key.partition("=")[0][-1]
            assert powered.started_again(lambda blobs, key=key: blobs.get(key)) == number.encode() * 3000

    recorded(steps)


def test_what_another_process_appended_is_there_once_it_is_made_durable() -> None:
    def steps(powered: Powered) -> None:
        mine, others = LocalBlobs(powered.place / "blobs"), LocalBlobs(powered.place / "blobs")
        (key,) = others.append([("results/acme/job_1/run_1/seg_1", b"page" * 2000)])
        assert powered.started_again(lambda blobs: blobs.get(key)) is None
        asyncio.run(mine.make_durable([key]))
        assert powered.started_again(lambda blobs: blobs.get(key)) == b"page" * 2000

    recorded(steps)


def test_a_deleted_object_does_not_come_back() -> None:
    def steps(powered: Powered) -> None:
        blobs = LocalBlobs(powered.place / "blobs")
        names = [f"results/acme/job_1/run_1/body_{number}" for number in range(3)]
        for name in names:
            asyncio.run(blobs.put(name, b"body"))
        asyncio.run(blobs.delete([names[1]]))
        assert powered.started_again(keys) == [names[0], names[2]]
        asyncio.run(blobs.delete([names[0], names[2]]))
        assert powered.started_again(keys) == []

    recorded(steps)


def test_a_deleted_object_in_a_log_stays_deleted_whatever_is_left_of_its_bytes() -> None:
    """Its space is given back without a sync: some of it may be there again, and nobody finds it."""

    def steps(powered: Powered) -> None:
        blobs = LocalBlobs(powered.place / "blobs")
        bodies = {f"results/acme/job_1/run_1/seg_{number}": b"%d" % number * 9000 for number in range(3)}
        placed = asyncio.run(blobs.put_all(list(bodies.items())))
        before = powered.record.position
        asyncio.run(blobs.delete([placed[1]]))
        after = powered.record.position
        assert any(isinstance(each, Punch) for each in powered.record.operations[before:])
        disk = Disk(powered.record.operations, powered.record.directories)
        disk.advance(after)
        for seed in range(20):
            for of_file in (keep_none, keep_all, keep_torn(random.Random(seed))):
                with quick_place() as place:
                    disk.image(Survival(of_file, lambda changes: [])).write(place)
                    there = LocalBlobs(place / "blobs")
                    assert asyncio.run(keys(there)) == [placed[0], placed[2]]
                    assert asyncio.run(there.get(placed[1])) is None
                    for key, body in zip(placed, bodies.values(), strict=True):
                        assert key == placed[1] or asyncio.run(there.get(key)) == body

    recorded(steps)


def test_a_deleted_folder_does_not_come_back() -> None:
    def steps(powered: Powered) -> None:
        blobs = LocalBlobs(powered.place / "blobs")
        for run in (1, 2):
            for number in range(3):
                asyncio.run(blobs.put(f"results/acme/job_1/run_{run}/body_{number}", b"body"))
        asyncio.run(blobs.put_all([("results/acme/job_1/run_1/seg_1", b"page" * 2000)]))
        while asyncio.run(blobs.delete_prefix("results/acme/job_1", 4)):
            pass
        assert powered.started_again(keys) == []

    recorded(steps)


def test_a_folder_is_gone_that_a_process_deleted_which_died_before_its_sync() -> None:
    def steps(powered: Powered) -> None:
        blobs = LocalBlobs(powered.place / "blobs")
        path = powered.place / "blobs/results/acme/job_1/body_1"
        asyncio.run(blobs.put("results/acme/job_1/body_1", b"body"))
        path.unlink()
        path.parent.rmdir()
        assert asyncio.run(blobs.delete_prefix("results/acme/job_1", 4)) == 0
        assert powered.started_again(keys) == []

    recorded(steps)


def test_a_small_file_is_the_old_one_or_the_new_one() -> None:
    def steps(powered: Powered) -> None:
        path = powered.place / "signing.key"
        write_durably(path, "old")
        assert powered.fail().files == {Path("signing.key"): b"old\n"}
        before = powered.record.position
        write_durably(path, "new")
        assert powered.fail().files == {Path("signing.key"): b"new\n"}
        disk = Disk(powered.record.operations, powered.record.directories)
        for cut in range(before, powered.record.position + 1):
            disk.advance(cut)
            assert disk.image(_ALL_LOST).files[Path("signing.key")] in (b"old\n", b"new\n")

    recorded(steps)


def test_a_new_data_directory_is_there_with_those_above_it() -> None:
    def steps(powered: Powered) -> None:
        make_data_directory(powered.place / "srv/jobs/conveyor")
        assert powered.fail().directories == [Path("srv"), Path("srv/jobs"), Path("srv/jobs/conveyor")]

    recorded(steps)


def test_a_data_directory_is_there_that_a_process_made_which_died_before_its_sync() -> None:
    def steps(powered: Powered) -> None:
        (powered.place / "conveyor").mkdir()
        make_data_directory(powered.place / "conveyor")
        assert powered.fail().directories == [Path("conveyor")]

    recorded(steps)

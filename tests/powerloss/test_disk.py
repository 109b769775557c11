"""The disk of the replay: what is synced is there, what is not may be, and the record is complete."""

import os
import random
from pathlib import Path

import pytest

from tests.powerloss.disk import (
    ROOT,
    Disk,
    Image,
    Names,
    Operation,
    Punch,
    Survival,
    Sync,
    Truncate,
    Write,
    keep_all,
    keep_none,
    keep_some,
    keep_torn,
)
from tests.powerloss.recorder import Recorder
from tests.support.places import quick_place

NOTHING_LOST = Survival(keep_all, lambda changes: changes)
ALL_LOST = Survival(keep_none, lambda changes: [])
NAMES_KEPT = Survival(keep_none, lambda changes: changes)

A, B = 1, 2
FILE = Path("file")


def image_of(operations: list[Operation], survival: Survival, directories: tuple[int, ...] = (ROOT,)) -> Image:
    disk = Disk(operations, directories)
    disk.advance(len(operations))
    return disk.image(survival)


def test_bytes_and_name_are_durable_each_by_its_own_sync() -> None:
    made: list[Operation] = [Names(ROOT, {"file": A}), Write(A, 0, b"bytes")]
    assert image_of(made, ALL_LOST).files == {}
    assert image_of([*made, Sync(A)], ALL_LOST).files == {}
    assert image_of([*made, Sync(ROOT)], ALL_LOST).files == {FILE: b""}
    assert image_of([*made, Sync(A), Sync(ROOT)], ALL_LOST).files == {FILE: b"bytes"}
    assert image_of(made, NOTHING_LOST).files == {FILE: b"bytes"}
    assert image_of(made, NAMES_KEPT).files == {FILE: b""}


def test_what_is_in_a_directory_without_a_durable_name_is_lost() -> None:
    made: list[Operation] = [
        Names(ROOT, {"folder": B}),
        Names(B, {"file": A}),
        Write(A, 0, b"bytes"),
        Sync(A),
        Sync(B),
    ]
    assert image_of(made, ALL_LOST, (ROOT, B)) == Image({}, [])
    assert image_of([*made, Sync(ROOT)], ALL_LOST, (ROOT, B)) == Image(
        {Path("folder/file"): b"bytes"}, [Path("folder")]
    )


def test_a_rename_in_a_directory_is_done_or_not() -> None:
    made: list[Operation] = [
        Names(ROOT, {"file": A}),
        Write(A, 0, b"old"),
        Sync(A),
        Names(ROOT, {"file.new": B}),
        Write(B, 0, b"new"),
        Sync(B),
        Sync(ROOT),
        Names(ROOT, {"file.new": None, "file": B}),
    ]
    assert image_of(made, ALL_LOST).files == {FILE: b"old", Path("file.new"): b"new"}
    assert image_of(made, NOTHING_LOST).files == {FILE: b"new"}


def test_truncates_and_holes_are_changes_like_others() -> None:
    made: list[Operation] = [
        Names(ROOT, {"file": A}),
        Sync(ROOT),
        Write(A, 0, b"0123456789"),
        Sync(A),
        Punch(A, 2, 3),
        Truncate(A, 8),
    ]
    assert image_of(made, ALL_LOST).files == {FILE: b"0123456789"}
    assert image_of(made, NOTHING_LOST).files == {FILE: b"01\0\0\x00567"}


@pytest.mark.parametrize("block", [512, 4096])
def test_a_torn_write_is_there_in_whole_blocks(block: int) -> None:
    old, new = b"o" * 20_000, b"n" * 20_000
    made: list[Operation] = [Names(ROOT, {"file": A}), Sync(ROOT), Write(A, 0, old), Sync(A), Write(A, 0, new)]
    torn = set()
    for seed in range(200):
        survival = Survival(keep_torn(random.Random(seed)), lambda changes: changes)
        content = image_of(made, survival).files[FILE]
        pieces = {content[start : start + block] for start in range(0, len(content), block)}
        assert len(content) == len(old)
        if all(len(set(piece)) == 1 for piece in pieces):
            torn.add(content)
    # Old, new, and mixtures of blocks of this size.
    assert len(torn) > 10


def test_what_was_written_beyond_the_end_may_be_missing_or_zeros() -> None:
    made: list[Operation] = [Names(ROOT, {"file": A}), Sync(ROOT), Write(A, 0, b"a" * 512), Write(A, 512, b"b" * 512)]
    seen = set()
    for seed in range(300):
        seen.add(image_of(made, Survival(keep_torn(random.Random(seed)), lambda changes: changes)).files[FILE])
        seen.add(image_of(made, Survival(keep_some(random.Random(seed)), lambda changes: changes)).files[FILE])
    a, b, zeros = b"a" * 512, b"b" * 512, bytes(512)
    assert {b"", a, a + b, zeros + b, a + zeros, zeros + zeros} <= seen


def test_everything_that_a_process_does_is_recorded() -> None:
    with quick_place() as place:
        record = Recorder(place)
        with record.recording():
            folder = place / "folder"
            folder.mkdir()
            descriptor = os.open(folder / "draft", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, b"one ")
            os.writev(descriptor, [b"two ", b"three"])
            copy = os.dup(descriptor)
            os.pwrite(copy, b"ONE", 0)
            os.fsync(copy)
            os.close(copy)
            os.ftruncate(descriptor, 7)
            os.close(descriptor)
            (folder / "draft").rename(place / "file")
            folder.rmdir()
            record.check_complete()
        disk = Disk(record.operations, record.directories)
        disk.advance(record.position)
        assert disk.image(NOTHING_LOST) == Image({FILE: b"ONE two"}, [])
        assert disk.image(ALL_LOST) == Image({}, [])
        assert disk.image(NAMES_KEPT).files == {FILE: b"ONE two three"}


def test_a_write_that_passes_the_recorder_by_is_noticed() -> None:
    with quick_place() as place:
        record = Recorder(place)
        with record.recording():
            with open(place / "file", "w") as file:  # noqa: PTH123  (the builtin is not recorded)
                file.write("past it")
            with pytest.raises(AssertionError):
                record.check_complete()

"""Fixed bugs of what a failing machine leaves behind: files that a power cut tore, bytes that a disk changed."""

from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from conveyor.auth import durable_file
from conveyor.cli import local_key
from conveyor.egress import descriptors
from conveyor.engines.blobs import Blobs
from conveyor.engines.sqlite import soundness
from conveyor.model import BodyRef
from conveyor.read.results import check_body
from tests.faults.planted import Planted
from tests.flow import test_damaged_bodies, test_open_files
from tests.support.places import quick_place
from tests.unit.cli import test_local_key
from tests.unit.engines import test_sqlite_soundness


def read_any_text(patch: pytest.MonkeyPatch) -> None:
    """A file without a line is as good as none, and a new key is written only where there is no file."""

    def write_new(path: Path, text: str) -> None:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(text + "\n")

    patch.setattr(local_key, "read_line", lambda path: path.read_text().strip() or None if path.exists() else None)
    patch.setattr(durable_file, "write_durably", write_new)


async def _an_empty_local_key_is_replaced() -> None:
    with quick_place() as place:
        await test_local_key.test_a_damaged_local_key_is_replaced(place, b"")


def send_the_last_piece_at_once(patch: pytest.MonkeyPatch) -> None:
    """A long body is checked when all of it was sent."""

    async def checked_at_last(blobs: Blobs, ref: BodyRef) -> AsyncIterator[bytes]:
        digest = sha256()
        async for piece in blobs.stream(ref.key):
            digest.update(piece)
            yield piece
        check_body(ref, ref.length, digest.hexdigest())

    patch.setattr(test_damaged_bodies, "stream_body", checked_at_last)


def blame_the_target_for_open_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(descriptors, "is_named", lambda causes: False)


def begin_anew_beside_blobs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(soundness, "check_present", lambda path, blobs: None)


async def _a_missing_database_is_refused() -> None:
    with quick_place() as place:
        await test_sqlite_soundness.a_missing_database_is_refused(place)


PLANTED = [
    Planted(
        "a database that is gone is silently a new one",
        begin_anew_beside_blobs,
        _a_missing_database_is_refused,
        faults=(pytest.fail.Exception,),
    ),
    Planted(
        "a process without descriptors blames its targets",
        blame_the_target_for_open_files,
        test_open_files.test_a_task_without_a_descriptor_waits_and_blames_nobody,
    ),
    Planted(
        "a damaged body is sent to its end",
        send_the_last_piece_at_once,
        test_damaged_bodies.test_the_last_piece_of_a_long_body_comes_after_its_check,
    ),
    Planted(
        "an empty local.key keeps a server from starting",
        read_any_text,
        _an_empty_local_key_is_replaced,
        faults=(FileExistsError,),
    ),
]

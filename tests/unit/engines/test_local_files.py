"""Temporary files of puts beside processes that sweep."""

import fcntl
from pathlib import Path

import pytest

from conveyor.engines.local_blobs import LocalBlobs


async def test_a_process_that_starts_takes_no_file_of_a_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sweeps between two steps of the put: the file is there, and its writer has not locked it yet."""
    blobs = LocalBlobs(tmp_path)
    lock, others = fcntl.flock, []

    def start_another_first(fd: int, operation: int) -> None:
        if not others:
            others.append("one, and none from within its own locks")
            LocalBlobs(tmp_path)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", start_another_first)
    await blobs.put("uploads/a", b"body")
    assert others and await blobs.get("uploads/a") == b"body"
    assert list((tmp_path / ".tmp").iterdir()) == []

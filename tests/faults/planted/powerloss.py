"""Bugs of durability: the power-loss replay, or the replay of one step, must catch each."""

import asyncio
import os
import shutil
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

import pytest

from conveyor import system
from conveyor.auth import signing
from conveyor.cli import run_directory
from conveyor.engines import local_blobs, local_logs
from conveyor.engines.local_files import Draft
from conveyor.engines.local_logs import LocalLogs
from conveyor.engines.sqlite import database
from conveyor.export import direct, growing, growing_directory
from tests.faults.planted import Planted
from tests.powerloss import test_durable_files
from tests.powerloss.run import check_answers, check_runs


def commits_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The log of the database was synced before it was copied, not at each commit."""
    pragmas = tuple(each.replace("synchronous=FULL", "synchronous=NORMAL") for each in database.WRITER_PRAGMAS)
    assert pragmas != database.WRITER_PRAGMAS
    patch.setattr(database, "WRITER_PRAGMAS", pragmas)


def rows_come_before_their_pages(patch: pytest.MonkeyPatch) -> None:
    """A row pointed to pages that a fetcher had appended, and nobody had synced."""

    def forget(self: LocalLogs, keys: Collection[str]) -> None:
        pass

    patch.setattr(LocalLogs, "sync", forget)


def segments_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """An append returned before its sync."""
    patch.setattr(local_logs, "sync", lambda fd: None)


def a_new_log_has_no_durable_name(patch: pytest.MonkeyPatch) -> None:
    """The directory of a new log was not synced: the log was, and was lost with its name."""
    patch.setattr(local_logs, "sync_directory", lambda directory: None)


def objects_are_renamed_before_they_are_synced(patch: pytest.MonkeyPatch) -> None:
    """An object had its name, and no bytes."""
    patch.setattr(Draft, "sync", lambda self: None)


def a_key_is_written_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    """A key file was written in place, and empty after a power cut."""

    def write(path: Path, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, f"{text}\n".encode())
        os.close(fd)

    patch.setattr(signing, "write_durably", write)


def a_new_data_directory_has_no_durable_name(patch: pytest.MonkeyPatch) -> None:
    """Everything in the data directory was synced, and lost with it."""
    patch.setattr(system, "make_data_directory", lambda path: path.mkdir(parents=True, exist_ok=True, mode=0o700))


def deletes_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """Files that were removed before their rows came back, and no row named them."""

    def forget(directories: Iterable[Path]) -> None:
        pass

    patch.setattr(local_blobs, "sync_deletes", forget)


def an_archive_is_published_before_it_is_synced(patch: pytest.MonkeyPatch) -> None:
    """The archive of `conveyor run` had its name, and no bytes, and the data that it was made of was removed."""
    patch.setattr(growing, "seal", lambda file: file.flush())


def files_of_a_run_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The manifest of a directory named files that were not there."""
    patch.setattr(growing_directory._BodyFiles, "sync", lambda self: None)


def invalid_lines_of_a_run_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    """The file of invalid lines was empty, and the data directory, which had them too, was removed."""
    patch.setattr(direct, "seal", lambda file: file.flush())


def a_finished_run_comes_back(patch: pytest.MonkeyPatch) -> None:
    """The data directory of a run that had ended was there again, whole or in part: no run could begin, or resume."""

    def remove(data: Path) -> None:
        removed = data.with_name(f"{data.name}.removed")
        data.rename(removed)
        shutil.rmtree(removed)

    patch.setattr(run_directory, "remove_data", remove)


async def _answers_hold(*parts: str) -> None:
    # The replay has a loop of its own, and a thread has one.
    await asyncio.to_thread(check_answers, *parts)


async def _runs_hold(*outs: str) -> None:
    await asyncio.to_thread(check_runs, *outs)


PLANTED = [
    Planted(bug.__name__, bug, partial(_answers_hold, *parts))
    for bug, parts in (
        (commits_are_not_synced, ["inline"]),
        (rows_come_before_their_pages, ["fetched"]),
        (segments_are_not_synced, ["staged"]),
        (a_new_log_has_no_durable_name, ["fetched"]),
        (objects_are_renamed_before_they_are_synced, ["added"]),
        (a_key_is_written_without_a_sync, ["inline"]),
        (a_new_data_directory_has_no_durable_name, ["inline"]),
        (deletes_are_not_synced, ["objects"]),
    )
]
PLANTED += [
    Planted(bug.__name__, bug, partial(_runs_hold, *outs))
    for bug, outs in (
        (an_archive_is_published_before_it_is_synced, ["pages.zip"]),
        (files_of_a_run_are_not_synced, ["pages"]),
        (invalid_lines_of_a_run_are_not_synced, ["mixed.zip"]),
        (a_finished_run_comes_back, ["pages.zip", "pages"]),
    )
]
PLANTED.append(
    Planted(
        "pieces_of_a_download_are_not_synced",
        objects_are_renamed_before_they_are_synced,
        partial(_answers_hold, "downloaded"),
    )
)
PLANTED.append(
    Planted(
        "deletes_are_not_synced_by_themselves",
        deletes_are_not_synced,
        partial(asyncio.to_thread, test_durable_files.test_a_deleted_folder_does_not_come_back),
    )
)

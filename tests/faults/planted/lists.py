"""Lists, exports and webhooks: padding that was refused, work that held up the loop, and progress that was lost."""

from typing import Any

import pytest

from conveyor.cli import run_command as run
from conveyor.cli.snapshot import Snapshot
from conveyor.egress.outbound import Outbound, Pairs, PostReply
from conveyor.egress.redirects import OutgoingRequest
from conveyor.egress.target_guard import parse_url
from conveyor.embedded import Embedded
from conveyor.errors import ListUnreadable
from conveyor.export.parquet import ParquetPart
from conveyor.export.time_slice import TimeSlice
from conveyor.export.writer import ExportWriter
from conveyor.lists import decoders
from conveyor.lists import reader as lists
from tests.faults.planted import Planted
from tests.flow.test_export_time_slices import every_time_slice_makes_progress, resuming_takes_no_time_slice
from tests.flow.test_run_kept import an_unfinished_run_is_not_purged, what_was_fetched_is_kept
from tests.flow.test_webhooks import the_head_of_an_answer_decides
from tests.unit.lists.test_reader import (
    others_run_between_two_batches,
    others_run_between_two_pieces,
    zeros_behind_and_between_are_ignored,
)


def padding_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros behind a member are taken for the next one."""
    monkeypatch.setattr(decoders, "_without_padding", bytes)


def readers_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that comes of the bytes at hand is read in one turn of the loop."""

    async def no_turn() -> None:
        return None

    monkeypatch.setattr(lists, "let_others_run", no_turn)


def bodies_of_answers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is one when its body was read."""

    async def post(self: Any, url: str, headers: Pairs, body: bytes, timeout: float) -> PostReply:
        request = OutgoingRequest("POST", parse_url(url), tuple(headers), body)
        async with self._open(request, timeout) as response:
            await response.body_reader.read(1 << 16)
            return PostReply(response.status, response.get_header("retry-after"))

    monkeypatch.setattr(Outbound, "post", post)


def parquet_parts_start_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Parquet part nothing is durable before its end."""
    checkpoint_if_due = ExportWriter._checkpoint_if_due

    async def pause_only(self: ExportWriter) -> None:
        if isinstance(self._part, ParquetPart):
            await self._pause_if_due()
        else:
            await checkpoint_if_due(self)

    monkeypatch.setattr(ExportWriter, "_checkpoint_if_due", pause_only)


def time_slices_begin_before_resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading up to the checkpoint counts as part of the time slice."""
    begin = TimeSlice.begin

    def begin_once(self: TimeSlice) -> None:
        if not hasattr(self, "_until"):
            begin(self)

    monkeypatch.setattr(TimeSlice, "begin", begin_once)


def unreadable_lists_were_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that can not be read to its end is taken for one that was refused, and all data is removed."""
    monkeypatch.setattr(Snapshot, "is_untouched", True)


def runs_purge_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run expires as a job of a server does, and what has expired is removed when it is resumed."""
    running = Embedded.running
    monkeypatch.setattr(Embedded, "running", lambda self, only=None, purges=True: running(self, only))
    monkeypatch.setattr(run, "MAX_RETENTION_DAYS", 14)


PLANTED = [
    Planted(
        "zeros behind a gzip list are refused",
        padding_is_data,
        zeros_behind_and_between_are_ignored,
        (ListUnreadable,),
    ),
    Planted(
        "batches of a list are read in one turn of the loop", readers_keep_the_loop, others_run_between_two_batches
    ),
    Planted("a list is inflated in one turn of the loop", readers_keep_the_loop, others_run_between_two_pieces),
    Planted("an answer whose body is cut counts as none", bodies_of_answers_count, the_head_of_an_answer_decides),
    Planted(
        "a Parquet part starts over in every time slice", parquet_parts_start_over, every_time_slice_makes_progress
    ),
    Planted("a time slice is spent on resuming", time_slices_begin_before_resuming, resuming_takes_no_time_slice),
    Planted("a list that is cut off takes all data along", unreadable_lists_were_never_run, what_was_fetched_is_kept),
    Planted("an unfinished run purges itself", runs_purge_themselves, an_unfinished_run_is_not_purged),
]

"""Lists, exports and webhooks: padding that was refused, work that held up the loop, and progress that was lost."""

import pytest

from conveyor import lists
from conveyor.errors import ListUnreadable
from tests.faults.planted import Planted
from tests.unit.test_lists import (
    others_run_between_two_batches,
    others_run_between_two_pieces,
    zeros_behind_and_between_are_ignored,
)


def padding_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros behind a member are taken for the next one."""
    monkeypatch.setattr(lists, "_without_padding", bytes)


def readers_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that comes of the bytes at hand is read in one turn of the loop."""

    async def no_turn() -> None:
        return None

    monkeypatch.setattr(lists, "let_others_run", no_turn)


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
]

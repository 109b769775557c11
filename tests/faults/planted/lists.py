"""Lists, exports and webhooks: padding that was refused, work that held up the loop, and progress that was lost."""

from typing import Any

import pytest

from conveyor import lists
from conveyor.errors import ListUnreadable
from conveyor.outbound import Outbound, Pairs
from conveyor.targets import parse_url
from tests.faults.planted import Planted
from tests.flow.test_webhooks import the_head_of_an_answer_decides
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


def bodies_of_answers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is one when its body was read."""

    async def post(self: Any, url: str, headers: Pairs, body: bytes, timeout: float) -> tuple[int, str | None]:
        async with self._open("POST", parse_url(url), headers, body, timeout) as response:
            await response.body_reader.read(1 << 16)
            return response.status, response.get_header("retry-after")

    monkeypatch.setattr(Outbound, "post", post)


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
]

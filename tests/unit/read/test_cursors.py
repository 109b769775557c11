"""Cursors: what was given out is taken back, and nothing else."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conveyor.errors import BadCursor
from conveyor.model import RunId, TaskId, shard_of, task_id
from conveyor.read import cursors as cursor

RUN = RunId("run_1")


def in_shard(shard: int, shards: int) -> TaskId:
    return next(each for each in (task_id(RUN, n) for n in range(10_000)) if shard_of(each, shards) == shard)


@st.composite
def positions(draw: st.DrawFn) -> list[TaskId | None]:
    shards = draw(st.integers(2, 12))
    ids = st.integers(0, 3000).map(lambda index: task_id(RUN, index))
    return [
        draw(st.none() | ids.filter(lambda each, shard=shard: shard_of(each, shards) == shard))  # type: ignore[misc]
        for shard in range(shards)
    ]


@given(st.integers(0, 1 << 40), st.integers(0, 1))
def test_one_shard_is_the_plain_task_id(index: int, shards: int) -> None:
    name = task_id(RUN, index)
    assert cursor.encode([name]) == name
    assert cursor.decode(name, shards) == [name]


@settings(max_examples=60, deadline=None)
@given(positions())
def test_many_shards_round_trip(given_positions: list[TaskId | None]) -> None:
    text = cursor.encode(given_positions)
    assert text.startswith("sh:")
    assert text.isascii()
    assert cursor.decode(text, len(given_positions)) == given_positions


@pytest.mark.parametrize("shards", [0, 1, 2, 8])
def test_no_cursor_is_the_beginning(shards: int) -> None:
    assert cursor.decode(None, shards) == [None] * max(shards, 1)


def test_a_listing_that_gave_nothing_has_no_cursor() -> None:
    for empty in ([], [None]):
        with pytest.raises(ValueError, match="no cursor"):
            cursor.encode(empty)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=200) | st.binary(max_size=100).map(lambda raw: raw.decode("latin-1")),
    shards=st.integers(0, 9),
)
def test_any_text_is_a_bad_cursor_and_never_a_crash(text: str, shards: int) -> None:
    for candidate in (text, "sh:" + text, "sh:" + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()):
        with pytest.raises(BadCursor):
            cursor.decode(candidate, shards)


@settings(max_examples=300, deadline=None)
@given(
    base=st.one_of(st.just([task_id(RUN, 1)]), positions()),
    edits=st.lists(
        st.tuples(st.integers(0, 10_000), st.sampled_from("rid"), st.integers(0, 0x2FF)), min_size=1, max_size=3
    ),
)
def test_a_mutated_cursor_is_refused_or_means_what_it_says(
    base: list[TaskId | None], edits: list[tuple[int, str, int]]
) -> None:
    text = cursor.encode(base)
    for where, kind, char in edits:
        at = where % max(len(text), 1)
        keep = text[at + (kind in "rd") :]
        text = text[:at] + ("" if kind == "d" else chr(char)) + keep
    try:
        found = cursor.decode(text, len(base))
    except BadCursor:
        return
    assert cursor.encode(found) == text
    foreign = {each for shard, each in enumerate(found) if each is not None and shard_of(each, len(base)) != shard}
    assert not foreign or (len(foreign) == 1 and None not in found)


def packed(value: object) -> str:
    return "sh:" + base64.urlsafe_b64encode(json.dumps(value, separators=(",", ":")).encode()).decode().rstrip("=")


ONE, TWO = in_shard(0, 2), in_shard(1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sh:",
        ONE[:-1],
        ONE.upper(),
        packed([ONE]),
        packed([ONE, TWO, None]),
        packed([TWO, ONE]),
        packed([TWO, None]),
        packed([ONE, TWO.upper()]),
        packed([ONE, TWO + " "]),
        packed([ONE, 7]),
        packed({"0": ONE}),
        packed([ONE, TWO]) + "=",
        packed([ONE, TWO]) + "\n",
        " " + packed([ONE, TWO]),
        "SH:" + packed([ONE, TWO])[3:],
        "sh:" + base64.urlsafe_b64encode(json.dumps([ONE, TWO], indent=1).encode()).decode(),
        "sh:" + "[" * 200,
        "sh:" + base64.urlsafe_b64encode(b"[" * 100).decode(),
        "sh:" + "A" * 1_000_000,
    ],
    ids=lambda text: repr(text[:16]),
)
def test_only_its_own_form_is_taken(text: str) -> None:
    assert cursor.decode(packed([ONE, TWO]), 2) == [ONE, TWO]
    with pytest.raises(BadCursor):
        cursor.decode(text, 2)


@pytest.mark.parametrize("text", ["", ONE[:-1], ONE + "0", ONE.upper(), ONE[:-1] + "g", ONE + "\n", packed([ONE, TWO])])
def test_a_plain_cursor_is_sixty_four_hex_digits(text: str) -> None:
    with pytest.raises(BadCursor):
        cursor.decode(text, 1)


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_a_plain_cursor_from_before_the_shards_is_a_place_in_each(shards: int) -> None:
    name = in_shard(1, shards)
    positions = cursor.decode(name, shards)
    assert positions == [name] * shards
    # Some shards have returned a task since, others have not.
    later: list[TaskId | None] = [in_shard(0, shards), *positions[1:]]
    assert cursor.decode(cursor.encode(positions), shards) == positions
    assert cursor.decode(cursor.encode(later), shards) == later

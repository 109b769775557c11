"""Every option of a job at its least and its largest value, alone and in pairs, by every way in: the run ends, and no
role fails on the way. What is beyond the bounds is refused by every way alike."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from conveyor.model import JobKind, Options
from conveyor.states import RunState
from tests.matrix.entries import ENTRIES, Answer, Case, Refusal, takes
from tests.matrix.options import Undeclared, allowed_in, leaves
from tests.matrix.pairs import all_pairs
from tests.matrix.world import World, open_world

KINDS = list(JobKind)
LEAVES = list(leaves())
# The factor of a row that says how its job comes in.
WAY = "~way in"
_DEFAULT = object()


def kinds_of(option: str) -> list[JobKind]:
    return [kind for kind in KINDS if allowed_in(kind, option)]


def alone(entry: str) -> list[Case]:
    """Each value of each option by itself; the kinds take turns."""
    numbers = count()
    return [
        Case(number := next(numbers), kinds_of(leaf.option)[number % len(kinds_of(leaf.option))], {leaf.path: value})
        for leaf in LEAVES
        if takes(entry, leaf.option)
        for value in leaf.allowed
    ]


def in_pairs(kind: JobKind) -> dict[str, list[Case]]:
    """By the way in."""
    factors: dict[str, Sequence[Any]] = {
        leaf.path: (_DEFAULT, *leaf.allowed) for leaf in LEAVES if allowed_in(kind, leaf.option)
    }
    cases: dict[str, list[Case]] = {entry: [] for entry in ENTRIES}
    for number, row in enumerate(all_pairs({**factors, WAY: list(ENTRIES)})):
        entry = row.pop(WAY)
        cases[entry].append(Case(number, kind, {path: value for path, value in row.items() if value is not _DEFAULT}))
    return cases


def beyond(entry: str) -> list[tuple[str, Case]]:
    """Every value that is not allowed, under a name that is the same whichever way it comes."""
    named = [
        (f"{leaf.path} {str(value)[:60]} {len(str(value))}", leaf, value) for leaf in LEAVES for value in leaf.beyond
    ]
    return [
        (name, Case(number, kinds_of(leaf.option)[0], {leaf.path: value}))
        for number, (name, leaf, value) in enumerate(named)
        if takes(entry, leaf.option)
    ]


async def run_all(world: World, entry: str, cases: list[Case]) -> None:
    answers = await ENTRIES[entry](world, cases)
    refused = [(case, answers[case.number]) for case in cases if isinstance(answers[case.number], Refusal)]
    assert not refused, f"refused by {entry}: {refused[:3]}"
    # Whoever looks after runs sees them before anything of them has ended, too.
    await world.belt.sweeper.run_once()
    ended = await world.until_ended([str(answers[case.number]) for case in cases])
    for case in cases:
        job = ended[str(answers[case.number])]
        # One that is kept for a minute may be gone by now.
        assert job is not None or "retention_days" in case.chosen, case
        assert job is None or job.state in (RunState.COMPLETED, RunState.FAILED), (case, job)
    assert world.failures() == []


def test_every_option_has_bounds() -> None:
    assert {leaf.option for leaf in LEAVES} == set(Options.__struct_fields__)
    with pytest.raises(Undeclared):
        list(leaves(msgspec.defstruct("New", [("unheard_of", int, 1)], bases=(Options,), frozen=True)))


def test_all_pairs_are_pairs_of_all() -> None:
    factors = {"a": [1, 2, 3], "b": [True, False], "c": "xyz", "d": [0]}
    rows = all_pairs(factors)
    seen = {frozenset([(one, row[one]), (other, row[other])]) for row in rows for one in row for other in row}
    wanted = {
        frozenset([(a, x), (b, y)]) for a in factors for b in factors if a != b for x in factors[a] for y in factors[b]
    }
    assert wanted <= seen
    assert len(rows) < 18


@pytest.mark.parametrize("entry", ENTRIES)
async def test_each_option_alone(entry: str) -> None:
    async with open_world() as world:
        await run_all(world, entry, alone(entry))


@pytest.mark.parametrize("kind", KINDS)
async def test_options_in_pairs(kind: JobKind) -> None:
    async with open_world() as world:
        for entry, cases in in_pairs(kind).items():
            await run_all(world, entry, cases)


async def test_what_is_beyond_is_refused_alike_by_every_way() -> None:
    answers: dict[str, dict[str, Answer]] = {}
    async with open_world() as world:
        for entry, enter in ENTRIES.items():
            cases = beyond(entry)
            said = await enter(world, [case for _, case in cases])
            for name, case in cases:
                answers.setdefault(name, {})[entry] = said[case.number]
        assert world.failures() == []
    for name, by_entry in answers.items():
        first = by_entry["http"]
        assert isinstance(first, Refusal), f"{name} is allowed by http"
        assert first.code in ("invalid_field", "malformed_json"), (name, first)
        for entry, answer in by_entry.items():
            assert isinstance(answer, Refusal), f"{name} is allowed by {entry}"
            assert answer.message == first.message, f"{name}: {entry} says {answer.message}, http {first.message}"
            assert answer.code in (first.code, None), f"{name}: {entry} says {answer.code}, http {first.code}"

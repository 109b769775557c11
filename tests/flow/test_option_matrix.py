"""Every option of a job at its least and its largest value, alone and in pairs, by every way in: the run ends, and no
role fails on the way. What is beyond the bounds is refused by every way alike."""

import tempfile
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conveyor.model import JobKind, Options
from conveyor.states import RunState
from tests.matrix.commands import COMMANDS, FLAGS, OTHER_FLAGS, arguments_of, command, flags_of
from tests.matrix.entries import ENTRIES, Answer, Case, Refusal, by_http, is_own, takes
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
        chosen = {path: value for path, value in row.items() if value is not _DEFAULT and is_own(entry, path)}
        cases[entry].append(Case(number, kind, chosen))
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
    await world.fleet.sweeper.run_once()
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
    factors: dict[str, Sequence[Any]] = {"a": [1, 2, 3], "b": [True, False], "c": "xyz", "d": [0]}
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


# The command line itself refuses other values of these.
CHOICES = {"--on-invalid", "--on-exhausted", "--pace"}


class TestCommandLine:
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        made = tmp_path / "lists"
        made.mkdir()
        return made

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_flag_of_a_job_is_in_the_matrix(self, name: str) -> None:
        assert set(flags_of(name)) <= FLAGS.keys() | OTHER_FLAGS

    async def test_what_is_beyond_is_refused_in_the_words_of_the_server(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by_path = {leaf.path: leaf for leaf in LEAVES}
        async with open_world() as world:
            monkeypatch.setenv("CONVEYOR_API_KEY", world.api.key)
            for name in COMMANDS:
                job_id = await waiting_job(world, cancelled=name == "rerun")
                for flag in sorted(set(flags_of(name)) & FLAGS.keys() - CHOICES):
                    # Just below and just above. Far beyond is no matter of the way in.
                    for value in by_path[FLAGS[flag]].beyond[:2]:
                        said = await command(*arguments_of(world, name, place, job_id), f"{flag}={value}")
                        (answer,) = (await by_http(world, [Case(0, JobKind.FETCH, {FLAGS[flag]: value})])).values()
                        refused = said.refusal._replace(message=said.refusal.message.removeprefix("In `job`: "))
                        assert refused == answer, (name, flag, value)
                        assert [path.name for path in place.iterdir()] == ["urls.txt"]
            assert world.failures() == []

    async def test_the_bounds_themselves_are_taken(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with open_world() as world:
            monkeypatch.setenv("CONVEYOR_API_KEY", world.api.key)
            await check_bounds_taken(world, place)


async def check_bounds_taken(world: World, place: Path) -> None:
    by_path = {leaf.path: leaf for leaf in LEAVES}
    made = []
    for flag in flags_of("submit"):
        for value in by_path[FLAGS[flag]].allowed if flag in FLAGS else ():
            for name in ("submit", "change", "rerun"):
                if flag not in flags_of(name):
                    continue
                job_id = await waiting_job(world, cancelled=name == "rerun")
                said = await command(*arguments_of(world, name, place, job_id), f"{flag}={value}")
                assert said.code == 0, (name, flag, value, said)
                made += [said.out.strip()] if name == "submit" else []
    await world.until_ended(made)
    assert world.failures() == []


async def test_a_rate_that_the_server_takes_is_taken_by_the_command_line() -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        async with open_world() as world:
            patch.setenv("CONVEYOR_API_KEY", world.api.key)
            said = await command(*arguments_of(world, "submit", Path(name), ""), "--rate=0.0005")
            assert said.code == 0, said
            (answer,) = (await by_http(world, [Case(0, JobKind.FETCH, {"rate_per_host": 0.0005})])).values()
            assert isinstance(answer, str), answer


async def waiting_job(world: World, cancelled: bool = False) -> str:
    """One that waits to be changed, or to be run again."""
    made = await world.api.submit({"tasks": [f"{world.address}/ok"]})
    move = "cancel" if cancelled else "pause"
    assert (await world.api.post(f"/v1/jobs/{made.json['id']}/{move}")).status == 200
    return str(made.json["id"])

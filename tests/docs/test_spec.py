"""SPEC.md is the contract: every setting, error, route, option, state and table stands in it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import typer

from conveyor.cli.command_list import app
from conveyor.engines.sqlite.database import MIGRATIONS
from conveyor.errors import ConveyorError
from conveyor.model import Options
from conveyor.settings import PREFIX, Settings
from conveyor.states import MOVES
from tests.docs.reference import described as openapi
from tests.docs.tables import tree, written

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "SPEC.md").read_text()


def section(number: str) -> str:
    start = SPEC.index(f"\n## {number}")
    end = SPEC.find("\n## ", start + 1)
    return SPEC[start : end if end > 0 else None]


def test_the_tables_of_settings_and_errors_are_those_of_the_code() -> None:
    assert written(SPEC) == SPEC, "generate them again: python -m tests.docs.tables"


def test_no_setting_is_described_that_is_not_there() -> None:
    known = {PREFIX + field.upper() for field in Settings.__struct_fields__}
    assert set(re.findall(r"`(CONVEYOR_[A-Z_]+)`", SPEC)) - {"CONVEYOR_<NAME>"} <= known


def test_every_option_is_named() -> None:
    described = section("7.")
    for field in Options.__struct_fields__:
        assert f"`{field}`" in described, field


def test_the_table_of_states_is_the_table_in_the_code() -> None:
    described = section("4.")
    for state, moves in MOVES.items():
        row = next(line for line in described.splitlines() if line.startswith(f"| `{state}`"))
        assert set(re.findall(r"`(\w+)`", row)) == {state, *moves}


def test_every_table_and_column_of_sqlite_is_described() -> None:
    described = section("5.")
    database = apsw.Connection(":memory:")
    for script in MIGRATIONS:
        database.execute(script)
    tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    for (name,) in list(database.execute(tables)):
        row = next((line for line in described.splitlines() if line.startswith(f"| `{name}`")), None)
        assert row is not None, name
        columns = [column for (column,) in database.execute("SELECT name FROM pragma_table_info(?)", (name,))]
        missing = [column for column in columns if not re.search(rf"\b{column}\b", row)]
        assert not missing, (name, missing)


def described_routes() -> set[tuple[str, str]]:
    """The routes of §7 as (method, path), without the names of parameters."""
    found = set()
    for text in re.findall(r"`([^`]+)`", section("7.")):
        whole = re.sub(r"\{\w+\}", "{}", text.partition("?")[0])
        match = re.fullmatch(r"((?:[A-Z]+ )+)(/\S*)", whole)
        if match:
            found |= {(method, match[2]) for method in match[1].split()}
    return found


def test_every_route_is_described() -> None:
    described = described_routes()
    assert ("GET", "/v1/jobs/{}") in described
    missing = []
    for path, operations in openapi()["paths"].items():
        shown = re.sub(r"\{\w+\}", "{}", path)
        missing += [(method, path) for method in operations if (method.upper(), shown) not in described]
    assert missing == []


def test_no_route_is_described_that_is_not_there() -> None:
    paths = openapi()["paths"]
    real = {(method.upper(), re.sub(r"\{\w+\}", "{}", path)) for path, each in paths.items() for method in each}
    beside = {("GET", "/metrics"), ("GET", "/v1/openapi.json")}
    assert described_routes() - real - beside == set()


def test_every_command_is_described() -> None:
    described = section("10.")
    named = set()
    for text in re.findall(r"`([^`\n]+)`", described):
        words = text.removeprefix("conveyor ").split()
        named.add(" ".join(words[:2]))
        for alternative in words[1].split("|") if len(words) > 1 and "|" in words[1] else [""]:
            named.add(f"{words[0]} {alternative}".strip())
    assert set(commands(typer.main.get_command(app))) - named == set()


def commands(command: Any, *path: str) -> Iterator[str]:
    """The full names of all commands."""
    if not hasattr(command, "commands"):
        yield " ".join(path)
        return
    for name, below in command.commands.items():
        yield from commands(below, *path, name)


def test_it_refers_to_nothing_outside_the_repository() -> None:
    files = re.findall(r"\]\(([^)#]+)", SPEC) + re.findall(r"`((?:docs|deploy|tests|src|examples)/[\w./-]+)`", SPEC)
    assert files
    missing = [name for name in files if not name.startswith("http") and not (ROOT / name).exists()]
    assert missing == []
    assert "../" not in SPEC
    named = {name for name in re.findall(r"\b[A-Z]{4,}\.md\b", SPEC) if not (ROOT / name).exists()}
    assert named == set()


def test_every_error_class_has_its_own_code() -> None:
    codes = [cls.code for cls in tree(ConveyorError)]
    assert len(codes) == len(set(codes))
    assert ConveyorError.code == "internal_error"

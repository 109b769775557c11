"""SPEC.md is the contract: every setting, error, route, option, state and table stands in it."""

import re
from pathlib import Path

import apsw

from conveyor.engines.sqlite.database import MIGRATIONS
from conveyor.errors import ConveyorError
from conveyor.model import Options
from conveyor.settings import PREFIX, Settings
from conveyor.states import MOVES
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


def test_every_route_is_described() -> None:
    described = re.sub(r"\{\w+\}", "{}", section("7."))
    source = "".join(path.read_text() for path in (ROOT / "src/conveyor/api").glob("*.py"))
    for method, path in re.findall(r"@(get|post|put|patch|delete)\(\s*\"(/[^\"]*)\"", source):
        shown = re.sub(r"\{\w+:\w+\}", "{}", path)
        parts = [shown, shown.rsplit("/", 1)[-1]]
        assert any(part in described for part in parts if part), (method, path)


def test_every_error_class_has_its_own_code() -> None:
    codes = [cls.code for cls in tree(ConveyorError)]
    assert len(codes) == len(set(codes))
    assert ConveyorError.code == "internal_error"

"""The tables of SPEC.md that are made from the code: settings and error codes. `python -m tests.docs.tables` writes
them anew; test_spec.py says when they are not what the code says."""

import re
from pathlib import Path
from typing import Any

import conveyor.handlers
import conveyor.targets
from conveyor.errors import ConveyorError
from conveyor.settings import PREFIX, Settings

SPEC = Path(__file__).parents[2] / "SPEC.md"
_SOURCE = Path(__file__).parents[2] / "src/conveyor/settings.py"


def tree(cls: type[ConveyorError]) -> list[type[ConveyorError]]:
    """The errors that stand in errors.py, and the two that stand beside what raises them."""
    assert conveyor.handlers and conveyor.targets
    return [cls, *(found for sub in cls.__subclasses__() for found in tree(sub))]


def settings_table() -> str:
    rows = ["| setting | default | |", "|---|---|---|"]
    for field, default in zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True):
        rows.append(f"| `{PREFIX}{field.upper()}` | {_shown(default)} | {_comment(field)} |")
    return "\n".join(rows)


def errors_table() -> str:
    rows = ["| code | status | |", "|---|---|---|"]
    seen = set()
    for cls in tree(ConveyorError):
        if cls.code not in seen and cls.__module__.startswith("conveyor."):
            seen.add(cls.code)
            text = " ".join((cls.__doc__ or "").split())
            rows.append(f"| `{cls.code}` | {cls.status} | {text} |")
    return "\n".join(rows)


def _comment(field: str) -> str:
    """The comment above the field in settings.py."""
    found = re.search(rf"((?:    # .*\n)+)    {field}: ", _SOURCE.read_text())
    assert found is not None, field
    return " ".join(line.strip().removeprefix("# ") for line in found[1].splitlines())


def _shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:,g}".replace(",", "") if isinstance(default, float) else str(default)


def written(spec: str) -> str:
    """SPEC.md with both tables made anew."""
    for heading, table in (("setting", settings_table()), ("code", errors_table())):
        spec, count = re.subn(
            rf"\| {heading} \| (?:default|status) \| \|\n(?:\|.*\n)+", lambda _, t=table: t + "\n", spec
        )
        assert count == 1, heading
    return spec


if __name__ == "__main__":
    SPEC.write_text(written(SPEC.read_text()))

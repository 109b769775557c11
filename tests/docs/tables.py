"""The generated parts of SPEC.md and of the reference under docs/: settings, errors, commands, routes, events, options,
metrics, limits. `python -m tests.docs.tables` writes them; test_spec.py and test_site.py fail when they are stale.

In a page of the docs, a generated part is between `<!-- made: name -->` and `<!-- /made -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conveyor.egress.target_guard
import conveyor.handlers
from bench.peers.page import peers_table
from conveyor.errors import ConveyorError
from conveyor.settings import PREFIX, Settings
from tests.docs import limits, reference
from tests.docs.blocks import DOCS

SPEC = Path(__file__).parents[2] / "SPEC.md"
_SOURCE = Path(__file__).parents[2] / "src/conveyor/settings.py"


def tree(cls: type[ConveyorError]) -> list[type[ConveyorError]]:
    """The errors that stand in errors.py, and the two that stand beside what raises them."""
    assert conveyor.handlers and conveyor.egress.target_guard
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
    return f"{default:.12g}" if isinstance(default, float) else str(default)


def written(spec: str) -> str:
    """SPEC.md with fresh tables."""
    tables = ("setting", settings_table()), ("code", errors_table()), ("metric", reference.metrics_part())
    for heading, table in tables:
        spec, count = re.subn(
            rf"\| {heading} \| (?:default|status|type \| labels) \| \|\n(?:\|.*\n)+", lambda _, t=table: t + "\n", spec
        )
        assert count == 1, heading
    return spec


PARTS: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "peers": peers_table,
    "errors": errors_table,
    "task errors": reference.task_errors_part,
    "reason codes": reference.reason_codes_part,
    "inputs": reference.inputs_part,
    "options": reference.options_part,
    "events": reference.events_part,
    "task events": reference.task_events_part,
    "commands": reference.cli_part,
    "routes": reference.http_part,
    "metrics": reference.metrics_part,
    "limits of requests": limits.requests_part,
    "limits of work": limits.work_part,
    "limits around it": limits.around_part,
}
_MADE = re.compile(r"(<!-- made: ([a-z ]+) -->\n)(?:(?!<!-- ).)*?(<!-- /made -->)", re.DOTALL)


def made_anew(page: str) -> str:
    """A page of the docs with fresh generated parts."""
    return _MADE.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n\n{found[3]}", page)


def parts_of(page: str) -> list[str]:
    return [found[2] for found in _MADE.finditer(page)]


if __name__ == "__main__":
    SPEC.write_text(written(SPEC.read_text()))
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text()
        if (after := made_anew(before)) != before:
            path.write_text(after)

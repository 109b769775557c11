"""`conveyor doctor`: check the environment, and say what to fix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson, Data, Server
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.doctor_checks import Check

_HIDDEN = frozenset({"headers", "gateway", "gateways", "export"})
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    show_options: Annotated[
        bool,
        typer.Option(
            "--show-options",
            help="Show the settings and the options of jobs that are not the default, and where each comes from.",
        ),
    ] = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Check the installation and say what to fix.

    Checks this machine, the data directory, the engines, the server and the key. Exits 1 if a check fails.
    """
    if show_options:
        _print_options(as_json)
        return
    from conveyor.cli.doctor_checks import all_checks
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(url=url, data=data)
    configure_log("error")
    checks = list(all_checks(settings))
    if as_json:
        print_json([check.as_json() for check in checks])
    else:
        _print_table(checks)
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


def _print_options(as_json: bool) -> None:
    from conveyor.cli.job_defaults import job_defaults
    from conveyor.cli.output import print_lines
    from conveyor.config_files import JOB, place_of
    from conveyor.settings import own_files, setting_sources

    settings, files = Settings.load(), own_files()
    shown = [
        {"name": name, "value": _shown(name, str(getattr(settings, name))), "from": source}
        for name, source in setting_sources().items()
    ]
    for name, value in job_defaults().items():
        key = f"{JOB}.{name}"
        shown.append({"name": key, "value": _shown(name, str(value)), "from": place_of(files, key) or ""})
    if as_json:
        print_json(shown)
        return
    columns = [("NAME", 24), ("VALUE", 32), ("FROM", 0)]
    print_lines(columns, (list(row.values()) for row in shown), "All settings and options have their defaults.")


def _shown(name: str, value: str) -> str:
    """A value without secrets: headers and gateways carry them, and so do addresses."""
    from conveyor.telemetry.redact import is_secret_name, redact

    return "(hidden)" if name in _HIDDEN or is_secret_name(name) else redact(value)


def _print_table(checks: "Sequence[Check]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("check", "", "result", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=_COLOURS[check.verdict])
        table.add_row(check.name, verdict, Text(check.found), Text(check.advice or ""))
    Console(highlight=False).print(table)

"""`conveyor doctor`: check the environment, and say what to fix."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson, Data, Server
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.doctor_checks import Check

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Check the installation and say what to fix.

    Checks this machine, the data directory, the engines, the server and the key. Exits 1 if a check fails.
    """
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

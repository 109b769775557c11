"""`conveyor breakers [list] | reset`: list and reset the breakers of a server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Server
from conveyor.errors import BadInput, NotFound
from conveyor.settings import Settings

app = typer.Typer(help="List and reset breakers. A breaker keeps tasks from a target that is down, until it is back.")

AllTenants = Annotated[
    bool, typer.Option("--all-tenants", help="Breakers of all tenants. Needs an administrator's key.")
]

_COLUMNS = [("state", 9), ("since", 20), ("next probe", 20), ("runs", 5), ("error", 16), ("target", 0)]
_TENANT = ("tenant", 16)


@app.callback(invoke_without_command=True)
def breakers(
    context: typer.Context,
    as_json: AsJson = False,
    all_tenants: AllTenants = False,
    url: Server = None,
    data: Data = None,
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, all_tenants, url, data)


@app.command("list")
def list_breakers(
    as_json: AsJson = False, all_tenants: AllTenants = False, url: Server = None, data: Data = None
) -> None:
    """List breakers that are open or half-open."""
    _list(as_json, all_tenants, url, data)


@app.command()
def reset(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="TARGET", help="Targets, as `conveyor breakers` shows them.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Reset all breakers.")] = False,
    all_tenants: AllTenants = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Reset breakers whose targets are back: the tasks that wait for them start at once."""
    from conveyor.cli.connection import connect
    from conveyor.telemetry.redact import printable

    if bool(targets) == every:
        raise BadInput("Pass the targets of breakers, or --all.")
    with connect(Settings.load(url=url, data=data)) as client:
        answer = client.reset_breakers(targets or None, all_tenants)
    if targets and not answer["reset"]:
        raise NotFound("No breaker of these targets is open. `conveyor breakers` shows the current ones.")
    if as_json:
        print_json(answer)
        return
    for each in answer["reset"]:
        tenant = f" of {each['tenant']}" if all_tenants else ""
        print(f"Reset {printable(each['target'])}{tenant}.")
    if not answer["reset"]:
        print("All breakers are closed.")


def _list(as_json: bool, all_tenants: bool, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = client.breakers(all_tenants)
        if as_json:
            print_json_array(rows)
        else:
            columns = [_TENANT, *_COLUMNS] if all_tenants else _COLUMNS
            print_lines(columns, (_row(each, all_tenants) for each in rows), "All breakers are closed.")


def _row(breaker: dict[str, Any], all_tenants: bool) -> list[object]:
    from conveyor.cli import formatting as text

    until = text.moment(breaker["until"]) if breaker["state"] == "open" else "now"
    row = [
        breaker["state"],
        text.moment(breaker["since"]),
        until,
        len(breaker["runs"]),
        breaker["error"],
        breaker["target"],
    ]
    return [breaker["tenant"], *row] if all_tenants else row

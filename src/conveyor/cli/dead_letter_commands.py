"""`conveyor dead-letters [list] | redrive`: list and redrive the dead letters of a server."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Limit, Server
from conveyor.errors import BadInput, NotFound
from conveyor.settings import Settings

app = typer.Typer(
    help="List and redrive dead letters. A dead letter is an ingest or a chunk of tasks that was set aside."
)

_COLUMNS = [("id", 10), ("at", 20), ("queue", 7), ("job", 30), ("redrive", 10), ("reason", 0)]


@app.callback(invoke_without_command=True)
def dead_letters(
    context: typer.Context, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, limit, url, data)


@app.command("list")
def list_dead_letters(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List dead letters, oldest first."""
    _list(as_json, limit, url, data)


@app.command()
def redrive(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Ids of dead letters, from `dead-letters list`.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Redrive all dead letters.")] = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Redrive dead letters: resume ingests, requeue messages, rerun failed tasks.

    Dead letters with nothing left to do are skipped. A task is rerun once no run of its job is in progress.
    """
    from conveyor.cli.connection import connect

    if bool(ids) == every:
        raise BadInput("Pass the ids of dead letters, or --all.")
    with connect(Settings.load(url=url, data=data)) as client:
        counts = client.redrive(ids or [dead_letter["id"] for dead_letter in client.dead_letters()])
    if ids and not counts["redriven"]:
        raise NotFound(
            "No dead letter with these ids can be redriven. `conveyor dead-letters list` shows the current ones."
        )
    if as_json:
        print_json(counts)
    else:
        print(f"{counts['redriven']:,} redriven, {counts['skipped']:,} skipped.")


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.dead_letters(), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_COLUMNS, map(_row, rows), "No dead letters.")


def _row(dead_letter: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    return [
        dead_letter["id"],
        text.moment(dead_letter["at"]),
        dead_letter["queue"],
        dead_letter["job_id"],
        dead_letter["redrive"],
        dead_letter["reason"],
    ]

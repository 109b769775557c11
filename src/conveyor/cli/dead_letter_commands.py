"""`conveyor dead-letters [list] | redrive`: list dead letters, and put them back to work."""

import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Limit, Server
from conveyor.errors import BadInput, NotFound
from conveyor.settings import Settings

app = typer.Typer(help="List dead letters (parts of ingests, and tasks), or redrive them.")

_COLUMNS = [("id", 10), ("at", 20), ("queue", 7), ("job", 30), ("redrive", 10), ("reason", 0)]


@app.callback(invoke_without_command=True)
def dead_letters(
    context: typer.Context, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, limit, url, data)


@app.command("list")
def list_letters(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List dead letters, oldest first."""
    _list(as_json, limit, url, data)


@app.command()
def redrive(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="As `dead-letters list` shows them.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Redrive all dead letters.")] = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Redrive dead letters: resume ingests, requeue messages, and rerun failed tasks.

    Dead letters with nothing left to do are skipped. A task is rerun once no run of its job is in progress.
    """
    from conveyor.cli.connection import connect

    if bool(ids) == every:
        raise BadInput("Give the ids of dead letters, or --all.")
    with connect(Settings.load(url=url, data=data)) as client:
        counts = client.redrive(ids or [letter["id"] for letter in client.dead_letters()])
    if ids and not counts["redriven"]:
        raise NotFound("None of these ids is a dead letter that can be redriven.")
    if as_json:
        print_json(counts)
    else:
        print(f"{counts['redriven']:,} redriven, {counts['skipped']:,} skipped.")


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice(client.dead_letters(), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_COLUMNS, map(_row, found), "There are no dead letters.")


def _row(letter: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    return [
        letter["id"],
        text.moment(letter["at"]),
        letter["queue"],
        letter["job_id"],
        letter["redrive"],
        letter["reason"],
    ]

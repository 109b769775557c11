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
    help="List and redrive dead letters. A dead letter is an ingest or a task that was set aside after its retries."
)

_COLUMNS = [("id", 36), ("at", 20), ("queue", 7), ("job", 30), ("error", 18), ("redrive", 10), ("reason", 0)]

ErrorCode = Annotated[
    str | None, typer.Option("--error-code", metavar="CODE", help="Only dead letters with this error code.")
]
OfJob = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only dead letters of this job.")]


@app.callback(invoke_without_command=True)
def dead_letters(
    context: typer.Context,
    error_code: ErrorCode = None,
    job: OfJob = None,
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    if context.invoked_subcommand is None:
        _list(error_code, job, as_json, limit, url, data)


@app.command("list")
def list_dead_letters(
    error_code: ErrorCode = None,
    job: OfJob = None,
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    """List dead letters: messages, oldest first, then tasks by run."""
    _list(error_code, job, as_json, limit, url, data)


@app.command()
def redrive(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Ids of dead letters, from `dead-letters list`.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    error_code: ErrorCode = None,
    job: OfJob = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Redrive dead letters: resume ingests, requeue messages, rerun failed tasks.

    Pass ids, or --all, --error-code or --job. Dead letters with nothing left to do are skipped. A task is rerun once no
    run of its job is in progress; all chosen tasks of a job are one rerun.
    """
    from conveyor.cli.connection import connect

    if bool(ids) == (every or error_code is not None or job is not None):
        raise BadInput("Pass the ids of dead letters, or else --all, --error-code or --job.")
    with connect(Settings.load(url=url, data=data)) as client:
        done = client.redrive(ids or None, all=every, error_code=error_code, job_id=job)
    if ids and not done["redriven"]:
        raise NotFound(
            "No dead letter with these ids can be redriven. `conveyor dead-letters list` shows the current ones."
        )
    if as_json:
        print_json(done)
        return
    print(f"{done['redriven']:,} redriven, {done['skipped']:,} skipped.")
    for run in done["runs"]:
        print(f"{run['job_id']} has a new run.")


def _list(
    error_code: str | None, job: str | None, as_json: bool, limit: int | None, url: str | None, data: Path | None
) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.dead_letters(error_code=error_code, job_id=job), limit)
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
        dead_letter["error_code"] or "",
        dead_letter["redrive"],
        dead_letter["reason"],
    ]

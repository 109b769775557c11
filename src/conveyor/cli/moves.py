"""`conveyor invalid | delete`: what was left out of a job, and how to be rid of it."""

import itertools
import sys
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Limit, Server
from conveyor.errors import BadInput
from conveyor.settings import Settings

_INVALID = [("line", 9), ("reason", 60), ("text", 0)]


def invalid(
    job: JobArgument, limit: Limit = None, as_json: AsJson = False, url: Server = None, data: Data = None
) -> None:
    """List the lines of a job's list that were no task, with the reason of each."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice((line.as_dict() for line in client.job(job).invalid_lines()), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_INVALID, map(_row, found), "Every line was a task.")


def delete(
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Delete a job with all its results. What runs of it stops."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = client.job(job)
        if not yes:
            _ask(found.data)
        found.delete()
    print(f"Deleted {job}.")


def _ask(job: dict[str, Any]) -> None:
    from conveyor.telemetry.redact import printable

    if not sys.stdin.isatty():
        raise BadInput("Deleting a job needs a yes, and nobody is there to be asked: add --yes.")
    name = f" ({printable(job['name'])})" if job.get("name") else ""
    question = f"Delete {job['id']}{name}, {job['state']}, with its {job['run']['total']:,} tasks and their results?"
    typer.confirm(question, abort=True, err=True)


def _row(line: dict[str, Any]) -> list[object]:
    return [line["line"], line["reason"], line["text"]]

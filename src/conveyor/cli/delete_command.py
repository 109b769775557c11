"""`conveyor delete`: delete a job and its results."""

import sys
from typing import Annotated, Any

import typer

from conveyor.cli.shared_options import Data, JobArgument, Server
from conveyor.errors import BadInput
from conveyor.settings import Settings


def delete(
    job: JobArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Delete a job and all its results. A running job stops first."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        handle = client.job(job)
        if not yes:
            _confirm(handle.data)
        handle.delete()
    print(f"Deleted {job}.")


def _confirm(job: dict[str, Any]) -> None:
    from conveyor.telemetry.redact import printable

    if not sys.stdin.isatty():
        raise BadInput("Cannot ask for confirmation without a terminal. Pass --yes to delete the job.")
    name = f" ({printable(job['name'])})" if job.get("name") else ""
    question = f"Delete {job['id']}{name}, {job['state']}, with its {job['run']['total']:,} tasks and their results?"
    typer.confirm(question, abort=True, err=True)

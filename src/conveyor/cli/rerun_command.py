"""`conveyor rerun`: tasks of a job once more, as a run of its own."""

from typing import Annotated

import typer

from conveyor.cli.output import print_json
from conveyor.cli.shared_options import (
    AsJson,
    Attempts,
    Concurrency,
    Data,
    Gateway,
    Headers,
    JobArgument,
    Rate,
    Server,
    Timeout,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings

_WHICH = "Which tasks"


def rerun(
    job: JobArgument,
    failed: Annotated[
        bool, typer.Option("--failed", rich_help_panel=_WHICH, help="Those that failed; without any choice, these.")
    ] = False,
    cancelled: Annotated[
        bool, typer.Option("--cancelled", rich_help_panel=_WHICH, help="Those that were cancelled.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", rich_help_panel=_WHICH, help="All of them.")] = False,
    error_code: Annotated[
        str | None, typer.Option("--error-code", metavar="CODE", rich_help_panel=_WHICH, help="Those that failed so.")
    ] = None,
    http_status: Annotated[
        int | None, typer.Option("--http-status", min=100, max=599, rich_help_panel=_WHICH, help="Those with this one.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", rich_help_panel=_WHICH, help="Those with this tag.")] = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Run tasks of a job again, each chosen by how it came out last; several choices must all match. A job whose list
    could not be ingested goes on where it stopped, once what stopped it is mended."""
    from conveyor.cli.connection import connect

    if every and (failed or cancelled or error_code or http_status or tag):
        raise BadInput("--all is all of them: it goes with no other choice.")
    options = job_spec(
        concurrency=concurrency, rate=rate, attempts=attempts, timeout=timeout, headers=header, gateway=gateway
    )
    with connect(Settings.load(url=url, data=data)) as client:
        again = client.job(job).rerun(
            failed=failed,
            cancelled=cancelled,
            all=every,
            error_code=error_code,
            http_status=http_status,
            tag=tag,
            **options,
        )
    if as_json:
        print_json(again.data)
    else:
        print(f"{again.id} is {again.state} again, run {again.data['run']['number']}.")

"""`conveyor duplicate`: submit a new job with the list and the options of a job."""

from typing import Annotated

import typer

from conveyor.cli.shared_options import (
    AsJson,
    Data,
    JobArgument,
    MoreOptions,
    Name,
    OptionsFile,
    Server,
    job_spec,
)
from conveyor.settings import Settings


def duplicate(
    job: JobArgument,
    name: Name = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Watch the new job until it finishes. Exit codes as for `watch`.")
    ] = False,
    option: MoreOptions = None,
    options: OptionsFile = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Submit a new job with the list and the options of a job.

    The server makes it, so that headers and other secrets go along without being shown. An open job becomes a closed
    one with the tasks that it has so far.
    """
    from conveyor.cli.connection import connect
    from conveyor.cli.output import print_json
    from conveyor.cli.watch_command import watch_job

    spec = job_spec(option=option, options=options)
    with connect(Settings.load(url=url, data=data)) as client:
        made = client.job(job).duplicate(name=name, **spec)
        if wait:
            raise typer.Exit(watch_job(made, as_json, name or made.id))
    if as_json:
        print_json(made.data)
    else:
        print(made.id)

"""`conveyor run`: a list in, an archive out, in this process, without a server."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.shared_options import (
    AllowPrivate,
    App,
    AsJson,
    Attempts,
    Concurrency,
    Download,
    ExportSpec,
    Gateway,
    Handler,
    Headers,
    Lists,
    Name,
    Rate,
    Timeout,
    WhenInvalid,
    job_spec,
)
from conveyor.model import MAX_RETENTION_DAYS, OnInvalid
from conveyor.settings import Settings


def run(
    lists: Lists,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT.zip", help="The archive to write.")],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="DIR",
            help="Keep the run's data here, and leave it there. [CONVEYOR_DATA, else OUT.zip.conveyor beside the "
            "archive, removed when the archive is written]",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run that was stopped, with the options it was started with."),
    ] = False,
    concurrency: Concurrency = None,
    rate: Rate = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    handler: Handler = None,
    download: Download = False,
    export: ExportSpec = None,
    on_invalid: WhenInvalid = None,
    name: Name = None,
    app: App = None,
    allow_private_targets: AllowPrivate = False,
    as_json: AsJson = False,
) -> None:
    """Run every task of a list and write the results to one zip archive.

    Ctrl-C stops cleanly; the same command with --resume goes on where it stopped.

    A list that can not be read to its end: the archive has what was fetched, and --resume goes on with the list mended.

    Exits 0 when all tasks succeeded, 3 when some failed, 2 on bad input.
    """
    from conveyor.accept.option_limits import check_limits
    from conveyor.accept.spec import decode_spec
    from conveyor.cli.local_run import RunPlan, run_here
    from conveyor.cli.run_directory import check_data, check_lists, check_out, default_data, is_default

    check_out(out)
    check_lists(lists)
    spec = job_spec(
        concurrency=concurrency,
        handler=handler,
        download=download,
        export=export,
        rate=rate,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
        name=name,
        # Nobody has to come back for what was left out: it is said before anything is run.
        on_invalid=on_invalid or OnInvalid.REJECT,
    )
    # An unfinished run waits for its user, for as long as any job may.
    spec["retention_days"] = MAX_RETENTION_DAYS
    # As a server checks them, and before anything is opened, staged or started.
    check_limits(decode_spec(json.dumps(spec).encode()))
    flags: dict[str, Any] = {"app": app, "allow_private_targets": allow_private_targets or None}
    settings = Settings.load(data=data, **flags)
    temporary = data is None and is_default(settings)
    if temporary:
        settings = Settings.load(data=default_data(out), **flags)
    check_data(settings.data)
    plan = RunPlan(
        lists=lists, spec=spec, out=out, settings=settings, resume=resume, temporary=temporary, title=name or out.name
    )
    raise typer.Exit(run_here(plan, as_json))

"""`conveyor rerun`: start a new run over tasks of a job."""

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
    Http2,
    Insecure,
    JobArgument,
    MaxLifetime,
    NoBreaker,
    PaceOption,
    Patience,
    Rate,
    RetentionDays,
    Server,
    Timeout,
    Wait,
    WhenExhausted,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings

_SELECT = "Tasks to rerun"
_EXTRACT = "Extract again"
_COMPARE = "Compare"


def rerun(
    job: JobArgument,
    failed: Annotated[
        bool,
        typer.Option("--failed", rich_help_panel=_SELECT, help="Failed tasks (the default)."),
    ] = False,
    cancelled: Annotated[bool, typer.Option("--cancelled", rich_help_panel=_SELECT, help="Cancelled tasks.")] = False,
    every: Annotated[bool, typer.Option("--all", rich_help_panel=_SELECT, help="All tasks.")] = False,
    error_code: Annotated[
        str | None,
        typer.Option(
            "--error-code",
            "--error",
            metavar="CODE",
            rich_help_panel=_SELECT,
            help="Tasks that failed with this error code.",
        ),
    ] = None,
    http_status: Annotated[
        int | None,
        typer.Option("--http-status", min=100, max=599, rich_help_panel=_SELECT, help="Tasks with this HTTP status."),
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", rich_help_panel=_SELECT, help="Tasks with this tag.")] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", rich_help_panel=_SELECT, help="Tasks with this host in their URL."),
    ] = None,
    task: Annotated[
        list[int] | None,
        typer.Option(
            "--task", min=0, metavar="INDEX", rich_help_panel=_SELECT, help="This task, by its index; repeat for more."
        ),
    ] = None,
    damaged: Annotated[
        bool,
        typer.Option("--damaged", rich_help_panel=_SELECT, help="Tasks whose stored body is damaged or missing."),
    ] = False,
    extract_only: Annotated[
        bool,
        typer.Option(
            "--extract-only",
            rich_help_panel=_EXTRACT,
            help="Make no request: extract again from the stored bodies, by default from all of them.",
        ),
    ] = False,
    changed_only: Annotated[
        bool,
        typer.Option(
            "--changed-only",
            rich_help_panel=_COMPARE,
            help="Ask servers for pages that have changed, by default for all. The others count as unchanged and keep "
            "their bodies.",
        ),
    ] = False,
    handler: Annotated[
        str | None,
        typer.Option(
            "--handler",
            metavar="NAME",
            rich_help_panel=_EXTRACT,
            help="With --extract-only: the registered Python function to call. [that of the job's --extract]",
        ),
    ] = None,
    concurrency: Concurrency = None,
    rate: Rate = None,
    pace: PaceOption = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    insecure: Insecure = False,
    http2: Http2 = False,
    retention_days: RetentionDays = None,
    max_lifetime: MaxLifetime = None,
    patience: Patience = None,
    no_breaker: NoBreaker = False,
    on_exhausted: WhenExhausted = None,
    wait: Wait = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Rerun tasks of a job, by default the failed ones.

    Tasks are selected by their latest result. Several conditions must all match. A failed task whose body is stored and
    only its --extract failed is extracted again, without a request.

    If the ingest of the job failed, rerun resumes it where it stopped. Fix the cause first.
    """
    from conveyor.cli.connection import connect
    from conveyor.cli.watch_command import watch_job

    if every and (failed or cancelled or error_code or http_status or tag or damaged or host or task):
        raise BadInput(
            "--all selects every task and cannot be combined with other conditions. Drop --all or the others."
        )
    if handler is not None and not extract_only:
        raise BadInput("--handler names a function for --extract-only. Pass both, or neither.")
    options = job_spec(
        extract=handler,
        concurrency=concurrency,
        rate=rate,
        pace=pace,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
        insecure=insecure,
        http2=http2,
        retention_days=retention_days,
        max_lifetime=max_lifetime,
        patience=patience,
        no_breaker=no_breaker,
        on_exhausted=on_exhausted,
    )
    with connect(Settings.load(url=url, data=data)) as client:
        handle = client.job(job).rerun(
            failed=failed,
            cancelled=cancelled,
            all=every,
            error_code=error_code,
            http_status=http_status,
            tag=tag,
            damaged=damaged,
            extract_only=extract_only,
            changed_only=changed_only,
            host=host,
            indexes=task,
            **options,
        )
        if wait:
            raise typer.Exit(watch_job(handle, as_json))
    if as_json:
        print_json(handle.data)
    else:
        print(f"{handle.id} is {handle.state}, run {handle.data['run']['number']}.")

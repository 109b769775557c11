"""`conveyor submit`: upload a list to a server and create a job from it."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli.shared_options import (
    AsJson,
    Attempts,
    Concurrency,
    Data,
    Download,
    DropBodies,
    ExportSpec,
    Extract,
    Gateway,
    Handler,
    Headers,
    Http2,
    Insecure,
    Lists,
    MaxLifetime,
    MoreOptions,
    Name,
    NoBreaker,
    OptionsFile,
    PaceOption,
    Patience,
    Rate,
    RetentionDays,
    Server,
    Timeout,
    UrlColumn,
    Wait,
    WhenExhausted,
    WhenInvalid,
    job_spec,
)
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client, Job


def submit(
    lists: Lists,
    name: Name = None,
    wait: Wait = False,
    concurrency: Concurrency = None,
    rate: Rate = None,
    pace: PaceOption = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    insecure: Insecure = False,
    http2: Http2 = False,
    patience: Patience = None,
    no_breaker: NoBreaker = False,
    handler: Handler = None,
    extract: Extract = None,
    drop_bodies: DropBodies = False,
    download: Download = False,
    export: ExportSpec = None,
    option: MoreOptions = None,
    options: OptionsFile = None,
    url_column: UrlColumn = None,
    on_invalid: WhenInvalid = None,
    retention_days: RetentionDays = None,
    max_lifetime: MaxLifetime = None,
    replaces: Annotated[
        str | None,
        typer.Option(
            "--replaces",
            metavar="JOB",
            help="Take the place of this job, named by its id or its idempotency key: cancel it, and start no task "
            "before it has stopped.",
        ),
    ] = None,
    on_exhausted: WhenExhausted = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Submit a list of tasks and print the id of the job.

    The list may also be one http or https URL, which the server reads.

    Exits 0 once the server has the job; with --wait as `watch` does; 2 if no line of a list of yours is a task.
    """
    from conveyor.cli.connection import connect
    from conveyor.cli.output import count_invalid_lines, print_json
    from conveyor.cli.run_directory import check_lists, expand_lists, is_plain_file
    from conveyor.cli.staging import refuse_unreadable
    from conveyor.cli.watch_command import watch_job

    lists = expand_lists(lists)
    if not _is_remote(lists):
        check_lists(lists)
    settings = Settings.load(url=url, data=data)
    spec = job_spec(
        is_new=True,
        concurrency=concurrency,
        handler=handler,
        extract=extract,
        drop_bodies=drop_bodies,
        download=download,
        export=export,
        rate=rate,
        pace=pace,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
        insecure=insecure,
        http2=http2,
        patience=patience,
        no_breaker=no_breaker,
        name=name,
        on_invalid=on_invalid,
        option=option,
        options=options,
        retention_days=retention_days,
        max_lifetime=max_lifetime,
        on_exhausted=on_exhausted,
    )
    if len(lists) == 1 and is_plain_file(lists[0]):
        refuse_unreadable(lists[0], spec.get("kind"), url_column)
    with connect(settings) as client:
        job = _send(client, lists, {**spec, "replaces": replaces}, settings.max_list_bytes, url_column)
        if wait:
            raise typer.Exit(watch_job(job, as_json, _name_of(lists)))
    if as_json:
        print_json(job.data)
    else:
        print(job.id)
    if job.invalid:
        # Of a longer list, only the ingest tells.
        skipped = f"{count_invalid_lines(job.invalid)} skipped; `conveyor invalid {job.id}` lists them."
        print(skipped, file=sys.stderr)


def _send(
    client: "Client", lists: Sequence[str], spec: dict[str, Any], max_bytes: int, url_column: str | None
) -> "Job":
    """Upload the list and create the job. Retries share one idempotency key, so there is one upload and one job."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.bar_view import view_bytes
    from conveyor.cli.staging import format_of, refuse_without_tasks, single_file
    from conveyor.client import RemoteList

    def uploading(sent: int, total: int | None) -> None:
        show(view_bytes("uploading", sent, total))

    if _is_remote(lists):
        with progress_bar(spec.get("name") or _name_of(lists)) as show:
            remote = RemoteList(lists[0], format=format_of([_name_of(lists)]))
            return client.submit(remote, url_column=url_column, progress=uploading, **spec)
    with (
        progress_bar(spec.get("name") or _name_of(lists)) as show,
        single_file(
            lists, max_bytes, lambda size: show(view_bytes("reading", size, None)), spec.get("kind"), url_column
        ) as path,
    ):
        # Several lists are joined into one of tasks, which has no columns.
        form, column = format_of(lists), url_column if len(lists) == 1 else None
        refuse_without_tasks(path, form, spec.get("kind"), column, max_bytes)
        return client.submit(
            path,
            format=form,
            url_column=column,
            progress=uploading,
            **spec,
        )


def _is_remote(lists: Sequence[str]) -> bool:
    """Whether it is one list that the server may read itself."""
    return len(lists) == 1 and lists[0].lower().startswith(("s3://", "gs://", "az://", "http://", "https://"))


def _name_of(lists: Sequence[str]) -> str:
    """The file name of the first list. The query of a URL may be secret."""
    name = lists[0].partition("?")[0] if _is_remote(lists) else lists[0]
    return Path(name).name

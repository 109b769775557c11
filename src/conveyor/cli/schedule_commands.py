"""`conveyor schedules [list] | create | show | run | pause | resume | delete`: jobs that the server starts by cron."""

import itertools
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import count_invalid_lines, print_json, print_json_array, print_lines
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
    Limit,
    MaxLifetime,
    MoreOptions,
    NoBreaker,
    OptionsFile,
    PaceOption,
    Patience,
    Rate,
    RetentionDays,
    Server,
    Timeout,
    UrlColumn,
    WhenExhausted,
    WhenInvalid,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings

app = typer.Typer(help="Start jobs on a cron schedule. Without a command, list the schedules.")

_COLUMNS = [("id", 35), ("cron", 16), ("time zone", 16), ("next", 20), ("fired", 6), ("name", 0)]

Scheduled = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="Id of the schedule, from `schedules list`.", show_default=False)
]


@app.callback(invoke_without_command=True)
def schedules(
    context: typer.Context, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, limit, url, data)


@app.command("list")
def list_schedules(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List schedules, oldest first."""
    _list(as_json, limit, url, data)


@app.command()
def create(
    cron: Annotated[
        str,
        typer.Argument(
            metavar="CRON", help="Cron expression with five fields, such as '0 6 * * MON-FRI'.", show_default=False
        ),
    ],
    tasks: Annotated[
        Path | None,
        typer.Argument(metavar="LIST", help="List of tasks, uploaded once, now.", show_default=False),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Read the list from this http or s3 URL at each fire."),
    ] = None,
    zone: Annotated[
        str, typer.Option("--timezone", metavar="NAME", help="Time zone of the cron expression, such as Europe/Berlin.")
    ] = "UTC",
    missed: Annotated[
        str | None,
        typer.Option(
            "--missed", metavar="HOW", help="What to do about missed fires: coalesce, skip or all. [coalesce]"
        ),
    ] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Create the schedule paused.")] = False,
    changed_only: Annotated[
        bool,
        typer.Option(
            "--changed-only",
            help="Compare the pages of each job with those of the last one that has finished. The same count as "
            "unchanged.",
        ),
    ] = False,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Name of the schedule.")] = None,
    concurrency: Concurrency = None,
    handler: Handler = None,
    extract: Extract = None,
    drop_bodies: DropBodies = False,
    download: Download = False,
    export: ExportSpec = None,
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
    option: MoreOptions = None,
    options: OptionsFile = None,
    url_column: UrlColumn = None,
    on_invalid: WhenInvalid = None,
    retention_days: RetentionDays = None,
    max_lifetime: MaxLifetime = None,
    on_exhausted: WhenExhausted = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Create a schedule that starts a job at each fire."""
    from conveyor.cli.connection import connect
    from conveyor.cli.staging import format_of, refuse_unreadable, refuse_without_tasks

    if (tasks is None) == (source is None):
        raise BadInput("Pass a list of tasks, or --from with the URL of a list.")
    if tasks is not None and not tasks.is_file():
        raise BadInput(f"List {tasks} not found.")
    job = job_spec(
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
        option=option,
        options=options,
        on_invalid=on_invalid,
        retention_days=retention_days,
        max_lifetime=max_lifetime,
        on_exhausted=on_exhausted,
    )
    spec = {"cron": cron, "timezone": zone, "name": name, "paused": paused, "missed": missed or "coalesce"}
    if changed_only:
        spec["changed_only"] = True
    settings = Settings.load(url=url, data=data)
    if tasks is not None:
        refuse_unreadable(str(tasks), job.get("kind"), url_column)
    with connect(settings) as client:
        if tasks is not None:
            form = format_of([str(tasks)])
            refuse_without_tasks(tasks, form, job.get("kind"), url_column, settings.max_list_bytes)
            read = {"upload_id": client.upload(tasks).upload_id, "format": form}
        else:
            read = {"url": source, "format": format_of([source.partition("?")[0]]) if source else None}
        read["url_column"] = url_column
        job["source"] = {field: value for field, value in read.items() if value is not None}
        body, key = {**spec, "job": job}, secrets.token_hex(16)
        created = client.request("POST", "/v1/schedules", body=body, idempotency_key=key)
    if as_json:
        print_json(created)
        return
    print(created["id"])
    _print_fires(created)


@app.command()
def show(schedule: Scheduled, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Show a schedule: its next fires, and the jobs of its last fires with their outcomes."""
    from conveyor.cli import formatting as text
    from conveyor.cli.connection import connect
    from conveyor.client import path_of
    from conveyor.telemetry.redact import printable

    with connect(Settings.load(url=url, data=data)) as client:
        shown = client.request("GET", path_of("schedules", schedule))
    if as_json:
        print_json(shown)
        return
    state = "paused" if shown["paused"] else "active"
    print(f"{shown['id']}  {shown['cron']}  {shown['timezone']}  {state}  {printable(shown['name'] or '')}".rstrip())
    print(f"  {shown['cron_text']}")
    for fire in shown["fires"]:
        more = f" (for {fire['coalesced']:,} missed fires too)" if fire["coalesced"] else ""
        print(f"  fired  {text.moment(fire['at'])}  {fire['job_id'] or printable(fire['error'])}{_outcome(fire)}{more}")
    _print_fires(shown)


@app.command()
def run(schedule: Scheduled, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Fire a schedule now, besides its times. Prints the id of the job that it starts."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        fire = client.request("POST", path_of("schedules", schedule, "run"))
    if as_json:
        print_json(fire)
    else:
        print(fire["job_id"])


@app.command()
def pause(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Pause a schedule: it does not fire until `resume`."""
    _change(schedule, True, url, data)


@app.command()
def resume(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Resume a paused schedule. Fires missed meanwhile are skipped."""
    _change(schedule, False, url, data)


@app.command()
def delete(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Delete a schedule. The jobs it started are kept."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("DELETE", path_of("schedules", schedule))
    print(f"Deleted {schedule}.")


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.pages("/v1/schedules"), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_COLUMNS, map(_row, rows), "No schedules.")


def _change(schedule: str, paused: bool, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        changed = client.request("PATCH", path_of("schedules", schedule), body={"paused": paused})
    print(f"{schedule} is {'paused' if paused else 'active'}.")
    _print_fires(changed)


def _print_fires(schedule: dict[str, Any]) -> None:
    from conveyor.cli import formatting as text

    for at in schedule["next_fires"]:
        print(f"  next   {text.moment(at)}")


def _outcome(fire: dict[str, Any]) -> str:
    """What the job of a fire has come to; nothing for one that does not exist yet, or no more."""
    outcome = fire["outcome"]
    if outcome is None:
        return ""
    counts = outcome["counts"]
    parts = [f"{counts[name]:,} {name}" for name in ("succeeded", "unchanged", "failed", "cancelled") if counts[name]]
    left = outcome["total"] - sum(counts[name] for name in ("succeeded", "failed", "cancelled"))
    parts += [f"{left:,} not finished"] if left > 0 else []
    skipped = outcome.get("invalid_lines", 0)
    parts += [f"{count_invalid_lines(skipped)} skipped"] if skipped else []
    return "  " + ", ".join([outcome["state"], *parts])


def _row(schedule: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    next_fire = text.moment(schedule["next_fires"][0]) if schedule["next_fires"] else "paused"
    return [schedule["id"], schedule["cron"], schedule["timezone"], next_fire, schedule["fired"], schedule["name"]]

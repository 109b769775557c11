"""`conveyor schedules [list] | create | show | pause | resume | delete`: jobs that a server makes by cron."""

import itertools
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import (
    AsJson,
    Attempts,
    Concurrency,
    Data,
    Gateway,
    Handler,
    Headers,
    Limit,
    Name,
    Rate,
    Server,
    Timeout,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings

app = typer.Typer(help="Jobs that the server makes again and again, by cron.")

_COLUMNS = [("id", 35), ("cron", 16), ("time zone", 16), ("next", 20), ("fired", 6), ("name", 0)]

Scheduled = Annotated[str, typer.Argument(metavar="SCHEDULE", help="As `schedules list` shows it.", show_default=False)]


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
        typer.Argument(metavar="CRON", help="Five fields, as '0 6 * * MON-FRI'.", show_default=False),
    ],
    tasks: Annotated[
        Path | None,
        typer.Argument(metavar="LIST", help="A file with the tasks, sent to the server now.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Read the list from here, anew at each fire.")
    ] = None,
    zone: Annotated[str, typer.Option("--timezone", metavar="NAME", help="Such as Europe/Berlin.")] = "UTC",
    missed: Annotated[
        str | None,
        typer.Option("--missed", metavar="HOW", help="Fires nobody was there for: coalesce, skip or all. [coalesce]"),
    ] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Do not fire before it is resumed.")] = False,
    name: Name = None,
    concurrency: Concurrency = None,
    handler: Handler = None,
    rate: Rate = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Have a job made at these times."""
    from conveyor.cli.connection import connect

    if (tasks is None) == (source is None):
        raise BadInput("Give a file with the tasks, or --from with the URL of a list.")
    if tasks is not None and not tasks.is_file():
        raise BadInput(f"There is no file {tasks}.")
    job = job_spec(
        concurrency=concurrency,
        handler=handler,
        rate=rate,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
    )
    spec = {"cron": cron, "timezone": zone, "name": name, "paused": paused, "missed": missed or "coalesce"}
    with connect(Settings.load(url=url, data=data)) as client:
        if tasks is not None:
            job["source"] = {"upload_id": client.upload(tasks).upload_id}
        else:
            job["source"] = {"url": source}
        body, key = {**spec, "job": job}, secrets.token_hex(16)
        made = client.request("POST", "/v1/schedules", body=body, idempotency_key=key)
    if as_json:
        print_json(made)
        return
    print(made["id"])
    _print_fires(made)


@app.command()
def show(schedule: Scheduled, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Show a schedule: its next fires, and what came of the last ones."""
    from conveyor.cli import formatting as text
    from conveyor.cli.connection import connect
    from conveyor.client import path_of
    from conveyor.telemetry.redact import printable

    with connect(Settings.load(url=url, data=data)) as client:
        found = client.request("GET", path_of("schedules", schedule))
    if as_json:
        print_json(found)
        return
    state = "paused" if found["paused"] else "active"
    print(f"{found['id']}  {found['cron']}  {found['timezone']}  {state}  {printable(found['name'] or '')}".rstrip())
    for fire in found["fires"]:
        more = f" (and {fire['coalesced']:,} missed before)" if fire["coalesced"] else ""
        print(f"  fired  {text.moment(fire['at'])}  {fire['job_id'] or printable(fire['error'])}{more}")
    _print_fires(found)


@app.command()
def pause(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Do not fire until it is resumed."""
    _change(schedule, True, url, data)


@app.command()
def resume(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Fire again, from now on."""
    _change(schedule, False, url, data)


@app.command()
def delete(schedule: Scheduled, url: Server = None, data: Data = None) -> None:
    """Remove a schedule. The jobs that it made stay."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("DELETE", path_of("schedules", schedule))
    print(f"Deleted {schedule}.")


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice(client.pages("/v1/schedules"), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_COLUMNS, map(_row, found), "There are no schedules.")


def _change(schedule: str, paused: bool, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        found = client.request("PATCH", path_of("schedules", schedule), body={"paused": paused})
    print(f"{schedule} is {'paused' if paused else 'active'}.")
    _print_fires(found)


def _print_fires(schedule: dict[str, Any]) -> None:
    from conveyor.cli import formatting as text

    for at in schedule["next_fires"]:
        print(f"  next   {text.moment(at)}")


def _row(schedule: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    coming = text.moment(schedule["next_fires"][0]) if schedule["next_fires"] else "paused"
    return [schedule["id"], schedule["cron"], schedule["timezone"], coming, schedule["fired"], schedule["name"]]

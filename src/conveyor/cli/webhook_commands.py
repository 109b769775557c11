"""`conveyor webhooks`: who is told of jobs, and what they were sent. `list`, `create`, `show`, `enable`, `disable`,
`rotate`, `delete`, `deliveries`, `redeliver` and `secret`."""

import itertools
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Limit, Server
from conveyor.settings import Settings

app = typer.Typer(help="Endpoints that are told of jobs by signed requests, and what they were sent.")

_COLUMNS = [("id", 34), ("state", 9), ("events", 30), ("url", 0)]
_SENT = [("event", 14), ("status", 9), ("tries", 5), ("last", 15), ("at", 20), ("id", 0)]

Endpoint = Annotated[str, typer.Argument(metavar="WEBHOOK", help="As `webhooks list` shows it.", show_default=False)]


@app.callback(invoke_without_command=True)
def webhooks(
    context: typer.Context, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, limit, url, data)


@app.command("list")
def list_webhooks(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List endpoints, oldest first."""
    _list(as_json, limit, url, data)


@app.command()
def create(
    target: Annotated[str, typer.Argument(metavar="URL", help="Where events are sent to.", show_default=False)],
    events: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="NAME", help="Only this one, such as run.completed; may be repeated. [all]"),
    ] = None,
    description: Annotated[str | None, typer.Option("--description", metavar="TEXT", help="What it is for.")] = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Make an endpoint and print its secret, which is not shown again."""
    from conveyor.cli.connection import connect

    spec = {"url": target, "events": events or None, "description": description}
    with connect(Settings.load(url=url, data=data)) as client:
        made = client.request("POST", "/v1/webhooks", body=spec, idempotency_key=secrets.token_hex(16))
    _print_secret(made, as_json)


@app.command()
def show(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Show an endpoint, as JSON."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        print_json(client.request("GET", path_of("webhooks", webhook)))


@app.command()
def enable(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Send to an endpoint again that was disabled, or had answered that it is gone."""
    _change(webhook, {"disabled": False}, "Enabled", url, data)


@app.command()
def disable(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Send nothing more to an endpoint for now."""
    _change(webhook, {"disabled": True}, "Disabled", url, data)


@app.command()
def rotate(webhook: Endpoint, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Give an endpoint a new secret and print it. The old one signs beside it for a day."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        _print_secret(client.request("POST", path_of("webhooks", webhook, "rotate")), as_json)


@app.command()
def delete(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Remove an endpoint. What is on its way to it is dropped."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("DELETE", path_of("webhooks", webhook))
    print(f"Deleted {webhook}.")


@app.command()
def deliveries(
    webhook: Endpoint, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    """List what an endpoint was sent, oldest event first, and what came of it."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice(client.pages(path_of("webhooks", webhook, "deliveries")), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_SENT, map(_sent, found), "Nothing was sent yet.")


@app.command()
def redeliver(
    delivery: Annotated[
        str, typer.Argument(metavar="DELIVERY", help="As `webhooks deliveries` shows it.", show_default=False)
    ],
    url: Server = None,
    data: Data = None,
) -> None:
    """Send an event again, now, under the same id."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("POST", path_of("webhooks", "deliveries", delivery, "redeliver"))
    print(f"{delivery} is on its way again.")


@app.command()
def secret(url: Server = None, data: Data = None) -> None:
    """Print the secret that signs what is sent to URLs which jobs name themselves."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        print(client.request("GET", "/v1/webhooks/secret")["secret"])


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice(client.pages("/v1/webhooks"), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_COLUMNS, map(_row, found), "There are no endpoints.")


def _change(webhook: str, change: dict[str, Any], done: str, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("PATCH", path_of("webhooks", webhook), body=change)
    print(f"{done} {webhook}.")


def _print_secret(made: dict[str, Any], as_json: bool) -> None:
    from conveyor.cli.guard import complain

    if as_json:
        print_json(made)
        return
    complain(f"{made['id']}; its secret is not shown again:")
    print(made["secret"])


def _row(webhook: dict[str, Any]) -> list[object]:
    events = "all" if webhook["events"] is None else ", ".join(webhook["events"]) or "none of its own"
    return [webhook["id"], "disabled" if webhook["disabled"] else "active", events, webhook["url"]]


def _sent(delivery: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    last = delivery["log"][-1] if delivery["log"] else {}
    came = last.get("error") or last.get("status")
    at = text.moment(last.get("at") or delivery["created_at"])
    return [delivery["event"], delivery["status"], delivery["attempts"], came, at, delivery["id"]]

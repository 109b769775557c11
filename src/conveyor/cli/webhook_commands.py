"""`conveyor webhooks`: manage webhook endpoints and their deliveries. `list`, `create`, `show`, `enable`, `disable`,
`test`, `rotate`, `delete`, `deliveries`, `redeliver` and `secret`."""

import itertools
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Limit, Server
from conveyor.settings import Settings

app = typer.Typer(help="Manage webhook endpoints and their deliveries. Endpoints get job events as signed requests.")

_COLUMNS = [("id", 34), ("state", 9), ("events", 30), ("url", 0)]
_DELIVERIES = [("event", 14), ("status", 9), ("attempts", 8), ("response", 15), ("at", 20), ("id", 0)]

Endpoint = Annotated[
    str, typer.Argument(metavar="WEBHOOK", help="Id of the endpoint, from `webhooks list`.", show_default=False)
]


@app.callback(invoke_without_command=True)
def webhooks(
    context: typer.Context, as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None
) -> None:
    if context.invoked_subcommand is None:
        _list(as_json, limit, url, data)


@app.command("list")
def list_webhooks(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List webhook endpoints, oldest first."""
    _list(as_json, limit, url, data)


@app.command()
def create(
    target: Annotated[str, typer.Argument(metavar="URL", help="URL that receives the events.", show_default=False)],
    events: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="NAME", help="Event to send, such as run.completed. Repeatable. [all events]"),
    ] = None,
    description: Annotated[
        str | None, typer.Option("--description", metavar="TEXT", help="A note on what the endpoint is for.")
    ] = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Create a webhook endpoint and print its secret. The secret cannot be shown again."""
    from conveyor.cli.connection import connect

    spec = {"url": target, "events": events or None, "description": description}
    with connect(Settings.load(url=url, data=data)) as client:
        created = client.request("POST", "/v1/webhooks", body=spec, idempotency_key=secrets.token_hex(16))
    _print_secret(created, as_json)


@app.command()
def show(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Show a webhook endpoint as JSON."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        print_json(client.request("GET", path_of("webhooks", webhook)))


@app.command()
def enable(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Enable a webhook endpoint. An endpoint that answers 410 Gone is disabled automatically."""
    _change(webhook, {"disabled": False}, "Enabled", url, data)


@app.command()
def disable(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Disable a webhook endpoint: send nothing to it until `enable`."""
    _change(webhook, {"disabled": True}, "Disabled", url, data)


@app.command()
def test(webhook: Endpoint, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Send a test event to a webhook endpoint. Prints the id of the delivery."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        delivery = client.request("POST", path_of("webhooks", webhook, "test"))
    if as_json:
        print_json(delivery)
    else:
        print(delivery["id"])


@app.command()
def rotate(webhook: Endpoint, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Replace the secret of a webhook endpoint. Prints the new one; for a day, both sign each request."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        _print_secret(client.request("POST", path_of("webhooks", webhook, "rotate")), as_json)


@app.command()
def delete(webhook: Endpoint, url: Server = None, data: Data = None) -> None:
    """Delete a webhook endpoint. Its pending deliveries are dropped."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("DELETE", path_of("webhooks", webhook))
    print(f"Deleted {webhook}.")


@app.command()
def deliveries(
    sender: Annotated[str, typer.Argument(metavar="ID", help="Id of the endpoint, or of a job.", show_default=False)],
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    """List the deliveries of a webhook endpoint, oldest first, or those of a job, by receiver. Those of a job include
    state machines and event buses."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    collection = "jobs" if sender.startswith("job_") else "webhooks"
    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.pages(path_of(collection, sender, "deliveries")), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_DELIVERIES, map(_delivery_row, rows), "No deliveries yet.")


@app.command()
def redeliver(
    delivery: Annotated[
        str,
        typer.Argument(metavar="DELIVERY", help="Id of the delivery, from `webhooks deliveries`.", show_default=False),
    ],
    url: Server = None,
    data: Data = None,
) -> None:
    """Redeliver an event now, with the same event id."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("POST", path_of("webhooks", "deliveries", delivery, "redeliver"))
    print(f"Redelivering {delivery}.")


@app.command()
def secret(url: Server = None, data: Data = None) -> None:
    """Print the secret that signs events for the webhook URLs of single jobs."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        print(client.request("GET", "/v1/webhooks/secret")["secret"])


def _list(as_json: bool, limit: int | None, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.pages("/v1/webhooks"), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_COLUMNS, map(_row, rows), "No webhook endpoints.")


def _change(webhook: str, change: dict[str, Any], verb: str, url: str | None, data: Path | None) -> None:
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        client.request("PATCH", path_of("webhooks", webhook), body=change)
    print(f"{verb} {webhook}.")


def _print_secret(created: dict[str, Any], as_json: bool) -> None:
    from conveyor.cli.guard import complain

    if as_json:
        print_json(created)
        return
    complain(f"Save the secret of {created['id']}; it cannot be shown again:")
    print(created["secret"])


def _row(webhook: dict[str, Any]) -> list[object]:
    events = "all" if webhook["events"] is None else ", ".join(webhook["events"]) or "none"
    state = "disabled" if webhook["disabled"] else "failing" if webhook.get("failing_since") else "active"
    return [webhook["id"], state, events, webhook["url"]]


def _delivery_row(delivery: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    last = delivery["log"][-1] if delivery["log"] else {}
    response = last.get("error") or last.get("status")
    at = text.moment(last.get("at") or delivery["created_at"])
    return [delivery["event"], delivery["status"], delivery["attempts"], response, at, delivery["id"]]

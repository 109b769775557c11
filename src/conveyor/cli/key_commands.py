"""`conveyor keys create | list | revoke`: on the data directory, or through the server that runs on it."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data
from conveyor.errors import DataDirectoryInUse
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client
    from conveyor.model import ApiKey
    from conveyor.system import System

T = TypeVar("T")

app = typer.Typer(
    help="Create, list and revoke API keys. No server is needed.",
    no_args_is_help=True,
)

_COLUMNS = [("key", 26), ("tenant", 16), ("created", 20), ("revoked", 20), ("name", 0)]


@app.command()
def create(
    tenant: Annotated[
        str, typer.Option("--tenant", metavar="NAME", help="Tenant of the key. Jobs and results belong to a tenant.")
    ],
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="A note on what the key is for.")] = None,
    as_json: AsJson = False,
    data: Data = None,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    made = _call(data, lambda system: _create(system, tenant, name), lambda client: client.create_key(tenant, name))
    if as_json:
        print_json(made)
    else:
        print(made["key"])


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only keys of this tenant.")] = None,
    as_json: AsJson = False,
    data: Data = None,
) -> None:
    """List keys, without their secrets."""
    keys = _call(data, lambda system: _list(system, tenant), lambda client: list(client.keys(tenant)))
    if as_json:
        print_json_array(keys)
    else:
        print_lines(_COLUMNS, map(_row, keys), "No keys.")


@app.command()
def revoke(
    key_id: Annotated[
        str, typer.Argument(metavar="KEY_ID", help="Id of the key, from `keys list`.", show_default=False)
    ],
    data: Data = None,
) -> None:
    """Revoke a key. Requests with it are refused from now on.

    The last administrator's key cannot be revoked.
    """
    _call(data, lambda system: _revoke(system, key_id), lambda client: client.revoke_key(key_id))
    print(f"Revoked {key_id}.")


def _call(data: Any, here: Callable[["System"], Awaitable[T]], through: Callable[["Client"], T]) -> T:
    """Call `here` on the data directory, or `through` the API if a server runs on it."""
    from conveyor.cli.loop import run_async
    from conveyor.system import open_system
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(data=data)
    configure_log(settings.log_level, quiet=True, form=settings.log_format)

    async def directly() -> T:
        async with open_system(settings) as system:
            return await here(system)

    try:
        return run_async(directly())
    except DataDirectoryInUse:
        with _owner(settings) as client:
            return through(client)


def _owner(settings: Settings) -> "Client":
    """A client for the server that runs on the data directory, with its local key."""
    from conveyor.cli.connection import local_key_file, local_url_file, read_own_line
    from conveyor.client import Client
    from conveyor.settings import DEFAULT_URL

    key = read_own_line(local_key_file(settings.data))
    if key is None:
        raise DataDirectoryInUse
    # Never to CONVEYOR_URL: that may be another server, which must not get this key.
    return Client(read_own_line(local_url_file(settings.data)) or DEFAULT_URL, key)


async def _create(system: "System", tenant: str, name: str | None) -> dict[str, Any]:
    from conveyor.auth.keys import make_key

    text, key = make_key(system.clock, tenant, name)
    await system.records.access.create_key(key)
    return {"key": text, "key_id": key.key_id}


async def _list(system: "System", tenant: str | None) -> list[dict[str, Any]]:
    from conveyor.model import TenantId

    return [_key_json(key) for key in await system.records.access.keys(TenantId(tenant) if tenant else None)]


async def _revoke(system: "System", key_id: str) -> None:
    from conveyor.auth.keys import revoke as revoke_stored

    await revoke_stored(system.records.access, system.records.documents, system.clock, key_id)


def _key_json(key: "ApiKey") -> dict[str, Any]:
    from conveyor.read.results import iso_time

    return {
        "key_id": key.key_id,
        "tenant": key.tenant,
        "name": key.name,
        "admin": key.admin,
        "created_at": iso_time(key.created_at),
        "expires_at": iso_time(key.expires_at),
        "revoked_at": iso_time(key.revoked_at),
    }


def _row(key: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    moments = text.moment(key["created_at"]), text.moment(key["revoked_at"])
    return [key["key_id"], key["tenant"], *moments, key["name"]]

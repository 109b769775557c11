"""`conveyor dashboard`: print a link to the dashboard of a server."""

from typing import TYPE_CHECKING

from conveyor.cli.shared_options import Data, Server
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.system import System


def dashboard(url: Server = None, data: Data = None) -> None:
    """Print a link that opens the dashboard and signs you in. It works once, and expires after an hour."""
    from conveyor.cli.connection import connect, server_url

    settings = Settings.load(url=url, data=data)
    with connect(settings) as client:
        link = client.request("POST", "/v1/sign-in/links")
    print(server_url(settings).rstrip("/") + link["path"])


async def dashboard_link(system: "System", key: str | None) -> str:
    """What follows the address of a server that starts, in its greeting: a path that signs in, on a terminal. Elsewhere
    the output goes to a log, whose readers must not be signed in."""
    import sys

    if sys.stdout.isatty():
        return await sign_in_path(system, key)
    return "/ (`conveyor dashboard` prints a link that signs in)"


async def sign_in_path(system: "System", key: str | None) -> str:
    """The path of the dashboard for a server that starts, with a one-time sign-in for the key. Without a valid key the
    path has no sign-in."""
    from conveyor.auth.keys import authenticate
    from conveyor.auth.sessions import Sessions
    from conveyor.errors import InvalidKey

    try:
        api_key = await authenticate(system.records.access, system.clock, key or "")
    except InvalidKey:
        return "/"
    return (await Sessions(system.records, system.clock, system.settings).link(api_key.key_id)).path

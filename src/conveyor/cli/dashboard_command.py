"""`conveyor dashboard`: a link that opens the dashboard of a server."""

from typing import TYPE_CHECKING

from conveyor.cli.shared_options import Data, Server
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.system import System


def dashboard(url: Server = None, data: Data = None) -> None:
    """Print a link that opens the dashboard, signed in with your key. It works once, and for an hour."""
    from conveyor.cli.connection import connect, server_url

    settings = Settings.load(url=url, data=data)
    with connect(settings) as client:
        link = client.request("POST", "/v1/sign-in/links")
    print(server_url(settings).rstrip("/") + link["path"])


async def sign_in_path(system: "System", key: str | None) -> str:
    """For a server that starts: the path of its dashboard, with what signs in, once, as this key; without that if the
    key is none that works here."""
    from conveyor.auth.keys import authenticate
    from conveyor.auth.sessions import Sessions
    from conveyor.errors import InvalidKey

    try:
        found = await authenticate(system.records.access, system.clock, key or "")
    except InvalidKey:
        return "/"
    return (await Sessions(system.records, system.clock, system.settings).link(found.key_id)).path

"""The way from settings to a server: its address, and the key to send."""

from typing import TYPE_CHECKING

from conveyor.client.server_address import local_key_file, local_url_file, read_line, server_key, server_url
from conveyor.errors import MissingKey
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client

__all__ = [
    "LOCAL_TENANT",
    "connect",
    "local_key_file",
    "local_url_file",
    "read_line",
    "server_key",
    "server_url",
]

LOCAL_TENANT = "local"


def connect(settings: Settings) -> "Client":
    """A client of the server that the settings name."""
    from conveyor.client import Client

    url = server_url(settings)
    key = server_key(settings, url)
    if key is None:
        raise MissingKey(
            f"No API key for {url}: set CONVEYOR_API_KEY, or CONVEYOR_DATA to the directory that `conveyor up` uses "
            f"on this machine (here it would be {local_key_file(settings.data)})."
        )
    return Client(url, key)

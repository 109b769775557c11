"""Connect to the server that the settings name, with its key."""

from typing import TYPE_CHECKING

from conveyor.client.http import host_of, is_loopback
from conveyor.client.server_address import (
    local_key_file,
    local_url_file,
    read_line,
    read_own_line,
    server_key,
    server_url,
)
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
    "read_own_line",
    "server_key",
    "server_url",
]

LOCAL_TENANT = "local"


def connect(settings: Settings) -> "Client":
    """Make a client for the server that the settings name."""
    from conveyor.client import Client

    url = server_url(settings)
    key = server_key(settings)
    if key is None:
        path = local_key_file(settings.data)
        if is_loopback(host_of(url)) and path.exists():
            raise MissingKey(f"{path} is damaged. Restart `conveyor up`, which replaces it, or set CONVEYOR_API_KEY.")
        raise MissingKey(
            f"No API key for {url}. Set CONVEYOR_API_KEY. For a server on this machine, set CONVEYOR_DATA to its data "
            f"directory (the key is expected in {path})."
        )
    return Client(url, key)

"""The way from settings to a server: its address, and the key to send."""

from typing import TYPE_CHECKING

from conveyor.client.place import local_key_file, local_url_file, read_line
from conveyor.errors import MissingKey
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client

__all__ = ["LOCAL_TENANT", "api_key", "connect", "local_key_file", "local_url_file", "read_line"]

LOCAL_TENANT = "local"


def api_key(settings: Settings) -> str | None:
    """The key of the settings, else that of the data directory."""
    return settings.api_key or read_line(local_key_file(settings.data))


def connect(settings: Settings) -> "Client":
    """A client of the server that the settings name."""
    from conveyor.client import Client

    key = api_key(settings)
    if key is None:
        raise MissingKey(
            f"No API key: set CONVEYOR_API_KEY, or CONVEYOR_DATA to the directory that `conveyor up` uses "
            f"(there is no {local_key_file(settings.data)})."
        )
    return Client(settings.url, key)

"""The way from settings to a server: its address, and the key to send."""

from pathlib import Path
from typing import TYPE_CHECKING

from conveyor.errors import MissingKey
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client

LOCAL_TENANT = "local"


def local_key_file(data: Path) -> Path:
    """Where `conveyor up` leaves the key of the user of this machine."""
    return data / "local.key"


def local_url_file(data: Path) -> Path:
    """Where `conveyor up` says, as long as it runs, which address it serves this directory on."""
    return data / "local.url"


def read_line(path: Path) -> str | None:
    """The one line of such a file, if there is one."""
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


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

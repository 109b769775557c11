"""Find the server and its key: from the arguments, else the settings, else the files that `conveyor up` writes on this
machine.

These files are in the data directory, by default in the current one, which may be another's: cloned, unpacked, or of
another user. So a key of the user's own goes only to an address of the user's own, and to the address in `local.url`
goes only the key that is beside it.
"""

import os
from pathlib import Path

from conveyor.client.http import host_of, is_loopback
from conveyor.errors import InvalidSetting
from conveyor.settings import DEFAULT_URL, Settings


def local_key_file(data: Path) -> Path:
    """The file where `conveyor up` stores the local key."""
    return data / "local.key"


def local_url_file(data: Path) -> Path:
    """The file where `conveyor up` stores its address while it runs."""
    return data / "local.url"


def read_line(path: Path) -> str | None:
    """Read the line in such a file; None if it does not exist, or is empty or garbage after a power cut."""
    try:
        line = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return line if line.isprintable() and line else None


def find_server(url: str | None, key: str | None) -> tuple[str, str | None]:
    """Return address and key. Raises InvalidSetting."""
    if url is not None and key is not None:
        return url, key
    settings = Settings.load(url=url, api_key=key)
    return server_url(settings), server_key(settings)


def server_url(settings: Settings) -> str:
    """The address in the settings, else that of the `conveyor up` on the data directory. Raises InvalidSetting."""
    return settings.url or read_own_line(local_url_file(settings.data)) or DEFAULT_URL


def server_key(settings: Settings) -> str | None:
    """The key for that address: the one in the settings, else the local key, which is only for servers on this machine.
    Raises InvalidSetting if the key is the user's and the address is not."""
    url = server_url(settings)
    if settings.api_key is None:
        return read_own_line(local_key_file(settings.data)) if is_loopback(host_of(url)) else None
    if settings.url is None and url != DEFAULT_URL:
        place = local_url_file(settings.data)
        raise InvalidSetting(
            f"Your API key is not sent to {url}: this address is from {place}, which may be another's. Set "
            "CONVEYOR_URL to the server of your key, or leave out the key to use that of the data directory."
        )
    return settings.api_key


def read_own_line(path: Path) -> str | None:
    """Read the line as `read_line` does. A file below the current directory must be this user's. Raises
    InvalidSetting."""
    line = read_line(path)
    if line is not None and not path.is_absolute() and _owner(path) not in {None, os.geteuid()}:
        raise InvalidSetting(
            f"{path} belongs to another user and is not used. Set CONVEYOR_URL and CONVEYOR_API_KEY, or CONVEYOR_DATA "
            "to the full path of a data directory that you trust."
        )
    return line


def _owner(path: Path) -> int | None:
    """None if the file is gone: a server that stops removes its address."""
    try:
        return path.stat().st_uid
    except OSError:
        return None

"""Find the server and its key: from the arguments, else the settings, else the files that `conveyor up` writes on this
machine."""

from pathlib import Path

from conveyor.client.http import host_of, is_loopback
from conveyor.settings import Settings


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
    """Return address and key. The key of the local server is never sent to another address."""
    if url is not None and key is not None:
        return url, key
    settings = Settings.load()
    url = url or server_url(settings)
    return url, key or server_key(settings, url)


def server_url(settings: Settings) -> str:
    """The address in the settings, else that of the `conveyor up` on the data directory."""
    local_url = None if settings.url != Settings().url else read_line(local_url_file(settings.data))
    return local_url or settings.url


def server_key(settings: Settings, url: str) -> str | None:
    """The key in the settings, else the local key, which is only for servers on this machine."""
    if settings.api_key is not None or not is_loopback(host_of(url)):
        return settings.api_key
    return read_line(local_key_file(settings.data))

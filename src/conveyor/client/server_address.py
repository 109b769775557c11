"""Where the server is, and the key to send: as given, else as the settings say, else as `conveyor up` left it on this
machine."""

from pathlib import Path

from conveyor.client.http import host_of, is_loopback
from conveyor.settings import Settings


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


def find_server(url: str | None, key: str | None) -> tuple[str, str | None]:
    """Address and key. The key of this machine's own server is sent nowhere else."""
    if url is not None and key is not None:
        return url, key
    settings = Settings.load()
    url = url or server_url(settings)
    return url, key or server_key(settings, url)


def server_url(settings: Settings) -> str:
    """As the settings say, else as `conveyor up` says that serves the data directory."""
    said = None if settings.url != Settings().url else read_line(local_url_file(settings.data))
    return said or settings.url


def server_key(settings: Settings, url: str) -> str | None:
    """As the settings say, else that of the data directory, which is for a server of this machine only."""
    if settings.api_key is not None or not is_loopback(host_of(url)):
        return settings.api_key
    return read_line(local_key_file(settings.data))

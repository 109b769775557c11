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
    if url is None:
        said = None if settings.url != Settings().url else read_line(local_url_file(settings.data))
        url = said or settings.url
    key = key or settings.api_key
    if key is None and is_loopback(host_of(url)):
        key = read_line(local_key_file(settings.data))
    return url, key

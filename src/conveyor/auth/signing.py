"""The signing key of the installation: CONVEYOR_SIGNING_KEY, or one that is created once in the data directory."""

import os
import re
import secrets
from pathlib import Path

from conveyor.errors import InvalidSetting
from conveyor.settings import Settings

FILE = "signing.key"

_BYTES = 32
_HEX = re.compile(rf"[0-9a-f]{{{2 * _BYTES}}}")


def signing_key(settings: Settings) -> bytes:
    """The signing key. The caller owns the data directory."""
    if settings.signing_key is not None:
        return settings.signing_key.encode()
    path = settings.data / FILE
    if not path.exists():
        _write(path, secrets.token_hex(_BYTES))
    text = path.read_text("ascii", "replace").strip()
    if not _HEX.fullmatch(text):
        raise InvalidSetting(
            f"{path} is corrupt. Delete it; a new key is created, and existing upload links become invalid."
        )
    return bytes.fromhex(text)


def _write(path: Path, text: str) -> None:
    """Write the file atomically, readable by its owner only from the first byte."""
    staged = path.with_name(f"{path.name}.new")
    staged.unlink(missing_ok=True)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

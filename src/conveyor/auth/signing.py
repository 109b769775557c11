"""The secret that upload links are signed with: the operator's, or one that is made once and kept beside the data."""

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
    """The secret of this installation. The caller owns the data directory."""
    if settings.signing_key is not None:
        return settings.signing_key.encode()
    path = settings.data / FILE
    if not path.exists():
        _keep(path, secrets.token_hex(_BYTES))
    text = path.read_text("ascii", "replace").strip()
    if not _HEX.fullmatch(text):
        raise InvalidSetting(
            f"{path} is damaged. Remove it: a new one is made, and links to upload must be asked for anew."
        )
    return bytes.fromhex(text)


def _keep(path: Path, text: str) -> None:
    """Whole or not at all, and for its owner only from the first byte."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

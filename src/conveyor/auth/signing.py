"""The signing key of the installation: CONVEYOR_SIGNING_KEY, or one that is created once in the data directory."""

import re
import secrets

from conveyor.auth.durable_file import write_durably
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
        write_durably(path, secrets.token_hex(_BYTES))
    text = path.read_text("ascii", "replace").strip()
    if not _HEX.fullmatch(text):
        raise InvalidSetting(
            f"{path} is corrupt. Delete it; a new key is created, and existing upload links become invalid."
        )
    return bytes.fromhex(text)

"""What a blob's key may be, the same for every engine behind Blobs."""

import re

MAX_KEY_CHARS = 1024

# A leading dot is refused along with `..`: it keeps an engine's own places out of reach of any key.
_SEGMENT = r"[A-Za-z0-9_=#-][A-Za-z0-9._=#-]{0,199}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def check_key(key: str) -> str:
    """The key itself, if it is a relative path of plain segments; ValueError if not. We choose keys, so a
    bad one is a mistake in the code and not in a request."""
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(f"not a blob key: {key[:80]!r}")
    return key


def folder_of(prefix: str) -> str:
    """The prefix with its closing slash; the empty one is the root."""
    folder = prefix.removesuffix("/")
    return f"{check_key(folder)}/" if folder else ""


def check_range(offset: int, length: int | None = None) -> None:
    """ValueError if it is no range of an object."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError("a range starts at 0 or later and is not negative")

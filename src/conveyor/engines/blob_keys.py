"""Validation of blob keys, shared by all engines of Blobs."""

import re

MAX_KEY_CHARS = 1024

# A leading dot is refused, like `..`: no key reaches an engine's own files.
_SEGMENT = r"[A-Za-z0-9_=#-][A-Za-z0-9._=#-]{0,199}"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


def check_key(key: str) -> str:
    """Return the key if it is a relative path of plain segments; else raise ValueError. Conveyor chooses keys, so an
    invalid one is a bug and not a bad request."""
    if len(key) > MAX_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(f"not a blob key: {key[:80]!r}")
    return key


def folder_of(prefix: str) -> str:
    """The prefix with its closing slash; an empty prefix is the root."""
    folder = prefix.removesuffix("/")
    return f"{check_key(folder)}/" if folder else ""


def check_range(offset: int, length: int | None = None) -> None:
    """Raise ValueError if this is not a range of an object."""
    if offset < 0 or (length is not None and length < 0):
        raise ValueError("a range needs an offset and a length of at least 0")

"""File descriptors of this process. While none is left, connections and look-ups fail, and no target is to blame."""

import errno
import os
from collections.abc import Collection

CODE = "too_many_open_files"
MESSAGE = "this machine has no file descriptor left for a connection; raise its limit (ulimit -n)"

# How long an attempt waits for a descriptor before it looks again, and how long its task waits in the queue after that.
PAUSE = 0.1
DELAY = 5.0

# Of this process, and of the whole machine.
_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE})
_TEXTS = tuple(text for number in _ERRNOS for text in (f"(os error {number})", f"[Errno {number}] "))


class OutOfDescriptors(Exception):
    """No file descriptor was left."""


def are_exhausted() -> bool:
    """Whether no file can be opened now. A failed look-up of a name does not say why."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in _ERRNOS
    return False


def is_named(causes: Collection[str]) -> bool:
    """Whether the causes of a failed connection say that no descriptor was left."""
    # As Rust says it, and as Python does.
    return any(text in cause for cause in causes for text in _TEXTS)

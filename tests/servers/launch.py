"""Starts a program that ends with whoever started it, however that comes about."""

import sys

# PR_SET_PDEATHSIG: the kernel kills it when its parent dies.
_LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""


def launched(*command: str) -> list[str]:
    """The command to start instead."""
    return [sys.executable, "-c", _LAUNCH, *command]

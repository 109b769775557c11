"""Starts a program that ends with whoever started it, however that comes about."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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


# By process: a thread does not survive a fork.
_starters: dict[int, ThreadPoolExecutor] = {}


def started(*command: str) -> "subprocess.Popen[bytes]":
    """Launch a silent server that lives as long as this process. The kernel takes the thread that starts it for its
    parent: a server that is started in a thread of a loop would die with the loop."""
    pid = os.getpid()
    if pid not in _starters:
        _starters[pid] = ThreadPoolExecutor(1, thread_name_prefix="launch")
    silent = subprocess.DEVNULL
    return (
        _starters[pid].submit(subprocess.Popen, launched(*command), stdin=silent, stdout=silent, stderr=silent).result()
    )

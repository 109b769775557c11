"""The site of `conveyor demo`, as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def demo_site() -> Iterator[str]:
    """Its address. It ends with its standard input, and so with the test process."""
    with subprocess.Popen(
        [sys.executable, "-m", "conveyor.demo.site"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"

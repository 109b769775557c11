"""Runs ministack on a free port of the loopback with a clock that tests move. Started by tests/servers/aws.py.

Prints the port once it listens, and ends when its standard input does: with the process that started it.
"""

import asyncio
import math
import mmap
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

_real_time = time.time


def _patch_time(path: Path) -> None:
    """time.time() follows the two numbers in the file: seconds to add, and a moment to stand still at unless NaN."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)
    path.unlink()

    def now() -> float:
        offset, still = struct.unpack("dd", shared[:16])
        return cast(float, _real_time() + offset if math.isnan(still) else still)

    time.time = now


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(0)


def main() -> None:
    _patch_time(Path(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    # Read when the modules are imported: queue URLs have the port.
    os.environ["GATEWAY_PORT"] = str(port)

    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from ministack.app import app

    config = Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.keep_alive_timeout = 75
    config.loglevel = "ERROR"
    print(port, flush=True)
    asyncio.run(serve(cast(Any, app), config))


if __name__ == "__main__":
    main()

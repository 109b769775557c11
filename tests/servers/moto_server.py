"""Runs moto on a free port of the loopback, with heartbeats by a clock that tests move. Started by moto.py beside it.

Prints the port once it listens, and ends when its standard input does: with the process that started it.
"""

import logging
import math
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOOK_SECONDS = 0.05


def _clock(path: Path) -> Callable[[], float]:
    """A clock by the two numbers in the file: seconds to add, and a moment to stand still at unless NaN."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), 16, access=mmap.ACCESS_READ)
    path.unlink()

    def now() -> float:
        offset, still = struct.unpack("dd", shared[:16])
        return time.time() + offset if math.isnan(still) else float(still)

    return now


def _patch_heartbeats(now: Callable[[], float]) -> None:
    from moto.stepfunctions.parser.asl.eval.callback import callback

    def clear_and_wait(self: Any) -> bool:
        deadline = now() + self._heartbeat_seconds
        while True:
            if self._next_heartbeat_event.wait(_LOOK_SECONDS):
                with self._mutex:
                    self._next_heartbeat_event.clear()
                return True
            if now() >= deadline:
                return False

    callback.HeartbeatEndpoint.clear_and_wait = clear_and_wait


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(0)


def main() -> None:
    now = _clock(Path(sys.argv[1]))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    port = listener.getsockname()[1]
    # State machines send to the SQS of the same server.
    os.environ["MOTO_PORT"] = str(port)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    _patch_heartbeats(now)
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, app, threaded=True, fd=listener.fileno())
    print(port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

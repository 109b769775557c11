"""nginx: a local server with pages of 2 KB, another one for each number, on a free loopback port."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.child import MeasurementFailed

INSTALL = "The fetch bench needs nginx: apt-get install nginx-light, dnf install nginx, or brew install nginx."

_PAGE_BYTES = 2048
_WORDS = "The belt carries one page after the other. "
_FILLER = (_WORDS * (_PAGE_BYTES // len(_WORDS) + 1))[: _PAGE_BYTES - len("page 0\n")]
_START_SECONDS = 10.0

# The page comes out of the configuration, not from a file: what is measured is the client.
_CONFIG = """
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    log_format number $uri;
    access_log {log};
    keepalive_timeout 75s;
    keepalive_requests 100000000;
    tcp_nodelay on;
    default_type text/plain;
    client_body_temp_path temp;
    proxy_temp_path temp;
    fastcgi_temp_path temp;
    uwsgi_temp_path temp;
    scgi_temp_path temp;
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location ~ ^/page/(?<number>[0-9]+)$ {{ return 200 "page $number\\n{filler}"; }}
        location / {{ return 404; }}
    }}
}}
"""


def found() -> str | None:
    """Where nginx is. Some systems keep it in sbin, which is not on everyone's PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")


def page(number: int) -> bytes:
    """What the server answers."""
    return f"page {number}\n{_FILLER}".encode()


class Site(NamedTuple):
    """Below `url` the pages are: URL/0 and so on. `servers` are the processes, for the meter."""

    url: str
    servers: list[int]


@contextmanager
def serving(scratch: Path, log: Path | None = None) -> Iterator[Site]:
    """The server, until the block ends. With `log`, it writes the path of each request there."""
    program = found()
    if program is None:
        raise MeasurementFailed(INSTALL)
    place = scratch / "nginx"
    place.mkdir(parents=True)
    port = _free_port()
    logged = "off" if log is None else f"{log.absolute()} number"
    (place / "nginx.conf").write_text(_CONFIG.format(port=port, filler=_FILLER, log=logged))
    command = [program, "-e", "stderr", "-p", str(place), "-c", "nginx.conf"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        _wait_until_it_listens(server, port)
        yield Site(f"http://127.0.0.1:{port}/page", [server.pid, *_workers(server.pid)])
    finally:
        server.terminate()
        server.wait(timeout=10)


def _workers(master: int) -> list[int]:
    try:
        return [int(worker) for worker in Path(f"/proc/{master}/task/{master}/children").read_text().split()]
    except OSError:
        return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_listens(server: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise MeasurementFailed("nginx did not start")

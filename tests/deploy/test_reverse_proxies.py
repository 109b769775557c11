"""The examples for nginx and Caddy. nginx, where it is installed, runs its example in front of a real server."""

import datetime
import http.client
import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from conveyor.settings import Settings
from tests.deploy.deployed_settings import DEPLOY
from tests.servers.launch import launched
from tests.support.up_process import running

NAME = "jobs.example.com"
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin:/usr/bin")
CADDY = shutil.which("caddy")
PATIENCE = 30.0

_MAIN = """
daemon off;
worker_processes 1;
pid {place}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {place}/temp;
    proxy_temp_path {place}/temp;
    fastcgi_temp_path {place}/temp;
    uwsgi_temp_path {place}/temp;
    scgi_temp_path {place}/temp;
    include {place}/conveyor.conf;
}}
"""


def self_signed(place: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, NAME)])
    began = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (place / "key").write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    (place / "certificate").write_bytes(certificate.public_bytes(encoding))


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


class Front(NamedTuple):
    """The ports of nginx, and where its certificate is."""

    plain: int
    tls: int
    place: Path

    def connect(self) -> http.client.HTTPSConnection:
        context = ssl.create_default_context(cafile=str(self.place / "certificate"))
        return _Named(context, self.tls)


class _Named(http.client.HTTPSConnection):
    """Connects to loopback, and asks for the name."""

    def __init__(self, context: ssl.SSLContext, port: int) -> None:
        super().__init__(NAME, port, timeout=PATIENCE, context=context)
        self._tls = context

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        self.sock = self._tls.wrap_socket(plain, server_hostname=NAME)


@contextmanager
def nginx(place: Path, upstream: str) -> Iterator[Front]:
    """The example, with other ports, another certificate and another upstream."""
    place.mkdir()
    (place / "temp").mkdir()
    self_signed(place)
    plain, tls = free_ports()
    text = (DEPLOY / "nginx" / "conveyor.conf").read_text()
    text = re.sub(r"^ *listen \[::\].*\n", "", text, flags=re.MULTILINE)
    for said, meant in (
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("listen 443 ssl", f"listen 127.0.0.1:{tls} ssl"),
        ("server 127.0.0.1:8080;", f"server {upstream};"),
        ("/etc/ssl/certs/jobs.example.com.pem", str(place / "certificate")),
        ("/etc/ssl/private/jobs.example.com.key", str(place / "key")),
    ):
        assert said in text
        text = text.replace(said, meant)
    (place / "conveyor.conf").write_text(text)
    (place / "nginx.conf").write_text(_MAIN.format(place=place))
    command = [str(NGINX), "-p", str(place), "-c", str(place / "nginx.conf"), "-e", "stderr"]
    tested = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    with subprocess.Popen(launched(*command), stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(process, tls)
            yield Front(plain, tls, place)
        finally:
            process.terminate()


def _wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError("nginx did not start")


def ask(connection: http.client.HTTPConnection, method: str, path: str, key: str, body: Any = None) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json", "host": NAME}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status < 300, content
    return json.loads(content)


@pytest.mark.slow
def test_nginx_in_front_of_a_server(tmp_path: Path) -> None:
    settings = {"CONVEYOR_TRUSTED_PROXIES": "127.0.0.1", "CONVEYOR_ALLOWED_HOSTS": NAME}
    with ExitStack() as opened:
        up = opened.enter_context(running(tmp_path, **settings))
        front = opened.enter_context(nginx(tmp_path / "nginx", up.direct.removeprefix("http://")))
        connection = opened.enter_context(closing(front.connect()))
        # Larger than every buffer on the way, and than nginx's default limit.
        content = b"".join(b"http://127.0.0.1:9/%d\n" % number for number in range(150_000))
        wanted = {"size": len(content), "sha256": sha256(content).hexdigest()}
        upload = ask(connection, "POST", "/v1/uploads", up.key, wanted)
        # By the headers of the proxy, which the server trusts.
        assert upload["url"].startswith(f"https://{NAME}/v1/uploads/")
        path = upload["url"].removeprefix(f"https://{NAME}")
        connection.request(upload["method"], path, content, {**upload["headers"], "host": NAME})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (204, b"")
        job = ask(connection, "POST", "/v1/jobs", up.key, {"kind": "fetch", "mode": "open"})
        # A stream sends its first frame at once, and no buffer keeps it.
        streaming = opened.enter_context(closing(front.connect()))
        headers = {"authorization": f"Bearer {up.key}", "accept": "text/event-stream", "host": NAME}
        streaming.request("GET", f"/v1/jobs/{job['id']}/stream", headers=headers)
        stream = streaming.getresponse()
        assert (stream.status, stream.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        assert any(line.startswith(b"event:") for line in iter(stream.readline, b""))
        plain = opened.enter_context(closing(http.client.HTTPConnection("127.0.0.1", front.plain, timeout=PATIENCE)))
        plain.request("GET", "/v1/jobs", headers={"host": NAME})
        redirect = plain.getresponse()
        assert (redirect.status, redirect.headers["location"]) == (308, f"https://{NAME}/v1/jobs")


def test_caddy_takes_its_example() -> None:
    command = [str(CADDY), "adapt", "--config", str(DEPLOY / "caddy" / "Caddyfile"), "--validate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"flush_interval":-1' in done.stdout


def test_a_proxy_closes_an_idle_connection_first() -> None:
    keep = Settings().keep_alive_seconds
    [seconds] = re.findall(r"keepalive_timeout (\d+)s;", (DEPLOY / "nginx" / "conveyor.conf").read_text())
    assert int(seconds) < keep
    [seconds] = re.findall(r"keepalive (\d+)s", (DEPLOY / "caddy" / "Caddyfile").read_text())
    assert int(seconds) < keep

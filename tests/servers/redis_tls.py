"""A Valkey server behind TLS that wants a client's certificate, and a user with the rights that the docs list.

The server of the wheel has no TLS of its own: a door before it does.
"""

import asyncio
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import quote, urlencode

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from conveyor.clock import SystemClock
from conveyor.engines.redis import RedisEngine
from tests.servers.redis import redis, with_prefix
from tests.support.clocks import ManualClock

USER = "conveyor"
PASSWORD = "p@ss/w?rd#:"
# As in docs/how-to/redis.md.
RIGHTS = "+@read +@write -@dangerous +@connection +eval +evalsha +time +info +cluster|slots"

_folder = tempfile.TemporaryDirectory(prefix="conveyor-tls-")


@cache
def certificates() -> dict[str, str]:
    """Files: `ca`, and `cert` with its `key`, which are the server's and the client's."""
    ca_key, ca_name = _key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    ca = _certificate(ca_name, ca_name, ca_key, ca_key, x509.BasicConstraints(ca=True, path_length=0))
    key, name = _key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    cert = _certificate(
        name, ca_name, key, ca_key, x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {"ca": ca.public_bytes(pem), "cert": cert.public_bytes(pem), "key": private}
    for file, content in files.items():
        (Path(_folder.name) / file).write_bytes(content)
    return {file: str(Path(_folder.name) / file) for file in files}


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(extension, critical=False)
    valid = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    return valid.sign(signer, hashes.SHA256())


@asynccontextmanager
async def tls_door(port: int) -> AsyncIterator[int]:
    """The port of a door to the server, which speaks TLS and lets in who has the certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates()["ca"])
    context.load_cert_chain(certificates()["cert"], certificates()["key"])
    context.verify_mode = ssl.CERT_REQUIRED
    copying: set[asyncio.Task[None]] = set()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                target.write(piece)
                await target.drain()
        except OSError:
            pass
        finally:
            target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        copying.update((asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)
        await listener.wait_closed()


def tls_url(port: int, **changed: str | None) -> str:
    """The URL of a door, with other files or without some."""
    files = {name: file for name, file in {**certificates(), **changed}.items() if file is not None}
    return f"rediss://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/0?{urlencode(files)}"


def make_user(prefix: str) -> None:
    redis().ask("ACL", "SETUSER", USER, "reset", "on", f">{PASSWORD}", f"~{{{prefix}:*", *RIGHTS.split())


@asynccontextmanager
async def open_engine(place: Path, clock: ManualClock) -> AsyncIterator[RedisEngine]:
    async with tls_door(redis().port) as port:
        url = with_prefix(tls_url(port), place)
        make_user(url.rpartition("=")[2])
        async with RedisEngine.open(url, SystemClock(), clock) as engine:
            yield engine

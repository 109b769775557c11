"""An authority of its own for each process of tests, and a certificate for 127.0.0.1 that it signed."""

import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# What an authority's key is for.
_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)
_folder = tempfile.TemporaryDirectory(prefix="conveyor-tls-")


@cache
def certificates() -> dict[str, str]:
    """Files: `ca`, and `cert` with its `key`, which are the server's and the client's."""
    ca_key, ca_name = _key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "an authority")])
    ca = _certificate(
        ca_name, ca_name, ca_key, ca_key, (x509.BasicConstraints(ca=True, path_length=0), True), (_SIGNS, True)
    )
    key, name = _key(), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    cert = _certificate(name, ca_name, key, ca_key, (names, False))
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
    *extensions: tuple[x509.ExtensionType, bool],
) -> x509.Certificate:
    """With these extensions, and whether each is critical. Python 3.13 verifies as strictly as RFC 5280 asks for: a
    certificate names its key and that of its authority."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    keys = (
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
    )
    for extension, is_critical in (*keys, *extensions):
        builder = builder.add_extension(extension, critical=is_critical)
    valid = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    return valid.sign(signer, hashes.SHA256())


def server_context(*protocols: str) -> ssl.SSLContext:
    """For a server on 127.0.0.1 that offers these protocols in the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates()["cert"], certificates()["key"])
    if protocols:
        context.set_alpn_protocols(protocols)
    return context

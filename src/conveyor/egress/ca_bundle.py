"""CONVEYOR_CA_BUNDLE: a file with the certificates of authorities that Conveyor trusts besides those of the system, for
targets, gateways, webhooks and lists behind URLs. A process reads it once, when it starts."""

from pathlib import Path

from pyreqwest.client import ClientBuilder
from pyreqwest.exceptions import PyreqwestError

from conveyor.errors import InvalidSetting

_BEGIN = b"-----BEGIN CERTIFICATE-----"
# The certificates of all public authorities are a quarter of this.
_MAX_BYTES = 1 << 20


def read_ca_bundle(path: Path | None) -> bytes | None:
    """The certificates of the file, as PEM; None without a file. Raises InvalidSetting, which names the file."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            bundle = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from None
    if len(bundle) > _MAX_BYTES:
        raise _invalid(path, f"has more than {_MAX_BYTES} bytes")
    # The client would take a file without any for one that adds nothing.
    if _BEGIN not in bundle:
        raise _invalid(path, "has no certificate; it must be PEM, with -----BEGIN CERTIFICATE-----")
    try:
        ClientBuilder().add_root_certificate_pem(bundle).build()
    except PyreqwestError:
        raise _invalid(path, "has a certificate that is broken, or not one of an authority") from None
    return bundle


def count_certificates(bundle: bytes) -> int:
    """How many certificates a bundle has."""
    return bundle.count(_BEGIN)


def _invalid(path: Path, problem: str) -> InvalidSetting:
    return InvalidSetting(f"CONVEYOR_CA_BUNDLE: {path} {problem}.")

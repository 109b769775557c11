"""Seals: encrypts secrets that are stored in documents, with AES-256-GCM. The key derives from the installation's
signing key (HKDF-SHA256).

A secret is sealed for a name, and opens only under that name. The nonce derives from secret and name with a key of its
own, so that a repeated write produces the same bytes, and no two secrets share a nonce.
"""

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_VERSION = b"\x01"
_MARK = 4
_NONCE = 12


class Seals:
    """Seals with the first key, and opens with any."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = [_Key(key) for key in keys]

    def close(self, secret: str, name: str) -> str:
        """Encrypt a secret for `name`, as text."""
        key = self._keys[0]
        plain, bound = secret.encode(), name.encode()
        nonce = hmac.digest(key.nonces, len(bound).to_bytes(4, "big") + bound + plain, sha256)[:_NONCE]
        sealed = key.cipher.encrypt(nonce, plain, bound)
        return urlsafe_b64encode(_VERSION + key.mark + nonce + sealed).decode()

    def open(self, sealed: str, name: str) -> str | None:
        """Decrypt; None if the key is unknown, the name differs, or the text was changed."""
        try:
            data = urlsafe_b64decode(sealed)
        except ValueError:
            return None
        start = len(_VERSION) + _MARK
        nonce, rest = data[start : start + _NONCE], data[start + _NONCE :]
        for key in self._keys:
            if data[:start] == _VERSION + key.mark:
                try:
                    return key.cipher.decrypt(nonce, rest, name.encode()).decode()
                except (InvalidTag, ValueError):
                    return None
        return None


class _Key:
    def __init__(self, secret: bytes) -> None:
        # No salt: the secret already has full entropy.
        derived = HKDF(SHA256(), 32 + 32 + _MARK, None, b"conveyor: sealed task tokens, 1").derive(secret)
        self.cipher = AESGCM(derived[:32])
        self.nonces = derived[32:64]
        self.mark = derived[64:]

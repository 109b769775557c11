"""Seals: secrets that are kept in rows. AES-256-GCM under a key that is made of the installation's own (HKDF-SHA256).

A secret is sealed for a name: under another one it does not open. The nonce is made of both, with a key of its own, so
that a write that is done again writes the same, and no two secrets share one.
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
    """Closes with the first key, opens with all."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._keys = [_Key(key) for key in keys]

    def close(self, secret: str, name: str) -> str:
        """As text that may be kept."""
        key = self._keys[0]
        said, bound = secret.encode(), name.encode()
        nonce = hmac.digest(key.nonces, len(bound).to_bytes(4, "big") + bound + said, sha256)[:_NONCE]
        sealed = key.cipher.encrypt(nonce, said, bound)
        return urlsafe_b64encode(_VERSION + key.mark + nonce + sealed).decode()

    def open(self, sealed: str, name: str) -> str | None:
        """None if it was sealed with a key that is not known, for another name, or was changed."""
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
        # The salt is empty: the secret has its full strength already.
        made = HKDF(SHA256(), 32 + 32 + _MARK, None, b"conveyor: sealed task tokens, 1").derive(secret)
        self.cipher = AESGCM(made[:32])
        self.nonces = made[32:64]
        self.mark = made[64:]

"""Signatures of webhooks, after the Standard Webhooks specification: HMAC-SHA256 over id, timestamp and body, one for
each secret that is valid at the time.

Secrets are not stored. They are derived from the signing key of this installation and the name of their purpose;
the records hold only the numbers of those in use.
"""

import hmac
from base64 import b64decode, b64encode
from collections.abc import Iterable
from hashlib import sha256

from conveyor.model import TenantId

PREFIX = "whsec_"


def endpoint_secret(key: bytes, tenant: TenantId, webhook_id: str, number: int) -> str:
    """The n-th secret of an endpoint."""
    return _secret(key, f"webhook:{tenant}:{webhook_id}:{number}")


def tenant_secret(key: bytes, tenant: TenantId) -> str:
    """The secret for URLs that jobs name themselves."""
    return _secret(key, f"webhook-of-jobs:{tenant}")


def signed_headers(secrets: Iterable[str], event_id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:
    """The signature headers of one attempt."""
    content = f"{event_id}.{timestamp}.".encode() + body
    return [
        ("webhook-id", event_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", " ".join(_signature(secret, content) for secret in secrets)),
    ]


def _secret(key: bytes, purpose: str) -> str:
    return PREFIX + b64encode(hmac.digest(key, purpose.encode(), sha256)).decode()


def _signature(secret: str, content: bytes) -> str:
    key = b64decode(secret.removeprefix(PREFIX))
    return "v1," + b64encode(hmac.digest(key, content, sha256)).decode()

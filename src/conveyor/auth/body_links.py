"""Links to bodies that work without a key: signed with the installation's key, for one task, until they expire."""

import hmac
from collections.abc import Sequence
from urllib.parse import quote, urlencode

from conveyor.errors import SignatureRefused
from conveyor.model import JobId, TaskId, TenantId

BODY_SECONDS = 86_400.0
# What of a task a link is for.
BODY = "body"
EXTRACTED = "extracted"
_DIGITS = 12


def body_path(key: bytes, tenant: TenantId, job_id: JobId, task_id: TaskId, now: float) -> str:
    """The path of a task's body, valid for a day."""
    expires = int(now + BODY_SECONDS)
    signature = _signature(key, tenant, job_id, task_id, expires)
    query = urlencode({"tenant": tenant, "expires": expires, "signature": signature})
    return f"/v1/bodies/{quote(job_id)}/{quote(task_id)}?{query}"


def extracted_path(key: bytes, tenant: TenantId, job_id: JobId, task_id: TaskId, now: float) -> str:
    """The path of what was extracted for a task, valid for a day."""
    expires = int(now + BODY_SECONDS)
    signature = _signature(key, tenant, job_id, task_id, expires, EXTRACTED)
    query = urlencode({"tenant": tenant, "expires": expires, "signature": signature})
    return f"/v1/extracted/{quote(job_id)}/{quote(task_id)}?{query}"


def check_body_link(
    keys: Sequence[bytes],
    tenant: str,
    job_id: str,
    task_id: str,
    expires: str,
    signature: str,
    now: float,
    part: str = BODY,
) -> None:
    """Raise SignatureRefused unless one of these keys has signed the link and it has not expired."""
    if not (expires.isascii() and expires.isdigit() and len(expires) <= _DIGITS) or now >= int(expires):
        raise SignatureRefused
    given = signature.encode(errors="replace")
    signed = [_signature(key, tenant, job_id, task_id, int(expires), part).encode() for key in keys]
    if not any(hmac.compare_digest(each, given) for each in signed):
        raise SignatureRefused


def _signature(key: bytes, tenant: str, job_id: str, task_id: str, expires: int, part: str = BODY) -> str:
    # No part may contain a line break: together they are one text and no other.
    text = "\n".join([part, *(part.replace("\n", "") for part in (tenant, job_id, task_id)), str(expires)])
    return hmac.digest(key, text.encode(errors="replace"), "sha256").hex()

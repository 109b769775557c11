"""Why a fetch failed, in stable codes. Gets what the client or the guard raised, hands on a TaskError whose message
holds no URL: queries and userinfo have secrets in them.

| Code | Meaning |
|---|---|
| timeout | the attempt as a whole took longer than `timeout` |
| connect_timeout | no connection, or no end to the TLS handshake, within `connect_timeout` |
| connect_failed | the connection was refused or reset, or there is no way to the address |
| dns_failed | the name has no address |
| tls_failed | the certificate is not valid for the name, or there is no common TLS |
| read_failed | the connection broke before the answer was complete |
| decode_failed | the answer is not HTTP, or its compression is broken |
| target_refused | the guard does not let us go there, on this hop |
| bad_url | the URL can not be fetched |
| bad_input | the task has a header, method, body or timeout that can not be |
| bad_redirect | the Location of a redirect can not be followed |
| too_many_redirects | more than `max_redirects` |
| body_too_large | the body, decoded, is larger than `max_body_bytes` |
| gateway_failed | the gateway could not be reached, or could not reach the target |
| http_<status> | the target answered, with a status that is not a success |
| internal | a fault of ours |
"""

from pyreqwest.exceptions import (
    BuilderError,
    ClientClosedError,
    DecodeError,
    DetailedPyreqwestError,
    NetworkError,
    PyreqwestError,
    RequestTimeoutError,
)

from conveyor.egress.redirects import BadRedirect
from conveyor.egress.target_guard import BadUrl, DnsFailed, TargetRefused
from conveyor.errors import BadInput
from conveyor.model import TaskError

_CONNECTING = "client error (Connect)"
# A body that ended too early, as it came or inside its compression.
_CUT = frozenset({"error reading a body from connection", "unexpected end of file"})
_TEXTS = {
    "timeout": "the attempt took longer than its timeout",
    "connect_timeout": "no connection within the connect timeout",
    "connect_failed": "the connection failed",
    "dns_failed": "the name of the target has no address",
    "tls_failed": "TLS failed",
    "read_failed": "the connection broke before the answer was complete",
    "decode_failed": "the answer can not be decoded",
    "gateway_failed": "the gateway could not be reached",
    "internal": "the fetch failed inside Conveyor",
}


class Failure(Exception):
    """An attempt that the executor itself gave up."""

    def __init__(self, code: str, message: str, http_status: int | None = None) -> None:
        super().__init__(message)
        self.error = TaskError(code, message)
        self.http_status = http_status


def failure_of(error: Exception, blamed: frozenset[str]) -> TaskError:
    """The code and the message for whatever ended an attempt. Codes in `blamed` are the gateway's fault."""
    found = _failure(error)
    if found.code not in blamed:
        return found
    return TaskError("gateway_failed", f"{_TEXTS['gateway_failed']}: {found.message}")


def is_connecting(error: PyreqwestError) -> bool:
    """Whether it failed before there was a connection."""
    return _CONNECTING in _causes(error)


def _failure(error: Exception) -> TaskError:
    match error:
        case Failure():
            return error.error
        case BadUrl() | TargetRefused() | DnsFailed():
            return TaskError(error.code, error.message)
        case BadInput():
            return TaskError("bad_input", error.message)
        case BadRedirect():
            return TaskError("bad_redirect", str(error))
        case PyreqwestError():
            causes = _causes(error)
            code = _code(error, causes)
            return TaskError(code, _message(code, causes))
        case TimeoutError():
            return TaskError("dns_failed", "the name of the target was not resolved in time")
        case _:
            return TaskError("internal", f"{_TEXTS['internal']} ({type(error).__name__})")


def _code(error: PyreqwestError, causes: list[str]) -> str:
    """By the causes first: the class of the error depends on how much of the body was read when it came."""
    connecting = _CONNECTING in causes
    # The client calls it a timeout of the connection even when it waited for the answer.
    if isinstance(error, RequestTimeoutError) or "operation timed out" in causes:
        return "connect_timeout" if connecting else "timeout"
    if connecting:
        return _connect_code(causes)
    if isinstance(error, ClientClosedError) or not _CUT.isdisjoint(causes):
        return "read_failed"
    if isinstance(error, DecodeError) or "request or response body error" in causes:
        return "decode_failed"
    if isinstance(error, NetworkError):
        return "read_failed"
    return "bad_url" if isinstance(error, BuilderError) else "internal"


def _connect_code(causes: list[str]) -> str:
    if "dns error" in causes:
        return "dns_failed"
    last = causes[-1]
    if "tcp connect error" in causes or "os error" in last or last.startswith("tunnel error") or "eof" in last:
        return "connect_failed"
    return "tls_failed"


def _message(code: str, causes: list[str]) -> str:
    text = _TEXTS.get(code, code)
    detail = causes[-1] if causes else ""
    if not detail or "://" in detail or code in {"timeout", "connect_timeout"}:
        return text
    return f"{text}: {detail[:200]}"


def _causes(error: PyreqwestError) -> list[str]:
    causes = (error.details.get("causes") or []) if isinstance(error, DetailedPyreqwestError) else []
    return [cause["message"] for cause in causes]

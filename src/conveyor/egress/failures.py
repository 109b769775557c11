"""Why a request failed, in stable codes: the one table from the errors of the HTTP client and the guard to codes. The
messages contain no URL, because queries and userinfo contain secrets.

| Code | Meaning |
|---|---|
| timeout | the whole attempt took longer than `timeout` |
| connect_timeout | no connection, or no complete TLS handshake, within `connect_timeout` |
| connect_failed | the connection was refused or reset, or the address is unreachable |
| dns_failed | the name has no address |
| tls_failed | the certificate is not valid for the name, or no common TLS version |
| read_failed | the connection broke before the answer was complete |
| decode_failed | the answer is not HTTP, or its content coding is broken or unknown |
| target_refused | the guard refuses the target, on this hop |
| bad_url | the URL is invalid |
| bad_input | the task has an invalid header, method, body or timeout |
| bad_redirect | the Location of a redirect is invalid |
| too_many_redirects | more than `max_redirects` |
| body_too_large | the decoded body is larger than `max_body_bytes` |
| gateway_failed | the gateway could not be reached, or could not reach the target |
| blocked_by_robots | robots.txt disallows the URL (robots.py) |
| robots_unavailable | robots.txt could not be read: the task waits, and no attempt is spent |
| http_<status> | the target answered with a status that is not a success |
| too_many_open_files | this process has no file descriptor left: the task waits, and no attempt is spent |
| internal | an error inside Conveyor |
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

from conveyor.egress import descriptors
from conveyor.egress.descriptors import OutOfDescriptors
from conveyor.egress.redirects import BadRedirect
from conveyor.egress.target_guard import BadUrl, DnsFailed, TargetRefused
from conveyor.errors import BadInput
from conveyor.model import TaskError

_CONNECTING = "client error (Connect)"
# A truncated body, or a request over HTTP/2 that the server ended without a response.
_TRUNCATED = frozenset({"error reading a body from connection", "http2 error"})
# What a SOCKS proxy says about the way from itself to the target.
_BEYOND_SOCKS = frozenset(
    f"SOCKS error: {reply}"
    for reply in ("network unreachable", "host unreachable", "connection refused", "ttl expired")
)
_REFUSED_CREDENTIALS = frozenset(
    {
        "tunnel error: proxy authorization required",
        "SOCKS error: server does not support user/pass authentication",
        "SOCKS error: server implements authentication incorrectly",
        "SOCKS error: credentials not accepted",
    }
)
PROXY_CREDENTIALS = (
    "the proxy refuses the request without other credentials: put user:password@ before the host in its URL, or "
    "Proxy-Authorization into the headers of the gateway"
)
_TEXTS = {
    "timeout": "the attempt took longer than its timeout",
    "connect_timeout": "no connection within the connect timeout",
    "connect_failed": "the connection failed",
    "dns_failed": "the name of the target has no address",
    "tls_failed": "TLS failed",
    "read_failed": "the connection broke before the answer was complete",
    "decode_failed": "the answer cannot be decoded",
    "gateway_failed": "the gateway could not be reached",
    "internal": "the fetch failed inside Conveyor",
}


class Failure(Exception):
    """An attempt that the executor itself ended, with a code. `http_status` is that of the last response, and
    `final_url` the URL of the last request, if they are known."""

    def __init__(self, code: str, message: str, http_status: int | None = None, final_url: str | None = None) -> None:
        super().__init__(message)
        self.error = TaskError(code, message)
        self.http_status = http_status
        self.final_url = final_url


def failure_of(error: Exception, gateway_codes: frozenset[str]) -> TaskError:
    """The code and the message for an error. Codes in `gateway_codes` become failures of the gateway."""
    failure = _failure(error)
    if failure.code not in gateway_codes:
        return failure
    last = _causes(error)[-1:] if isinstance(error, PyreqwestError) else []
    if not _BEYOND_SOCKS.isdisjoint(last):
        return failure
    if not _REFUSED_CREDENTIALS.isdisjoint(last):
        return TaskError("gateway_failed", PROXY_CREDENTIALS)
    return TaskError("gateway_failed", f"{_TEXTS['gateway_failed']}: {failure.message}")


def is_connecting(error: PyreqwestError) -> bool:
    """Whether the request failed before it had a connection, and not for want of a file descriptor here."""
    causes = _causes(error)
    return _CONNECTING in causes and not descriptors.is_named(causes)


def _failure(error: Exception) -> TaskError:
    match error:
        case Failure():
            return error.error
        case BadUrl() | TargetRefused() | DnsFailed():
            return TaskError(error.code, error.message)
        case OutOfDescriptors():
            return TaskError(descriptors.CODE, descriptors.MESSAGE)
        case BadInput():
            return TaskError("bad_input", error.message)
        case BadRedirect():
            return TaskError("bad_redirect", str(error))
        case PyreqwestError():
            causes = _causes(error)
            if descriptors.is_named(causes):
                return TaskError(descriptors.CODE, descriptors.MESSAGE)
            code = _code(error, causes)
            return TaskError(code, _message(code, causes))
        case TimeoutError():
            return TaskError("dns_failed", "the name of the target was not resolved in time")
        case _ if descriptors.is_named([str(error)]):
            return TaskError(descriptors.CODE, descriptors.MESSAGE)
        case _:
            return TaskError("internal", f"{_TEXTS['internal']} ({type(error).__name__})")


def _code(error: PyreqwestError, causes: list[str]) -> str:
    """By the causes first: the class of the error depends on how much of the body was read before."""
    connecting = _CONNECTING in causes
    # The client uses the class for connect timeouts even if it waited for the answer.
    if isinstance(error, RequestTimeoutError) or "operation timed out" in causes:
        return "connect_timeout" if connecting else "timeout"
    if connecting:
        return _connect_code(causes)
    if isinstance(error, ClientClosedError) or not _TRUNCATED.isdisjoint(causes):
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
    if "error connecting to socks proxy" in causes:
        return "connect_failed"
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

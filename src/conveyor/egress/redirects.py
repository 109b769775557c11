"""Redirects. Gets a request and a Location, and returns the next request. It does not check addresses: the route does,
for each hop."""

import msgspec
from pyreqwest.http import Url

from conveyor.egress.target_guard import MAX_URL_LENGTH, url_problem

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
# Headers with one of these in their name are not sent to another origin.
_SENSITIVE = ("auth", "cookie", "token", "secret", "key", "session", "signature", "password", "credential")
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-language", "content-location", "digest"})


class BadRedirect(Exception):
    """The Location of a redirect is invalid."""


class OutgoingRequest(msgspec.Struct, frozen=True, gc=False):
    """One hop. `url` is the target; `at` is the URL to request instead, on the origin of the gateway."""

    method: str
    url: Url
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    at: Url | None = None


def follow_redirect(
    request: OutgoingRequest, status: int, location: str, base: Url, gateway_origin: str | None = None
) -> OutgoingRequest:
    """The next request. `base` is what Location is relative to: the target, or the URL of the gateway."""
    url = _join(base, location)
    method, headers, body = request.method, request.headers, request.body
    if (status == 303 and method != "HEAD") or (status in {301, 302} and method == "POST"):
        method, body = "GET", None
        headers = tuple(pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
    if gateway_origin is not None and url.origin_ascii == gateway_origin:
        return OutgoingRequest(method, request.url, headers, body, at=url)
    if url.origin_ascii != request.url.origin_ascii:
        headers = tuple(pair for pair in headers if not is_sensitive(pair[0]))
    if url.fragment is None and request.url.fragment is not None:
        url = url.with_fragment(request.url.fragment)
    return OutgoingRequest(method, url, headers, body)


def is_sensitive(header: str) -> bool:
    """Whether a header must not follow a redirect to another origin."""
    name = header.lower()
    return any(part in name for part in _SENSITIVE)


def _join(base: Url, location: str) -> Url:
    if not location:
        raise BadRedirect("the Location of the redirect is empty, or not ASCII")
    try:
        url = base.join(location)
    except ValueError as error:
        raise BadRedirect(f"the Location of the redirect is not a URL: {error}") from None
    problem = url_problem(url) if len(location) <= MAX_URL_LENGTH else "it is too long"
    if problem is not None:
        raise BadRedirect(f"the Location of the redirect is invalid: {problem}")
    return url

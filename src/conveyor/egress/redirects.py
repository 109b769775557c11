"""Redirects. Gets a request and the head of its response, and returns the next request. It does not check addresses:
the route does, for each hop.

A chain of redirects has its own cookies: what a response on the way sets goes into the later requests of the same
chain, by the rules for domain, path and Secure, and nowhere else. Many sites that ask for consent, or that choose a
region or a session, redirect for ever without.
"""

import re
from urllib.parse import quote_from_bytes

import msgspec
from pyreqwest.cookie import CookieStore
from pyreqwest.http import Url

from conveyor.egress.heads import ResponseHead
from conveyor.egress.target_guard import MAX_URL_LENGTH, url_problem

REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
# Headers with one of these in their name are not sent to another origin.
_SENSITIVE = ("auth", "cookie", "token", "secret", "key", "session", "signature", "password", "credential")
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-language", "content-location", "digest"})
# As in curl: cookies of one response, and characters of one Cookie header. Further ones are dropped.
_MAX_COOKIES = 50
_MAX_COOKIE_HEADER = 8190
_DOMAIN = re.compile(r";\s*domain\s*=\s*\.?([^;\s]*)", re.IGNORECASE)
# Every ASCII character: only bytes that are not ASCII are escaped.
_ASCII = "".join(map(chr, range(128)))

Pairs = tuple[tuple[str, str], ...]


class BadRedirect(Exception):
    """The Location of a redirect is invalid."""


class OutgoingRequest(msgspec.Struct, frozen=True, gc=False):
    """One hop. `url` is the target. `cookies` are those of the chain, if a response set any."""

    method: str
    url: Url
    headers: Pairs = ()
    body: bytes | None = None
    cookies: CookieStore | None = None


def follow_redirect(request: OutgoingRequest, head: ResponseHead, location: str | None = None) -> OutgoingRequest:
    """The next request. `location` is that of the response, unless a gateway changed it, and relative to the target."""
    url = _join(request.url, head.fields["location"] if location is None else location)
    status = head.status
    method, headers, body = request.method, request.headers, request.body
    if (status == 303 and method != "HEAD") or (status in {301, 302} and method == "POST"):
        method, body = "GET", None
        headers = tuple(pair for pair in headers if pair[0].lower() not in _OF_THE_BODY)
    if url.origin_ascii != request.url.origin_ascii:
        headers = tuple(pair for pair in headers if not is_sensitive(pair[0]))
    if url.fragment is None and request.url.fragment is not None:
        url = url.with_fragment(request.url.fragment)
    return OutgoingRequest(method, url, headers, body, cookies=_keep_cookies(request, head, request.url))


def headers_to_send(request: OutgoingRequest) -> Pairs:
    """The headers of a request, with the cookies of its chain; they replace those of the job by name."""
    if request.cookies is None:
        return request.headers
    cookies = request.cookies.matches(request.url)
    if not cookies:
        return request.headers
    names = {cookie.name for cookie in cookies}
    own = [text.strip() for name, value in request.headers if name.lower() == "cookie" for text in value.split(";")]
    kept = [text for text in own if text and text.partition("=")[0].strip() not in names]
    sent = ""
    for text in (*kept, *(cookie.stripped() for cookie in cookies)):
        longer = f"{sent}; {text}" if sent else text
        if len(longer) <= _MAX_COOKIE_HEADER:
            sent = longer
    others = tuple(pair for pair in request.headers if pair[0].lower() != "cookie")
    return (*others, ("cookie", sent)) if sent else others


def is_sensitive(header: str) -> bool:
    """Whether a header must not follow a redirect to another origin."""
    name = header.lower()
    return any(part in name for part in _SENSITIVE)


def _keep_cookies(request: OutgoingRequest, head: ResponseHead, url: Url) -> CookieStore | None:
    """The cookies of the chain, after this response from `url`."""
    if "set-cookie" not in head.fields:
        return request.cookies
    store = request.cookies or CookieStore()
    for cookie in [value for name, value in head.pairs if name == "set-cookie"][:_MAX_COOKIES]:
        try:
            # The client sends text as UTF-8.
            text = cookie.encode("latin-1").decode()
            if _has_domain_of(text, url):
                store.insert(text, url)
        except ValueError:
            # Not text, not a cookie, or not one that this URL may set.
            continue
    return store


def _has_domain_of(cookie: str, url: Url) -> bool:
    """Whether a cookie may have its Domain. A top-level domain would match every host in it; the store allows it."""
    match = _DOMAIN.search(cookie)
    return match is None or "." in match[1] or match[1].lower() in {"", url.host_str}


def _join(base: Url, location: str) -> Url:
    if not location:
        raise BadRedirect("the Location of the redirect is empty")
    try:
        url = base.join(location if location.isascii() else _unicode_location(location))
    except ValueError as error:
        raise BadRedirect(f"the Location of the redirect is not a URL: {error}") from None
    problem = url_problem(url) if len(location) <= MAX_URL_LENGTH else "it is too long"
    if problem is not None:
        raise BadRedirect(f"the Location of the redirect is invalid: {problem}")
    return url


def _unicode_location(location: str) -> str:
    """A Location whose bytes are not all ASCII: UTF-8, which the parser escapes, or bytes that are escaped as they
    are."""
    raw = location.encode("latin-1")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return quote_from_bytes(raw, safe=_ASCII)

"""What is asked for next after a redirect: method, body, headers and where."""

import pytest
from pyreqwest.http import Url

from conveyor.clock import SystemClock
from conveyor.egress.clients import Clients
from conveyor.egress.heads import ResponseHead
from conveyor.egress.redirects import (
    BadRedirect,
    OutgoingRequest,
    follow_redirect,
    headers_to_send,
    is_sensitive,
)
from conveyor.egress.routes import route_of
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import Gateway

HERE = "http://site.example/dir/page?q=1"
HEADERS = (("X-Plain", "1"), ("Content-Type", "text/plain"), ("Authorization", "secret"), ("COOKIE", "secret"))


def answer(location: str, status: int = 302, *cookies: str) -> ResponseHead:
    pairs = [("location", location), *(("set-cookie", cookie) for cookie in cookies)]
    return ResponseHead(status, pairs, dict(pairs))


def follow(location: str, status: int = 302, method: str = "GET", url: str = HERE) -> OutgoingRequest:
    request = OutgoingRequest(method, Url(url), HEADERS, b"body" if method != "GET" else None)
    return follow_redirect(request, answer(location, status))


def cookies_sent(request: OutgoingRequest) -> str | None:
    return {name.lower(): value for name, value in headers_to_send(request)}.get("cookie")


def chain(
    *steps: tuple[str, tuple[str, ...]], url: str = HERE, headers: tuple[tuple[str, str], ...] = ()
) -> str | None:
    """The Cookie of the last request of a chain, whose responses have these Locations and cookies."""
    request = OutgoingRequest("GET", Url(HERE), headers)
    for location, cookies in steps:
        request = follow_redirect(request, answer(location, 302, *cookies))
    return cookies_sent(request)


@pytest.mark.parametrize(
    ("status", "method", "becomes"),
    [
        (301, "GET", "GET"),
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (303, "PUT", "GET"),
        (303, "DELETE", "GET"),
        (303, "HEAD", "HEAD"),
        (301, "HEAD", "HEAD"),
        (301, "PUT", "PUT"),
        (302, "DELETE", "DELETE"),
        (307, "POST", "POST"),
        (308, "POST", "POST"),
        (308, "GET", "GET"),
    ],
)
def test_the_method_follows_the_status(status: int, method: str, becomes: str) -> None:
    after = follow("/next", status, method)
    assert after.method == becomes
    kept = becomes == method
    assert after.body == (b"body" if kept and method != "GET" else None)
    assert ("Content-Type" in dict(after.headers)) == kept


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("/next", "http://site.example/next"),
        ("next", "http://site.example/dir/next"),
        ("?q=2", "http://site.example/dir/page?q=2"),
        ("../up", "http://site.example/up"),
        ("//other.example/x", "http://other.example/x"),
        ("https://other.example", "https://other.example/"),
        # Bytes that are not ASCII, as a head has them: one character for each.
        ("HTTP://OTHER.example/\xc3\xa4?q=\xc3\xa4", "http://other.example/%C3%A4?q=%C3%A4"),
        ("/\xe4 b%20c", "http://site.example/%E4%20b%20c"),
        ("http://b\xc3\xbccher.example/", "http://xn--bcher-kva.example/"),
        ("http://0x7f.1/", "http://127.0.0.1/"),
        ("#part", "http://site.example/dir/page?q=1#part"),
    ],
)
def test_the_location_is_relative_to_the_page(location: str, url: str) -> None:
    assert str(follow(location).url) == url


@pytest.mark.parametrize(
    "location",
    [
        "",
        "ftp://other.example/",
        "file:///etc/passwd",
        "javascript:alert(1)",
        "data:,x",
        "http://",
        "http://user:password@other.example/",
        "http://other.example:0/",
        "http://other.example:99999/",
        "//[::1",
        "http://a..b/",
        "/" + "a" * 9000,
    ],
)
def test_a_location_that_can_not_be_followed_is_an_error(location: str) -> None:
    with pytest.raises(BadRedirect):
        follow(location)


@pytest.mark.parametrize(
    ("location", "leaves"),
    [
        ("/next", False),
        ("http://site.example:80/next", False),
        ("http://other.example/", True),
        ("http://site.example:8080/", True),
        ("https://site.example/", True),
        ("http://sub.site.example/", True),
    ],
)
def test_secrets_stay_with_the_origin_they_were_meant_for(location: str, leaves: bool) -> None:
    names = {name for name, _ in follow(location).headers}
    assert ("Authorization" in names) is not leaves
    assert ("COOKIE" in names) is not leaves
    assert "X-Plain" in names


@pytest.mark.parametrize(
    "name", ["Authorization", "cookie", "X-Api-Key", "X-Auth-Token", "X-CSRF-Token", "X-Session-Id"]
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert is_sensitive(name)
    assert not is_sensitive("Accept-Language")


def test_a_fragment_is_inherited_and_can_be_replaced() -> None:
    assert follow("/next", url=f"{HERE}#mine").url.fragment == "mine"
    assert follow("/next#theirs", url=f"{HERE}#mine").url.fragment == "theirs"


@pytest.mark.parametrize(
    ("template", "location", "target"),
    [
        ("https://gate.example/fetch?key=k&url={url}", "/next", "/next"),
        ("https://gate.example/fetch?key=k&url={url}", "https://gate.example/admin", "https://gate.example/admin"),
        ("https://gate.example/fetch?url={url}", "https://gate.example/fetch?url=http%3A%2F%2Fa%2F%3Fb", "http://a/?b"),
        ("https://gate.example/fetch?url={url}", "/fetch?url=http%3A%2F%2Fa%2F", "http://a/"),
        ("https://gate.example/?url={url}&js=1", "https://gate.example/?url=http%3A%2F%2Fa%2F&js=1", "http://a/"),
        ("https://gate.example/?url={url}&js=1", "https://gate.example/?url=http%3A%2F%2Fa%2F", None),
        ("https://gate.example/{url}", "/next", "/next"),
        ("https://gate.example/{url}", "https://gate.example/http%3A%2F%2Fa%2F", "http://a/"),
    ],
)
async def test_a_gateway_that_rewrites_redirects(template: str, location: str, target: str | None) -> None:
    clock = SystemClock()
    guard = TargetGuard(allow_private=False, clock=clock)
    route = route_of(Gateway(url=template), Clients(clock, "test"), guard, trusted=True)
    assert route.unwrap(location) == (target or location)


class TestCookies:
    @pytest.mark.parametrize(
        ("cookie", "location", "sent"),
        [
            ("a=1", "/dir/next", "a=1"),
            # Without a Path it is for the folder of the page.
            ("a=1", "/other", None),
            ("a=1; Path=/", "/other", "a=1"),
            ("a=1; Path=/other", "/other/page", "a=1"),
            ("a=1; Path=/other", "/otherwise", None),
            # Without a Domain it is for the host alone.
            ("a=1; Path=/", "http://sub.site.example/", None),
            ("a=1; Path=/; Domain=site.example", "http://sub.site.example/", "a=1"),
            ("a=1; Path=/; Domain=.site.example", "http://sub.site.example/", "a=1"),
            ("a=1; Path=/; Domain=other.example", "http://other.example/", None),
            ("a=1; Path=/; Domain=example", "http://other.example/", None),
            # Secure is for https alone.
            ("a=1; Path=/; Secure", "/next", None),
            ("a=1; Path=/; HttpOnly; SameSite=Strict", "/next", "a=1"),
            ("a=1; Path=/; Max-Age=0", "/next", None),
            ("a=1; Path=/; Expires=Thu, 01 Jan 1970 00:00:00 GMT", "/next", None),
            ("a=\xc3\xa9; Path=/", "/next", "a=\xe9"),
            ("nonsense", "/next", None),
            ("a=\xe9; Path=/", "/next", None),
        ],
    )
    def test_a_cookie_goes_where_its_rules_say(self, cookie: str, location: str, sent: str | None) -> None:
        assert chain((location, (cookie,))) == sent

    def test_cookies_last_to_the_end_of_the_chain(self) -> None:
        steps = [("/1", ("a=1; Path=/", "b=1; Path=/")), ("/2", ("b=2; Path=/",)), ("/3", ("a=; Path=/; Max-Age=0",))]
        assert chain(*steps[:1]) == "a=1; b=1"
        assert chain(*steps[:2]) in {"a=1; b=2", "b=2; a=1"}
        assert chain(*steps) == "b=2"

    def test_the_jobs_own_cookies_stay_unless_the_chain_sets_them(self) -> None:
        own = (("Cookie", "session=old; theme=dark"), ("X-Plain", "1"))
        assert chain(("/next", ("session=new; Path=/",)), headers=own) == "theme=dark; session=new"
        # To another origin go only those that the chain has for it.
        elsewhere = [("http://other.example/", ("session=new; Path=/",)), ("/next", ("b=2; Path=/",))]
        assert chain(*elsewhere, headers=own) == "b=2"

    def test_they_are_bounded(self) -> None:
        many = chain(("/next", tuple(f"c{number}={'x' * 1000}; Path=/" for number in range(200))))
        assert many is not None
        assert len(many) <= 8190

"""What is asked for next after a redirect: method, body, headers and where."""

import pytest
from pyreqwest.http import Url

from conveyor.egress.redirects import BadRedirect, OutgoingRequest, follow_redirect, is_sensitive

HERE = "http://site.example/dir/page?q=1"
HEADERS = (("X-Plain", "1"), ("Content-Type", "text/plain"), ("Authorization", "secret"), ("COOKIE", "secret"))


def follow(location: str, status: int = 302, method: str = "GET", url: str = HERE) -> OutgoingRequest:
    request = OutgoingRequest(method, Url(url), HEADERS, b"body" if method != "GET" else None)
    return follow_redirect(request, status, location, request.url)


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
        ("HTTP://OTHER.example/ä", "http://other.example/%C3%A4"),
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


def test_a_redirect_on_the_gateway_is_between_it_and_us() -> None:
    gateway = Url("https://gate.example/fetch?url=x")
    request = OutgoingRequest("GET", Url(HERE), HEADERS)
    after = follow_redirect(request, 302, "/session/1", gateway, "https://gate.example")
    assert str(after.url) == HERE
    assert str(after.at) == "https://gate.example/session/1"
    assert after.headers == HEADERS


def test_a_redirect_that_leaves_the_gateway_is_one_of_the_target() -> None:
    gateway = Url("https://gate.example/fetch?url=x")
    request = OutgoingRequest("GET", Url(HERE), HEADERS, at=Url("https://gate.example/session/1"))
    after = follow_redirect(request, 302, "http://other.example/", gateway, "https://gate.example")
    assert (str(after.url), after.at) == ("http://other.example/", None)
    assert "Authorization" not in dict(after.headers)

"""The input of a fetch task: what is read, and what is refused, each with a line that says why."""

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.errors import InvalidField, MalformedJson
from conveyor.lists.gateways import gateway_problem
from conveyor.lists.inputs import (
    _USUAL,
    FORBIDDEN_HEADERS,
    FetchInput,
    body_bytes,
    headers_problem,
    input_problem,
    is_plain,
    parse_fetch_input,
    problem,
    task_problem,
)
from conveyor.model import Gateway, JobKind, PooledGateway, Sticky

URL = "http://site.example/"


def given_as(**fields: Any) -> str:
    return msgspec.json.encode({"url": URL, **fields}).decode()


def test_a_string_is_a_url_and_all_defaults() -> None:
    given = parse_fetch_input(f'"{URL}"')
    assert given == FetchInput(URL)
    assert is_plain(given)
    assert problem(given) is None


def test_an_object_carries_the_rest() -> None:
    raw = given_as(method="POST", headers={"X-A": "b"}, body="hi", id="7", tag="t", timeout=2, connect_timeout=1.5)
    given = parse_fetch_input(raw.encode())
    assert given == FetchInput(URL, "POST", {"X-A": "b"}, "hi", None, "7", "t", 2.0, 1.5)
    assert not is_plain(given)
    assert problem(given) is None


def test_labels_of_the_user_leave_a_task_plain() -> None:
    assert is_plain(parse_fetch_input(given_as(id="a", tag="b")))


@pytest.mark.parametrize("raw", ["", "{", '"http://site.example', "nul", '{"url":"http://a/",}', b"\xff", '"\\ud800"'])
def test_what_is_not_json_is_told_so(raw: str | bytes) -> None:
    with pytest.raises(MalformedJson):
        parse_fetch_input(raw)


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ("1", "Expected"),
        ("null", "Expected"),
        ("[]", "Expected"),
        ("{}", "url"),
        ('{"url": 1}', "url: Expected `str`"),
        (given_as(unknown=1), "unknown field `unknown`"),
        (given_as(headers=[]), "headers"),
        (given_as(headers={"a": 1}), "headers"),
        (given_as(timeout="1"), "timeout"),
        (given_as(body=1), "body"),
        (given_as(id=1), "id"),
    ],
)
def test_what_has_the_wrong_shape_is_named(raw: str, part: str) -> None:
    with pytest.raises(InvalidField, match=part):
        parse_fetch_input(raw)
    assert part in (input_problem(raw) or "")


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"url": "ftp://site.example/"}, "http://"),
        ({"url": "http://user:pw@site.example/"}, "password"),
        ({"method": "TRACE"}, "method"),
        ({"method": "CONNECT"}, "method"),
        ({"method": "GET / HTTP/1.1\r\nX: y"}, "method"),
        ({"method": ""}, "method"),
        ({"headers": {"X-A": "b\r\nX-C: d"}}, "X-A"),
        ({"headers": {"X-A": "b\nc"}}, "X-A"),
        ({"headers": {"X-A": "b\rc"}}, "X-A"),
        ({"headers": {"X-A": "b\x00"}}, "X-A"),
        ({"headers": {"X-A\r\nX-B": "c"}}, "name"),
        ({"headers": {"X A": "c"}}, "name"),
        ({"headers": {"X:A": "c"}}, "name"),
        ({"headers": {"": "c"}}, "name"),
        ({"headers": {"Ä": "c"}}, "name"),
        ({"headers": {f"x-{number}": "" for number in range(101)}}, "more than 100"),
        ({"headers": {"x": "a" * 40_000}}, "larger"),
        ({"body": "a", "body_base64": "YQ=="}, "not both"),
        ({"body_base64": "not base64"}, "base64"),
        ({"body_base64": "YQ"}, "base64"),
        ({"body_base64": "Y Q=="}, "base64"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 86_401}, "timeout"),
        ({"connect_timeout": 0}, "connect_timeout"),
        ({"connect_timeout": 301}, "connect_timeout"),
        ({"id": "a" * 1025}, "id"),
        ({"tag": "a" * 1025}, "tag"),
    ],
)
def test_what_can_not_be_fetched_is_named(fields: dict[str, Any], part: str) -> None:
    said = input_problem(given_as(**fields))
    assert said is not None
    assert part in said
    assert "\n" not in said


@pytest.mark.parametrize("name", [*sorted(FORBIDDEN_HEADERS), "HOST", "Transfer-Encoding", "Content-Length"])
def test_headers_of_the_connection_are_not_the_users(name: str) -> None:
    assert name in (headers_problem({name: "x"}) or "")


@pytest.mark.parametrize("name", ["Authorization", "Cookie", "Content-Type", "User-Agent", "Accept-Encoding", "X-Üser"])
def test_other_headers_are(name: str) -> None:
    assert (headers_problem({name: "välue\twith a tab"}) is None) == name.isascii()


@pytest.mark.parametrize("method", ["GET", "get", "HEAD", "Post", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_methods_are_taken_in_any_case(method: str) -> None:
    assert input_problem(given_as(method=method)) is None


def test_the_body_is_text_or_bytes() -> None:
    assert body_bytes(FetchInput(URL)) is None
    assert body_bytes(FetchInput(URL, body="é")) == "é".encode()
    assert body_bytes(FetchInput(URL, body="")) == b""
    assert body_bytes(FetchInput(URL, body_base64=base64.b64encode(b"\x00\xff").decode())) == b"\x00\xff"


def test_a_body_with_half_a_letter_is_refused() -> None:
    assert problem(FetchInput(URL, body="\ud800"))


@pytest.mark.parametrize(
    ("gateway", "part"),
    [
        (Gateway(), "either"),
        (Gateway(proxy="http://a:1", url="http://a/{url}"), "either"),
        (Gateway(proxy="nothing"), "not a URL"),
        (Gateway(proxy="socks5://a:1"), "use socks5h://"),
        (Gateway(proxy="socks4a://a:1"), "use socks5h://"),
        (Gateway(proxy="socks5h://a:0"), "must be http"),
        (Gateway(proxy="socks5h:///a"), "must be http"),
        (Gateway(proxy="socks5h://a b:1"), "not a URL"),
        (Gateway(proxy="SOCKS5H://a:1", headers={"X": "1"}), "gets no headers"),
        (Gateway(proxy="ftp://a:1"), "must be http"),
        (Gateway(proxy="http://a:0"), "must be http"),
        (Gateway(url="http://a/"), "{url}"),
        (Gateway(url="ftp://a/{url}"), "must begin"),
        (Gateway(url="http://{url}/"), "not in its host"),
        (Gateway(url="http://a.{url}/"), "not in its host"),
        (Gateway(url="{url}"), "not a URL"),
        (Gateway(url="http://{url}@a/"), "not in its host"),
        (Gateway(url="http://a/{url}", headers={"Host": "b"}), "Host"),
        (Gateway(url="http://a/{url}", headers={"Proxy-Authorization": "b"}), "Proxy-Authorization"),
        (Gateway(proxy="http://a:1", headers={"X": "a\r\nb"}), "X"),
        (Gateway(proxy="http://a:1", sticky=Sticky.HOST), "needs a `pool`"),
        (Gateway(proxy="http://a:1", pool=[PooledGateway(proxy="http://b:1")]), "of its own"),
        (
            Gateway(pool=[PooledGateway(proxy="http://b:1"), PooledGateway(proxy="b")]),
            "gateway 2 of the pool: the proxy",
        ),
        (Gateway(pool=[PooledGateway(proxy="http://b:1", weight=0)]), "between 1 and 100"),
        (Gateway(pool=[PooledGateway(proxy="http://b:1")] * 51), "at most 50"),
    ],
)
def test_a_gateway_that_can_not_work_is_named(gateway: Gateway, part: str) -> None:
    assert part in (gateway_problem(gateway) or "")


@pytest.mark.parametrize(
    "gateway",
    [
        Gateway(proxy="http://user:password@proxy.example:3128", headers={"Proxy-Authorization": "Bearer x"}),
        Gateway(proxy="https://proxy.example"),
        Gateway(proxy="socks5h://user:password@proxy.example:1080"),
        Gateway(proxy="socks5h://proxy.example"),
        Gateway(url="https://api.example/v1?key=k&url={url}", headers={"X-Api-Key": "k"}),
        Gateway(url="http://127.0.0.1:8080/{url}"),
    ],
)
def test_a_gateway_is_a_proxy_or_a_template(gateway: Gateway) -> None:
    assert gateway_problem(gateway) is None


@given(st.text() | st.binary())
def test_no_text_makes_the_check_raise(raw: str | bytes) -> None:
    input_problem(raw)


@given(
    st.fixed_dictionaries(
        {"url": st.just(URL) | st.text()},
        optional={
            "method": st.text(max_size=8),
            "headers": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
            "body": st.text(),
            "body_base64": st.text(),
            "id": st.text(),
            "timeout": st.floats(),
            "connect_timeout": st.floats(),
        },
    )
)
def test_what_passes_can_be_sent(fields: dict[str, Any]) -> None:
    given = FetchInput(**fields)
    if problem(given) is None:
        body_bytes(given)
        assert not any(mark in f"{name}{value}" for name, value in given.headers.items() for mark in "\r\n\0")


@given(st.from_regex(_USUAL, fullmatch=True))
def test_the_short_way_takes_nothing_that_the_long_way_refuses(raw: bytes) -> None:
    assert input_problem(raw) is None


@pytest.mark.parametrize(
    "text",
    [
        "http://a..example/",
        "http://1.2.3.999/",
        "http://-a.example/",
        "http://user:pass@a.example/",
        "http:///a.example/",
        "http://a.example:0/",
        "http://a.example:65536/",
        "http://a.example:080/",
        "http://1.2.3.04/",
        "http://1.2.3/",
        "http://1.2.3.4.5/",
        "http://" + "a." * 200 + "example/",
        "ftp://a.example/",
        "http://a.example/\\x",
        "http://xn--a.example/",
    ],
)
def test_the_short_way_leaves_the_rest_to_the_long_one(text: str) -> None:
    assert _USUAL.fullmatch(msgspec.json.encode(text)) is None


@pytest.mark.parametrize("kind", [JobKind.FETCH, JobKind.DOWNLOAD])
@pytest.mark.parametrize(
    "raw",
    [
        b'"https://www.example.com/catalogue/item/7?from=list"',
        b'"http://www.example.com:8080/"',
        b'"http://127.0.0.1:45581/page/7"',
        b'"https://255.255.255.255"',
    ],
)
def test_the_usual_url_goes_the_short_way(kind: JobKind, raw: bytes) -> None:
    assert _USUAL.fullmatch(raw)
    assert task_problem(kind, raw) is None

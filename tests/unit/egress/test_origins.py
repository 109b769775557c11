"""Origins: scheme, host and port of a URL, as one text for one target."""

import json

import pytest

from conveyor.egress.origins import plain_origin
from conveyor.process.executors.fetch.fetch_executor import input_origin


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://a.example/x", "https://a.example"),
        ("https://a.example:443/x", "https://a.example"),
        ("https://a.example:0443", "https://a.example"),
        ("http://a.example:443?q", "http://a.example:443"),
        ("http://a.example:80", "http://a.example"),
        ("http://a.example:8080/", "http://a.example:8080"),
        ("HTTP://A.Example./", "http://a.example"),
        ("http://127.0.0.1:9/", "http://127.0.0.1:9"),
        ("http://[::1]:81/", "http://[::1]:81"),
        ("ftp://a.example/", None),
        ("not a URL", None),
    ],
)
def test_of_a_task(url: str, origin: str | None) -> None:
    assert input_origin(json.dumps(url)) == origin
    assert input_origin(json.dumps({"url": url})) == origin


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://user:secret@gate.example:3128", "http://gate.example:3128"),
        ("https://gate.example/?u={url}", "https://gate.example"),
        ("http://[::1]:3128", "http://[::1]:3128"),
        ("http://gate.example:port", None),
        ("nothing", None),
    ],
)
def test_of_a_gateway(url: str, origin: str | None) -> None:
    assert plain_origin(url) == origin

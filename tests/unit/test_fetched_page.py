"""The page that a function of `extract` gets."""

import pytest

from conveyor import Page


@pytest.mark.parametrize(
    ("body", "content_type", "text"),
    [
        ("grüße".encode(), None, "grüße"),
        ("\ufeffgrüße".encode(), "text/html; charset=latin-1", "grüße"),
        ("grüße".encode("utf-16"), None, "grüße"),
        ("grüße".encode("latin-1"), 'text/html; charset="ISO-8859-1"', "grüße"),
        (b"<meta charset=windows-1252>\x80", None, "<meta charset=windows-1252>€"),
        (
            b'<?xml version="1.0" encoding="ISO-8859-15"?>\xa4',
            "text/xml",
            '<?xml version="1.0" encoding="ISO-8859-15"?>€',
        ),
        (b"\xff\xfe\x00", "text/plain; charset=utf-8", "\ufffd"),
        (b"plain", "text/html; charset=no-such-thing", "plain"),
        *((b"plain", f"text/html; charset={codec}", "plain") for codec in ("rot13", "hex", "base64", "idna", "zlib")),
        *((b"a-1", f"text/html; charset={codec}", "a-1") for codec in ("punycode", "undefined", "unicode_escape")),
    ],
)
def test_text_is_in_its_own_encoding(body: bytes, content_type: str | None, text: str) -> None:
    assert Page(body, url="https://example.com/", content_type=content_type).text == text


def test_what_it_tells_of_request_and_response() -> None:
    page = Page(
        b'{"a": [1]}',
        url="https://example.com/",
        input={"url": "https://example.com/", "id": "one", "tag": "red"},
        status=200,
        headers=[("Set-Cookie", "a=1"), ("set-cookie", "b=2"), ("X", "y")],
    )
    assert page.json() == {"a": [1]}
    assert page.headers == {"set-cookie": "a=1, b=2", "x": "y"}
    assert (page.id, page.tag, page.final_url) == ("one", "red", "https://example.com/")
    plain = Page(b"", url="https://example.com/")
    assert (plain.input, plain.id, plain.tag) == ("https://example.com/", None, None)


def test_html_is_parsed() -> None:
    page = Page("<h1>grüße</h1><p>x".encode("latin-1"), url="u", content_type="text/html; charset=latin-1")
    assert page.html.css_first("h1").text() == "grüße"

"""Rules of robots.txt: the examples of RFC 9309, and what real files have."""

import pytest

from conveyor.egress.robots_rules import MAX_WILDCARDS, RobotsRules, parse_robots, product_token

RFC = b"""
User-Agent: *
Disallow: *.gif$
Disallow: /example/
Allow: /publications/

User-Agent: foobot
Disallow:/
Allow:/example/page.html
Allow:/example/allowed.gif

User-Agent: barbot
User-Agent: bazbot
Disallow: /example/page.html

User-Agent: quxbot

"""


def allowed(text: bytes, token: str, target: str) -> bool:
    return parse_robots(text, token).allows(target)


@pytest.mark.parametrize(
    ("token", "target", "expected"),
    [
        ("foobot", "/", False),
        ("foobot", "/example/page.html", True),
        ("foobot", "/example/allowed.gif", True),
        ("barbot", "/example/page.html", False),
        ("bazbot", "/example/page.html", False),
        ("bazbot", "/example/other", True),
        ("quxbot", "/example/", True),
        ("conveyor", "/example/", False),
        ("conveyor", "/a.gif", False),
        ("conveyor", "/a.gif?x", True),
        ("conveyor", "/publications/a.gif", True),
    ],
)
def test_the_example_of_the_rfc(token: str, target: str, expected: bool) -> None:
    assert allowed(RFC, token, target) is expected


@pytest.mark.parametrize(
    ("rules", "target", "expected"),
    [
        # The longest rule counts, in whatever order; `allow` if they are equally long.
        ("Disallow: /\nAllow: /p", "/page", True),
        ("Allow: /page\nDisallow: /*.htm", "/page.htm", False),
        ("Allow: /$\nDisallow: /", "/", True),
        ("Allow: /$\nDisallow: /", "/page.htm", False),
        ("Disallow: /page\nAllow: /page", "/page", True),
        ("Disallow: /fo*\nAllow: /foo", "/foo", True),
        # Wildcards.
        ("Disallow: /*.php", "/folder/filename.php?parameters", False),
        ("Disallow: /*.php$", "/filename.php?parameters", True),
        ("Disallow: /fish*.php", "/fishheads/catfish.php?parameters", False),
        ("Disallow: /fish*.php", "/Fish.PHP", True),
        ("Disallow: /a*b*c$", "/a-b-c", False),
        ("Disallow: /a*b*c$", "/a-b-cd", True),
        ("Disallow: /a*aa$", "/aa", True),
        ("Disallow: /*", "/", False),
        # Escapes and letters of any alphabet are compared in one spelling.
        ("Disallow: /foo/bar/\u30c4", "/foo/bar/%E3%83%84", False),
        ("Disallow: /foo/bar/%E3%83%84", "/foo/bar/%e3%83%84", False),
        ("Disallow: /foo/bar/%62%61%7A", "/foo/bar/baz", False),
        ("Disallow: /a%2Fb", "/a/b", True),
        # What says nothing.
        ("Disallow:", "/x", True),
        ("Disallow", "/x", True),
        ("Crawl-delay: 10", "/x", True),
        ("Disallow: x", "/x", True),
        ("Disallow: /x # and why", "/x", False),
    ],
)
def test_one_rule_decides(rules: str, target: str, expected: bool) -> None:
    assert allowed(f"User-agent: *\n{rules}".encode(), "conveyor", target) is expected


def test_groups_for_the_same_agent_count_together() -> None:
    text = b"\xef\xbb\xbfuser-agent: CONVEYOR/1.0\rdisallow: /a\r\nUser-agent: x\nDisallow: /\nUSER-AGENT: conveyor\n"
    text += b"Disallow: /b"
    rules = parse_robots(text, "conveyor")
    assert [rules.allows(target) for target in ("/a", "/b", "/c")] == [False, False, True]


def test_lines_between_two_agents_do_not_part_them() -> None:
    text = b"User-agent: a\nCrawl-delay: 5\nSitemap: https://x/\nUser-agent: conveyor\nDisallow: /"
    assert not allowed(text, "conveyor", "/x")
    assert not allowed(text, "a", "/x")


@pytest.mark.parametrize(
    ("agent", "token"),
    [
        ("conveyor/0.1.0", "conveyor"),
        ("My_Crawler-2/1.0 (+https://example.com)", "my_crawler-"),
        ("Mozilla/5.0 (compatible; ShopBot/2.1; +https://shop.example/bot)", "shopbot"),
        ("Mozilla/5.0 (X11; Linux x86_64)", "mozilla"),
        ("42", "*"),
        ("", "*"),
    ],
)
def test_the_name_of_an_agent(agent: str, token: str) -> None:
    assert product_token(agent) == token


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00", b"<html>User-agent: *</html>", b":::\n::", b"Disallow: /"])
def test_what_is_no_robots_file_forbids_nothing(text: bytes) -> None:
    assert allowed(text, "conveyor", "/x")


def test_a_file_made_to_be_slow_is_not() -> None:
    """However many rules and wildcards: the work for one URL is bounded."""
    many = parse_robots(b"User-agent: *\n" + b"".join(b"Disallow: /%d\n" % number for number in range(50_000)), "x")
    assert not many.allows("/49999")
    assert many.allows("/x")
    wild = RobotsRules([(f"/{'*a' * 200}{number}$", False) for number in range(MAX_WILDCARDS + 5)])
    assert wild.allows("/" + "a" * 2000)
    assert len(wild._wildcards) == MAX_WILDCARDS

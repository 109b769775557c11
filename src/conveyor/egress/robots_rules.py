"""Rules of a robots.txt, by RFC 9309. Gets the bytes of the file and a user agent, returns what the agent may fetch.

Groups for the product token of the agent count together; without one, those for `*`. The longest rule that matches a
URL decides, `allow` if two are equally long; `*` stands for any characters, `$` for the end. The standard library's
parser knows neither, and takes the first rule. Crawl-delay is not part of the RFC, and is ignored.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import quote

# Rules with wildcards that count, of one agent: each is compared with every URL.
MAX_WILDCARDS = 2000
_PRODUCT = re.compile(r"[A-Za-z_-]+")
_COMPATIBLE = re.compile(r"\bcompatible;\s*([A-Za-z_-]+)")
_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
# All that quote() leaves: a path has been escaped before, but for what is not ASCII.
_ASCII = "".join(map(chr, range(33, 127)))

Line = tuple[str, str]


@lru_cache(maxsize=256)
def product_token(user_agent: str) -> str:
    """The name by which robots.txt may know an agent: that of its first product, or of the one that browsers are
    `compatible` with in what so many crawlers send."""
    found = _COMPATIBLE.search(user_agent) if user_agent.startswith("Mozilla/") else None
    product = found[1] if found else (_PRODUCT.match(user_agent) or [""])[0]
    return product.lower() or "*"


class RobotsRules:
    """What one agent may fetch. Without rules, everything."""

    __slots__ = ("_lengths", "_plain", "_wildcards", "size")

    def __init__(self, rules: list[tuple[str, bool]]) -> None:
        # Rules without wildcards by their text; whether they allow.
        self._plain: dict[str, bool] = {}
        self._wildcards: list[tuple[int, bool, list[str], bool]] = []
        # Characters in all of them.
        self.size = 0
        for pattern, allows in rules:
            self._add(pattern, allows)
        self._lengths = sorted({len(pattern) for pattern in self._plain}, reverse=True)
        self._wildcards.sort(key=lambda rule: (-rule[0], not rule[1]))

    def allows(self, target: str) -> bool:
        """Return whether the path and query of a URL may be fetched."""
        target = _normal(target)
        length, allows = self._longest_plain(target)
        for longer, wildcard_allows, parts, is_anchored in self._wildcards:
            if longer < length:
                break
            if _matches(target, parts, is_anchored):
                # The first one is the longest, and allows if it can.
                return wildcard_allows or (longer == length and allows)
        return allows

    def _longest_plain(self, target: str) -> tuple[int, bool]:
        for length in self._lengths:
            if length <= len(target) and (allows := self._plain.get(target[:length])) is not None:
                return length, allows
        return -1, True

    def _add(self, pattern: str, allows: bool) -> None:
        pattern = _normal(pattern)
        if "*" not in pattern and not pattern.endswith("$"):
            self._plain[pattern] = allows or self._plain.get(pattern, False)
        elif len(self._wildcards) < MAX_WILDCARDS:
            is_anchored = pattern.endswith("$")
            self._wildcards.append((len(pattern), allows, pattern.removesuffix("$").split("*"), is_anchored))
        self.size += len(pattern)


def parse_robots(text: bytes, token: str) -> RobotsRules:
    """The rules for an agent with this product token."""
    own: list[tuple[str, bool]] | None = None
    others: list[tuple[str, bool]] = []
    agents: set[str] = set()
    begun = False
    for name, value in _lines(text):
        if name == "user-agent":
            if begun:
                agents, begun = set(), False
            agents.add("*" if value.startswith("*") else (_PRODUCT.match(value) or [""])[0].lower())
            own = [] if own is None and token in agents else own
        elif name in ("allow", "disallow"):
            begun = True
            # An empty rule disallows nothing.
            rule = [(value, name == "allow")] if value.startswith(("/", "*")) else []
            if token in agents and own is not None:
                own += rule
            if "*" in agents:
                others += rule
    return RobotsRules(others if own is None else own)


def _lines(text: bytes) -> Iterator[Line]:
    decoded = text.decode("utf-8-sig", "replace")
    for line in re.split(r"\r\n|\r|\n", decoded):
        name, colon, value = line.partition("#")[0].partition(":")
        if colon:
            yield name.strip().lower(), value.strip()


def _normal(text: str) -> str:
    """One spelling of a path: escapes of plain characters undone, others in upper case, what is not ASCII escaped."""
    if not text.isascii():
        text = quote(text, safe=_ASCII)
    return _ESCAPE.sub(_unescape, text) if "%" in text else text


def _unescape(escape: re.Match[str]) -> str:
    character = chr(int(escape[0][1:], 16))
    return character if character in _UNRESERVED else escape[0].upper()


def _matches(target: str, parts: list[str], is_anchored: bool) -> bool:
    """Whether the parts between the wildcards occur one after the other: the first at the beginning, and the last of an
    anchored rule at the end."""
    if not target.startswith(parts[0]):
        return False
    at = len(parts[0])
    if len(parts) == 1:
        return not is_anchored or at == len(target)
    for part in parts[1:-1]:
        at = target.find(part, at)
        if at < 0:
            return False
        at += len(part)
    if is_anchored:
        return len(target) - len(parts[-1]) >= at and target.endswith(parts[-1])
    return target.find(parts[-1], at) >= 0

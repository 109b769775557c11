"""Redaction: removes secrets from every line of the log and from every error that a command prints.

It removes keys and tokens by their format, values behind names that mark a secret, and the user info, query and
fragment of URLs. When in doubt it removes: a line that hides too much is a nuisance, one that hides too little leaks a
key.
"""

import re
from collections.abc import Mapping, MutableMapping
from typing import Any

GONE = "***"

# Names of headers, parameters, fields or settings whose values are secret.
_NAME = (
    r"authorization|cookie|passw(?:or)?d|passphrase|secret|token|signature|credential|api[-_]?key|access[-_]?key"
    r"|signing[-_]?key|private[-_]?key|session[-_]?id"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
# Words of a header's name that mark a secret, where the names above do not.
_SECRET_WORD = re.compile(r"(?:^|[-_])(?:auth|key|apikey|jwt|sid|session)(?:$|[-_])", re.IGNORECASE)
# Repeats are bounded, so that a hostile text cannot take long. The value of a header extends to the end of its line or
# quotes; other values extend to the next separator.
_HEADER = re.compile(
    r"""(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(["']?\s{0,5}[:=]\s{0,5}(?:b?["'])?)[^\r\n"']+"""
)
_PAIR = re.compile(
    rf"""(?i)((?:{_NAME})[\w.-]{{0,40}}\\{{0,4}}["']?\s{{0,5}}(?:[:=]|%3[AD])\s{{0,5}}(?:b?\\{{0,4}}["'])?)"""
    r"""([^\s"'&,;)\]}\\?]+)"""
)
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s{1,5})[\w.~+/=-]{3,}")
_KEY = re.compile(r"\b(cv_[0-9a-z]{4,26}_)[0-9a-f]+")
_LOOKS = re.compile(
    r"whsec_[\w+/=-]+"  # a webhook's secret
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"  # an AWS key
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"  # a JWT
    r"|\b[A-Za-z0-9+/_=-]{100,}"  # a task token: longer than any id or digest
)
_URL = re.compile(r"""([a-zA-Z][a-zA-Z0-9+.-]{0,30}:(?:\\{0,4}/){2})([^\s"'<>`]+)""")
_USER = re.compile(r"""(?<=//)[^\s"'<>`/?#]{1,1000}@""")
_QUERY = re.compile(r"""(?<=[\w/])\?[\w.%~$-]+=[^\s"'<>`)\]}]+""")
_OPTION = re.compile(r"\?[\w.-]+=")
_NUMBER = re.compile(r"\d*")
_CLOSING = ".,;:!)]}"


def redact(text: str) -> str:
    """The text without secrets."""
    text = _HEADER.sub(rf"\1\2{GONE}", text)
    text = _URL.sub(_url, text)
    text = _QUERY.sub(f"?{GONE}", text)
    text = _SCHEME.sub(rf"\1\2{GONE}", text)
    text = _KEY.sub(rf"\1{GONE}", text)
    text = _PAIR.sub(_pair, text)
    return _LOOKS.sub(GONE, text)


def is_secret_name(name: str) -> bool:
    """Whether a header of this name carries a secret: Authorization, Cookie, X-Api-Key, X-Auth, X-Session-Token…"""
    return bool(_SECRET_NAME.search(name) or _SECRET_WORD.search(name))


def redact_credentials(text: str) -> str:
    """The text without the values behind names that mark a secret, and without the user info of URLs. The rest of a URL
    stays, with other parts of its query."""
    text = _USER.sub(f"{GONE}@", text)
    for pattern in (_HEADER, _SCHEME):
        text = pattern.sub(rf"\1\2{GONE}", text)
    return _PAIR.sub(_pair, _KEY.sub(rf"\1{GONE}", text))


def redact_event(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor, the last one before the renderer."""
    return {name: _value(name, value) for name, value in event.items()}


def _value(name: str, value: Any) -> Any:
    """The redacted form of a value that is logged under `name`."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if _SECRET_NAME.search(name):
        return GONE
    if isinstance(value, Mapping):
        return {redact(str(key)): _value(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_value("", inner) for inner in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return redact(bytes(value).decode("utf-8", "replace"))
    return redact(value if isinstance(value, str) else repr(value))


def _pair(match: re.Match[str]) -> str:
    # Small numbers are counts, not secrets.
    return match[0] if match[2].isdecimal() and len(match[2]) < 10 else match[1] + GONE


def _url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    end = rest[len(rest.rstrip(_CLOSING)) :]
    rest = rest.removesuffix(end)
    return scheme + _without_query(_without_user(scheme, rest)) + end


def _without_user(scheme: str, rest: str) -> str:
    """Remove the user info, also where a password has unescaped slashes or question marks."""
    authority = re.split(r"[/?#\\]", rest, maxsplit=1)[0]
    _, at, host = authority.rpartition("@")
    if at:
        return f"{GONE}@{host}{rest[len(authority) :]}"
    port = authority.rpartition(":")[2] if ":" in authority and not authority.endswith("]") else ""
    odd = not _NUMBER.fullmatch(port)
    if "@" in rest and (odd or not scheme.lower().startswith("http")):
        before, _, after = rest.rpartition("@")
        # The value of an option may have an @, too: what follows is then a part of it.
        return GONE if _OPTION.search(before) else f"{GONE}@{after}"
    # In a truncated text, a port that is not a number is the start of a password.
    return GONE if odd else rest


def _without_query(rest: str) -> str:
    place = re.search(r"[?#]", rest)
    return rest if place is None else f"{rest[: place.start() + 1]}{GONE}"


def printable(text: str) -> str:
    """The text without control characters, which a terminal would execute: lists and responses are untrusted."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)

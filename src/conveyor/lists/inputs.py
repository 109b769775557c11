"""The inputs of tasks that fetch or download. Gets JSON text (a URL, or an object around one), hands on a value, and
says in one line what is wrong with it. Accept asks before anything is written; the executor reads the same form back.

A million lines pass through here, so a plain URL costs a few microseconds: one decode and one parse.
"""

import binascii
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import msgspec
from pyreqwest.http import Url

from conveyor.egress.target_guard import BadUrl, check_url
from conveyor.errors import BadInput, InvalidField, MalformedJson
from conveyor.model import Gateway, InputJson, JobKind

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# As for a whole job (accept/option_limits.py).
MAX_TIMEOUT = 86_400.0
MAX_CONNECT_TIMEOUT = 300.0
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_LABEL = 1024
# The client writes these itself; a second opinion on where a message ends or goes is how requests are smuggled.
FORBIDDEN_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
MAX_INPUT_BYTES = 256 * 1024
# Far below the depth at which a decoder gives up, wherever a worker stands when it decodes.
MAX_DEPTH = 64
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# One step down or up, as signed bytes.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_LINE_BREAKS = re.compile(rb"[\r\n]")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")


class FetchInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task of kind fetch. `id` and `tag` are the user's own and only travel along."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: str | None = None
    body_base64: str | None = None
    id: str | None = None
    tag: str | None = None
    timeout: float | None = None
    connect_timeout: float | None = None


class DownloadInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task of kind download. `sha256`, in hexadecimal, is what the file must have."""

    url: str
    headers: Mapping[str, str] = {}
    sha256: str | None = None
    id: str | None = None
    tag: str | None = None
    timeout: float | None = None
    connect_timeout: float | None = None


_decoder = msgspec.json.Decoder(str | FetchInput)
_download_decoder = msgspec.json.Decoder(str | DownloadInput)


def parse_fetch_input(raw: str | bytes) -> FetchInput:
    """From JSON text; a string is a URL and all defaults. Raises MalformedJson or InvalidField."""
    try:
        value = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidField(_explain(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedJson(f"not valid JSON: {error}") from None
    return FetchInput(value) if isinstance(value, str) else value


def parse_download_input(raw: str | bytes) -> DownloadInput:
    """As parse_fetch_input. What it says may still be wrong: see `download_problem`."""
    try:
        value = _download_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidField(_explain(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedJson(f"not valid JSON: {error}") from None
    return DownloadInput(value) if isinstance(value, str) else value


def download_problem(given: DownloadInput) -> str | None:
    """What is wrong with this input, in one line, or None."""
    if given.sha256 is not None and not _SHA256.fullmatch(given.sha256):
        return "sha256 must be 64 hexadecimal digits"
    return check_url(given.url) or headers_problem(given.headers) or _timeout_problem(given) or _label_problem(given)


def problem(given: FetchInput) -> str | None:
    """What is wrong with this input, in one line, or None. It looks at nothing but the input."""
    wrong = check_url(given.url)
    if wrong is not None:
        return wrong
    if is_plain(given):
        return _label_problem(given)
    return (
        _method_problem(given.method)
        or headers_problem(given.headers)
        or _body_problem(given)
        or _timeout_problem(given)
        or _label_problem(given)
    )


def input_problem(raw: str | bytes) -> str | None:
    """Both in one: what is wrong with this JSON text as the input of a fetch task, or None."""
    try:
        return problem(parse_fetch_input(raw))
    except BadInput as error:
        return error.message


def headers_problem(headers: Mapping[str, str]) -> str | None:
    """What is wrong with headers that a user wants sent, in a task or for a whole job, or None."""
    if len(headers) > MAX_HEADERS:
        return f"more than {MAX_HEADERS} headers"
    size = 0
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            return f"header name {name[:40]!r} is not valid"
        if name.lower() in FORBIDDEN_HEADERS:
            return f"header {name} can not be set"
        if _CONTROL.search(value):
            return f"header {name} has a line end or another control character"
        size += len(name) + len(value)
    return f"headers are larger than {MAX_HEADER_BYTES} bytes" if size > MAX_HEADER_BYTES else None


def gateway_problem(gateway: Gateway) -> str | None:
    """What is wrong with a gateway, the operator's or a job's, or None."""
    if (gateway.proxy is None) == (gateway.url is None):
        return "a gateway has either `proxy` or `url`"
    wrong = _proxy_problem(gateway.proxy) if gateway.proxy is not None else _template_problem(gateway.url or "")
    # A proxy is sent its credentials in a header that no target may be sent.
    headers = {name: text for name, text in gateway.headers.items() if name.lower() != "proxy-authorization"}
    return wrong or headers_problem(headers if gateway.proxy is not None else gateway.headers)


def is_plain(given: FetchInput) -> bool:
    """Whether the input is a URL and nothing more, but for the user's own labels."""
    return (
        given.method == "GET"
        and not given.headers
        and given.body is None
        and given.body_base64 is None
        and given.timeout is None
        and given.connect_timeout is None
    )


def body_bytes(given: FetchInput) -> bytes | None:
    """The request body. The input has passed `problem`."""
    if given.body_base64 is not None:
        return binascii.a2b_base64(given.body_base64, strict_mode=True)
    return None if given.body is None else given.body.encode()


def _method_problem(method: str) -> str | None:
    return None if method.upper() in METHODS else f"method must be one of {', '.join(sorted(METHODS))}"


def _body_problem(given: FetchInput) -> str | None:
    if given.body is not None and given.body_base64 is not None:
        return "give `body` or `body_base64`, not both"
    try:
        body_bytes(given)
    except UnicodeError:
        return "body has a lone surrogate"
    except ValueError:
        return "body_base64 is not valid base64"
    return None


def _timeout_problem(given: FetchInput | DownloadInput) -> str | None:
    if given.timeout is not None and not 0 < given.timeout <= MAX_TIMEOUT:
        return f"timeout must be above 0 and at most {MAX_TIMEOUT:.0f} seconds"
    if given.connect_timeout is not None and not 0 < given.connect_timeout <= MAX_CONNECT_TIMEOUT:
        return f"connect_timeout must be above 0 and at most {MAX_CONNECT_TIMEOUT:g} seconds"
    return None


def _label_problem(given: FetchInput | DownloadInput) -> str | None:
    if len(given.id or "") > MAX_LABEL or len(given.tag or "") > MAX_LABEL:
        return f"id and tag are at most {MAX_LABEL} characters long"
    return None


def _proxy_problem(proxy: str) -> str | None:
    try:
        url = Url(proxy)
    except ValueError as error:
        return f"the proxy is not a URL: {error}"
    # SOCKS would have this machine resolve the names of targets, past the guard.
    if url.scheme not in {"http", "https"} or not url.host_str or url.port == 0:
        return "the proxy must be http://host:port or https://host:port"
    return None


def _template_problem(template: str) -> str | None:
    if "{url}" not in template:
        return "the gateway URL must contain {url}"
    try:
        one, other = (Url(template.replace("{url}", text)) for text in ("a", "b"))
    except ValueError as error:
        return f"the gateway is not a URL: {error}"
    if one.scheme not in {"http", "https"} or not one.host_str or one.port == 0:
        return "the gateway must begin with http:// or https://"
    if (one.origin_ascii, one.username, one.password) != (other.origin_ascii, other.username, other.password):
        return "{url} may stand in the path or the query of the gateway, not in its host"
    return None


def _explain(error: msgspec.ValidationError) -> str:
    message, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    return f"{field}: {message}" if field else message


_OF_URLS = frozenset({JobKind.FETCH, JobKind.DOWNLOAD})
# A URL as JSON: a host of plain names with a plain top-level domain, then visible ASCII that JSON does not escape. Less
# than what is taken, and never more.
_USUAL = re.compile(
    rb'"https?://(?![^/?#"]{201})(?:[a-z0-9]{1,60}(?:-[a-z0-9]{1,60}){0,5}\.){1,6}[a-z]{2,20}(?:[/?#][!#-?A-\[\]-~]*)?"'
)
_USUAL_BYTES = 4096


class InputProblem(NamedTuple):
    """Why a task is not valid; `code` is stable."""

    code: str
    message: str


def wrong_task(kind: JobKind, raw: bytes) -> InputProblem | None:
    """What is wrong with one task, or None."""
    # Nearly every task of a million is a URL that nothing can be wrong with.
    if kind in _OF_URLS and len(raw) <= _USUAL_BYTES and _USUAL.fullmatch(raw):
        return None
    if len(raw) > MAX_INPUT_BYTES:
        return InputProblem("too_large", f"the input has {len(raw)} bytes, at most {MAX_INPUT_BYTES} are taken")
    if _too_deep(raw):
        return InputProblem("too_deep", f"the input is nested more than {MAX_DEPTH} deep")
    if kind is JobKind.FETCH:
        return _wrong_fetch(raw)
    return _wrong_download(raw) if kind is JobKind.DOWNLOAD else _wrong_value(raw)


def _wrong_fetch(raw: bytes) -> InputProblem | None:
    try:
        given = parse_fetch_input(raw)
    except BadInput as error:
        return InputProblem(error.code, error.message)
    message = problem(given)
    if message is None:
        return None
    return InputProblem(BadUrl.code if check_url(given.url) else InvalidField.code, message)


def _wrong_download(raw: bytes) -> InputProblem | None:
    try:
        given = parse_download_input(raw)
    except BadInput as error:
        return InputProblem(error.code, error.message)
    message = download_problem(given)
    if message is None:
        return None
    return InputProblem(BadUrl.code if check_url(given.url) else InvalidField.code, message)


def _wrong_value(raw: bytes) -> InputProblem | None:
    """Any JSON value, as long as Python can hold it: syntax was seen to already, the size of numbers was not."""
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        return InputProblem(InvalidField.code, str(error))
    return None


def one_line(raw: bytes) -> InputJson:
    """An input as it is stored: a line break outside a string is only layout, and a manifest has one line a task."""
    return InputJson((msgspec.json.format(raw, indent=-1) if _LINE_BREAKS.search(raw) else raw).decode())


def _too_deep(raw: bytes) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    steps = _STRING.sub(b"", raw).translate(_STEPS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH

"""Inputs of tasks. Parses the JSON text of fetch and download inputs (a URL, or an object with one), and says in one
line what is wrong with an input. Accept and ingest validate with it; the executors parse the same text again.

Lists have millions of lines, so a plain URL costs a few microseconds: one decode and one parse.
"""

import binascii
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

import msgspec

from conveyor.egress.target_guard import BadUrl, check_url
from conveyor.errors import BadInput, InvalidField, MalformedJson
from conveyor.model import InputJson, JobKind

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# The limit of the job's option too (accept/option_limits.py).
MAX_TIMEOUT = 86_400.0
MAX_CONNECT_TIMEOUT = 300.0
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
MAX_LABEL = 1024
# The HTTP client sets these. A second value for where a message ends or goes allows request smuggling.
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
# Far below the depth at which a decoder fails, even deep in a worker's call stack.
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
    """One task of kind fetch. `id`, `tag` and `data`, an object, are the user's own."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = {}
    body: str | None = None
    body_base64: str | None = None
    id: str | None = None
    tag: str | None = None
    timeout: float | None = None
    connect_timeout: float | None = None
    data: msgspec.Raw = msgspec.Raw(b"")


class DownloadInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One task of kind download. The file must have this `sha256`, in hexadecimal."""

    url: str
    headers: Mapping[str, str] = {}
    sha256: str | None = None
    id: str | None = None
    tag: str | None = None
    timeout: float | None = None
    connect_timeout: float | None = None
    data: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(str | FetchInput)
_download_decoder = msgspec.json.Decoder(str | DownloadInput)


def parse_fetch_input(raw: str | bytes) -> FetchInput:
    """Parse JSON text; a string is a URL with all defaults. Raises MalformedJson or InvalidField."""
    value = parse_url_or_input(raw)
    return FetchInput(value) if isinstance(value, str) else value


def parse_url_or_input(raw: str | bytes) -> str | FetchInput:
    """As `parse_fetch_input`, but a URL with all defaults stays text."""
    try:
        value: str | FetchInput = _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidField(_explain(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedJson(f"not valid JSON: {error}") from None
    return value


def parse_download_input(raw: str | bytes) -> DownloadInput:
    """As `parse_fetch_input`. `download_problem` checks the values."""
    try:
        value = _download_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidField(_explain(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise MalformedJson(f"not valid JSON: {error}") from None
    return DownloadInput(value) if isinstance(value, str) else value


def download_problem(task_input: DownloadInput) -> str | None:
    """What is wrong with this input, in one line, or None."""
    if task_input.sha256 is not None and not _SHA256.fullmatch(task_input.sha256):
        return "sha256 must be 64 hexadecimal digits"
    return (
        check_url(task_input.url)
        or headers_problem(task_input.headers)
        or _timeout_problem(task_input)
        or _label_problem(task_input)
    )


def problem(task_input: FetchInput) -> str | None:
    """What is wrong with this input, in one line, or None. It checks only the text."""
    wrong = check_url(task_input.url)
    if wrong is not None:
        return wrong
    if is_plain(task_input):
        return _label_problem(task_input)
    return (
        _method_problem(task_input.method)
        or headers_problem(task_input.headers)
        or _body_problem(task_input)
        or _timeout_problem(task_input)
        or _label_problem(task_input)
    )


def input_problem(raw: str | bytes) -> str | None:
    """What is wrong with this JSON text as the input of a fetch task, or None."""
    try:
        return problem(parse_fetch_input(raw))
    except BadInput as error:
        return error.message


def headers_problem(headers: Mapping[str, str]) -> str | None:
    """What is wrong with the request headers of a task or a job, or None."""
    if len(headers) > MAX_HEADERS:
        return f"more than {MAX_HEADERS} headers"
    size = 0
    for name, value in headers.items():
        if not _TOKEN.fullmatch(name):
            return f"header name {name[:40]!r} is not valid"
        if name.lower() in FORBIDDEN_HEADERS:
            return f"header {name} cannot be set"
        if _CONTROL.search(value):
            return f"header {name} has a line break or another control character"
        size += len(name) + len(value)
    return f"headers are larger than {MAX_HEADER_BYTES} bytes" if size > MAX_HEADER_BYTES else None


def is_plain(task_input: FetchInput) -> bool:
    """Whether the input is only a URL, apart from the user's labels."""
    return (
        task_input.method == "GET"
        and not task_input.headers
        and task_input.body is None
        and task_input.body_base64 is None
        and task_input.timeout is None
        and task_input.connect_timeout is None
    )


def request_text(raw: str) -> str:
    """What two inputs of fetches have in common if they make the same request: the URL, or all that the request is made
    of, but not the user's labels and no timeout."""
    try:
        value = parse_url_or_input(raw)
    except BadInput:
        return raw
    if isinstance(value, str):
        return value
    parts = (value.method.upper(), value.url, sorted(value.headers.items()), value.body, value.body_base64)
    return value.url if parts == ("GET", value.url, [], None, None) else msgspec.json.encode(parts).decode()


def body_bytes(task_input: FetchInput) -> bytes | None:
    """The request body of an input without problems."""
    if task_input.body_base64 is not None:
        return binascii.a2b_base64(task_input.body_base64, strict_mode=True)
    return None if task_input.body is None else task_input.body.encode()


def _method_problem(method: str) -> str | None:
    return None if method.upper() in METHODS else f"method must be one of {', '.join(sorted(METHODS))}"


def _body_problem(task_input: FetchInput) -> str | None:
    if task_input.body is not None and task_input.body_base64 is not None:
        return "give `body` or `body_base64`, not both"
    try:
        body_bytes(task_input)
    except UnicodeError:
        return "body has a lone surrogate"
    except ValueError:
        return "body_base64 is not valid base64"
    return None


def _timeout_problem(task_input: FetchInput | DownloadInput) -> str | None:
    if task_input.timeout is not None and not 0 < task_input.timeout <= MAX_TIMEOUT:
        return f"timeout must be above 0 and at most {MAX_TIMEOUT:.0f} seconds"
    if task_input.connect_timeout is not None and not 0 < task_input.connect_timeout <= MAX_CONNECT_TIMEOUT:
        return f"connect_timeout must be above 0 and at most {MAX_CONNECT_TIMEOUT:g} seconds"
    return None


def _label_problem(task_input: FetchInput | DownloadInput) -> str | None:
    if len(task_input.id or "") > MAX_LABEL or len(task_input.tag or "") > MAX_LABEL:
        return f"id and tag are at most {MAX_LABEL} characters long"
    return None if bytes(task_input.data)[:1] in (b"", b"{") else "data must be an object"


def _explain(error: msgspec.ValidationError) -> str:
    message, _, path = str(error).partition(" - at `$.")
    field = path.rstrip("`")
    return f"{field}: {message}" if field else message


OF_URLS = frozenset({JobKind.FETCH, JobKind.DOWNLOAD})
# A host of plain names with a plain top-level domain, or an IPv4 address; maybe a port; then visible ASCII that JSON
# does not escape. It matches only valid URLs, though not all of them. Of names and paths nothing is given back once it
# is matched: no other match is possible.
_USUAL_NAME = rb"(?:[a-z0-9]{1,60}+(?:-[a-z0-9]{1,60}+){0,5}+\.){1,6}+[a-z]{2,20}+"
_OCTET = rb"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_USUAL_PORT = rb":(?:[1-5][0-9]{4}|[1-9][0-9]{0,3})"
USUAL_URL = (
    rb'https?://(?![^/?#"\n]{201})(?:%b(?:\.%b){3}|%b)(?:%b)?' % (_OCTET, _OCTET, _USUAL_NAME, _USUAL_PORT)
    + rb"(?:[/?#][!#-?A-\[\]-~]{0,3800}+)?+"
)
_USUAL = re.compile(b'"' + USUAL_URL + b'"')


class InputProblem(NamedTuple):
    """Why a task is not valid; `code` is stable."""

    code: str
    message: str


def task_problem(kind: JobKind, raw: bytes) -> InputProblem | None:
    """What is wrong with one task, or None."""
    # The fast path for nearly every task.
    if kind in OF_URLS and _USUAL.fullmatch(raw):
        return None
    if len(raw) > MAX_INPUT_BYTES:
        return InputProblem("too_large", f"the input has more than {MAX_INPUT_BYTES} bytes")
    if _too_deep(raw):
        return InputProblem("too_deep", f"the input is nested more than {MAX_DEPTH} levels deep")
    if kind is JobKind.FETCH:
        return _wrong_fetch(raw)
    return _wrong_download(raw) if kind is JobKind.DOWNLOAD else _wrong_value(raw)


def _wrong_fetch(raw: bytes) -> InputProblem | None:
    try:
        task_input = parse_fetch_input(raw)
    except BadInput as error:
        return InputProblem(error.code, error.message)
    message = problem(task_input)
    if message is None:
        return None
    return InputProblem(BadUrl.code if check_url(task_input.url) else InvalidField.code, message)


def _wrong_download(raw: bytes) -> InputProblem | None:
    try:
        task_input = parse_download_input(raw)
    except BadInput as error:
        return InputProblem(error.code, error.message)
    message = download_problem(task_input)
    if message is None:
        return None
    return InputProblem(BadUrl.code if check_url(task_input.url) else InvalidField.code, message)


def _wrong_value(raw: bytes) -> InputProblem | None:
    """Any JSON value that Python can decode: the syntax was checked before, the size of numbers was not."""
    try:
        msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        return InputProblem(InvalidField.code, str(error))
    return None


def compact_json(raw: bytes) -> InputJson:
    """An input as it is stored, without line breaks between JSON tokens: a manifest has one line per task."""
    return InputJson((msgspec.json.format(raw, indent=-1) if _LINE_BREAKS.search(raw) else raw).decode())


def _too_deep(raw: bytes) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    steps = _STRING.sub(b"", raw).translate(_STEPS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > MAX_DEPTH

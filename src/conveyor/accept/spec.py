"""What a client asks for: the body of POST /v1/jobs as a value, and the way from bytes to it.

Decoding says what is wrong with the shape (JSON, fields, types); `limits` says what is wrong with the values, and
`seeds` what is wrong with the tasks.
"""

import re
from typing import TypeVar

import msgspec

from conveyor.errors import BadInput, InvalidField, MalformedJson, UnknownField
from conveyor.jobs.event_names import Notify
from conveyor.model import LONG_KINDS, Compression, Job, JobKind, ListFormat, Mode, Options, ResultLayout

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_POSITION = re.compile(r"JSON is malformed: (?P<what>.*) \(byte (?P<position>\d+)\)", re.DOTALL)
# msgspec appends the path last, so the last mark is its own, whatever a field is called.
_AT = " - at `$"
_SHOWN = 100


class SourceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list that was uploaded before. Its form is found from its first bytes where it is not named."""

    upload_id: str
    format: ListFormat | None = None
    compression: Compression | None = None


class TasksSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tasks that are added to an open job; with `last_batch` it is closed in the same step."""

    tasks: list[msgspec.Raw] = []
    last_batch: bool = False


class JobSpec(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job as it is asked for. The fields of Options stand beside its own."""

    kind: JobKind = JobKind.FETCH
    name: str | None = None
    tasks: list[msgspec.Raw] = msgspec.field(default_factory=list)
    source: SourceSpec | None = None
    mode: Mode = Mode.CLOSED
    # Without it, the number of tasks decides.
    result_layout: ResultLayout | None = None
    # Who is told of the job, beside the tenant's own endpoints.
    notify: list[Notify] = msgspec.field(default_factory=list)

    def options(self) -> Options:
        """The part that is kept with the job. A message of long tasks carries one of them, whatever was asked for."""
        given = {field: getattr(self, field) for field in Options.__struct_fields__}
        return Options(**{**given, "chunk_size": 1} if self.kind in LONG_KINDS else given)


S = TypeVar("S")


def decode_spec(body: bytes | bytearray) -> JobSpec:
    """The job in a request body, or what is wrong with it."""
    return decode_body(body, JobSpec)


def spec_of(job: Job) -> JobSpec:
    """A job like this one, of tasks yet to be named."""
    options = {field: getattr(job.options, field) for field in Options.__struct_fields__}
    return JobSpec(kind=job.kind, name=job.name, result_layout=job.result_layout, **options)


def decode_body(body: bytes | bytearray, shape: type[S]) -> S:
    """A request body of some shape, or what is wrong with it."""
    _check_text(body)
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _wrong_shape(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error)) from None
    except RecursionError:
        raise MalformedJson("The body is nested too deeply.") from None


def _check_text(body: bytes | bytearray) -> None:
    # Tasks stay raw while the rest is decoded, and nobody looks into their strings then.
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise MalformedJson(f"The body is not UTF-8 at byte {error.start}.", position=error.start) from None
    if not body.strip():
        raise MalformedJson("The body is empty.")


def _wrong_shape(text: str) -> BadInput:
    message, mark, tail = text.rpartition(_AT)
    path = tail.removesuffix("`").removeprefix(".") if mark else ""
    message = message if mark else text
    unknown = _UNKNOWN.fullmatch(message)
    if unknown:
        field = ".".join(filter(None, [path, unknown["name"][:_SHOWN]]))
        return UnknownField(f"There is no field `{field}`.", field=field)
    if not path:
        return InvalidField(f"The body: {message}.", field="")
    return InvalidField(f"`{path}`: {message}.", field=path)


def _malformed(text: str) -> MalformedJson:
    match = _POSITION.fullmatch(text)
    if match is None:
        return MalformedJson("The body is not valid JSON: it ends too early.")
    return MalformedJson(
        f"The body is not valid JSON: {match['what']} at byte {match['position']}.",
        position=int(match["position"]),
    )

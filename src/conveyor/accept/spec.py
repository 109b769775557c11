"""The body of POST /v1/jobs as a value, and its decoding.

Decoding checks the shape (JSON, fields, types), `option_limits` the values, and `task_seeds` the tasks.
"""

import re
from operator import attrgetter
from typing import TypeVar

import msgspec

from conveyor.accept.unique_fields import check_unique_fields
from conveyor.errors import BadInput, InvalidField, MalformedJson, UnknownField
from conveyor.jobs.event_names import Notify
from conveyor.model import LONG_KINDS, Compression, Job, JobKind, ListFormat, Mode, Options, ResultLayout

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_POSITION = re.compile(r"JSON is malformed: (?P<what>.*) \(byte (?P<position>\d+)\)", re.DOTALL)
# msgspec appends the path last, so the last mark is its own, whatever a field is called.
_AT = " - at `$"
_SHOWN = 100


class SourceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A list: an upload, or a URL that the server reads, `s3://BUCKET/KEY` or `https://…`. Format and compression are
    detected from its first bytes where they are not given."""

    upload_id: str | None = None
    url: str | None = None
    # Of the request for the URL.
    headers: dict[str, str] = {}
    # The version that the client means; without one, the ingest reads the version that it finds.
    version_id: str | None = None
    etag: str | None = None
    sha256: str | None = None
    format: ListFormat | None = None
    compression: Compression | None = None
    # The column of a csv that has the URLs, if that is not `url`.
    url_column: str | None = None


class TasksSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch of tasks for an open job; with `last_batch` the job is closed in the same step."""

    tasks: list[msgspec.Raw] = []
    last_batch: bool = False


class JobSpec(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A requested job. The fields of Options stand beside its own."""

    kind: JobKind = JobKind.FETCH
    name: str | None = None
    tasks: list[msgspec.Raw] = msgspec.field(default_factory=list)
    source: SourceSpec | None = None
    mode: Mode = Mode.CLOSED
    # None: the number of tasks decides.
    result_layout: ResultLayout | None = None
    # Receivers of the job's events, beside the tenant's endpoints.
    notify: list[Notify] = msgspec.field(default_factory=list)
    # The id of a job, or an idempotency key: that job is cancelled, and no task starts before nothing of it is in
    # flight.
    replaces: str | None = None

    def options(self) -> Options:
        """The part that is stored with the job. A message of long tasks always carries one reference."""
        options = Options(*_read_options(self))
        return msgspec.structs.replace(options, chunk_size=1) if self.kind in LONG_KINDS else options


_read_options = attrgetter(*Options.__struct_fields__)

S = TypeVar("S")


def decode_spec(body: bytes | bytearray) -> JobSpec:
    """Decode a requested job. Raises BadInput."""
    return decode_body(body, JobSpec)


def spec_of(job: Job) -> JobSpec:
    """The spec of a job with the options of this one, without tasks."""
    options = {field: getattr(job.options, field) for field in Options.__struct_fields__}
    return JobSpec(kind=job.kind, name=job.name, result_layout=job.result_layout, **options)


def decode_body(body: bytes | bytearray, shape: type[S]) -> S:
    """Decode a request body. Raises BadInput."""
    _check_text(body)
    try:
        decoded = msgspec.json.decode(body, type=shape)
    except msgspec.ValidationError as error:
        raise _wrong_shape(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error)) from None
    except RecursionError:
        raise MalformedJson("The body is nested too deeply.") from None
    check_unique_fields(body)
    return decoded


def _check_text(body: bytes | bytearray) -> None:
    # Tasks stay raw while the rest is decoded: their strings would not be checked.
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
        return UnknownField(f"Unknown field `{field}`.", field=field)
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

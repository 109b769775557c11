"""The shapes of requests and answers, for the OpenAPI page. Answers are made elsewhere; a test holds them to these."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, Parameter, RequestBody, Schema

from conveyor.accept.answer import CountsView
from conveyor.accept.spec import JobSpec
from conveyor.api.problems import MEDIA_TYPE, Problem
from conveyor.model import JobId, JobKind, ResultLayout, RunId, TaskError, TaskId
from conveyor.states import RunState


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer with these fields and no others."""


class RunShape(Shape, frozen=True):
    """One pass over a job's tasks."""

    id: RunId
    number: int
    state: RunState
    total: int
    counts: CountsView
    created_at: str
    ended_at: str | None


class ErrorCount(Shape, frozen=True):
    """How many tasks failed with a code."""

    code: str
    count: int


class JobShape(Shape, frozen=True):
    """A job, with its latest run as it is now."""

    id: JobId
    name: str | None
    state: RunState
    reason: str | None
    kind: JobKind
    mode: str
    task_shard_count: int
    result_layout: ResultLayout
    options: dict[str, Any]
    created_at: str
    expires_at: str
    run: RunShape
    # Tasks a second.
    rate: float
    # Seconds.
    eta: float | None
    top_errors: list[ErrorCount]


class TaskShape(Shape, frozen=True):
    """A task and its result."""

    task_id: TaskId
    index: int
    input: Any
    status: str
    attempts: int
    http_status: int | None
    error: TaskError | None
    content_type: str | None
    size: int | None
    sha256: str | None
    final_url: str | None
    headers: list[tuple[str, str]] | None
    elapsed: float | None
    finished_at: str | None
    body_url: str | None


class EventShape(Shape, frozen=True):
    """Something that happened to a job or to one of its tasks."""

    seq: int
    at: str
    event: str
    run_id: RunId
    index: int | None
    data: dict[str, Any]


class HealthShape(Shape, frozen=True):
    """It is well."""

    status: str


class JobsPage(Shape, frozen=True):
    """Jobs, newest first."""

    items: list[JobShape]
    next_cursor: str | None


class ResultsPage(Shape, frozen=True):
    """Tasks, in order of task_id."""

    items: list[TaskShape]
    next_cursor: str | None


class EventsPage(Shape, frozen=True):
    """Events, oldest first."""

    items: list[EventShape]
    next_cursor: str | None


def problems(*statuses: int) -> dict[int, ResponseSpec]:
    """Problems with these statuses; a missing key is always one."""
    return {
        status: ResponseSpec(
            Problem, generate_examples=False, media_type=MEDIA_TYPE, description="A problem; see `code`."
        )
        for status in (401, *statuses)
    }


def shaped(shape: type[msgspec.Struct], status: int = 200) -> dict[int, ResponseSpec]:
    """An answer with this shape."""
    return {status: ResponseSpec(shape, generate_examples=False, description=shape.__doc__ or "")}


def answers(shape: type[Shape], *statuses: int) -> dict[int, ResponseSpec]:
    """200 with this shape, or problems."""
    return {**shaped(shape), **problems(*statuses)}


@dataclass
class _Given(Schema):
    """A schema that is written already."""

    given: dict[str, Any] = field(default_factory=dict)

    def to_schema(self) -> dict[str, Any]:
        return self.given


def _inlined(node: Any, parts: dict[str, Any]) -> Any:
    """The schema without references: those of msgspec lead into its own document."""
    if isinstance(node, list):
        return [_inlined(each, parts) for each in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        beside = {key: value for key, value in node.items() if key not in {"$ref", "$defs"}}
        return {**_inlined(parts[name], parts), **beside}
    return {key: _inlined(value, parts) for key, value in node.items() if key != "$defs"}


def _submit_body() -> RequestBody:
    schema = msgspec.json.schema(JobSpec)
    given = _Given(given=_inlined(schema, schema["$defs"]))
    return RequestBody(content={"application/json": OpenAPIMediaType(schema=given)}, required=True)


@dataclass
class SubmitOperation(Operation):
    """POST /v1/jobs reads its body itself, as a stream; this is what the page says of it."""

    def __post_init__(self) -> None:
        key = Parameter(
            name="Idempotency-Key",
            param_in="header",
            schema=Schema(type=OpenAPIType.STRING, min_length=1, max_length=255),
            description="Your own name for this request: sent again, it gets the same answer for 24 hours.",
        )
        self.parameters = [*(self.parameters or []), key]
        self.request_body = _submit_body()

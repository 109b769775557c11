"""Request bodies and headers, for the OpenAPI page. Handlers read their bodies as streams, so Litestar cannot see
their schemas."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar.openapi.spec import (
    OpenAPIFormat,
    OpenAPIMediaType,
    OpenAPIType,
    Operation,
    Parameter,
    RequestBody,
    Schema,
)

IDEMPOTENCY_KEY = Parameter(
    name="Idempotency-Key",
    param_in="header",
    schema=Schema(type=OpenAPIType.STRING, min_length=1, max_length=255),
    description="Your own id for this request. A repeated request gets the same response for 24 hours.",
)
PREFER = Parameter(
    name="Prefer",
    param_in="header",
    schema=Schema(type=OpenAPIType.STRING),
    description="`respond-async` ingests a small job too, and responds 202.",
)


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body without fields."""


@dataclass
class _FinalSchema(Schema):
    """A schema that is already in its final form."""

    schema_json: dict[str, Any] = field(default_factory=dict)

    def to_schema(self) -> dict[str, Any]:
        return self.schema_json


def takes(shape: type[msgspec.Struct], *headers: Parameter, required: bool = True) -> type[Operation]:
    """An operation with a JSON body of type `shape`, and these headers."""

    @dataclass
    class Takes(Operation):
        def __post_init__(self) -> None:
            self.parameters = [*(self.parameters or []), *headers]
            self.request_body = _json_body(shape, required)

    return Takes


@dataclass
class TakesBytes(Operation):
    """An operation with a binary body."""

    def __post_init__(self) -> None:
        schema = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        self.request_body = RequestBody(
            content={"application/octet-stream": OpenAPIMediaType(schema=schema)}, required=True
        )


def _json_body(shape: type[msgspec.Struct], required: bool) -> RequestBody:
    schema = msgspec.json.schema(shape)
    body = _FinalSchema(schema_json=_inlined(schema, schema["$defs"]))
    return RequestBody(content={"application/json": OpenAPIMediaType(schema=body)}, required=required)


def _inlined(node: Any, parts: dict[str, Any]) -> Any:
    """The schema with references inlined: msgspec's references point into its own document."""
    if isinstance(node, list):
        return [_inlined(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        siblings = {key: value for key, value in node.items() if key not in {"$ref", "$defs"}}
        return {**_inlined(parts[name], parts), **siblings}
    # A discriminator holds such references too.
    return {key: _inlined(value, parts) for key, value in node.items() if key not in {"$defs", "discriminator"}}

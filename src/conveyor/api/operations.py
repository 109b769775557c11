"""What requests carry, for the OpenAPI page. Handlers read their bodies themselves, as streams, so that the page would
not know of them."""

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
    description="Your own name for this request: sent again, it gets the same answer for 24 hours.",
)
PREFER = Parameter(
    name="Prefer",
    param_in="header",
    schema=Schema(type=OpenAPIType.STRING),
    description="`respond-async` has a small job ingested too, and answered 202.",
)


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body without fields."""


@dataclass
class _Given(Schema):
    """A schema that is written already."""

    given: dict[str, Any] = field(default_factory=dict)

    def to_schema(self) -> dict[str, Any]:
        return self.given


def takes(shape: type[msgspec.Struct], *headers: Parameter, required: bool = True) -> type[Operation]:
    """An operation with a JSON body of this shape, and these headers."""

    @dataclass
    class Takes(Operation):
        def __post_init__(self) -> None:
            self.parameters = [*(self.parameters or []), *headers]
            self.request_body = _json_body(shape, required)

    return Takes


@dataclass
class TakesBytes(Operation):
    """An operation with a body of plain bytes."""

    def __post_init__(self) -> None:
        schema = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        self.request_body = RequestBody(
            content={"application/octet-stream": OpenAPIMediaType(schema=schema)}, required=True
        )


def _json_body(shape: type[msgspec.Struct], required: bool) -> RequestBody:
    schema = msgspec.json.schema(shape)
    given = _Given(given=_inlined(schema, schema["$defs"]))
    return RequestBody(content={"application/json": OpenAPIMediaType(schema=given)}, required=required)


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
    # What a discriminator adds to the tags themselves leads there too.
    return {key: _inlined(value, parts) for key, value in node.items() if key not in {"$defs", "discriminator"}}

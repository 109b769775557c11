"""Turns every exception of a request into problem+json that reveals nothing internal."""

from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    ValidationException,
)
from litestar.types import ExceptionHandlersMap

from conveyor.api.edge import request_id
from conveyor.errors import (
    BadInput,
    ConveyorError,
    IdempotencyInFlight,
    InvalidField,
    MethodNotAllowed,
    Overloaded,
    RangeRefused,
    RouteNotFound,
)

log = structlog.get_logger()

MEDIA_TYPE = "application/problem+json"
_SHOWN = 200
# Temporary: a retry may succeed.
_FOR_NOW = frozenset({HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS})


class Problem(msgspec.Struct, frozen=True):
    """The members of every problem. Some have more, such as `errors` or `field`."""

    type: str
    title: str
    status: int
    code: str
    detail: str


def problem_of(error: ConveyorError) -> Problem:
    """The problem that the client sees. The message of an internal failure goes to the log only."""
    is_internal = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Overloaded)
    return Problem(
        type=f"urn:conveyor:problem:{error.code}",
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        code=error.code,
        detail=type(error)().message if is_internal else error.message,
    )


def answer_known(request: Request[Any, Any, Any], error: ConveyorError) -> Response[bytes]:
    """Respond to a ConveyorError."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR and not isinstance(error, Overloaded):
        _log_failure(request, error)
        return _answer(request, error, {})
    return _answer(request, error, error.details)


def answer_framework(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Respond to an error of Litestar: routing, methods, parameters."""
    if error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return answer_unknown(request, error)
    known = _translated(error)
    response = _answer(request, known, known.details)
    for name, value in (error.headers or {}).items():
        response.headers.setdefault(name, value)
    return response


def answer_unknown(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Respond to an unexpected exception."""
    _log_failure(request, error)
    return _answer(request, ConveyorError(), {})


def unready(error: ConveyorError) -> Response[bytes]:
    """The answer of a health check that failed for this reason: 503, whatever the status of the error."""
    problem = msgspec.structs.asdict(problem_of(error)) | {"status": HTTPStatus.SERVICE_UNAVAILABLE}
    return Response(
        msgspec.json.encode(problem),
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
        media_type=MEDIA_TYPE,
        headers={"Retry-After": "1"},
    )


HANDLERS: ExceptionHandlersMap = {
    ConveyorError: answer_known,
    HTTPException: answer_framework,
    Exception: answer_unknown,
}


def _answer(request: Request[Any, Any, Any], error: ConveyorError, details: dict[str, Any]) -> Response[bytes]:
    problem = msgspec.structs.asdict(problem_of(error))
    more = {name: value for name, value in details.items() if name not in problem}
    response = Response(msgspec.json.encode({**problem, **more}), status_code=error.status, media_type=MEDIA_TYPE)
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="conveyor"'
    if error.status in _FOR_NOW or isinstance(error, IdempotencyInFlight):
        response.headers["Retry-After"] = str(details.get("retry_after", 1))
    if isinstance(error, RangeRefused):
        response.headers["Content-Range"] = f"bytes */{error.details['length']}"
    if "expect" in request.headers:
        # The client may or may not send its body now, so the connection cannot be reused.
        response.headers["Connection"] = "close"
    return response


def _translated(error: HTTPException) -> ConveyorError:
    match error:
        case NotFoundException():
            return RouteNotFound()
        case MethodNotAllowedException():
            return MethodNotAllowed()
        case ValidationException(extra=[{"key": key, "message": message}, *_]):
            return InvalidField(f"`{key}`: {str(message)[:_SHOWN]}.", field=key)
        case _:
            return BadInput(f"The request is invalid: {error.detail[:_SHOWN]}.")


def _log_failure(request: Request[Any, Any, Any], error: Exception) -> None:
    log.error(
        "request failed",
        request_id=request_id(request.scope),
        method=request.method,
        route=request.scope.get("path_template"),
        exc_info=error,
    )

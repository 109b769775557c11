"""Submits past Litestar: POST /v1/jobs, the route that clients call thousands of times a second.

Litestar's routing, injection and responses cost as much CPU as all checks of a submit together. The same guard, reader
and service answer here, and the same handlers turn their errors into problems. Any other form of the request (a query,
a slash at the end) takes the route in `job_routes`, which is also the one that the OpenAPI page shows.
"""

from typing import Any

from litestar import Request, Response

from conveyor.api import problems
from conveyor.api.auth import authenticate_request
from conveyor.api.dependencies import ApiRequest, Dependencies
from conveyor.api.job_routes import carry_out_submit
from conveyor.errors import ConveyorError
from conveyor.jobs.idempotency import Accepted

_PATH = "/v1/jobs"


class DirectSubmit:
    """Answers submits of one system."""

    def __init__(self, dependencies: Dependencies) -> None:
        self._dependencies = dependencies

    async def answer(self, scope: Any, receive: Any, send: Any) -> bool:
        """Respond to a submit. Returns False for any other request."""
        if scope["path"] != _PATH or scope["method"] != "POST" or scope["query_string"]:
            return False
        scope["path_template"] = _PATH
        request: ApiRequest = Request(scope, receive, send)
        try:
            await authenticate_request(request)
            accepted = await carry_out_submit(request, self._dependencies.system, self._dependencies.submit)
        except ConveyorError as error:
            await _send_response(problems.answer_known(request, error), request)
        except Exception as error:
            await _send_response(problems.answer_unknown(request, error), request)
        else:
            await _send_accepted(accepted, send)
        return True


async def _send_accepted(accepted: Accepted, send: Any) -> None:
    headers = [
        (b"location", f"{_PATH}/{accepted.subject}".encode()),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(accepted.body)),
    ]
    if accepted.replayed:
        headers.append((b"idempotency-replayed", b"true"))
    await send({"type": "http.response.start", "status": accepted.status, "headers": headers})
    await send({"type": "http.response.body", "body": accepted.body})


async def _send_response(response: Response[bytes], request: ApiRequest) -> None:
    await response.to_asgi_response(app=None, request=request)(request.scope, request.receive, request.send)

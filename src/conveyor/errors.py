"""One tree of errors. The class docstring is the message, `code` is stable on the wire, `status` is for HTTP.

ConveyorError
├── BadInput (400)
│   ├── MalformedJson · UnknownField · InvalidField · InvalidTasks · NoTasks · BadCursor · InvalidSetting
│   ├── UploadRefused · FormatUnavailable
│   ├── ListUnreadable ── ListMissing · ListChanged · ListRejected
│   └── TooManyTasks (413) · BodyTooLarge (413) · UnsupportedMediaType (415) · RangeRefused (416)
├── Unauthorized (401) ── MissingKey · InvalidKey · SessionEnded · LinkRefused · SignatureRefused (403)
├── NotFound (404) ── RouteNotFound · NoBody
├── Forbidden (403) ── CrossSite
├── MethodNotAllowed (405) · TooManyStreams (429) · QuotaExceeded (429)
├── Conflict (409) ── IdempotencyMismatch · IdempotencyInFlight · JobClosed · UploadConflict · LimitReached
│   └── RunNotEnded · JobEnded · NothingToRerun · ExportFailed
└── Unavailable (503) ── DataDirectoryInUse · ServerUnreachable · EngineFailed
    └── Overloaded ── NoWorkers
"""

from typing import Any, ClassVar


class ConveyorError(Exception):
    """Something went wrong inside Conveyor; the log has the details."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str | None = None, **details: Any) -> None:
        self.message = message or (type(self).__doc__ or "").split("\n\n")[0].replace("\n    ", " ")
        self.details = details
        super().__init__(self.message)


class BadInput(ConveyorError):
    """The request is not valid."""

    code = "bad_input"
    status = 400


class MalformedJson(BadInput):
    """The body is not valid JSON."""

    code = "malformed_json"


class UnknownField(BadInput):
    """The body has a field that this route does not know."""

    code = "unknown_field"


class InvalidField(BadInput):
    """A field has a value that it can not have."""

    code = "invalid_field"


class InvalidTasks(BadInput):
    """Some tasks are not valid; `errors` names each by its index. Nothing was written."""

    code = "invalid_tasks"


class NoTasks(BadInput):
    """The job has no tasks. Give at least one in `tasks`."""

    code = "no_tasks"


class BadCursor(BadInput):
    """The cursor is not one that this listing gave out. Start again without a cursor."""

    code = "bad_cursor"


class InvalidSetting(BadInput):
    """A setting has a value that it can not have."""

    code = "invalid_setting"


class ListUnreadable(BadInput):
    """The list of tasks could not be read."""

    code = "list_unreadable"


class ListMissing(ListUnreadable):
    """The staged list is not there any more."""

    code = "list_missing"


class ListChanged(ListUnreadable):
    """The staged list is not the one that was accepted: its size or sha256 is another."""

    code = "list_changed"


class ListRejected(ListUnreadable):
    """The list has lines that are not valid, and the job asked for such a list to be refused."""

    code = "list_rejected"


class TooManyTasks(BadInput):
    """The request carries more tasks than one request may. Send the list in several jobs, or use `conveyor run`."""

    code = "too_many_tasks"
    status = 413


class BodyTooLarge(BadInput):
    """The request body is larger than the server takes."""

    code = "body_too_large"
    status = 413


class UnsupportedMediaType(BadInput):
    """The body must be JSON: send `Content-Type: application/json`."""

    code = "unsupported_media_type"
    status = 415


class RangeRefused(BadInput):
    """The body has no bytes in the range that was asked for."""

    code = "range_not_satisfiable"
    status = 416


class Unauthorized(ConveyorError):
    """The request is not authorised."""

    code = "unauthorized"
    status = 401


class MissingKey(Unauthorized):
    """No API key was given. Send `Authorization: Bearer <key>`; `conveyor keys create` makes one."""

    code = "missing_key"


class InvalidKey(Unauthorized):
    """The API key is not known, has expired or was revoked. `conveyor keys create` makes one."""

    code = "invalid_key"


class SessionEnded(Unauthorized):
    """The session has ended. Sign in again: `conveyor dashboard` prints a link."""

    code = "session_ended"


class LinkRefused(Unauthorized):
    """The link was used before, or has expired. `conveyor dashboard` prints a new one."""

    code = "link_refused"


class NotFound(ConveyorError):
    """There is nothing under this id."""

    code = "not_found"
    status = 404


class RouteNotFound(NotFound):
    """There is no such route. `/v1/openapi.json` lists them."""

    code = "route_not_found"


class NoBody(NotFound):
    """The task has no result body."""

    code = "no_body"


class Forbidden(ConveyorError):
    """This key may not do that."""

    code = "forbidden"
    status = 403


class CrossSite(Forbidden):
    """The request comes from a page that is not the dashboard's own."""

    code = "cross_site"


class MethodNotAllowed(ConveyorError):
    """The route does not take this method."""

    code = "method_not_allowed"
    status = 405


class Conflict(ConveyorError):
    """The request conflicts with the present state."""

    code = "conflict"
    status = 409


class IdempotencyMismatch(Conflict):
    """The Idempotency-Key was used before with another body. Use a new key for a new request."""

    code = "idempotency_key_reused"


class IdempotencyInFlight(Conflict):
    """A request with this Idempotency-Key is still under way. Send it again in a moment."""

    code = "idempotency_key_in_flight"


class JobClosed(Conflict):
    """The job is closed: no tasks can be added to it."""

    code = "job_closed"


class UploadConflict(Conflict):
    """The upload is not in a state for this: it was stored already, or was not stored yet."""

    code = "upload_conflict"


class RunNotEnded(Conflict):
    """The job's latest run has not ended. Wait for it, or cancel it first."""

    code = "run_not_ended"


class JobEnded(Conflict):
    """The job has ended. POST /v1/jobs/{id}/rerun runs its tasks again."""

    code = "job_ended"


class NothingToRerun(Conflict):
    """No task of the job is one of those that were asked for."""

    code = "nothing_to_rerun"


class LimitReached(Conflict):
    """There are as many of these as a tenant may have. Remove one first."""

    code = "limit_reached"


class TooManyStreams(ConveyorError):
    """As many event streams are open as a tenant may have at once. Close one, or try again later."""

    code = "too_many_streams"
    status = 429


class ExportFailed(Conflict):
    """The export failed; it says why."""

    code = "export_failed"


class FormatUnavailable(BadInput):
    """The server can not write this format: a library that it takes is not installed there."""

    code = "format_unavailable"


class QuotaExceeded(ConveyorError):
    """The tenant has as much under way as it may. Wait until some of it has ended."""

    code = "quota_exceeded"
    status = 429


class UploadRefused(BadInput):
    """The upload is not what was announced: its size or sha256 is another."""

    code = "upload_refused"


class SignatureRefused(Unauthorized):
    """The link's signature is not valid, or it has expired. Ask for a new upload."""

    code = "signature_refused"
    status = 403


class Unavailable(ConveyorError):
    """The service can not answer now. Try again."""

    code = "unavailable"
    status = 503


class DataDirectoryInUse(Unavailable):
    """Another Conveyor process owns this data directory. Stop it, or choose another with --data."""

    code = "data_directory_in_use"


class ServerUnreachable(Unavailable):
    """No Conveyor server answers. Start one with `conveyor up`, or set CONVEYOR_URL."""

    code = "server_unreachable"


class EngineFailed(Unavailable):
    """A storage engine failed."""

    code = "engine_failed"


class Overloaded(Unavailable):
    """There is no room for more work now. Nothing was accepted; send it again after a while."""

    code = "overloaded"


class NoWorkers(Overloaded):
    """Too few workers are alive for work to be accepted."""

    code = "no_workers"

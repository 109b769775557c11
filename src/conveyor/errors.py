"""One tree of errors. The class docstring is the message, `code` is stable on the wire, `status` is for HTTP.

ConveyorError
├── BadInput (400)
│   ├── MalformedJson · UnknownField · DuplicateField · InvalidField · InvalidTasks · NoTasks · BadCursor
│   ├── UnknownHandler
│   ├── InvalidSetting · MalformedHttp · UploadRefused · FormatUnavailable
│   ├── ListUnreadable ── ListMissing · ListChanged · ListRejected · ListTooSparse
│   └── TooManyTasks (413) · BodyTooLarge (413) · UnsupportedMediaType (415) · RangeRefused (416)
│   └── HostRefused (421) · HeadTooLarge (431)
├── Unauthorized (401) ── MissingKey · InvalidKey · SessionEnded · LinkRefused · SignatureRefused (403)
├── NotFound (404) ── RouteNotFound · NoBody
├── Forbidden (403) ── CrossSite · SourceRefused · DestinationRefused · EventTargetRefused
├── BodyDamaged (500)
├── MethodNotAllowed (405) · TooManyStreams (429) · TooManyFailedKeys (429) · QuotaExceeded (429)
├── Conflict (409) ── IdempotencyMismatch · IdempotencyInFlight · JobClosed · UploadConflict · LimitReached
│   └── LastAdminKey · RunNotEnded · JobEnded · NothingToRerun · ExportFailed
│   └── ReplacementInFlight · AlreadyReplaced · TasksElsewhere · TasksInUse
└── Unavailable (503) ── DataDirectoryInUse · ServerUnreachable · SourceUnavailable
    ├── DestinationUnavailable
    ├── Overloaded ── NoWorkers
    └── EngineFailed
        ├── DatabaseUnusable · EngineRefused · NewerRow
        └── DiskUnwritable (507) ── DiskFull · DiskReadOnly
"""

from typing import Any, ClassVar


class ConveyorError(Exception):
    """Internal error in Conveyor. See the server's log for the details."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str | None = None, **details: Any) -> None:
        # From 3.13 on, Python removes the indentation of docstrings by itself.
        self.message = message or " ".join((type(self).__doc__ or "").split("\n\n")[0].split())
        self.details = details
        super().__init__(self.message)


class BadInput(ConveyorError):
    """The request is invalid. Correct it and send it again."""

    code = "bad_input"
    status = 400


class MalformedHttp(BadInput):
    """The request is not valid HTTP. Check that the client speaks HTTP/1.1 without TLS."""

    code = "malformed_http"


class MalformedJson(BadInput):
    """The body is not valid JSON. Send one JSON object."""

    code = "malformed_json"


class UnknownField(BadInput):
    """The body has an unknown field. Remove it; `/v1/openapi.json` lists the fields of each route."""

    code = "unknown_field"


class InvalidField(BadInput):
    """A field has an invalid value. `/v1/openapi.json` lists the values that it may have."""

    code = "invalid_field"


class UnknownHandler(BadInput):
    """No live worker has this handler. Check its name, or start a worker whose CONVEYOR_APP registers it."""

    code = "unknown_handler"


class InvalidTasks(BadInput):
    """Some tasks are invalid. Correct those that `errors` lists by index; nothing was written."""

    code = "invalid_tasks"


class NoTasks(BadInput):
    """The job has no tasks. Give at least one in `tasks`."""

    code = "no_tasks"


class BadCursor(BadInput):
    """The cursor is invalid for this listing. Start again without a cursor."""

    code = "bad_cursor"


class InvalidSetting(BadInput):
    """A setting has an invalid value. `conveyor doctor` shows all settings."""

    code = "invalid_setting"


class ListUnreadable(BadInput):
    """The list of tasks cannot be read. Check its format and compression."""

    code = "list_unreadable"


class ListMissing(ListUnreadable):
    """The staged list no longer exists. Upload it again."""

    code = "list_missing"


class ListChanged(ListUnreadable):
    """The staged list has changed since it was accepted: its size or sha256 differs. Upload it again."""

    code = "list_changed"


class ListRejected(ListUnreadable):
    """The list has invalid lines, and the job has `on_invalid: reject`. Correct them, or use `skip`."""

    code = "list_rejected"


class ListTooSparse(ListUnreadable):
    """The list has too many lines without a task: blank lines, comments, invalid lines. Remove or correct them."""

    code = "list_too_sparse"


class TooManyTasks(BadInput):
    """The request has more tasks than one request may. Upload the list, or use `conveyor run`."""

    code = "too_many_tasks"
    status = 413


class BodyTooLarge(BadInput):
    """The request body is too large. Split it, or upload the list."""

    code = "body_too_large"
    status = 413


class HeadTooLarge(BadInput):
    """The head of the request is too large. Send fewer or shorter headers, or a shorter URL."""

    code = "head_too_large"
    status = 431


class HostRefused(BadInput):
    """The server does not answer to this host name. Use another one, or ask its operator to list it in
    CONVEYOR_ALLOWED_HOSTS."""

    code = "host_refused"
    status = 421


class DuplicateField(BadInput):
    """The body has a field twice. Send it once."""

    code = "duplicate_field"


class UnsupportedMediaType(BadInput):
    """The body is not declared as JSON. Send `Content-Type: application/json`."""

    code = "unsupported_media_type"
    status = 415


class RangeRefused(BadInput):
    """The range is outside the body. Ask for a range within its length."""

    code = "range_not_satisfiable"
    status = 416


class Unauthorized(ConveyorError):
    """The request is not authorized. Send a valid API key."""

    code = "unauthorized"
    status = 401


class MissingKey(Unauthorized):
    """The API key is missing. Send `Authorization: Bearer <key>`; `conveyor keys create` makes one."""

    code = "missing_key"


class InvalidKey(Unauthorized):
    """The API key is unknown, expired or revoked. `conveyor keys create` makes a new one."""

    code = "invalid_key"


class SessionEnded(Unauthorized):
    """The session has expired. Sign in again: `conveyor dashboard` prints a link."""

    code = "session_ended"


class LinkRefused(Unauthorized):
    """The link has expired or was already used. `conveyor dashboard` prints a new one."""

    code = "link_refused"


class NotFound(ConveyorError):
    """Not found. Check the id, and that the key belongs to the right tenant."""

    code = "not_found"
    status = 404


class RouteNotFound(NotFound):
    """Unknown route. `/v1/openapi.json` lists all routes."""

    code = "route_not_found"


class NoBody(NotFound):
    """The task has no result body. Its `status` and `error` say why."""

    code = "no_body"


class Forbidden(ConveyorError):
    """This key lacks the permission. Use an administrator's key."""

    code = "forbidden"
    status = 403


class SourceRefused(Forbidden):
    """The server does not read from this bucket. Ask its operator to list it in CONVEYOR_SOURCE_BUCKETS, or upload the
    list."""

    code = "source_refused"


class DestinationRefused(Forbidden):
    """The server writes no exports to this place. Ask its operator to list it in CONVEYOR_EXPORT_BUCKETS, or export
    with your own credentials: `conveyor export JOB --to URL`."""

    code = "destination_refused"


class EventTargetRefused(Forbidden):
    """The server sends no events to this state machine or event bus. Ask its operator to list its ARN in
    CONVEYOR_EVENT_TARGETS."""

    code = "event_target_refused"


class CrossSite(Forbidden):
    """The request comes from another site. Use the dashboard's own pages, or send an API key."""

    code = "cross_site"


class MethodNotAllowed(ConveyorError):
    """The route does not support this method. `/v1/openapi.json` lists those that it does."""

    code = "method_not_allowed"
    status = 405


class Conflict(ConveyorError):
    """The request conflicts with the current state. Read the state, then decide whether to send it again."""

    code = "conflict"
    status = 409


class IdempotencyMismatch(Conflict):
    """The Idempotency-Key was already used with another body. Use a new key for a new request."""

    code = "idempotency_key_reused"


class IdempotencyInFlight(Conflict):
    """A request with this Idempotency-Key is still in progress. Retry in a moment."""

    code = "idempotency_key_in_flight"


class ReplacementInFlight(Conflict):
    """Another request is about to replace the same job. Retry in a moment."""

    code = "replacement_in_flight"


class AlreadyReplaced(Conflict):
    """Another job took the place of this request before it was accepted."""

    code = "already_replaced"


class JobClosed(Conflict):
    """The job is closed and accepts no more tasks. Create a new job for them."""

    code = "job_closed"


class UploadConflict(Conflict):
    """The upload is in the wrong state: already stored, or not stored yet. GET /v1/uploads/{id} shows it."""

    code = "upload_conflict"


class RunNotEnded(Conflict):
    """The job's latest run has not finished. Wait for it, or cancel it first."""

    code = "run_not_ended"


class JobEnded(Conflict):
    """The job has finished. POST /v1/jobs/{id}/rerun runs its tasks again."""

    code = "job_ended"


class NothingToRerun(Conflict):
    """No task of the job matches the request. Widen it, or check the job's results."""

    code = "nothing_to_rerun"


class LastAdminKey(Conflict):
    """This is the last administrator's key. To replace it, remove `local.key` from the data directory, restart
    `conveyor up`, and then revoke it."""

    code = "last_admin_key"


class TooManyFailedKeys(ConveyorError):
    """Too many invalid keys came from this address. Check the key, then retry later."""

    code = "too_many_failed_keys"
    status = 429


class LimitReached(Conflict):
    """The tenant has reached the maximum number of these. Delete one first."""

    code = "limit_reached"


class TooManyStreams(ConveyorError):
    """The tenant has reached the maximum number of open event streams. Close one, or retry later."""

    code = "too_many_streams"
    status = 429


class ExportFailed(Conflict):
    """The export failed. Its `error` says why; create a new one."""

    code = "export_failed"


class FormatUnavailable(BadInput):
    """The server cannot write this format, because a library is not installed there. Use another format."""

    code = "format_unavailable"


class QuotaExceeded(ConveyorError):
    """The tenant has reached its quota of unfinished work. Wait until some of it has finished."""

    code = "quota_exceeded"
    status = 429


class UploadRefused(BadInput):
    """The upload differs from its announcement in size or sha256. Send the file again."""

    code = "upload_refused"


class SignatureRefused(Unauthorized):
    """The signature of the link is invalid or has expired. Request a new link."""

    code = "signature_refused"
    status = 403


class TasksElsewhere(Conflict):
    """The job's tasks are in a task engine that this server does not open. Add its URL to CONVEYOR_OTHER_TASKS."""

    code = "tasks_elsewhere"


class TasksInUse(Conflict):
    """Other transactions read the tasks of the run. Retry later."""

    code = "tasks_in_use"


class Unavailable(ConveyorError):
    """The service is temporarily unavailable. Retry in a moment."""

    code = "unavailable"
    status = 503


class DataDirectoryInUse(Unavailable):
    """Another Conveyor process uses this data directory. Stop it, or choose another with --data."""

    code = "data_directory_in_use"


class ServerUnreachable(Unavailable):
    """No Conveyor server responds. Start one with `conveyor up`, or set CONVEYOR_URL."""

    code = "server_unreachable"


class SourceUnavailable(Unavailable):
    """The list cannot be read from its source now. Retry in a moment."""

    code = "source_unavailable"


class DestinationUnavailable(Unavailable):
    """The bucket or directory of an export cannot be used. Check that it exists, and your credentials."""

    code = "destination_unavailable"


class BodyDamaged(ConveyorError):
    """A stored body is damaged or missing. Run its task again: `conveyor rerun JOB --damaged`."""

    code = "body_damaged"


class EngineFailed(Unavailable):
    """A storage engine failed. Retry; the server's log has the details."""

    code = "engine_failed"


class NewerRow(EngineFailed):
    """A newer Conveyor wrote this. Upgrade the server."""

    code = "newer_row"


class EngineRefused(EngineFailed):
    """A storage engine refuses what it is asked to store. The server's log has the details."""

    code = "engine_refused"


class DatabaseUnusable(EngineFailed):
    """The server's database is damaged, missing or not Conveyor's. Restore it; the server's log has the details."""

    code = "database_unusable"


class DiskUnwritable(EngineFailed):
    """The server's disk cannot be written. Make it writable; the server resumes by itself."""

    # Not 503: a client need not retry for all its patience before it says so.
    code = "disk_unwritable"
    status = 507


class DiskFull(DiskUnwritable):
    """The server's disk is full. Free some space; the server resumes by itself."""

    code = "disk_full"


class DiskReadOnly(DiskUnwritable):
    """The server's disk is read-only. Make it writable; the server resumes by itself."""

    code = "disk_read_only"


class Overloaded(Unavailable):
    """The server is at capacity and accepted nothing. Retry later."""

    code = "overloaded"


class NoWorkers(Overloaded):
    """Too few workers are alive, so the server accepted nothing. Start `conveyor work`, then retry."""

    code = "no_workers"


def is_outage(error: Exception) -> bool:
    """Whether an engine cannot be used now, whatever it is asked: the work at hand is not at fault, and it goes on
    when the engine answers again."""
    return isinstance(error, EngineFailed) and not isinstance(error, EngineRefused)

"""Makes Litestar's description of the routes exact. Gets it as a JSON value, and adds what Litestar cannot see: the
form of ids and cursors, the responses that come from layers around the handlers, and every media type of a response.

A handler checks its ids and cursors itself, so that a malformed id gets the same 404 as an unknown one.
"""

from typing import Any

from conveyor.api.dependencies import NDJSON
from conveyor.api.job_filters import KINDS, STATES
from conveyor.api.problems import MEDIA_TYPE
from conveyor.export.request import ExportCompression, ExportFormat, media_type_of
from conveyor.read.run_comparison import Change

# Any route may respond with them: an unknown parameter, another host, a head that is too large, and failures of ours.
EVERYWHERE = frozenset({400, 421, 431, 500, 503})
# The key is missing or invalid, a cookie came from another site, too many invalid keys.
_WITH_KEY = frozenset({401, 403, 429})
_WITH_BODY = frozenset({413, 415})
# The disk is full or read-only.
_WITH_CHANGE = frozenset({507})
# Load balancers name any host there.
_ANY_HOST = frozenset({"/healthz", "/readyz"})

_JOB = "job_[0-9a-z]{26}"
_TASK = "[0-9a-f]{64}"
_EXPORT = "export_[0-9a-z]{26}"
_WEBHOOK = "webhook_[0-9a-z]{26}"
_SCHEDULE = "schedule_[0-9a-z]{26}"
_DELIVERY = rf"({_WEBHOOK}|{_JOB}\.[0-9]{{1,3}}):[A-Za-z0-9_.-]{{1,100}}"
_KEY = "[0-9a-z]{26}"
_SEQUENCE = "[0-9]{1,12}"
_ONE_RUN = "latest|run_[0-9a-z]{26}|[1-9][0-9]{0,8}"
_SHARDS = "sh:[A-Za-z0-9_-]+"
_RESULTS = rf"{_TASK}|{_SHARDS}|run:[0-9]{{1,6}}:({_TASK}|{_SHARDS})?|ix:[0-9]{{1,15}}"

# The form of parameters, by name.
_FORMS: dict[str, dict[str, Any]] = {
    "job_id": {"pattern": _JOB},
    "task_id": {"pattern": _TASK},
    "task": {"pattern": _TASK},
    "upload_id": {"pattern": "upload_[0-9a-z]{26}"},
    "export_id": {"pattern": _EXPORT},
    "webhook_id": {"pattern": _WEBHOOK},
    "delivery_id": {"pattern": _DELIVERY},
    "schedule_id": {"pattern": _SCHEDULE},
    "key_id": {"pattern": _KEY},
    "number": {"minimum": 1},
    "run": {"pattern": "latest|latest-per-task|run_[0-9a-z]{26}|[1-9][0-9]{0,8}"},
    "http_status": {"type": "integer", "minimum": 100, "maximum": 599},
    "status": {"enum": ["pending", "succeeded", "failed", "cancelled"]},
    "with": {"pattern": _ONE_RUN},
    "change": {"enum": list(Change)},
    "state": {"enum": list(STATES)},
    "kind": {"enum": list(KINDS)},
    "created_after": {"format": "date-time"},
    "created_before": {"format": "date-time"},
    "tenant": {"pattern": "[a-z0-9][a-z0-9_-]{0,62}"},
    "expires": {"pattern": "[0-9]{1,12}"},
    "signature": {"pattern": "[0-9a-f]{64}"},
    "Idempotency-Key": {"pattern": r"[\x21-\x7e]{1,255}"},
}
# Routes that show one run, and not the latest outcome of each task.
_OF_ONE_RUN = frozenset(f"/v1/jobs/{{job_id}}/{name}" for name in ("comparison", "errors", "hosts"))
# The form of a cursor, by path. Some hold more than a pattern can say, and are refused if they do not fit the listing.
_CURSORS = {
    "/v1/jobs": _JOB,
    "/v1/lanes": _JOB,
    "/v1/jobs/{job_id}/results": _RESULTS,
    "/v1/jobs/{job_id}/search": _RESULTS,
    "/v1/jobs/{job_id}/comparison": _RESULTS,
    "/v1/jobs/{job_id}/exports": _EXPORT,
    "/v1/jobs/{job_id}/invalid": r"[0-9]{6,12}-[0-9]{12}\.[0-9]{1,6}",
    "/v1/jobs/{job_id}/events": _SEQUENCE,
    "/v1/jobs/{job_id}/deliveries": _DELIVERY,
    "/v1/webhooks": _WEBHOOK,
    "/v1/webhooks/{webhook_id}/deliveries": _DELIVERY,
    "/v1/schedules": _SCHEDULE,
    "/v1/dead-letters": r"[0-9]{1,18}|[a-z]+:[\x21-\x7e]{1,400}",
    "/v1/keys": _KEY,
    "/v1/tenants": "[a-z0-9][a-z0-9_-]{0,62}",
}
_FILES = sorted({media_type_of(kind, coding) for kind in ExportFormat for coding in ExportCompression})
# The media types of a 200, where they are not one.
_MEDIA_TYPES = {
    "/v1/jobs/{job_id}/results": ["application/json", NDJSON],
    "/v1/jobs/{job_id}/invalid": ["application/json", NDJSON],
    "/v1/exports/{export_id}/parts/{number}": _FILES,
    "/metrics": ["text/plain", "application/openmetrics-text"],
}


def exact(document: dict[str, Any]) -> dict[str, Any]:
    """The document, changed in place."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                parameter["schema"] = _parameter_schema(path, parameter)
            _add_media_types(path, operation["responses"])
            _add_problems(path, method, operation)
    return document


def _parameter_schema(path: str, parameter: dict[str, Any]) -> dict[str, Any]:
    """A query string has no null: an optional parameter is left out."""
    schema: dict[str, Any] = dict(parameter["schema"])
    for kind in schema.pop("oneOf", ()):
        if kind["type"] != "null":
            schema |= kind
    name = parameter["name"]
    form = {"pattern": _CURSORS[path]} if name == "cursor" else _FORMS.get(name, {})
    if name == "run" and path in _OF_ONE_RUN:
        form = {"pattern": _ONE_RUN}
    if "pattern" in form:
        form = {"pattern": f"^({form['pattern']})$"}
        # An empty default is only the sign that the parameter is missing.
        schema.pop("default", None)
    return {**schema, **form}


def _add_media_types(path: str, responses: dict[str, Any]) -> None:
    if path in _MEDIA_TYPES and "200" in responses:
        schemas = responses["200"]["content"]
        responses["200"]["content"] = {kind: schemas.get(kind, {"schema": {}}) for kind in _MEDIA_TYPES[path]}
    if "204" in responses:
        responses["204"].pop("content", None)
    if "416" in responses:
        responses["206"] = {**responses["200"], "description": "The requested range."}
    if "text/event-stream" in responses.get("200", {}).get("content", {}) and "404" in responses:
        responses["204"] = {"description": "The run has finished, and the client has its last event."}


def _add_problems(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    statuses = set(EVERYWHERE)
    if path in _ANY_HOST:
        statuses.discard(421)
    if operation.get("security"):
        statuses |= _WITH_KEY
    if "application/json" in operation.get("requestBody", {}).get("content", {}):
        statuses |= _WITH_BODY
    if method != "get":
        statuses |= _WITH_CHANGE
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": "A problem; see `code`.", "content": {MEDIA_TYPE: problem}}
    operation["responses"] = dict(sorted(responses.items()))

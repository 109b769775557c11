"""The generated parts of the reference: commands, routes, options, events, errors of tasks, metrics.

Each is a function that returns Markdown. `tables.py` puts it between the markers of a page.
"""

import asyncio
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from conveyor.accept.option_limits import RANGES
from conveyor.api.openapi_document import EVERYWHERE
from conveyor.jobs.event_names import EVENTS
from conveyor.lists.csv_columns import _FIELDS
from conveyor.lists.inputs import METHODS, DownloadInput, FetchInput
from conveyor.model import JobKind, Options
from conveyor.process.retry import FINAL_ERRORS, RETRYABLE_ERRORS
from conveyor.states import ReasonCode, TaskStatus

# When each event is written, and its data besides job_id and run_id.
EVENT_DATA = {
    "job.accepted": "The server accepted the job. `total`, if its tasks were written in the same transaction.",
    "job.ingested": "All tasks of the job's list are written. `total`, `invalid`. Absent if the job was accepted "
    "together with its tasks.",
    "job.changed": "A user changed options of the running job. `changed`: names of the options, without values.",
    "run.added": "A user started a rerun. `number`, `lineage`, and `overrides`: names of the options that differ.",
    "run.progress": "A further quarter of the tasks has finished. `percent` (25, 50 or 75), `total`, `counts`, `job`.",
    "run.overdue": "The run is past its deadline; its unfinished tasks are requeued. `tries`, `of`, `deadline`.",
    "run.paused": "A user paused the run: no further task starts.",
    "run.resumed": "A user resumed the run.",
    "run.completed": "All tasks have finished. `counts`, `job`, `reason`.",
    "run.failed": "The run failed: failure threshold, deadline, maximum lifetime, or a list that cannot be ingested. "
    "`counts`, `job`, `reason`.",
    "run.cancelled": "A user cancelled the run. `counts`, `job`, `reason`.",
    "tasks.failed": "Further tasks have failed. `failed` (number since the last event), `counts`, `job`, `top_errors`. "
    "At most once in `CONVEYOR_FAILURE_NOTICE_SECONDS`, and once more when the run finishes.",
    "export.ready": "An export is ready for download. `export_id`, `format`, `tasks`, `bytes`, `parts`, `name`.",
    "export.failed": "An export failed. `export_id`, `format`, `error`.",
}
TASK_EVENTS = {
    "task.retried": "An attempt failed and will be retried. As `task.failed`, and `retry_in`.",
    "task.failed": "The last attempt failed. The error, the attempt, `elapsed`, `first_byte`, `worker`.",
    "task.dead_lettered": "The task was dead-lettered: poison, stuck, or without retries left (`on_exhausted`).",
    "task.succeeded": "The task succeeded. Derived from its row.",
    "task.cancelled": "The task was cancelled with its run. Derived from its row.",
}
# Why a run is in its state.
REASON_CODES = {
    ReasonCode.INGEST_FAILED: "The list could not be ingested in several attempts.",
    ReasonCode.LIST_UNREADABLE: "The list cannot be read as its format or compression says.",
    ReasonCode.LIST_MISSING: "The staged list no longer exists.",
    ReasonCode.LIST_CHANGED: "The list is not the one that was accepted: its size or sha256 differs.",
    ReasonCode.LIST_REJECTED: "The list has invalid lines, and the job has `on_invalid: reject`.",
    ReasonCode.LIST_TOO_SPARSE: "The list has too many lines without a task: blank lines, comments, invalid lines.",
    ReasonCode.NO_TASKS: "The list has no tasks, or no task matches the selection of the rerun.",
    ReasonCode.FAILURE_THRESHOLD: "As many tasks failed as `failure_threshold` allows, and the rest was cancelled.",
    ReasonCode.DEADLINE: "The run did not finish by its `deadline`, in as many tries as it has.",
    ReasonCode.MAX_LIFETIME: "The run was unfinished when its `max_lifetime` was over.",
    ReasonCode.CANCELLED: "A user cancelled the run.",
    ReasonCode.REPLACED: "Another job took the place of this one (`replaces`).",
    ReasonCode.PAUSED: "A user paused the run.",
    ReasonCode.IDLE_TIMEOUT: "The open job was closed because nobody added to it for `idle_timeout`.",
}
# Why a task failed. A code that is not here is `http_<status>`.
TASK_ERRORS = {
    "bad_answer": "The response of the export API has no id, state or link at the path that the job names.",
    "bad_input": "The input cannot be filled into the request to the export API.",
    "bad_redirect": "A redirect has no Location, or an invalid one.",
    "bad_url": "The URL is invalid.",
    "blocked_by_robots": "With `robots: obey`: robots.txt of the site disallows the URL. No request was made.",
    "body_too_large": "The body exceeds `max_body_bytes`, or the file exceeds `download.max_bytes`.",
    "checksum_mismatch": "The file's sha256 differs from the one that the task names.",
    "connect_failed": "The connection failed.",
    "connect_timeout": "No connection within `connect_timeout`.",
    "deadline": "`task_deadline` has passed, so no further attempt may start.",
    "decode_failed": "The body has a broken or unknown content coding, or the answer is not HTTP.",
    "dns_failed": "The host name has no address.",
    "export_api_failed": "A call of the export API failed finally, or after its last retry.",
    "export_failed": "The export API reports that the export failed.",
    "export_timeout": "The export was not ready within `export.poll.timeout`.",
    "extract_failed": "The function of `extract` raised, took longer than `timeout`, killed its process, is not "
    "registered, or returned no object. The body is stored: a rerun extracts again without a request.",
    "file_changed": "The file changed during the download; it is downloaded anew.",
    "gateway_failed": "The gateway is unreachable, failed itself, or refuses the credentials.",
    "handler_missing": "The worker has no function registered under this name.",
    "handler_raised": "The function raised an exception.",
    "internal": "Internal error in Conveyor. See the server's log for the details.",
    "process_failed": "No process could be started for the function.",
    "range_failed": "The server does not answer range requests consistently.",
    "read_failed": "The connection broke while the response was read.",
    "result_not_json": "The function's return value cannot be encoded as JSON.",
    "robots_unavailable": "With `robots: obey`: robots.txt of the site could not be read. The task waits and spends "
    "no attempt; after `breaker.patience` it fails.",
    "store_failed": "A piece of the file could not be stored. The task waits and spends no attempt.",
    "stuck": "The task made no progress for `stuck_after`, three times in a row.",
    "target_down": "The target's breaker stayed open for `breaker.patience`.",
    "target_refused": "The target has a private address.",
    "timeout": "No complete response within `timeout`.",
    "tls_failed": "The TLS handshake failed, or the certificate is invalid.",
    "too_many_open_files": "The worker has no file descriptor left. The task waits and spends no attempt.",
    "too_many_redirects": "More redirects than `max_redirects`.",
    "too_slow": "Slower than `download.min_rate` bytes a second for `download.min_rate_seconds`.",
    "worker_lost": "The task killed its worker process repeatedly.",
}
INPUTS = {
    "url": "The URL. The only required field.",
    "method": f"{', '.join(sorted(METHODS))}. Default: GET.",
    "headers": "Headers in addition to the job's; they replace headers of the same name.",
    "body": "Request body, as text.",
    "body_base64": "Request body, as base64.",
    "id": "Your own id for the task.",
    "tag": "A label to filter by.",
    "timeout": "Replaces the job's `timeout`.",
    "connect_timeout": "Replaces the job's `connect_timeout`.",
    "data": "An object of your own, which the result carries. In a CSV: all other columns.",
    "sha256": "Expected sha256 of the file, in hexadecimal.",
}
OPTIONS = {
    "concurrency": "Maximum number of tasks of the run at once, over all workers.",
    "rate_per_host": "Maximum number of requests a second to one host, over all workers.",
    "concurrency_per_host": "Maximum number of requests at once to one host, over all workers.",
    "pace": "`auto`: find how many requests at once each host can take, by its latency and errors. `fixed`: as many as "
    "the limits allow. For the kinds `fetch` and `download`; without it, `auto` if there is no `rate_per_host`, no "
    "`concurrency_per_host` and no gateway, the operator's included.",
    "attempts": "Maximum number of attempts of a task, including the first.",
    "backoff": "Seconds before a retry: random, up to `base * rate^(n-1)`, at most `cap`. Without `jitter`, exactly "
    "that bound.",
    "retry_statuses": "HTTP statuses that are retried.",
    "retry_errors": "Error codes that are retried. Default: those marked in [Errors of tasks](errors.md).",
    "outage": "While the target is unavailable: after every `quick_tries` attempts in a row, wait `delay` seconds in "
    "the queue.",
    "on_exhausted": "A task without retries left: `fail`, or `dead_letter`: it fails and can be redriven.",
    "upstream": "Your own name for the system that the tasks depend on: one breaker for all of them.",
    "breaker": "Whether tasks wait while the breaker of their target is open, and for how many seconds at most.",
    "task_deadline": "Seconds after the start of a task's first attempt in which another may start.",
    "deadline": "Seconds that a run may take before its unfinished tasks are requeued, and finally fail.",
    "stuck_after": "Seconds without progress after which a long task counts as stuck. Default: `CONVEYOR_STUCK_AFTER`.",
    "timeout": "Seconds for an attempt. For a download: seconds until the response starts, and between two reads.",
    "connect_timeout": "Seconds to connect.",
    "max_body_bytes": "Maximum size of a fetched body, in bytes.",
    "max_redirects": "Maximum number of redirects to follow.",
    "headers": "Headers sent with each request. The API does not show them.",
    "success_statuses": "HTTP statuses that count as success. If empty: 200 to 299.",
    "gateway": "`proxy`, the URL of an HTTP or SOCKS proxy, or `url`, a template with `{url}`; and `headers` for the "
    "gateway. Or a `pool` of these, each with a `weight`, and `sticky: host`.",
    "insecure": "`true`: verify no certificate, of targets and of the job's own gateway. The server must allow it: "
    "`CONVEYOR_ALLOW_INSECURE`. Not for kind `python`.",
    "http2": "`true`: speak HTTP/2 with sites that choose it in the TLS handshake, else HTTP/1.1. Not for kind "
    "`python`.",
    "robots": "`obey`: fetch nothing that robots.txt of the site disallows. `ignore`, the default. For the kinds "
    "`fetch` and `download`.",
    "handler": "Name of the registered function, for kind `python`.",
    "extract": "Name of the registered function that gets each body, for kinds that fetch; its return value is the "
    "task's `extracted`.",
    "keep_bodies": "`false`: do not store a body from which `extract` got its result. For kind `fetch`.",
    "changed_from": "Id of an earlier job: pages that are the same as its pages count as unchanged. For kind `fetch`.",
    "download": "Limits of a download: `max_bytes`, and the minimum rate.",
    "export": "The export API, for kind `export_download`.",
    "priority": "Among one tenant's runs, the highest goes first.",
    "retention_days": "Days to keep rows and bodies after the end of the latest run; an unfinished job does not "
    "expire.",
    "max_lifetime": "Seconds after its creation at which an unfinished run fails, paused or not.",
    "failure_threshold": "Fail the run at `failed` failed tasks, or when more than `ratio` of at least `after` "
    "finished tasks failed.",
    "chunk_size": "References in one queue message; always 1 for downloads.",
    "on_invalid": "`skip` invalid lines, or `reject` a list that has any.",
    "idle_timeout": "Seconds without a batch after which an open job is closed.",
}
# Sections of the HTTP reference, by path prefix; the last one takes the remaining routes.
_AREAS: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    ("Jobs", "/v1/jobs"),
    ("Uploads", "/v1/uploads"),
    ("Exports", "/v1/exports"),
    ("Webhooks", "/v1/webhooks"),
    ("Schedules", "/v1/schedules"),
    ("Dead letters", "/v1/dead-letters"),
    ("Keys", "/v1/keys"),
    ("Dashboard sessions", ("/v1/session", "/v1/sign-in")),
    ("The system", "/"),
)


def cell(text: str) -> str:
    """Text for a table cell: one line, with pipes escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def inputs_part() -> str:
    kinds = {JobKind.FETCH: FetchInput, JobKind.DOWNLOAD: DownloadInput}
    fields = dict.fromkeys(field for shape in kinds.values() for field in shape.__struct_fields__)
    assert list(fields) == [*INPUTS]
    rows = []
    for field in fields:
        of = [kind.value for kind, shape in kinds.items() if field in shape.__struct_fields__]
        in_csv = [kind.value for kind in kinds if field in _FIELDS[kind]]
        shown = "yes" if in_csv == of else ""
        rows.append(f"| `{field}` | {', '.join(of)} | {shown} | {INPUTS[field]} |")
    return "\n".join(["| field | kinds | in CSV | |", "|---|---|---|---|", *rows])


def events_part() -> str:
    assert set(EVENT_DATA) == EVENTS
    rows = [f"| `{name}` | {EVENT_DATA[name]} |" for name in EVENT_DATA]
    return "\n".join(["| event | |", "|---|---|", *rows])


def task_events_part() -> str:
    assert {f"task.{status.label}" for status in TaskStatus if status is not TaskStatus.PENDING} <= set(TASK_EVENTS)
    rows = [f"| `{name}` | {TASK_EVENTS[name]} |" for name in TASK_EVENTS]
    return "\n".join(["| event | |", "|---|---|", *rows])


def task_errors_part() -> str:
    assert set(TASK_ERRORS) >= RETRYABLE_ERRORS | FINAL_ERRORS
    rows = [
        f"| `{code}` | {'yes' if code in RETRYABLE_ERRORS else ''} | {text} |" for code, text in TASK_ERRORS.items()
    ]
    return "\n".join(["| code | retried | |", "|---|---|---|", *rows])


def reason_codes_part() -> str:
    rows = [f"| `{code}` | {REASON_CODES[code]} |" for code in ReasonCode]
    return "\n".join(["| code | |", "|---|---|", *rows])


def options_part() -> str:
    assert list(OPTIONS) == list(Options.__struct_fields__)
    rows = []
    defaults = Options()
    for field in Options.__struct_fields__:
        default = getattr(defaults, field)
        least, most = RANGES.get(field, (None, None))
        bounds = "" if least is None or most is None else f"{_number(least)} to {_number(most)}"
        rows.append(f"| `{field}` | {_default(default)} | {bounds} | {cell(OPTIONS[field])} |")
    return "\n".join(["| option | default | range | |", "|---|---|---|---|", *rows])


def _default(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        built = {name: getattr(value, name) for name in value.__struct_fields__}
        return ", ".join(f"{name} {_default(given)}" for name, given in built.items())
    if value is None or value in ({}, ()):
        return "none" if value is None else "empty"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return _number(value) if isinstance(value, int | float) else str(value)


def _number(value: float) -> str:
    return f"{value:,.12g}"


def cli_part() -> str:
    import typer.main

    from conveyor.cli.command_list import app

    return "\n\n".join(_commands("conveyor", typer.main.get_command(app)))


def _commands(path: str, command: Any) -> Iterator[str]:
    inner: Mapping[str, Any] = getattr(command, "commands", {})
    if path != "conveyor":
        yield _command(path, command)
    for name, sub in inner.items():
        yield from _commands(f"{path} {name}", sub)


def _command(path: str, command: Any) -> str:
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option" and param.name != "help"]
    groups = " COMMAND" if getattr(command, "commands", None) else ""
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_argument, arguments)]) + groups
    help_text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    parts = [f"## {path}", f"`{usage}`", help_text]
    rows = [f"| `{_argument(param)}` | {cell(param.help or '')} |" for param in arguments]
    rows += [f"| {_flags(param)} | {cell(param.help or '')}{_shown_default(param)} |" for param in options]
    if rows:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _argument(param: Any) -> str:
    name = param.metavar or param.name.upper()
    return f"{name}..." if param.nargs == -1 else name


def _flags(param: Any) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(param.opts, key=len, reverse=True))
    if getattr(param, "is_flag", False):
        return names
    choices = "\\|".join(getattr(param.type, "choices", ()))
    # The name of a number with bounds is "int range".
    shown = param.metavar or choices or param.type.name.split()[0].upper()
    return f"{names} {shown}" + (", required" if param.required else "")


def _shown_default(param: Any) -> str:
    given = param.default
    shown = given is not None and not callable(given) and not getattr(param, "is_flag", False) and given != []
    return f" [{given}]" if shown and not param.required else ""


def described() -> dict[str, Any]:
    """The content of /v1/openapi.json."""
    from conveyor.api.application import create_app
    from conveyor.settings import Settings
    from conveyor.system import open_system

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/v1/openapi.json",
        "raw_path": b"/v1/openapi.json",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
        "state": {},
    }
    body = bytearray()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        body.extend(message.get("body", b""))

    async def ask() -> None:
        with tempfile.TemporaryDirectory() as place:
            async with open_system(Settings(data=Path(place) / "data")) as system:
                await create_app(system)(scope, receive, send)

    asyncio.run(ask())
    page: dict[str, Any] = msgspec.json.decode(bytes(body))
    return page


def http_part() -> str:
    page = described()
    routes = [
        (path, method.upper(), operation)
        for path, operations in page["paths"].items()
        for method, operation in operations.items()
    ]
    parts: list[str] = []
    left = list(routes)
    for title, prefix in _AREAS:
        mine = [route for route in left if route[0].startswith(prefix)]
        left = [route for route in left if route not in mine]
        parts += [f"## {title}", *(_route(*route, page) for route in mine)]
    assert not left, left
    parts.append("## Response schemas")
    for name, schema in page["components"]["schemas"].items():
        if "properties" in schema:
            parts.append(_shape(name, schema))
    return "\n\n".join(parts)


def _route(path: str, method: str, operation: dict[str, Any], page: dict[str, Any]) -> str:
    lines = [f"### {method} {path}", f"**{operation.get('summary', '')}.** {_line(operation.get('description', ''))}"]
    items = []
    for parameter in operation.get("parameters", []):
        if parameter["in"] != "path":
            where = "header" if parameter["in"] == "header" else "query"
            about = _line(parameter.get("description") or "")
            items.append(
                f"- {where} `{parameter['name']}` ({_type(parameter['schema'])}){': ' if about else ''}{about}"
            )
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        fields = _resolved(body, page).get("properties", {})
        if fields:
            items.append(f"- body: {', '.join(f'`{name}`' for name in fields)}")
    answers = []
    for status, answer in operation.get("responses", {}).items():
        if int(status) in EVERYWHERE:
            continue
        content = answer.get("content", {})
        schema = next(iter(content.values()), {}).get("schema", {})
        shape = schema.get("$ref", "").rpartition("/")[2]
        answers.append(f"{status} {_link(shape)}" if shape and shape != "Problem" else str(status))
    items.append(f"- responses: {', '.join(answers)}")
    return "\n\n".join([*lines, "\n".join(items)])


def _shape(name: str, schema: dict[str, Any]) -> str:
    rows = [
        f"| `{field}` | {_type(value)} | {cell(value.get('description') or '')} |"
        for field, value in schema["properties"].items()
    ]
    about = _line(schema.get("description") or "")
    return "\n\n".join(filter(None, [f"### {name}", about, "\n".join(["| | | |", "|---|---|---|", *rows])]))


def _resolved(schema: dict[str, Any], page: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema
    if "$ref" in schema:
        found = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    several = schema.get("oneOf") or schema.get("anyOf")
    if several:
        return " or ".join(dict.fromkeys(_type(each) for each in several))
    kind = schema.get("type", "any")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(kind)


# Schemas of plain values, without a table.
_VALUES = frozenset({"JobKind", "Mode", "ResultLayout", "RunState"})


def _link(shape: str) -> str:
    return f"`{shape}`" if shape in _VALUES else f"[{shape}](#{shape.lower()})"


def _line(text: str) -> str:
    return " ".join(text.split())


def metrics_part() -> str:
    """The table of metrics, if this version has them."""
    if importlib.util.find_spec("conveyor.telemetry") is None:
        return "This version has no metrics yet."
    from tests.docs.metrics import table

    return table()

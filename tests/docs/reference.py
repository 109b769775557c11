"""The parts of the reference that are made from the code: commands, routes, options, events, errors of tasks, metrics.

Each is a function that returns Markdown. `tables.py` puts them between the markers of the pages.
"""

import asyncio
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from enum import EnumType
from pathlib import Path
from typing import Any

import msgspec

from conveyor.accept.option_limits import RANGES
from conveyor.jobs.event_names import EVENTS
from conveyor.lists.inputs import METHODS, DownloadInput, FetchInput
from conveyor.lists.reader import _COLUMNS
from conveyor.model import JobKind, Options
from conveyor.process.retry import FINAL_ERRORS, RETRYABLE_ERRORS
from conveyor.states import TaskStatus

# What an event carries beside job_id and run_id, and when it is told.
EVENT_DATA = {
    "job.accepted": "The job is written. `total`, if it was written whole.",
    "job.ingested": "All tasks of its list are written. `total`, `invalid`. Not for a job that was written whole.",
    "job.changed": "Options were changed while it runs. `changed`: their names, not their values.",
    "run.added": "A rerun was made. `number`, `lineage`, and `overrides`: the names of the options that are new.",
    "run.progress": "A quarter of the tasks has ended. `percent` (25, 50 or 75), `total`, `counts`.",
    "run.overdue": "The run is past its deadline; its unfinished tasks are queued again. `tries`, `of`, `deadline`.",
    "run.paused": "Nothing more of it starts.",
    "run.resumed": "It goes on.",
    "run.completed": "Every task has ended. `counts`, `reason`.",
    "run.failed": "The run was given up: failure threshold, deadline, or a list that could not be ingested. `counts`, "
    "`reason`.",
    "run.cancelled": "Somebody cancelled it. `counts`, `reason`.",
    "tasks.failed": "More tasks have failed. `failed` (how many more), `counts`, `top_errors`; at most once in "
    "`CONVEYOR_FAILURE_NOTICE_SECONDS`, and the rest at the end.",
    "export.ready": "An export can be downloaded. `export_id`, `format`, `tasks`, `bytes`, `parts`, `name`.",
    "export.failed": "An export was given up. `export_id`, `format`, `error`.",
}
TASK_EVENTS = {
    "task.retried": "An attempt failed and is made again. The error, the attempt, `retry_in`.",
    "task.failed": "The last attempt failed. The error and the number of attempts.",
    "task.dead_lettered": "The task was given up because it takes its worker along, or never moves.",
    "task.succeeded": "It succeeded. Made from its row.",
    "task.cancelled": "Its run ended before it did. Made from its row.",
}
# Why a task failed. A code that is not here is `http_<status>`.
TASK_ERRORS = {
    "bad_answer": "The export API answered something that has no id, state or link where the job says.",
    "bad_input": "The input can not be filled into the request to the export API.",
    "bad_redirect": "A redirect without a Location, or to something that is no URL.",
    "bad_url": "The URL can not be fetched.",
    "body_too_large": "The body has more than `max_body_bytes`; the file more than `download.max_bytes`.",
    "checksum_mismatch": "The file does not have the sha256 that its task names.",
    "connect_failed": "No connection could be made.",
    "connect_timeout": "No connection within `connect_timeout`.",
    "content_encoded": "The file came compressed although that was not asked for: it could not be resumed.",
    "deadline": "No attempt may begin any more: `task_deadline`.",
    "decode_failed": "The compressed body is damaged.",
    "dns_failed": "The name has no address.",
    "export_api_failed": "A call of the export API failed for good, or too often.",
    "export_failed": "The export API says that the export failed.",
    "export_timeout": "The export was not ready within `export.poll.timeout`.",
    "file_changed": "The file was replaced while it was downloaded; it is taken anew.",
    "gateway_failed": "The gateway could not be reached, or failed itself.",
    "handler_missing": "No function is registered under this name where the worker runs.",
    "handler_raised": "The function raised.",
    "internal": "Something went wrong inside Conveyor; the log has the details.",
    "process_failed": "No process could be started for the function.",
    "range_failed": "The server's answers to requests for the rest of a file fit nothing.",
    "read_failed": "The connection broke while the answer was read.",
    "result_not_json": "What the function returned is nothing that JSON can hold.",
    "store_failed": "The piece of a file could not be stored; waits, and spends no attempt.",
    "stuck": "The task did not move for `stuck_after`, three times in a row.",
    "target_down": "The target was down for `breaker.patience`.",
    "target_refused": "The target is on an address that is not public.",
    "timeout": "No whole answer within `timeout`.",
    "tls_failed": "The certificate or the handshake is not good.",
    "too_many_redirects": "More than `max_redirects`.",
    "too_slow": "Fewer bytes a second than `download.min_rate` for `download.min_rate_seconds`.",
    "worker_lost": "It took the process that ran it along, again and again.",
}
INPUTS = {
    "url": "Where it is. The only one that has to be there.",
    "method": f"{', '.join(sorted(METHODS))}. Without it, GET.",
    "headers": "Beside those of the job; of one that both name, the task's.",
    "body": "What is sent, as text.",
    "body_base64": "The same, as base64.",
    "id": "Your own name for the task.",
    "tag": "A word to find it by.",
    "timeout": "Instead of the job's.",
    "connect_timeout": "Instead of the job's.",
    "sha256": "What the file must have, in hexadecimal.",
}
OPTIONS = {
    "concurrency": "Tasks of the run at once, over all workers.",
    "rate_per_host": "Requests a second to one host, over all workers.",
    "concurrency_per_host": "Requests at once to one host, over all workers.",
    "attempts": "Tries of a task, the first included.",
    "backoff": "Seconds before the next try: random up to `base * rate^(n-1)`, at most `cap`. Without `jitter`, that "
    "bound itself.",
    "retry_statuses": "HTTP statuses that are tried again.",
    "retry_errors": "Error codes that are tried again; without it, those marked in [Errors of tasks](errors.md).",
    "outage": "While the target is away: after each `quick_tries` tries in a row, wait `delay` seconds in the queue.",
    "upstream": "What the tasks depend on, by a name of your own: one breaker for all of them.",
    "breaker": "Whether tasks of a target that is down are held back, and for how many seconds at most.",
    "task_deadline": "Seconds after a task's first attempt began in which another may begin.",
    "deadline": "Seconds that a run may take before its unfinished tasks are queued again, and at last given up.",
    "stuck_after": "Seconds without progress after which a long task counts as stuck; without it, "
    "`CONVEYOR_STUCK_AFTER`.",
    "timeout": "Seconds for an attempt; for a download, until an answer begins, and for a pause.",
    "connect_timeout": "Seconds for a connection.",
    "max_body_bytes": "Largest body of a fetch.",
    "max_redirects": "Redirects that are followed.",
    "headers": "Sent with each request. Not shown again.",
    "success_statuses": "HTTP statuses that are a success; if empty, 200 to 299.",
    "gateway": "`proxy`, an HTTP proxy, or `url`, a template with `{url}`; and `headers` for it.",
    "handler": "Name of the registered function, for kind `python`.",
    "download": "Bounds of a download: `max_bytes`, and the least rate.",
    "export": "The export API, for kind `export_download`.",
    "priority": "Among one tenant's runs, the highest goes first.",
    "retention_days": "How long rows and bodies are kept.",
    "failure_threshold": "Give the run up at `failed` failed tasks, or when more than `ratio` of at least `after` "
    "ended ones failed.",
    "chunk_size": "References in one queue message; always 1 for downloads.",
    "on_invalid": "`skip` lines that are no task, or `reject` a list that has any.",
    "idle_timeout": "Seconds without a batch after which an open job is closed.",
}
# By how their paths begin; the last takes all that is left.
_AREAS: tuple[tuple[str, str | tuple[str, ...]], ...] = (
    ("Jobs", "/v1/jobs"),
    ("Uploads", "/v1/uploads"),
    ("Exports", "/v1/exports"),
    ("Webhooks", "/v1/webhooks"),
    ("Schedules", "/v1/schedules"),
    ("Dead letters", "/v1/dead-letters"),
    ("Keys", "/v1/keys"),
    ("Sessions of the dashboard", ("/v1/session", "/v1/sign-in")),
    ("The system", "/"),
)


def cell(text: str) -> str:
    """Text that stands in a table: one line, no column of its own."""
    return " ".join(text.split()).replace("|", "\\|")


def inputs_part() -> str:
    kinds = {JobKind.FETCH: FetchInput, JobKind.DOWNLOAD: DownloadInput}
    fields = dict.fromkeys(field for shape in kinds.values() for field in shape.__struct_fields__)
    assert list(fields) == [*INPUTS]
    rows = []
    for field in fields:
        of = [kind.value for kind, shape in kinds.items() if field in shape.__struct_fields__]
        in_csv = [kind.value for kind in kinds if field in _COLUMNS[kind]]
        shown = "yes" if in_csv == of else ""
        rows.append(f"| `{field}` | {', '.join(of)} | {shown} | {INPUTS[field]} |")
    return "\n".join(["| field | of | in a csv | |", "|---|---|---|---|", *rows])


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
    return "\n".join(["| code | tried again | |", "|---|---|---|", *rows])


def options_part() -> str:
    assert list(OPTIONS) == list(Options.__struct_fields__)
    rows = []
    defaults = Options()
    for field in Options.__struct_fields__:
        default = getattr(defaults, field)
        least, most = RANGES.get(field, (None, None))
        bounds = "" if least is None or most is None else f"{_number(least)} to {_number(most)}"
        rows.append(f"| `{field}` | {_default(default)} | {bounds} | {cell(OPTIONS[field])} |")
    return "\n".join(["| option | default | from, to | |", "|---|---|---|---|", *rows])


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
    kind = param.bare_type()
    choices = "\\|".join(each.value for each in kind) if isinstance(kind, EnumType) else None
    shown = param.metavar or choices or getattr(kind, "__name__", str(kind)).upper()
    return f"{names} {shown}" + (", required" if param.required else "")


def _shown_default(param: Any) -> str:
    given = param.default
    shown = given is not None and not callable(given) and not getattr(param, "is_flag", False) and given != []
    return f" [{given}]" if shown and not param.required else ""


def described() -> dict[str, Any]:
    """What /v1/openapi.json says."""
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
    parts.append("## What answers hold")
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
        content = answer.get("content", {})
        schema = next(iter(content.values()), {}).get("schema", {})
        shape = schema.get("$ref", "").rpartition("/")[2]
        answers.append(f"{status} {_link(shape)}" if shape and shape != "Problem" else str(status))
    items.append(f"- answers: {', '.join(answers)}")
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


# Shapes that are plain values, and have no table of their own.
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

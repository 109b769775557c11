"""Options that several commands share, and the way from them to a job's spec."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.errors import BadInput
from conveyor.model import OnInvalid

_JOB = "Job"

Lists = Annotated[
    list[str],
    typer.Argument(
        metavar="LIST",
        help="Files with the tasks, or - for standard input. One URL a line (empty lines and lines that start with "
        "# are skipped), or .jsonl with a URL or an object a line, or .csv; any of them .gz or .zst too. Of any size.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data directory. [CONVEYOR_DATA, else conveyor-data]"),
]
App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE", help="Module with functions registered by @conveyor.task."),
]
AllowPrivate = Annotated[
    bool,
    typer.Option("--allow-private-targets", help="Fetch from private, loopback and link-local addresses too."),
]
Server = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The server. [CONVEYOR_URL, else the one that `conveyor up` runs here]"),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.", show_default=False)]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Show at most so many.")]

Concurrency = Annotated[int | None, typer.Option("--concurrency", rich_help_panel=_JOB, help="Tasks at once. [64]")]
Handler = Annotated[
    str | None,
    typer.Option(
        "--handler",
        metavar="NAME",
        rich_help_panel=_JOB,
        help="Call this registered Python function for each task, instead of fetching a URL.",
    ),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        rich_help_panel=_JOB,
        help="The URLs are large files: take each in pieces, and go on where it was after any cut or crash.",
    ),
]
ExportSpec = Annotated[
    Path | None,
    typer.Option(
        "--export",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        rich_help_panel=_JOB,
        help="JSON that describes an API which makes a file of each task: create, poll, download.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", rich_help_panel=_JOB, help="Requests a second to one host, at most."),
]
Attempts = Annotated[int | None, typer.Option("--attempts", rich_help_panel=_JOB, help="Tries per task. [4]")]
Timeout = Annotated[float | None, typer.Option("--timeout", rich_help_panel=_JOB, help="Seconds per try. [30]")]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", metavar="'NAME: VALUE'", rich_help_panel=_JOB, help="Send this header; may be repeated."),
]
Gateway = Annotated[
    str | None,
    typer.Option(
        "--gateway",
        metavar="URL",
        rich_help_panel=_JOB,
        help="Fetch through an HTTP proxy, or an API gateway given as a template with {url}. [CONVEYOR_GATEWAY]",
    ),
]
WhenInvalid = Annotated[
    OnInvalid | None,
    typer.Option(
        "--on-invalid",
        rich_help_panel=_JOB,
        help="Leave out lines that are no valid task, or refuse a list that has any. [run: reject, submit: skip]",
    ),
]
Name = Annotated[str | None, typer.Option("--name", rich_help_panel=_JOB, help="A name to know the job by.")]


def job_spec(
    *,
    concurrency: int | None = None,
    handler: str | None = None,
    download: bool = False,
    export: Path | None = None,
    rate: float | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    headers: list[str] | None = None,
    gateway: str | None = None,
    name: str | None = None,
    on_invalid: OnInvalid | None = None,
) -> dict[str, Any]:
    """The body of POST /v1/jobs without its tasks. What was not given stays the server's choice."""
    kinds = [
        kind
        for kind, given in (("python", handler), ("download", download), ("export_download", export is not None))
        if given
    ]
    if len(kinds) > 1:
        raise BadInput("Give one of --handler, --download and --export.")
    spec = {
        "kind": kinds[0] if kinds else None,
        "export": None if export is None else _described(export),
        "name": name,
        "concurrency": concurrency,
        "handler": handler,
        "rate_per_host": rate,
        "attempts": attempts,
        "timeout": timeout,
        "headers": dict(_header(line) for line in headers) if headers else None,
        "on_invalid": on_invalid.value if on_invalid else None,
        "gateway": {"url" if "{url}" in gateway else "proxy": gateway} if gateway else None,
    }
    return {field: value for field, value in spec.items() if value is not None}


def _described(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"--export {path} can not be read: {error}") from None


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise BadInput(f"--header must be 'Name: value', not {line!r}.")
    return name.strip(), value.strip()

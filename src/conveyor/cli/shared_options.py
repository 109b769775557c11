"""Options that several commands share, and the job spec that they make."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from conveyor.cli.guard import complain
from conveyor.cli.job_defaults import with_job_defaults
from conveyor.errors import BadInput
from conveyor.model import OnExhausted, OnInvalid, Pace

_JOB = "Job"

Lists = Annotated[
    list[str],
    typer.Argument(
        metavar="LIST",
        help="Files with the tasks, patterns such as 'pages-*.csv', s3://BUCKET/KEY (gs://, az://), an https URL, or - "
        "for standard input: text with one URL per line (empty lines and lines that start with # are ignored), .jsonl "
        "or .ndjson with a URL or an object per line, .csv or .tsv. All may be compressed (.gz, .zst, .bz2), and have "
        "any size.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Data directory. [CONVEYOR_DATA, else conveyor-data]"),
]
App = Annotated[
    str | None,
    typer.Option("--app", metavar="MODULE", help="Module with functions registered with @conveyor.task."),
]
AllowPrivate = Annotated[
    bool,
    typer.Option("--allow-private-targets", help="Allow targets on private, loopback and link-local addresses."),
]
Server = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="Server address. [CONVEYOR_URL, else the local `conveyor up`]"),
]
Wait = Annotated[bool, typer.Option("--wait", help="Watch the job until it finishes. Exit codes as for `watch`.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.", show_default=False)]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of rows to show.")]
RUN_HELP = "Only this run, by number or id, or latest. [latest-per-task: the latest outcome of each task over all runs]"
RunOption = Annotated[str | None, typer.Option("--run", help=RUN_HELP)]

Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", rich_help_panel=_JOB, help="Maximum number of tasks in progress at once. [64]"),
]
Handler = Annotated[
    str | None,
    typer.Option(
        "--handler",
        metavar="NAME",
        rich_help_panel=_JOB,
        help="Call this registered Python function for each task instead of fetching a URL.",
    ),
]
Extract = Annotated[
    str | None,
    typer.Option(
        "--extract",
        metavar="NAME",
        rich_help_panel=_JOB,
        help="Call this registered Python function with each fetched body. Its result is kept beside the body.",
    ),
]
DropBodies = Annotated[
    bool,
    typer.Option(
        "--drop-bodies",
        rich_help_panel=_JOB,
        help="Keep only what --extract returned, and the bodies that it failed with.",
    ),
]
Download = Annotated[
    bool,
    typer.Option(
        "--download",
        rich_help_panel=_JOB,
        help="Download large files in ranges, and resume them after a broken connection or a crash.",
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
        help="JSON file that describes an export API: how to create, poll and download the file of a task.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", rich_help_panel=_JOB, help="Maximum requests per second to one host."),
]
PaceOption = Annotated[
    Pace | None,
    typer.Option(
        "--pace",
        rich_help_panel=_JOB,
        help="auto: find how many requests at once each host can take. fixed: send as many as the job's limits allow. "
        "[auto without a rate and a gateway]",
    ),
]
Attempts = Annotated[
    int | None, typer.Option("--attempts", rich_help_panel=_JOB, help="Maximum attempts per task. [4]")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", rich_help_panel=_JOB, help="Time limit of one attempt, in seconds. [30]"),
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header", metavar="'NAME: VALUE'", rich_help_panel=_JOB, help="Header to send with each request. Repeatable."
    ),
]
Gateway = Annotated[
    list[str] | None,
    typer.Option(
        "--gateway",
        metavar="URL",
        rich_help_panel=_JOB,
        help="Fetch through a proxy (http, https or socks5h), or through an API given as a URL template with {url}. "
        "Repeat it for a pool: tasks go through one or the other. [CONVEYOR_GATEWAY]",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        rich_help_panel=_JOB,
        help="Verify no certificate of the sites: anyone on the way can read and change requests and responses. A "
        "server must allow it (CONVEYOR_ALLOW_INSECURE).",
    ),
]
Http2 = Annotated[
    bool,
    typer.Option("--http2", rich_help_panel=_JOB, help="Speak HTTP/2 with sites that choose it. [HTTP/1.1]"),
]
Patience = Annotated[
    float | None,
    typer.Option(
        "--patience",
        metavar="SECONDS",
        rich_help_panel=_JOB,
        help="How long tasks wait while their target is down, before they fail. [run: 60, else 3600]",
    ),
]
NoBreaker = Annotated[
    bool,
    typer.Option(
        "--no-breaker", rich_help_panel=_JOB, help="Try every task, also while its target is down. Uses up attempts."
    ),
]
WhenInvalid = Annotated[
    OnInvalid | None,
    typer.Option(
        "--on-invalid",
        rich_help_panel=_JOB,
        help="skip: leave out invalid lines, and list them. reject: refuse a list with invalid lines. [skip]",
    ),
]
MoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        rich_help_panel=_JOB,
        help="Any option of a job, such as max_redirects=2 or backoff.cap=60; the value is JSON or text. Repeatable.",
    ),
]
OptionsFile = Annotated[
    Path | None,
    typer.Option(
        "--options",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        rich_help_panel=_JOB,
        help="JSON file with options of a job. Flags win over it.",
    ),
]
UrlColumn = Annotated[
    str | None,
    typer.Option("--url-column", metavar="NAME", rich_help_panel=_JOB, help="Column of a csv that has the URLs. [url]"),
]
RetentionDays = Annotated[
    float | None,
    typer.Option(
        "--retention-days", rich_help_panel=_JOB, help="Days to keep the job after its latest run finished. [14]"
    ),
]
MaxLifetime = Annotated[
    float | None,
    typer.Option(
        "--max-lifetime",
        rich_help_panel=_JOB,
        help="Fail the run if it is unfinished this many seconds after its creation. [no limit]",
    ),
]
WhenExhausted = Annotated[
    OnExhausted | None,
    typer.Option(
        "--on-exhausted",
        rich_help_panel=_JOB,
        help="fail: a task without retries left fails. dead_letter: it is a dead letter as well, and can be redriven. "
        "[fail]",
    ),
]
Bodies = Annotated[
    str | None,
    typer.Option(
        "--bodies",
        metavar="FORM",
        help="How to include bodies. zip: file or none; jsonl: none, text or base64; parquet: none or binary. "
        "[zip: file, others: none]",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")]
Names = Annotated[
    str | None,
    typer.Option(
        "--names",
        metavar="TEMPLATE",
        help="Names of the bodies in a zip, such as {tag}/{id}{ext}. Fields: index, id, tag, host, slug, task_id, ext "
        "and data.COLUMN. [{id}{ext}, or {index}_{slug}{ext} without an id]",
    ),
]
Name = Annotated[str | None, typer.Option("--name", rich_help_panel=_JOB, help="Name of the job.")]


def job_spec(
    *,
    concurrency: int | None = None,
    handler: str | None = None,
    extract: str | None = None,
    drop_bodies: bool = False,
    download: bool = False,
    export: Path | None = None,
    rate: float | None = None,
    pace: Pace | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    headers: list[str] | None = None,
    gateway: list[str] | None = None,
    insecure: bool = False,
    http2: bool = False,
    name: str | None = None,
    on_invalid: OnInvalid | None = None,
    retention_days: float | None = None,
    max_lifetime: float | None = None,
    patience: float | None = None,
    no_breaker: bool = False,
    on_exhausted: OnExhausted | None = None,
    option: list[str] | None = None,
    options: Path | None = None,
    is_new: bool = False,
) -> dict[str, Any]:
    """Make the body of POST /v1/jobs, without its tasks. The server has the defaults; those of conveyor.toml go
    before them for a job that is new. Raises BadInput."""
    kinds = [
        kind
        for kind, is_set in (("python", handler), ("download", download), ("export_download", export is not None))
        if is_set
    ]
    if len(kinds) > 1:
        raise BadInput("--handler, --download and --export exclude each other. Pass one of them.")
    if no_breaker and patience is not None:
        raise BadInput("--patience and --no-breaker exclude each other. Pass one of them.")
    spec = {
        "kind": kinds[0] if kinds else None,
        "export": None if export is None else _read_json("--export", export),
        "name": name,
        "concurrency": concurrency,
        "handler": handler,
        "extract": extract,
        "keep_bodies": False if drop_bodies else None,
        "rate_per_host": rate,
        "pace": pace.value if pace else None,
        "attempts": attempts,
        "timeout": timeout,
        "retention_days": retention_days,
        "max_lifetime": max_lifetime,
        "headers": dict(_header(line) for line in headers) if headers else None,
        "on_invalid": on_invalid.value if on_invalid else None,
        "breaker": {"enabled": False} if no_breaker else None if patience is None else {"patience": patience},
        "on_exhausted": on_exhausted.value if on_exhausted else None,
        "gateway": _gateways(gateway) if gateway else None,
        "insecure": insecure or None,
        "http2": http2 or None,
    }
    own = {field: value for field, value in spec.items() if value is not None}
    merged = merged_options(own, option or [], None if options is None else _read_json("--options", options))
    complete = with_job_defaults(merged) if is_new else merged
    if complete.get("insecure") is True:
        # Here, so that no command leaves it out.
        complain("Warning: certificates are not verified. Anyone on the way can read and change what is sent.")
    return complete


# Fields of a request for a job, and arguments of the client, that arguments and flags set.
_NOT_OPTIONS = frozenset(
    {
        "compression",
        "format",
        "idempotency_key",
        "mode",
        "progress",
        "replaces",
        "source",
        "tasks",
        "url",
        "url_column",
    }
)


def merged_options(spec: dict[str, Any], pairs: list[str], stored: Any = None) -> dict[str, Any]:
    """The options of a file, then those of `--option`, then those of flags. A name with dots is inside another. Raises
    BadInput."""
    if not isinstance(stored, dict | None):
        raise BadInput("--options: the file must contain one JSON object, with options by name.")
    merged: dict[str, Any] = dict(stored or {})
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not all(name.split(".")):
            raise BadInput(f"--option: invalid option {pair!r}. Use NAME=VALUE, such as max_redirects=2.")
        *outer, last = name.split(".")
        place = merged
        for part in outer:
            inner = place.get(part)
            place[part] = dict(inner) if isinstance(inner, dict) else {}
            place = place[part]
        place[last] = _json_or_text(text)
    if wrong := sorted(_NOT_OPTIONS.intersection(merged)):
        raise BadInput(f"--option: {wrong[0]} is not an option of a job. Use the argument or the flag for it.")
    for name, value in spec.items():
        inner = merged.get(name)
        merged[name] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _gateways(addresses: list[str]) -> dict[str, Any]:
    """A gateway, or a pool of them. Raises BadInput."""
    pool = [_gateway(address) for address in addresses]
    return dict(pool[0]) if len(pool) == 1 else {"pool": pool}


def _gateway(address: str) -> dict[str, str]:
    """A proxy, or a template. Raises BadInput for a proxy with a path: it was meant as a template."""
    if "{url}" in address:
        return {"url": address}
    rest = address.partition("://")[2] or address
    if rest.partition("/")[2] or "?" in rest:
        raise BadInput(
            f"--gateway: {rest.partition('@')[2] or rest} has a path and no {{url}}. Put {{url}} where the address of "
            "the page goes, or leave out the path if it is a proxy."
        )
    return {"proxy": address}


def _read_json(flag: str, path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{flag}: cannot read {path}: {error}") from None


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name.strip():
        raise BadInput(f"--header: invalid header {line!r}. Use 'Name: value'.")
    return name.strip(), value.strip()

"""`conveyor jobs | show | results`: read the jobs of a server."""

import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from conveyor.cli.output import count_invalid_lines, print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Limit, RunOption, Server
from conveyor.settings import Settings

_JOBS = [
    ("job", 30),
    ("state", 10),
    ("created", 20),
    ("total", 10),
    ("done", 10),
    ("failed", 8),
    ("skipped", 8),
    ("waiting", 9),
    ("name", 0),
]
_RESULTS = [("index", 8), ("status", 10), ("http", 4), ("attempts", 8), ("size", 10), ("input", 0)]
_EVENTS = [("at", 20), ("event", 24), ("data", 0)]


def jobs(
    text: Annotated[
        str | None, typer.Option("--search", metavar="TEXT", help="Only jobs with this text in their name or id.")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            "--state", help="Only jobs in this state: active, ingesting, running, paused, completed, failed, cancelled."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="Only jobs of this kind: fetch, download, export_download, python.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", metavar="ID", help="Only jobs that this schedule made.")
    ] = None,
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    """List jobs, newest first."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        matching = client.jobs(text=text, state=state, kind=kind, schedule_id=schedule)
        rows = itertools.islice((job.data for job in matching), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_JOBS, map(_job_row, rows), "No jobs.")


def show(
    job: JobArgument,
    events: bool = typer.Option(False, "--events", help="Show the events of the job too."),
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Count the task rows and compare them with the job's counts. Above 100,000 rows, an "
            "administrator's key is needed.",
        ),
    ] = False,
    run: RunOption = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Show a job: state, counts, throughput, errors and runs.

    Counts and errors are by the latest outcome of each task over all runs; --run shows those of one run.
    """
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        handle = client.job(job, verify, run)
        event_rows = [event.as_dict() for event in handle.events()] if events else []
    status = handle.data
    if as_json:
        print_json({**status, "events": event_rows} if events else status)
        return
    for name, value in _facts(status):
        print(f"{name:<12}{value}")
    if events:
        print()
        print_lines(_EVENTS, map(_event_row, event_rows), "No events.")


def results(
    job: JobArgument,
    status: Annotated[
        str | None, typer.Option("--status", help="Only tasks in this state: pending, succeeded, failed or cancelled.")
    ] = None,
    error_code: Annotated[
        str | None,
        typer.Option("--error-code", "--error", metavar="CODE", help="Only tasks that failed with this error code."),
    ] = None,
    http_status: Annotated[int | None, typer.Option("--http", help="Only tasks with this HTTP status.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only tasks with this tag.")] = None,
    run: RunOption = None,
    limit: Limit = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """List the tasks of a job, each with its latest outcome over all runs; --run lists one run."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        filters = {"status": status, "error_code": error_code, "http_status": http_status, "tag": tag, "run": run}
        query = {name: value for name, value in filters.items() if value is not None}
        tasks = client.pages(path_of("jobs", job, "results"), {"limit": min(limit or 500, 500), **query})
        rows = itertools.islice(tasks, limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_RESULTS, map(_result_row, rows), "No matching tasks.")


def _job_row(job: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text
    from conveyor.cli.snapshot import Snapshot

    now = Snapshot.of(job)
    created = text.moment(job.get("created_at"))
    counts = (text.count(now.total), text.count(now.done), text.count(now.failed))
    if job.get("reason_code") == "tasks_elsewhere":
        counts = (text.count(now.total), "elsewhere", "-")
    waiting = (job.get("waiting") or {}).get("code")
    return [now.job_id, now.state.value, created, *counts, text.count(now.invalid), waiting, job.get("name")]


def _facts(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from conveyor.cli import formatting as text
    from conveyor.cli.bar_view import view_job
    from conveyor.cli.snapshot import Snapshot
    from conveyor.states import RunState
    from conveyor.telemetry.redact import printable

    now = Snapshot.of(job)
    yield "job", now.job_id
    if job.get("name"):
        yield "name", printable(job["name"])
    yield "kind", job["kind"]
    yield "state", now.state.value + (f" ({printable(now.reason)})" if now.reason else "")
    yield "created", text.moment(job.get("created_at"))
    if job["options"].get("insecure"):
        yield "insecure", "certificates are not verified"
    if now.state is RunState.INGESTING:
        yield "ingest", view_job(now).done
    yield "total", text.count(now.total)
    counts = job.get("counts", job["run"]["counts"])
    yield from ((status, text.count(counts[status])) for status in counts if counts[status] or status != "unchanged")
    if now.rate is not None:
        yield "rate", text.rate(now.rate)
    if now.eta is not None and not now.ended:
        yield "eta", text.duration(now.eta)
    if job.get("task_time"):
        p50, p95 = (text.latency(job["task_time"][name]) for name in ("p50", "p95"))
        yield "latency", f"p50 {p50}, p95 {p95}"
    if now.invalid:
        yield "invalid", f"{count_invalid_lines(now.invalid)}; `conveyor invalid {now.job_id}` lists them"
    for place, (code, number) in enumerate(now.errors):
        yield "errors" if place == 0 else "", f"{number:>9,}  {code}"
    if now.errors:
        yield "", f"`conveyor errors {now.job_id}` shows them by host, with messages"
    if len(job["runs"]) > 1:
        for place, run in enumerate(job["runs"]):
            yield "runs" if place == 0 else "", _run_line(run)
    if "verify" in job:
        drift = job["verify"]["drift"]
        yield (
            "verified",
            "counts match the task rows" if drift == 0 else f"counts differ from the task rows by {drift:,}",
        )


def _run_line(run: dict[str, Any]) -> str:
    from conveyor.cli import formatting as text

    counts = run["counts"]
    parts = [f"{run['number']}: {run['state']}", f"{text.count(run['total'])} tasks"]
    parts += [
        f"{text.count(counts[status])} {status}"
        for status in ("succeeded", "unchanged", "failed", "cancelled")
        if counts.get(status)
    ]
    return ", ".join(parts)


def _event_row(event: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    return [text.moment(event.get("at")), event.get("event"), json.dumps(event.get("data"), ensure_ascii=False)]


def _result_row(task: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    value, error = task["input"], task["error"]
    description = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if error:
        description += f"  {error['code']}: {error['message']}"
    size = text.size(task["size"])
    return [task["index"], task["status"], task["http_status"], task["attempts"], size, description]

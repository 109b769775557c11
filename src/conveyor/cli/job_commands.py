"""`conveyor jobs | show | results`: what a server has."""

import itertools
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Limit, Server
from conveyor.settings import Settings

_JOBS = [("job", 30), ("state", 10), ("created", 20), ("total", 10), ("done", 10), ("failed", 8), ("name", 0)]
_RESULTS = [("index", 8), ("status", 10), ("http", 4), ("tries", 5), ("size", 10), ("input", 0)]
_EVENTS = [("at", 20), ("event", 24), ("data", 0)]


def jobs(as_json: AsJson = False, limit: Limit = None, url: Server = None, data: Data = None) -> None:
    """List jobs, newest first."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        found = itertools.islice((job.data for job in client.jobs()), limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_JOBS, map(_job_row, found), "There are no jobs.")


def show(
    job: JobArgument,
    events: bool = typer.Option(False, "--events", help="The job's events too."),
    verify: Annotated[
        bool, typer.Option("--verify", help="Count the rows of all tasks, and hold the kept counts to them.")
    ] = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Show one job: state, counts, rate, how long tasks take, errors by code, its runs."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        seen = client.job(job, verify)
        happened = [event.as_dict() for event in seen.events()] if events else []
    found = seen.data
    if as_json:
        print_json({**found, "events": happened} if events else found)
        return
    for name, value in _facts(found):
        print(f"{name:<12}{value}")
    if events:
        print()
        print_lines(_EVENTS, map(_event_row, happened), "There are no events.")


def results(
    job: JobArgument,
    status: Annotated[
        str | None, typer.Option("--status", help="Only these: pending, succeeded, failed, cancelled.")
    ] = None,
    error_code: Annotated[
        str | None, typer.Option("--error", metavar="CODE", help="Only tasks that failed so.")
    ] = None,
    http_status: Annotated[int | None, typer.Option("--http", help="Only tasks with this HTTP status.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="Only tasks with this tag.")] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", help="A run by its number or id, latest, or latest-per-task: each task as it came out last."
        ),
    ] = None,
    limit: Limit = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """List the tasks of a job with their outcome, as they are read."""
    from conveyor.cli.connection import connect
    from conveyor.client import path_of

    with connect(Settings.load(url=url, data=data)) as client:
        where = {"status": status, "error_code": error_code, "http_status": http_status, "tag": tag, "run": run}
        query = {name: value for name, value in where.items() if value is not None}
        every = client.pages(path_of("jobs", job, "results"), {"limit": min(limit or 500, 500), **query})
        found = itertools.islice(every, limit)
        if as_json:
            print_json_array(found)
        else:
            print_lines(_RESULTS, map(_result_row, found), "There are no such tasks.")


def _job_row(job: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text
    from conveyor.cli.snapshot import Snapshot

    now = Snapshot.of(job)
    created = text.moment(job.get("created_at"))
    counts = (text.count(now.total), text.count(now.done), text.count(now.failed))
    return [now.job_id, now.state.value, created, *counts, job.get("name")]


def _facts(job: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from conveyor.cli import formatting as text
    from conveyor.cli.bar_view import of_job
    from conveyor.cli.output import number_of_lines
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
    if now.state is RunState.INGESTING:
        yield "ingest", of_job(now).done
    yield "total", text.count(now.total)
    for status, number in job["run"]["counts"].items():
        yield status, text.count(number)
    if now.rate is not None:
        yield "rate", text.rate(now.rate)
    if now.eta is not None and not now.ended:
        yield "eta", text.duration(now.eta)
    if job.get("task_time"):
        yield "task time", f"{job['task_time']['p50']:g} s median, {job['task_time']['p95']:g} s at 95 %"
    if now.invalid:
        yield "invalid", f"{number_of_lines(now.invalid)} no task; `conveyor invalid {now.job_id}` lists them"
    for place, (code, number) in enumerate(now.errors):
        yield "errors" if place == 0 else "", f"{number:>9,}  {code}"
    if len(job["runs"]) > 1:
        for place, run in enumerate(job["runs"]):
            yield "runs" if place == 0 else "", _run_line(run)
    if "verify" in job:
        drift = job["verify"]["drift"]
        yield "verified", "the counts agree with the rows" if drift == 0 else f"the counts were off by {drift:,}"


def _run_line(run: dict[str, Any]) -> str:
    from conveyor.cli import formatting as text

    counts = run["counts"]
    parts = [f"{run['number']}: {run['state']}", f"{text.count(run['total'])} tasks"]
    parts += [
        f"{text.count(counts[status])} {status}" for status in ("succeeded", "failed", "cancelled") if counts[status]
    ]
    return ", ".join(parts)


def _event_row(event: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    return [text.moment(event.get("at")), event.get("event"), json.dumps(event.get("data"), ensure_ascii=False)]


def _result_row(task: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    given, error = task["input"], task["error"]
    what = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if error:
        what += f"  {error['code']}: {error['message']}"
    size = text.size(task["size"])
    return [task["index"], task["status"], task["http_status"], task["attempts"], size, what]

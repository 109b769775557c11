"""`conveyor dead-letters [list] | redrive`: list and redrive the dead letters of a server."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli.output import print_json, print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, Limit, Server
from conveyor.errors import BadInput, NotFound
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client

app = typer.Typer(
    help="List and redrive dead letters. A dead letter is an ingest or a task that was set aside after its retries."
)

# The exit code of `watch` and `run` for a job of which tasks failed.
_SOME_FAILED = 3
_COLUMNS = [("id", 36), ("at", 20), ("queue", 7), ("job", 30), ("error", 18), ("redrive", 10), ("reason", 0)]

ErrorCode = Annotated[
    str | None, typer.Option("--error-code", "--error", metavar="CODE", help="Only dead letters with this error code.")
]
OfJob = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Only dead letters of this job.")]


@app.callback(invoke_without_command=True)
def dead_letters(
    context: typer.Context,
    error_code: ErrorCode = None,
    job: OfJob = None,
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    if context.invoked_subcommand is None:
        _list(error_code, job, as_json, limit, url, data)


@app.command("list")
def list_dead_letters(
    error_code: ErrorCode = None,
    job: OfJob = None,
    as_json: AsJson = False,
    limit: Limit = None,
    url: Server = None,
    data: Data = None,
) -> None:
    """List dead letters: messages, oldest first, then tasks by run."""
    _list(error_code, job, as_json, limit, url, data)


@app.command()
def redrive(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID", help="Ids of dead letters, from `dead-letters list`.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    error_code: ErrorCode = None,
    job: OfJob = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what a redrive would do, and do nothing.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the reruns and print their outcomes; exit with 3 if tasks failed.")
    ] = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Redrive dead letters: resume ingests, requeue messages, rerun failed tasks.

    Pass ids, or --all, --error-code or --job. Dead letters with nothing left to do are skipped. A task is rerun once no
    run of its job is in progress; all chosen tasks of a job are one rerun. --dry-run shows what would happen, --wait
    what came of it.
    """
    from conveyor.cli.connection import connect

    if bool(ids) == (every or error_code is not None or job is not None):
        raise BadInput("Pass the ids of dead letters, or else --all, --error-code or --job.")
    if dry_run and wait:
        raise BadInput("--dry-run starts nothing to --wait for. Pass one of them.")
    with connect(Settings.load(url=url, data=data)) as client:
        done = client.redrive(ids or None, all=every, error_code=error_code, job_id=job, dry_run=dry_run)
        if ids and not done["redriven"] and not dry_run:
            raise NotFound(
                "No dead letter with these ids can be redriven. `conveyor dead-letters list` shows the current ones."
            )
        if not as_json:
            print(_summary(done, dry_run))
            for run in done["runs"]:
                print(f"{run['job_id']}: {_rerun_line(run, dry_run)}")
        outcomes = [_outcome(client, run) for run in done["runs"]] if wait else []
    if as_json:
        print_json({**done, "outcomes": outcomes} if wait else done)
    for outcome in [] if as_json else outcomes:
        print(f"{outcome['job_id']}: {outcome['succeeded']:,} succeeded, {outcome['failed']:,} failed.")
    if any(outcome["failed"] for outcome in outcomes):
        raise typer.Exit(_SOME_FAILED)


def _summary(done: dict[str, Any], dry_run: bool) -> str:
    """What was done, or would be, and why the rest was not."""
    verb = "would be redriven" if dry_run else "redriven"
    rest = done["skipped"] - done["blocked"]
    reasons = [
        f"{done['blocked']:,} because a run of their job is in progress" if done["blocked"] else "",
        f"{rest:,} because nothing is left to do" if rest else "",
    ]
    skipped = ", ".join(reason for reason in reasons if reason)
    requeued = f" ({done['requeued']:,} back to their queues)" if done["requeued"] else ""
    return f"{done['redriven']:,} {verb}{requeued}, {done['skipped']:,} skipped{': ' if skipped else ''}{skipped}."


def _rerun_line(run: dict[str, Any], dry_run: bool) -> str:
    count = "1 dead letter" if run["dead_letters"] == 1 else f"{run['dead_letters']:,} dead letters"
    return f"a rerun of {count} would start." if dry_run else f"a rerun of {count} has started."


def _outcome(client: "Client", run: dict[str, Any]) -> dict[str, Any]:
    """The counts of a rerun, once it has finished."""
    counts = client.job(run["job_id"]).wait().refresh(run=run["run_id"]).data["counts"]
    return {**run, **counts}


def _list(
    error_code: str | None, job: str | None, as_json: bool, limit: int | None, url: str | None, data: Path | None
) -> None:
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        rows = itertools.islice(client.dead_letters(error_code=error_code, job_id=job), limit)
        if as_json:
            print_json_array(rows)
        else:
            print_lines(_COLUMNS, map(_row, rows), "No dead letters.")


def _row(dead_letter: dict[str, Any]) -> list[object]:
    from conveyor.cli import formatting as text

    return [
        dead_letter["id"],
        text.moment(dead_letter["at"]),
        dead_letter["queue"],
        dead_letter["job_id"],
        dead_letter["error_code"] or "",
        dead_letter["redrive"],
        dead_letter["reason"],
    ]

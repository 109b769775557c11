"""`conveyor verify`: check that all stored data fits together, and repair what can be repaired safely."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli import EXIT_BAD_INPUT, EXIT_ERROR
from conveyor.cli.output import print_json
from conveyor.cli.shared_options import AsJson, Data
from conveyor.errors import BadInput, ConveyorError, DataDirectoryInUse
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.bar_view import View
    from conveyor.verify.findings import Finding, FindingKind, Findings, FindingsOfKind

_SHOWN = 5
# Of the time, beside live servers.
_SHARE = 0.5

# What to do about findings of each kind.
_NEXT = {
    "counts": "conveyor verify --repair recounts finished runs. GET /v1/jobs/JOB?verify=true recounts all runs.",
    "total": "Rows are missing, or too many: restore the database from a backup, or submit the job again.",
    "body_missing": "conveyor rerun JOB --damaged",
    "body_damaged": "conveyor rerun JOB --damaged",
    "list": "Upload the list again for a new job or schedule. Tasks that are ingested do not need it.",
    "export": "conveyor export JOB -o FILE makes a new export.",
    "message": "Nobody receives them, and they do no harm.",
    "dead_letter": "conveyor dead-letters list",
    "orphan": "conveyor verify --repair removes them.",
}

OnlyJob = Annotated[str | None, typer.Option("--job", metavar="JOB", help="Check one job only.")]
Share = Annotated[
    float | None,
    typer.Option(
        "--share",
        min=0.01,
        max=1.0,
        help="Share of the time in which to work; verify pauses for the rest, for the sake of live servers. "
        "[0.5; 1 with the embedded engines, which no server uses meanwhile]",
    ),
]
Repair = Annotated[
    bool,
    typer.Option("--repair", help="Repair counts of finished runs, and remove orphans that are older than a day."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Remove orphans without asking for confirmation.")]


def verify(
    job: OnlyJob = None,
    repair: Repair = False,
    yes: Yes = False,
    share: Share = None,
    as_json: AsJson = False,
    data: Data = None,
) -> None:
    """Check all stored data: counts, bodies, lists, exports, and objects that nothing refers to.

    Reads every row and every body, and changes nothing without --repair. With the embedded engines it needs the data
    directory for itself: stop the server first. Exits 0 if all is well, 1 if there are findings, 2 if it could not
    check.
    """
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import run_async
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(data=data)
    configure_log("error", quiet=True, form=settings.log_format)
    if repair and not yes and not sys.stdin.isatty():
        raise BadInput("Cannot ask for confirmation without a terminal. Pass --yes to remove orphans.")
    try:
        code = run_async(_verify(settings, job, repair, yes, share, as_json))
    except DataDirectoryInUse:
        complain(
            f"Another process uses {settings.data}, and the embedded engines are open to one process only. Stop the "
            "server, or verify a snapshot of the directory with --data. [data_directory_in_use]"
        )
        code = EXIT_BAD_INPUT
    except ConveyorError as error:
        complain(f"Could not check: {error.message} [{error.code}]")
        code = EXIT_BAD_INPUT
    raise typer.Exit(code)


async def _verify(
    settings: Settings, job: str | None, repair: bool, yes: bool, share: float | None, as_json: bool
) -> int:
    from conveyor.cli.bar import progress_bar
    from conveyor.model import JobId
    from conveyor.system import check_database_present, open_system
    from conveyor.verify.findings import UNREADABLE, Findings, error_text
    from conveyor.verify.installation import Installation

    if settings.records is None and not (settings.data / "conveyor.db").exists():
        check_database_present(settings)
        raise BadInput(f"{settings.data} holds no data. Choose the data directory with --data.")
    only = None if job is None else JobId(job)
    share = share or (1.0 if settings.records is None else _SHARE)
    async with open_system(settings) as system:
        with progress_bar("Verifying") as show:
            findings = Findings(lambda now: show(_view(now)))
            installation = Installation(system, findings, share, repair)
            try:
                await installation.verify(only)
            except UNREADABLE as error:
                findings.fail(error_text(error))
        if repair and "orphan" in findings.by_kind and (yes or _agrees(findings)):
            await installation.remove_orphans(only)
    if as_json:
        print_json(_json(findings))
    else:
        _print(findings)
    if findings.left:
        return EXIT_ERROR
    return EXIT_BAD_INPUT if findings.failures else 0


def _agrees(findings: "Findings") -> bool:
    from conveyor.cli import formatting as text
    from conveyor.verify.findings import FindingKind

    orphans = findings.by_kind[FindingKind.ORPHAN]
    question = f"Remove {text.count(orphans.count)} orphans ({text.size(orphans.bytes)})?"
    return typer.confirm(question, err=True)


def _view(findings: "Findings") -> "View":
    from conveyor.cli import formatting as text
    from conveyor.cli.bar_view import View

    checked = findings.checked
    # Tasks may be added meanwhile.
    total = max(checked.tasks_total, checked.tasks)
    done = f"{text.count(checked.tasks)} of {text.count(total)} tasks, {text.size(checked.bytes)}"
    problems = f"{text.count(findings.left)} findings" if findings.left else ""
    tail = f"{text.count(checked.objects)} objects" if checked.objects else ""
    return View("", checked.tasks, total or None, done, problems, tail=tail)


def _json(findings: "Findings") -> dict[str, Any]:
    import msgspec

    return {
        "clean": not findings.left and not findings.failures,
        "checked": msgspec.to_builtins(findings.checked),
        "findings": {
            kind.value: {**msgspec.to_builtins(of_kind), "next": _next(kind, of_kind)}
            for kind, of_kind in sorted(findings.by_kind.items())
        },
        "failures": findings.failures,
        "not_checked": findings.notes,
    }


def _print(findings: "Findings") -> None:
    from conveyor.cli import formatting as text
    from conveyor.telemetry.redact import printable

    checked = findings.checked
    print(
        f"Checked {text.count(checked.jobs)} jobs, {text.count(checked.runs)} runs, {text.count(checked.tasks)} tasks, "
        f"{text.count(checked.bodies)} bodies, {text.count(checked.lists)} lists, {text.count(checked.exports)} exports"
        f" and {text.count(checked.objects)} objects: {text.size(checked.bytes)} read."
    )
    for kind, of_kind in sorted(findings.by_kind.items()):
        size = f", {text.size(of_kind.bytes)}" if of_kind.bytes else ""
        repaired = f", {text.count(of_kind.repaired)} repaired" if of_kind.repaired else ""
        print(f"\n{kind.value}: {text.count(of_kind.count)}{size}{repaired}")
        for finding in of_kind.examples[:_SHOWN]:
            print(f"  {printable(_line(finding))}")
        if of_kind.count > _SHOWN:
            print(f"  … and {text.count(of_kind.count - _SHOWN)} more.")
        if of_kind.count > of_kind.repaired:
            print(f"  Next: {_next(kind, of_kind)}")
    if not findings.by_kind:
        print("Nothing is wrong." if not findings.failures else "No findings in what could be checked.")
    for failure in findings.failures:
        print(f"Could not check: {printable(failure)}")
    for note in findings.notes:
        print(f"Not checked: {note}")


def _next(kind: "FindingKind", of_kind: "FindingsOfKind") -> str:
    """What to do, with the id of the job if it is one job."""
    jobs = {finding.job_id for finding in of_kind.examples}
    only = jobs.pop() if len(jobs) == 1 else None
    return _NEXT[kind].replace("JOB", only or "JOB")


def _line(finding: "Finding") -> str:
    run = f"run {finding.run}" if finding.run is not None else None
    task = f"task {finding.index}" if finding.index is not None else None
    where = " ".join(part for part in (finding.job_id, run, task, finding.key) if part)
    return f"{where}: {finding.detail}" if where else finding.detail

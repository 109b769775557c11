"""`conveyor watch`: show the progress of a job until it finishes."""

from typing import TYPE_CHECKING

import typer

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Server
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Job


def watch(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Show the progress of a job until it finishes.

    Exits 0 if all tasks succeeded, 3 if some did not, 2 if the list is unreadable or has no tasks.
    """
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        raise typer.Exit(watch_job(client.job(job), as_json))


def watch_job(job: "Job", as_json: bool, title: str | None = None) -> int:
    """Watch the job and return its exit code. A job without a name is shown as `title`."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.bar_view import view_job
    from conveyor.cli.guard import complain
    from conveyor.cli.output import count_invalid_lines, print_json
    from conveyor.cli.snapshot import Snapshot
    from conveyor.telemetry.redact import printable

    try:
        with progress_bar(job.name or title or job.id) as show:
            job.wait(progress=lambda status: show(view_job(Snapshot.of(status.data))))
    except KeyboardInterrupt:
        complain(f"Stopped watching; the job continues. `conveyor watch {job.id}` resumes watching.")
        return EXIT_INTERRUPTED
    now = Snapshot.of(job.data)
    if as_json:
        print_json(job.data)
    else:
        print(f"{job.id}: {view_job(now).line()}")
        if now.reason:
            print(f"  {printable(now.reason)}")
        for code, number in now.errors:
            print(f"  {number:>9,}  {code}")
        if now.invalid:
            print(f"  {count_invalid_lines(now.invalid)}; `conveyor invalid {job.id}` lists them.")
    return now.exit_code

"""`conveyor watch`: a job of a server, live, until it ends."""

import threading
from typing import TYPE_CHECKING, Any

import typer

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.options import AsJson, Data, JobArgument, Server
from conveyor.errors import ServerUnreachable
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client

_POLL_SECONDS = 0.5
# A server that is started anew is back within this.
_PATIENCE = 60.0


def watch(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Show a job's progress until it ends. Exits 0 when all tasks succeeded, 3 when some did not, 2 when its list
    could not be read."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        raise typer.Exit(watch_job(client, job, as_json))


def watch_job(client: "Client", job_id: str, as_json: bool, title: str | None = None) -> int:
    """The exit code that the job's end asks for. `title` is for a job without a name."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.guard import complain
    from conveyor.cli.output import number_of_lines, print_json, printable
    from conveyor.cli.snapshot import Snapshot
    from conveyor.cli.view import of_job

    try:
        job = client.job(job_id)
        with progress_bar(job.get("name") or title or job_id) as show:
            while not Snapshot.of(job).ended:
                show(of_job(Snapshot.of(job)))
                threading.Event().wait(_POLL_SECONDS)
                job = _ask(client, job_id)
            show(of_job(Snapshot.of(job)))
    except KeyboardInterrupt:
        complain(f"Stopped watching; the job goes on. `conveyor watch {job_id}` shows it again.")
        return EXIT_INTERRUPTED
    now = Snapshot.of(job)
    if as_json:
        print_json(job)
    else:
        print(f"{job_id}: {of_job(now).line()}")
        if now.reason:
            print(f"  {printable(now.reason)}")
        for code, number in now.errors:
            print(f"  {number:>9,}  {code}")
        if now.invalid:
            print(f"  {number_of_lines(now.invalid)} no task; `conveyor invalid {job_id}` lists them.")
    return now.exit_code


def _ask(client: "Client", job_id: str) -> dict[str, Any]:
    waited = 0.0
    while True:
        try:
            return client.job(job_id)
        except ServerUnreachable:
            if waited >= _PATIENCE:
                raise
        threading.Event().wait(2.0)
        waited += 2.0

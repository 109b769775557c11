"""`conveyor cancel | pause | resume | change`: a job that is under way."""

from typing import Annotated, Any

import typer

from conveyor.cli.output import print_json
from conveyor.cli.shared_options import (
    AsJson,
    Attempts,
    Concurrency,
    Data,
    Gateway,
    Headers,
    JobArgument,
    Rate,
    Server,
    Timeout,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings


def cancel(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Start nothing more of a job, for good. Its results so far stay; `rerun` runs the rest."""
    _move("cancel", job, as_json, Settings.load(url=url, data=data))


def pause(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Start nothing more of a job until it is resumed."""
    _move("pause", job, as_json, Settings.load(url=url, data=data))


def resume(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Go on with a paused job."""
    _move("resume", job, as_json, Settings.load(url=url, data=data))


def change(
    job: JobArgument,
    concurrency: Concurrency = None,
    rate: Rate = None,
    no_rate: Annotated[bool, typer.Option("--no-rate", help="Lift the limit of requests to one host.")] = False,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    max_failed: Annotated[
        int | None, typer.Option("--max-failed", help="Stop the job at so many failed tasks.")
    ] = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Change how a job is run while it runs; workers follow within a second."""
    from conveyor.cli.connection import connect

    options: dict[str, Any] = job_spec(
        concurrency=concurrency, rate=rate, attempts=attempts, timeout=timeout, headers=header, gateway=gateway
    )
    if no_rate:
        if rate is not None:
            raise BadInput("Give --rate or --no-rate, not both.")
        options["rate_per_host"] = None
    if max_failed is not None:
        options["failure_threshold"] = {"failed": max_failed}
    if not options:
        raise BadInput("Say what to change; `conveyor change --help` lists what can be.")
    with connect(Settings.load(url=url, data=data)) as client:
        found = client.job(job).change(**options).data
    if as_json:
        print_json(found)
    else:
        print(f"Changed {found['id']}: {', '.join(sorted(options))}.")


def _move(how: str, job: str, as_json: bool, settings: Settings) -> None:
    from conveyor.cli.connection import connect

    with connect(settings) as client:
        seen = client.job(job)
        moves = {"cancel": seen.cancel, "pause": seen.pause, "resume": seen.resume}
        found = moves[how]().data
    if as_json:
        print_json(found)
        return
    left = found["run"]["counts"]["pending"]
    behind = f"; {left:,} tasks are cancelled behind it" if found["state"] == "cancelled" and left else ""
    print(f"{found['id']} is {found['state']}{behind}.")

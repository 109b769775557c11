"""`conveyor cancel | pause | resume | change`: control a running job."""

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
    Http2,
    Insecure,
    JobArgument,
    MaxLifetime,
    NoBreaker,
    PaceOption,
    Patience,
    Rate,
    RetentionDays,
    Server,
    Timeout,
    job_spec,
)
from conveyor.errors import BadInput
from conveyor.settings import Settings


def cancel(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Cancel a job: start no more tasks. Results so far are kept; `rerun --cancelled` runs the rest."""
    _control("cancel", job, as_json, Settings.load(url=url, data=data))


def pause(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Pause a job: start no more tasks until `resume`."""
    _control("pause", job, as_json, Settings.load(url=url, data=data))


def resume(job: JobArgument, as_json: AsJson = False, url: Server = None, data: Data = None) -> None:
    """Resume a paused job."""
    _control("resume", job, as_json, Settings.load(url=url, data=data))


def change(
    job: JobArgument,
    concurrency: Concurrency = None,
    rate: Rate = None,
    pace: PaceOption = None,
    no_rate: Annotated[bool, typer.Option("--no-rate", help="Remove the limit on requests per host.")] = False,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    insecure: Insecure = False,
    http2: Http2 = False,
    retention_days: RetentionDays = None,
    max_lifetime: MaxLifetime = None,
    patience: Patience = None,
    no_breaker: NoBreaker = False,
    max_failed: Annotated[
        int | None, typer.Option("--max-failed", help="Fail the job when this many tasks have failed.")
    ] = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Change the options of a running job. Workers apply them within a second.

    Of a finished job, --retention-days alone can change.
    """
    from conveyor.cli.connection import connect

    options: dict[str, Any] = job_spec(
        concurrency=concurrency,
        rate=rate,
        pace=pace,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
        insecure=insecure,
        http2=http2,
        retention_days=retention_days,
        max_lifetime=max_lifetime,
        patience=patience,
        no_breaker=no_breaker,
    )
    if no_rate:
        if rate is not None:
            raise BadInput("--rate and --no-rate exclude each other. Pass one of them.")
        options["rate_per_host"] = None
    if max_failed is not None:
        options["failure_threshold"] = {"failed": max_failed}
    if not options:
        raise BadInput("No option to change. `conveyor change --help` lists them.")
    with connect(Settings.load(url=url, data=data)) as client:
        changed = client.job(job).change(**options).data
    if as_json:
        print_json(changed)
    else:
        print(f"Changed {changed['id']}: {', '.join(sorted(options))}.")


def _control(action: str, job: str, as_json: bool, settings: Settings) -> None:
    from conveyor.cli.connection import connect

    with connect(settings) as client:
        handle = client.job(job)
        actions = {"cancel": handle.cancel, "pause": handle.pause, "resume": handle.resume}
        status = actions[action]().data
    if as_json:
        print_json(status)
        return
    pending = status["run"]["counts"]["pending"]
    note = f"; {pending:,} pending tasks are being cancelled" if status["state"] == "cancelled" and pending else ""
    print(f"{status['id']} is {status['state']}{note}.")

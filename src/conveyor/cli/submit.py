"""`conveyor submit`: a list to a server, in one request."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.options import (
    AsJson,
    Attempts,
    Concurrency,
    Data,
    Gateway,
    Handler,
    Headers,
    Lists,
    Name,
    Rate,
    Server,
    Timeout,
    job_spec,
)
from conveyor.errors import BodyTooLarge, TooManyTasks
from conveyor.settings import Settings

if TYPE_CHECKING:
    import msgspec


def submit(
    lists: Lists,
    name: Name = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Watch the job until it ends; exit codes as for `watch`.")
    ] = False,
    concurrency: Concurrency = None,
    rate: Rate = None,
    attempts: Attempts = None,
    timeout: Timeout = None,
    header: Headers = None,
    gateway: Gateway = None,
    handler: Handler = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Submit a list of tasks to the server and print the job's id."""
    from conveyor.cli.connection import connect
    from conveyor.cli.output import print_json
    from conveyor.cli.place import check_lists
    from conveyor.cli.watch import watch_job
    from conveyor.clock import SystemClock

    check_lists(lists)
    settings = Settings.load(url=url, data=data)
    spec = job_spec(
        concurrency=concurrency,
        handler=handler,
        rate=rate,
        attempts=attempts,
        timeout=timeout,
        headers=header,
        gateway=gateway,
        name=name,
    )
    with connect(settings) as client:
        spec["tasks"] = _read(lists, settings, handler)
        job = client.submit(spec, SystemClock().new_id("cli"))
        if wait:
            raise typer.Exit(watch_job(client, job["id"], as_json))
    if as_json:
        print_json(job)
    else:
        print(job["id"])


def _read(lists: Sequence[str], settings: Settings, handler: str | None) -> "list[msgspec.Raw]":
    """The tasks of the lists; refused here already where one request can not carry them."""
    import msgspec

    from conveyor.model import JobKind
    from conveyor.stage.lists import read_lists

    tasks: list[msgspec.Raw] = []
    size = 0
    for given in read_lists(lists, JobKind.PYTHON if handler else JobKind.FETCH):
        if len(tasks) == settings.max_inline_tasks:
            raise TooManyTasks(
                f"The list has more than {settings.max_inline_tasks:,} tasks, too many for one request. Send it in "
                "several jobs, or use `conveyor run`."
            )
        tasks.append(msgspec.Raw(given.encode()))
        size += len(given)
    if size > settings.max_request_bytes:
        raise BodyTooLarge(f"The list has {size:,} bytes, too many for one request. Use `conveyor run`.")
    return tasks

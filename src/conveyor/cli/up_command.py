"""`conveyor up`: run the API and all background roles in one process."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.shared_options import AllowPrivate, App, Data
from conveyor.settings import Settings, is_loopback

if TYPE_CHECKING:
    from conveyor.cli.loop import Stop


def up(
    data: Data = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one. [8080]")
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Number of worker loops. [1]")] = None,
    app: App = None,
    allow_private_targets: AllowPrivate = False,
) -> None:
    """Start a server with the API, the dashboard and workers.

    All roles run in one process, until Ctrl-C or SIGTERM.

    The first start creates an API key in the data directory, where the other commands find it.
    """
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import Stop, loading, run_async
    from conveyor.cli.run_directory import check_data

    with loading():
        import conveyor.api.server
        import conveyor.embedded  # noqa: F401
        from conveyor.system import check_shared_engines
        from conveyor.telemetry.logs import configure_log

    settings = Settings.load(
        data=data,
        host=host,
        port=port,
        workers=workers,
        app=app,
        allow_private_targets=allow_private_targets or None,
    )
    check_data(settings.data)
    check_shared_engines(settings)
    configure_log(settings.log_level, form=settings.log_format)
    if not is_loopback(settings.host):
        complain(
            f"Listening on {settings.host} without TLS: keys are sent unencrypted. Put a TLS proxy in front of it."
        )
    stop = Stop(lambda: complain("Stopping: finishing requests, requeuing tasks in flight."), settings.drain_seconds)
    run_async(_serve(settings, stop))
    complain(f"Stopped. All data is in {settings.data}; `conveyor up` resumes.")


async def _serve(settings: Settings, stop: "Stop") -> None:
    from conveyor.api.scrape import serve_metrics
    from conveyor.api.server import serve
    from conveyor.cli.dashboard_command import dashboard_link
    from conveyor.cli.local_key import ensure_local_key
    from conveyor.embedded import Embedded
    from conveyor.system import open_system

    stop.listen()
    async with open_system(settings) as system:
        link = await dashboard_link(system, await ensure_local_key(system))
        embedded = Embedded(system)
        async with embedded.running(), serve_metrics(settings, embedded.failing_role):
            with _announce(settings, link) as on_ready:
                await serve(system, settings.host, settings.port, stop.event, on_ready)


@contextmanager
def _announce(settings: Settings, dashboard: str) -> Iterator[Callable[[str], None]]:
    """Print the address of the server once it listens, and keep it in local.url while it runs."""
    from conveyor.cli.connection import local_url_file
    from conveyor.cli.loop import freeze_loaded_objects

    def on_ready(bound: str) -> None:
        freeze_loaded_objects()
        # A server that listens on all addresses is reached on loopback from here.
        url = bound.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        local_url_file(settings.data).touch(mode=0o600)
        local_url_file(settings.data).write_text(url + "\n")
        _print_welcome(settings, url, dashboard)

    try:
        yield on_ready
    finally:
        local_url_file(settings.data).unlink(missing_ok=True)


def _print_welcome(settings: Settings, url: str, dashboard: str) -> None:
    from conveyor import __version__
    from conveyor.cli.connection import local_key_file

    data = shlex.quote(str(settings.data.absolute()))
    environment = [] if settings.data == Settings().data else [f"CONVEYOR_DATA={data}"]
    print(f"Conveyor {__version__} is up at {url}")
    print(f"  data    {settings.data.absolute()}")
    print(f"  key     {local_key_file(settings.data).absolute()} (other commands find it)")
    print(f"  submit  {' '.join([*environment, 'conveyor submit urls.txt'])}")
    print(f"  open    {url}{dashboard}")
    print("  stop    Ctrl-C", flush=True)

"""Commands that run one role each, and `migrate`: for engines that several processes share."""

from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.shared_options import AllowPrivate, App, Data
from conveyor.errors import InvalidSetting
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.loop import Stop
    from conveyor.clock import Clock

_RETRY_SECONDS = 2.0

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. [127.0.0.1]")]
Port = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one. [8080]")
]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Number of worker loops. [1]")]
Ingesters = Annotated[int | None, typer.Option("--ingesters", min=1, help="Number of ingest loops. [2]")]


def api(data: Data = None, host: Host = None, port: Port = None) -> None:
    """Run only the API server. Other processes run the tasks."""
    _run(Settings.load(data=data, host=host, port=port), "api")


def work(
    data: Data = None, workers: Workers = None, app: App = None, allow_private_targets: AllowPrivate = False
) -> None:
    """Run only workers, which run tasks. Start as many of these processes as you need."""
    allowed = allow_private_targets or None
    _run(Settings.load(data=data, workers=workers, app=app, allow_private_targets=allowed), "work")


def ingest(data: Data = None, ingesters: Ingesters = None, allow_private_targets: AllowPrivate = False) -> None:
    """Run only the ingester, which turns lists into tasks."""
    allowed = allow_private_targets or None
    _run(Settings.load(data=data, ingesters=ingesters, allow_private_targets=allowed), "ingest")


def sweep(data: Data = None, allow_private_targets: AllowPrivate = False) -> None:
    """Run only the sweeper, which repairs runs and purges data. It also makes exports and delivers webhooks."""
    _run(Settings.load(data=data, allow_private_targets=allow_private_targets or None), "sweep")


def schedule(data: Data = None, allow_private_targets: AllowPrivate = False) -> None:
    """Run only the scheduler, which fires schedules."""
    _run(Settings.load(data=data, allow_private_targets=allow_private_targets or None), "schedule")


def intake(data: Data = None) -> None:
    """Run only the intake, which accepts jobs from queues. CONVEYOR_INTAKE names the queues."""
    settings = Settings.load(data=data)
    if settings.intake is None:
        raise InvalidSetting("CONVEYOR_INTAKE is missing. Set it to the queues to accept jobs from.")
    _run(settings, "intake")


Once = Annotated[bool, typer.Option("--once", help="Run one pass, print its counts as JSON, and exit.")]


def monitor(data: Data = None, once: Once = False) -> None:
    """Run only the monitor, which finds stuck tasks, dead workers and overdue runs."""
    settings = Settings.load(data=data)
    if not once:
        _run(settings, "monitor")
        return
    from conveyor.cli.loop import run_async
    from conveyor.system import check_shared_engines
    from conveyor.telemetry.logs import configure_log

    check_shared_engines(settings)
    configure_log(settings.log_level, form=settings.log_format)
    print(run_async(_monitor_once(settings)))


async def _monitor_once(settings: Settings) -> str:
    import msgspec

    from conveyor.recover.monitor import monitor_of
    from conveyor.system import open_system

    async with open_system(settings) as system:
        return msgspec.json.encode(await monitor_of(system).run_once()).decode()


Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait for engines that do not answer yet.")
]


def migrate(data: Data = None, wait: Wait = 0.0) -> None:
    """Create or upgrade tables, queues and buckets.

    The engine URLs in the settings name them. Run it before you start or upgrade other processes.
    """
    from conveyor.cli.loop import run_async
    from conveyor.clock import SystemClock
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(data=data)
    configure_log(settings.log_level, form=settings.log_format)
    steps = run_async(_migrated(settings, SystemClock(), wait))
    for step in steps:
        print(step)
    if not steps:
        print("Nothing to migrate: the embedded engines create what they need.")


async def _migrated(settings: Settings, clock: "Clock", wait: float) -> list[str]:
    """Migrate, again and again for `wait` seconds if an engine fails: it may start at the same time."""
    from conveyor.cli.guard import complain
    from conveyor.errors import EngineFailed
    from conveyor.system import migrate as migrate_engines

    ends = clock.monotonic() + wait
    while True:
        try:
            return await migrate_engines(settings, clock)
        except EngineFailed as error:
            if clock.monotonic() + _RETRY_SECONDS > ends:
                raise
            complain(f"{error} Trying again for {ends - clock.monotonic():.0f} s.")
        await clock.sleep(_RETRY_SECONDS)


_SHARED = ("records", "tasks", "queue", "coordinator")


def _run(settings: Settings, role: str) -> None:
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import Stop, loading, run_async

    with loading():
        import conveyor.api.server
        import conveyor.embedded  # noqa: F401
        from conveyor.system import check_shared_engines
        from conveyor.telemetry.logs import configure_log

    missing = [f"CONVEYOR_{seam.upper()}" for seam in _SHARED if not getattr(settings, seam)]
    if missing:
        raise InvalidSetting(
            f"A single role needs shared engines. Set {', '.join(missing)}, or use `conveyor up`, which runs all roles "
            "in one process."
        )
    check_shared_engines(settings)
    configure_log(settings.log_level, form=settings.log_format)
    stop = Stop(lambda: complain("Stopping: requeuing work in flight."), settings.drain_seconds)
    run_async(_work(settings, role, stop))


def _announce(url: str, dashboard: str) -> None:
    from conveyor.cli.loop import freeze_loaded_objects

    freeze_loaded_objects()
    print(f"Serving at {url}")
    print(f"  open    {url}{dashboard}", flush=True)


async def _work(settings: Settings, role: str, stop: "Stop") -> None:
    from conveyor.api.scrape import serve_metrics
    from conveyor.api.server import serve
    from conveyor.cli.connection import local_key_file, read_line
    from conveyor.cli.dashboard_command import dashboard_link
    from conveyor.cli.loop import freeze_loaded_objects
    from conveyor.embedded import Embedded
    from conveyor.system import open_system

    stop.listen()
    async with open_system(settings) as system:
        if role == "api":
            link = await dashboard_link(system, settings.api_key or read_line(local_key_file(settings.data)))
            async with serve_metrics(settings):
                await serve(system, settings.host, settings.port, stop.event, lambda url: _announce(url, link))
            return
        embedded = Embedded(system)
        async with embedded.running({role}), serve_metrics(settings, embedded.failing_role):
            freeze_loaded_objects()
            print(f"Conveyor {role} is running.", flush=True)
            await stop.event.wait()

"""Each role alone, and `migrate`: for engines that several processes share."""

from typing import TYPE_CHECKING, Annotated

import typer

from conveyor.cli.shared_options import AllowPrivate, App, Data
from conveyor.errors import InvalidSetting
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.cli.loop import Stop

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. [127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one. [8080]")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Worker loops. [1]")]
Ingesters = Annotated[int | None, typer.Option("--ingesters", min=1, help="Ingest loops. [2]")]


def api(data: Data = None, host: Host = None, port: Port = None) -> None:
    """Serve the API alone; other processes do the work."""
    _run(Settings.load(data=data, host=host, port=port), "api")


def work(
    data: Data = None, workers: Workers = None, app: App = None, allow_private_targets: AllowPrivate = False
) -> None:
    """Run tasks alone: as many of these as there is work for."""
    allowed = allow_private_targets or None
    _run(Settings.load(data=data, workers=workers, app=app, allow_private_targets=allowed), "work")


def ingest(data: Data = None, ingesters: Ingesters = None) -> None:
    """Make tasks of staged lists alone."""
    _run(Settings.load(data=data, ingesters=ingesters), "ingest")


def sweep(data: Data = None, allow_private_targets: AllowPrivate = False) -> None:
    """Repair, clear away, make exports and deliver webhooks alone."""
    _run(Settings.load(data=data, allow_private_targets=allow_private_targets or None), "sweep")


def schedule(data: Data = None, allow_private_targets: AllowPrivate = False) -> None:
    """Fire schedules alone."""
    _run(Settings.load(data=data, allow_private_targets=allow_private_targets or None), "schedule")


def intake(data: Data = None) -> None:
    """Take in jobs that come by queue alone."""
    settings = Settings.load(data=data)
    if settings.intake is None:
        raise InvalidSetting("CONVEYOR_INTAKE names no queue that jobs could come in by.")
    _run(settings, "intake")


Once = Annotated[bool, typer.Option("--once", help="Make one pass, print what it did as JSON, and end.")]


def monitor(data: Data = None, once: Once = False) -> None:
    """Find stuck tasks, lost workers and runs past their deadline alone."""
    settings = Settings.load(data=data)
    if not once:
        _run(settings, "monitor")
        return
    from conveyor.cli.loop import run_async
    from conveyor.telemetry.logs import configure_log

    configure_log(settings.log_level, form=settings.log_format)
    print(run_async(_monitor_once(settings)))


async def _monitor_once(settings: Settings) -> str:
    import msgspec

    from conveyor.recover.monitor import monitor_of
    from conveyor.system import open_system

    async with open_system(settings) as system:
        return msgspec.json.encode(await monitor_of(system).run_once()).decode()


def migrate(data: Data = None) -> None:
    """Make the tables, queues and buckets that the settings name, or bring them up to date."""
    from conveyor.cli.loop import run_async
    from conveyor.clock import SystemClock
    from conveyor.system import migrate as migrate_engines
    from conveyor.telemetry.logs import configure_log

    settings = Settings.load(data=data)
    configure_log(settings.log_level, form=settings.log_format)
    for done in run_async(migrate_engines(settings, SystemClock())):
        print(done)
    if not any(getattr(settings, seam) for seam in _SHARED):
        print("Nothing to do: the embedded engines make what they need.")


_SHARED = ("records", "tasks", "queue", "coordinator")


def _run(settings: Settings, role: str) -> None:
    from conveyor.cli.guard import complain
    from conveyor.cli.loop import Stop, run_async
    from conveyor.telemetry.logs import configure_log

    missing = [f"CONVEYOR_{seam.upper()}" for seam in _SHARED if not getattr(settings, seam)]
    if missing:
        raise InvalidSetting(
            f"A role alone needs engines that processes share: set {', '.join(missing)}, or use `conveyor up`, "
            "which has all roles in one process."
        )
    configure_log(settings.log_level, form=settings.log_format)
    stop = Stop(lambda: complain("Stopping: giving back what is held."))
    run_async(_work(settings, role, stop))


def _announce(url: str, dashboard: str) -> None:
    from conveyor.cli.loop import keep_for_good

    keep_for_good()
    print(f"Serving at {url}")
    print(f"  open    {url}{dashboard}", flush=True)


async def _work(settings: Settings, role: str, stop: "Stop") -> None:
    from conveyor.api.scrape import scraped
    from conveyor.api.server import serve
    from conveyor.cli.connection import local_key_file, read_line
    from conveyor.cli.dashboard_command import sign_in_path
    from conveyor.cli.loop import keep_for_good
    from conveyor.embedded import Embedded
    from conveyor.system import open_system

    stop.listen()
    async with open_system(settings) as system:
        if role == "api":
            link = await sign_in_path(system, settings.api_key or read_line(local_key_file(settings.data)))
            async with scraped(settings):
                await serve(system, settings.host, settings.port, stop.event, lambda url: _announce(url, link))
            return
        async with Embedded(system).running({role}), scraped(settings):
            keep_for_good()
            print(f"Conveyor {role} is at work.", flush=True)
            await stop.event.wait()

"""The checks of `conveyor doctor`, each a function from settings to a verdict."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conveyor.cli import formatting as text
from conveyor.errors import ConveyorError, DataDirectoryInUse, ServerUnreachable, Unauthorized
from conveyor.settings import Settings

Verdict = Literal["ok", "warn", "fail"]

_PYTHON = (3, 11)
# The first with the fix of the race between a WAL checkpoint and a writer.
_SQLITE = (3, 51, 3)
_LITTLE_SPACE = 1 << 30
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"}
# Any moment before this one is a clock that was never set: 2025-01-01.
_EARLIEST = 1_735_689_600.0


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to do."""

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def all_checks(settings: Settings) -> Iterator[Check]:
    """Run them in order."""
    checks: list[Callable[[Settings], Check]] = [
        _python,
        _sqlite,
        _clock,
        _data,
        _space,
        _owner,
        _server,
        _key,
        _targets,
    ]
    for check in checks:
        yield check(settings)
    yield from _engines(settings)


def _python(_: Settings) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _PYTHON:
        return Check("python", "fail", version, "Conveyor needs Python 3.11 or newer.")
    return Check("python", "ok", version)


def _sqlite(_: Settings) -> Check:
    import apsw

    version = apsw.sqlitelibversion()
    if tuple(map(int, version.split("."))) < _SQLITE:
        return Check("sqlite", "fail", version, "It can corrupt a database under load: pip install -U apsw.")
    return Check("sqlite", "ok", version)


def _clock(_: Settings) -> Check:
    from conveyor.clock import SystemClock

    now = SystemClock().now()
    if now < _EARLIEST:
        return Check("clock", "fail", text.moment(now), "Set the machine's clock: leases and retention follow it.")
    return Check("clock", "ok", text.moment(now))


def _data(settings: Settings) -> Check:
    place = settings.data.absolute()
    if place.exists() and not place.is_dir():
        return Check("data", "fail", f"{place} is not a directory", "Choose another with --data.")
    nearest = _nearest(place)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Check("data", "fail", f"{nearest} is not writable", "Choose another with --data.")
    kind = _filesystem(nearest)
    if kind in _NETWORK_FILESYSTEMS:
        advice = "SQLite's locks are not safe on a network filesystem: choose a local disk with --data."
        return Check("data", "fail", f"{place} is on {kind}", advice)
    missing = "" if place.exists() else ", made at first use"
    return Check("data", "ok", f"{place}{missing}{f' ({kind})' if kind else ''}")


def _space(settings: Settings) -> Check:
    found = os.statvfs(_nearest(settings.data.absolute()))
    free = found.f_bavail * found.f_frsize
    if free < _LITTLE_SPACE:
        return Check("space", "warn", f"{text.size(free)} free", "Results are kept there: make room.")
    return Check("space", "ok", f"{text.size(free)} free")


def _owner(settings: Settings) -> Check:
    from conveyor.cli.connection import local_url_file, read_line

    if not settings.data.exists():
        return Check("owner", "ok", "nobody uses the data directory")
    try:
        _open(settings)
    except DataDirectoryInUse:
        url = read_line(local_url_file(settings.data))
        return Check("owner", "ok", f"in use by the server at {url}" if url else "in use by another process")
    except (ConveyorError, OSError) as error:
        return Check("owner", "fail", f"the data directory does not open: {error}", "Choose another with --data.")
    return Check("owner", "ok", "nobody uses the data directory; it opens")


def _open(settings: Settings) -> None:
    from conveyor.cli.loop import run_async
    from conveyor.system import open_system

    async def opened() -> None:
        async with open_system(settings):
            pass

    run_async(opened())


def _engines(settings: Settings) -> Iterator[Check]:
    """Every engine that a URL names: what it says of itself, once for each."""
    from conveyor.cli.loop import run_async
    from conveyor.clock import SystemClock
    from conveyor.system import SEAMS, engine_findings, step_functions_findings

    findings = []
    if any(getattr(settings, seam) for seam in SEAMS):
        findings += run_async(engine_findings(settings, SystemClock()))
    if settings.step_functions is not None:
        findings += run_async(step_functions_findings(settings.step_functions))
    for name, problem in findings:
        yield Check(name, "ok", "fine") if problem is None else Check(name, "fail", "not fine", problem)


def _server(settings: Settings) -> Check:
    from conveyor.cli.connection import server_url
    from conveyor.client import Client

    url = server_url(settings)
    try:
        with Client(url) as client:
            client.health()
    except ServerUnreachable:
        advice = "Only `conveyor run` works without one: start it with `conveyor up`, or set CONVEYOR_URL."
        return Check("server", "warn", f"none at {url}", advice)
    except ConveyorError as error:
        return Check("server", "fail", error.message, "Set CONVEYOR_URL to a Conveyor server.")
    return Check("server", "ok", url)


def _key(settings: Settings) -> Check:
    from conveyor.cli.connection import server_key, server_url
    from conveyor.client import Client

    url = server_url(settings)
    key = server_key(settings, url)
    source = "CONVEYOR_API_KEY" if settings.api_key else str(settings.data / "local.key")
    if key is None:
        advice = "Needed to use a server: `conveyor up` makes one, or set CONVEYOR_API_KEY."
        return Check("key", "warn", f"none in CONVEYOR_API_KEY and no {settings.data / 'local.key'}", advice)
    try:
        with Client(url, key) as client:
            next(client.jobs(), None)
    except ServerUnreachable:
        return Check("key", "warn", f"from {source}, not tried: no server", None)
    except Unauthorized as error:
        return Check("key", "fail", f"from {source}: {error.message}", "`conveyor keys create --tenant NAME`")
    except ConveyorError as error:
        return Check("key", "fail", f"from {source}: {error.message}", "Set CONVEYOR_URL to a Conveyor server.")
    return Check("key", "ok", f"from {source}, accepted")


def _targets(settings: Settings) -> Check:
    if settings.allow_private_targets:
        advice = "Unset CONVEYOR_ALLOW_PRIVATE_TARGETS unless everyone with a key may reach your network."
        return Check("targets", "warn", "private addresses are fetched too", advice)
    return Check("targets", "ok", "private, loopback and link-local addresses are refused")


def _nearest(place: Path) -> Path:
    """The directory itself, or the one that it would be made in."""
    while not place.exists():
        place = place.parent
    return place


def _filesystem(place: Path) -> str | None:
    """The type of the filesystem that holds a path; None where the system does not say."""
    best, kind = "", None
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, found, *_ = line.split(" ")
            if len(mount) >= len(best) and place.is_relative_to(mount.replace("\\040", " ")):
                best, kind = mount, found
    return kind

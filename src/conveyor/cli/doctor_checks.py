"""The checks of `conveyor doctor`: each is a function from settings to a Check."""

import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from conveyor.cli import formatting as text
from conveyor.disk import disk_problem
from conveyor.errors import ConveyorError, DataDirectoryInUse, InvalidSetting, ServerUnreachable, Unauthorized
from conveyor.settings import Settings

Verdict = Literal["ok", "warn", "fail"]

_PYTHON = (3, 11)
# The first version that fixes the race between a WAL checkpoint and a writer.
_SQLITE = (3, 51, 3)
_LITTLE_SPACE = 1 << 30
# Databases, logs, clients of the API: beside one for each task.
_OTHER_FILES = 256
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"}
# A clock before 2025-01-01 was never set.
_EARLIEST = 1_735_689_600.0


@dataclass(frozen=True)
class Check:
    """The outcome of one check, and what to do about it."""

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def all_checks(settings: Settings) -> Iterator[Check]:
    """Run all checks, in order."""
    checks: list[Callable[[Settings], Check]] = [
        _python,
        _sqlite,
        _data,
        _space,
        _open_files,
        _owner,
        # After the checks of the data directory: it opens it.
        _clock,
        _server,
        _key,
        _targets,
        _certificates,
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
        return Check(
            "sqlite", "fail", version, "This version can corrupt a database under load. Run: pip install -U apsw"
        )
    return Check("sqlite", "ok", version)


def _clock(settings: Settings) -> Check:
    from conveyor.clock import SystemClock

    now = SystemClock().now()
    advice = "Set the machine's clock: leases and retention depend on it."
    if now < _EARLIEST:
        return Check("clock", "fail", text.moment(now), advice)
    # If the data cannot be opened, another check says why.
    with suppress(ConveyorError, OSError):
        problem = _clock_problem(settings) if settings.data.exists() else None
        if problem is not None:
            return Check("clock", "warn", f"{text.moment(now)}, {problem}", advice)
    return Check("clock", "ok", text.moment(now))


def _clock_problem(settings: Settings) -> str | None:
    from conveyor.cli.loop import run_async
    from conveyor.coordination.trusted_time import clock_problem
    from conveyor.system import open_system

    async def compared() -> str | None:
        async with open_system(settings) as system:
            return await clock_problem(system.records.documents, system.clock)

    return run_async(compared())


def _data(settings: Settings) -> Check:
    from conveyor.system import exposed_data

    place = settings.data.absolute()
    if place.exists() and not place.is_dir():
        return Check("data", "fail", f"{place} is not a directory", "Choose a directory with --data.")
    nearest = _nearest(place)
    if not os.access(nearest, os.W_OK | os.X_OK):
        return Check("data", "fail", f"{nearest} is not writable", "Choose a writable directory with --data.")
    kind = _filesystem(nearest)
    if kind in _NETWORK_FILESYSTEMS:
        advice = "SQLite locks are not safe on a network filesystem. Choose a local disk with --data."
        return Check("data", "fail", f"{place} is on {kind}", advice)
    if exposed := exposed_data(settings):
        names = ", ".join(each.name for each in exposed[1:])
        found = f"other users can read {place}" + (f": {names}" if names else "")
        return Check("data", "warn", found, f"Run: chmod -R go= {place}")
    missing = "" if place.exists() else ", created on first use"
    return Check("data", "ok", f"{place}{missing}{f' ({kind})' if kind else ''}")


def _space(settings: Settings) -> Check:
    problem = disk_problem(_nearest(settings.data.absolute()))
    if problem is not None:
        return Check("space", "fail", "the disk cannot be written", problem.message)
    disk = os.statvfs(_nearest(settings.data.absolute()))
    free = disk.f_bavail * disk.f_frsize
    if free < _LITTLE_SPACE:
        return Check("space", "warn", f"{text.size(free)} free", "Free some disk space: results are stored there.")
    return Check("space", "ok", f"{text.size(free)} free")


def _open_files(settings: Settings) -> Check:
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("open files", "ok", "no limit")
    wanted = settings.worker_concurrency * settings.workers + _OTHER_FILES
    if limit < wanted:
        advice = f"Raise it to {wanted} (ulimit -Hn, LimitNOFILE= of systemd), or lower CONVEYOR_WORKER_CONCURRENCY."
        return Check("open files", "warn", f"at most {limit}", advice)
    return Check("open files", "ok", f"at most {limit}")


def _owner(settings: Settings) -> Check:
    from conveyor.cli.connection import local_url_file, read_line

    if not settings.data.exists():
        return Check("owner", "ok", "no process uses the data directory")
    try:
        _open(settings)
    except DataDirectoryInUse:
        url = read_line(local_url_file(settings.data))
        return Check("owner", "ok", f"in use by the server at {url}" if url else "in use by another process")
    except ConveyorError as error:
        return Check("owner", "fail", "cannot open the data directory", error.message)
    except OSError as error:
        advice = "Make the directory writable, or choose another with --data."
        return Check("owner", "fail", f"cannot open the data directory: {error}", advice)
    return Check("owner", "ok", "no process uses the data directory; it can be opened")


def _open(settings: Settings) -> None:
    from conveyor.cli.loop import run_async
    from conveyor.system import open_system

    async def opened() -> None:
        async with open_system(settings):
            pass

    run_async(opened())


def _engines(settings: Settings) -> Iterator[Check]:
    """Check every engine that a URL in the settings names."""
    from conveyor.cli.loop import run_async
    from conveyor.clock import SystemClock
    from conveyor.system import SEAMS, engine_findings, step_functions_findings

    findings = []
    if any(getattr(settings, seam) for seam in (*SEAMS, "other_tasks")):
        findings += run_async(engine_findings(settings, SystemClock()))
    if settings.step_functions is not None:
        findings += run_async(step_functions_findings(settings.step_functions))
    for name, problem in findings:
        yield Check(name, "ok", "ready") if problem is None else Check(name, "fail", "not ready", problem)


def _server(settings: Settings) -> Check:
    from conveyor.cli.connection import server_url
    from conveyor.client import Client

    try:
        url = server_url(settings)
        # Without a key: /healthz needs none, and who answers there is not known yet.
        with Client(url, "") as client:
            client.health()
    except ServerUnreachable:
        advice = "Start a server with `conveyor up`, or set CONVEYOR_URL. `conveyor run` needs no server."
        return Check("server", "warn", f"no server at {url}", advice)
    except ConveyorError as error:
        return Check("server", "fail", error.message, "Set CONVEYOR_URL to a Conveyor server.")
    return Check("server", "ok", url)


def _key(settings: Settings) -> Check:
    from conveyor.cli.connection import server_key, server_url
    from conveyor.client import Client

    try:
        url, key = server_url(settings), server_key(settings)
    except InvalidSetting as error:
        return Check("key", "fail", "key and address do not belong together", error.message)
    source = "CONVEYOR_API_KEY" if settings.api_key else str(settings.data / "local.key")
    if key is None and not settings.api_key and (settings.data / "local.key").exists():
        return Check("key", "fail", f"{source} is damaged", "Restart `conveyor up`, which replaces it.")
    if key is None:
        advice = "A server needs a key: start `conveyor up`, which creates one, or set CONVEYOR_API_KEY."
        return Check("key", "warn", f"no CONVEYOR_API_KEY and no {settings.data / 'local.key'}", advice)
    try:
        with Client(url, key) as client:
            next(client.jobs(), None)
    except ServerUnreachable:
        return Check("key", "warn", f"from {source}, not checked: no server", None)
    except Unauthorized as error:
        create, restart = (
            "Create a key: `conveyor keys create --tenant NAME`",
            "Restart `conveyor up`, which replaces it.",
        )
        return Check("key", "fail", f"from {source}: {error.message}", create if settings.api_key else restart)
    except ConveyorError as error:
        return Check("key", "fail", f"from {source}: {error.message}", "Set CONVEYOR_URL to a Conveyor server.")
    return Check("key", "ok", f"from {source}, accepted")


def _targets(settings: Settings) -> Check:
    advice = "Leave out --allow-private-targets unless everyone with a key may reach your network."
    allowed = _allowed_by_workers(settings)
    if allowed is not None:
        found = (
            "the server's workers allow private addresses" if allowed else "the server's workers refuse private ones"
        )
        return Check("targets", "warn" if allowed else "ok", found, advice if allowed else None)
    if settings.allow_private_targets:
        return Check("targets", "warn", "these settings allow private addresses", advice)
    return Check("targets", "ok", "these settings refuse private, loopback and link-local addresses")


def _certificates(settings: Settings) -> Check:
    from conveyor.egress.ca_bundle import count_certificates, read_ca_bundle

    try:
        bundle = read_ca_bundle(settings.ca_bundle)
    except InvalidSetting as error:
        return Check("certificates", "fail", error.message, "Set CONVEYOR_CA_BUNDLE to a file with certificates.")
    found = "those of the system are trusted"
    if bundle is not None:
        found = f"those of the system and {count_certificates(bundle)} of {settings.ca_bundle} are trusted"
    if settings.allow_insecure:
        advice = "Unset CONVEYOR_ALLOW_INSECURE unless everyone with a key may leave certificates unverified."
        return Check("certificates", "warn", f"{found}; jobs may leave certificates unverified", advice)
    return Check("certificates", "ok", found)


def _allowed_by_workers(settings: Settings) -> bool | None:
    """Whether a worker of the server makes requests to private addresses; None if no server or no worker tells."""
    from conveyor.cli.connection import connect

    try:
        with connect(settings) as client:
            workers = client.request("GET", "/v1/workers")["workers"]
    except ConveyorError:
        return None
    said = {worker.get("private_targets") for worker in workers}
    return True if True in said else False if said == {False} else None


def _nearest(place: Path) -> Path:
    """The directory itself, or its nearest existing parent."""
    while not place.exists():
        place = place.parent
    return place


def _filesystem(place: Path) -> str | None:
    """The type of the filesystem of a path; None where the system does not report it."""
    longest, kind = "", None
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, mounted_kind, *_ = line.split(" ")
            if len(mount) >= len(longest) and place.is_relative_to(mount.replace("\\040", " ")):
                longest, kind = mount, mounted_kind
    return kind

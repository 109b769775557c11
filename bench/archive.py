"""archive: small results out of the store into one zip, made offline, against bare loops that write the same bytes.

The bare loops have names and bytes in memory before their clock starts: one writes by zipfile, one by the writer that
exports use. Ours finds the tasks, makes the names, reads the bodies from their segments, where they are deflated,
checks each, inflates them for a stored archive, hashes the archive, and can be taken up by another process after any
piece. All end with an fsync.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from bench.child import ROOT, MeasurementFailed, Setup, run_async
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 200_000
KILLS = 3
HANDLER = "bench.page"

_PATIENCE = 300.0


def run(setup: Setup) -> list[Figure]:
    count, scratch = setup.count(COUNT), setup.scratch
    data, archive = str(scratch / "data"), str(scratch / "ours.zip")
    setup.bare("bench.archive:fill", count=count, data=data)
    figures: list[Figure] = []
    for compression in ("none", "deflate"):
        exports, limits, writers = [], [], []
        for _ in range(setup.repeat):
            given = {"count": count, "archive": archive}
            exports.append(setup.ours("bench.archive:ours", data=data, compression=compression, **given))
            limits.append(setup.bare("bench.archive:bare", **given))
            writers.append(setup.bare("bench.archive:bare_writer", **given))
        name = {"none": "export, stored", "deflate": "export, deflated"}[compression]
        by_zipfile, by_writer = "zipfile, bytes in memory", "our zip writer, bytes in memory"
        more = {"count": count, "mib": limits[-1]["mib"], **details(exports)}
        goal, own_goal = ("at least", 0.5), ("at least", 0.6)
        figures += [
            Figure("archive", name, "results/s", rates(exports), by_zipfile, rates(limits), goal, more),
            Figure("archive", name, "results/s", rates(exports), by_writer, rates(writers), own_goal),
            Figure("archive", f"CPU time, {compression}", "µs/result", cpu_each(exports), by_zipfile, cpu_each(limits)),
        ]
    killed = [setup.bare("bench.archive:killed", count=count, data=data) for _ in range(setup.repeat)]
    read = [float(each["rows"]) for each in killed]
    limit = "an export that nobody kills"
    # What a kill repeats is the same for a small job, and so more of it.
    whole = ("at most", 1.3) if count >= COUNT else None
    figures.append(
        Figure("archive", f"rows read, killed {KILLS} times", "rows", read, limit, [count] * len(read), whole)
    )
    return figures


async def fill(count: int, data: str, place: str) -> dict[str, Any]:
    """A job with results to export, which stay when the child and its `place` have gone."""
    from bench.belt import TENANT, belt, check_counts, ended
    from conveyor.accept.spec import decode_spec

    spec = {"kind": "python", "handler": HANDLER, "result_layout": "packed", "tasks": list(range(count))}
    async with belt(data, app="bench.app", max_inline_tasks=count) as embedded:
        accepted = await embedded.submit.submit(TENANT, decode_spec(msgspec.json.encode(spec)))
        await check_counts(embedded.system, await ended(embedded, accepted.subject), count)
    return {}


async def ours(count: int, data: str, archive: str, compression: str, place: str) -> dict[str, Any]:
    from conveyor.cli.loop import freeze_loaded_objects

    async with _export(data, compression) as (system, export_id, role):
        # As every command does that makes exports.
        freeze_loaded_objects()
        meter = Meter()
        await _ready(system, export_id, role)
        spent = meter.stop()
        await _copy(system, export_id, Path(archive))
    _check(Path(archive), count)
    return {"count": count, **spent}


def bare(count: int, archive: str, place: str) -> dict[str, Any]:
    from isal import isal_zlib

    entries, crcs = _entries(archive)
    copy = f"{place}/bare.zip"
    # The same deflate and CRC as ours, which are faster than its own.
    zipfile.zlib = isal_zlib  # type: ignore[attr-defined]
    zipfile.crc32 = isal_zlib.crc32  # type: ignore[attr-defined]
    meter = Meter()
    with open(copy, "wb") as file:  # noqa: PTH123  (what a bare script would do)
        with zipfile.ZipFile(file, "w", compresslevel=2) as written:
            now = time.localtime()[:6]
            for name, method, body in entries:
                written.writestr(zipfile.ZipInfo(name, now), body, method)
        file.flush()
        os.fsync(file.fileno())
    spent = meter.stop()
    return _same(copy, crcs, count, entries, spent)


def bare_writer(count: int, archive: str, place: str) -> dict[str, Any]:
    from conveyor.export.zip_writer import LEVEL, ZipWriter

    entries, crcs = _entries(archive)
    deflated = sum(method == zipfile.ZIP_DEFLATED for _, method, _ in entries) > 1
    copy = f"{place}/bare.zip"
    meter = Meter()
    with open(copy, "wb") as file:  # noqa: PTH123  (what a bare script would do)
        written = ZipWriter(modified=datetime.now(UTC), level=LEVEL if deflated else 0)
        for name, _, body in entries:
            file.write(written.add(name, body))
        file.write(written.drain())
        file.write(written.end())
        file.flush()
        os.fsync(file.fileno())
    spent = meter.stop()
    return _same(copy, crcs, count, entries, spent)


async def killed(count: int, data: str, place: str) -> dict[str, Any]:
    """An export whose process is killed on the way, three times; it must be whole all the same."""
    reads = Path(place) / "reads"
    async with _export(data, "none") as (_, export_id, _role):
        pass
    for kill in range(KILLS):
        _kill_at(data, export_id, reads, count * (kill + 1) // (KILLS + 1))
    if _start(data, export_id, reads).wait(_PATIENCE) != 0:
        raise MeasurementFailed("the last process did not finish the export")
    from bench.belt import store

    async with store(data) as system:
        await _copy(system, export_id, Path(place) / "out.zip")
    _check(Path(place) / "out.zip", count)
    if unzip := shutil.which("unzip"):
        tested = subprocess.run([unzip, "-tqq", f"{place}/out.zip"], check=False, capture_output=True)
        if tested.returncode != 0:
            raise MeasurementFailed(f"unzip -t says {tested.returncode}")
    return {"rows": _rows(reads)}


def make(data: str, export_id: str, reads: str) -> None:
    """What a process does that may be killed: it writes down how many rows it reads."""
    run_async(_make(data, export_id, reads))


async def _make(data: str, export_id: str, reads: str) -> None:
    from bench.belt import store

    descriptor = os.open(reads, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    async with store(data) as system:
        # The engine behind the router, if there is one.
        engine: Any = getattr(system.tasks, "configured", system.tasks)
        real: Any = engine.walk

        async def counted(*given: Any) -> Any:
            walked = await real(*given)
            os.write(descriptor, b"%d\n" % walked.read)
            return walked

        engine.walk = counted
        await _ready(system, export_id, _role(system))


def _start(data: str, export_id: str, reads: Path) -> "subprocess.Popen[bytes]":
    call = f"from bench.archive import make; make({data!r}, {export_id!r}, {str(reads)!r})"
    return subprocess.Popen([sys.executable, "-c", call], cwd=ROOT)


def _kill_at(data: str, export_id: str, reads: Path, rows: int) -> None:
    process = _start(data, export_id, reads)
    give_up = time.monotonic() + _PATIENCE
    while _rows(reads) < rows:
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            raise MeasurementFailed("the export ended before it was killed, or never came so far")
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def _rows(reads: Path) -> int:
    return sum(map(int, reads.read_text().split())) if reads.exists() else 0


@asynccontextmanager
async def _export(data: str, compression: str) -> AsyncIterator[tuple[Any, str, Any]]:
    """The store, an export that is asked for, and a role to make it."""
    from bench.belt import TENANT, store
    from conveyor.export.exports import Exports
    from conveyor.export.request import ExportSpec

    async with store(data) as system:
        job = (await system.records.jobs.jobs(TENANT, None, 1)).items[0]
        spec = msgspec.convert({"compression": compression}, ExportSpec)
        accepted = await Exports(system).create(job, spec)
        yield system, accepted.subject, _role(system)


def _role(system: Any) -> Any:
    from conveyor.export.exporter import Exporter
    from conveyor.settings import export_places

    piece = system.settings.export_piece_bytes
    places = export_places(system.settings)
    name = system.clock.new_id("exporter")
    return Exporter(system.records, system.tasks, system.blobs, system.coordinator, system.clock, piece, places, name)


async def _ready(system: Any, export_id: str, role: Any) -> None:
    from bench.belt import TENANT
    from conveyor.export.exports import Exports, ExportState

    while (export := (await Exports(system).find(TENANT, export_id)).export).state is not ExportState.READY:
        if export.state is ExportState.FAILED:
            raise MeasurementFailed(f"the export failed: {export.error}")
        if delay := await role.tick():
            await system.clock.sleep(delay)


async def _copy(system: Any, export_id: str, archive: Path) -> None:
    """The archive to a file of its own, and the export away."""
    from bench.belt import TENANT
    from conveyor.export.exports import Exports, part_range

    row, export = await Exports(system).find(TENANT, export_id)
    with archive.open("wb") as file:
        async for piece in part_range(system.blobs, export.parts[0], 0, export.parts[0].size):
            file.write(piece)
    await Exports(system).delete(TENANT, export_id)
    while await system.blobs.delete_prefix(f"exports/{TENANT}/{row.job_id}/{export_id}", 1000):
        pass


def _check(archive: Path, count: int) -> None:
    with zipfile.ZipFile(archive) as made:
        damaged = made.testzip()
        names = made.namelist()
        lines = made.read("manifest.jsonl").count(b"\n")
    if damaged is not None or len(names) != count + 1 or lines != count:
        raise MeasurementFailed(f"the archive has {len(names)} entries, {lines} lines, and a damaged {damaged}")


def _entries(archive: str) -> tuple[list[tuple[str, int, bytes]], dict[str, int]]:
    with zipfile.ZipFile(archive) as made:
        entries = [(entry.filename, entry.compress_type, made.read(entry)) for entry in made.infolist()]
        return entries, {entry.filename: entry.CRC for entry in made.infolist()}


def _same(
    copy: str, crcs: dict[str, int], count: int, entries: list[tuple[str, int, bytes]], spent: dict[str, Any]
) -> dict[str, Any]:
    with zipfile.ZipFile(copy) as written:
        if {entry.filename: entry.CRC for entry in written.infolist()} != crcs:
            raise MeasurementFailed("the two archives do not hold the same")
    return {"count": count, "mib": round(sum(len(body) for _, _, body in entries) / 2**20, 1), **spent}

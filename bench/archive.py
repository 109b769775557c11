"""archive: small results out of the store into one zip, against a bare loop that writes the same bytes by zipfile.

The bare loop has names and bytes in memory before its clock starts; ours finds the tasks, makes the names, reads the
bodies from their segments and checks each against its sha256. Both end with an fsync.
"""

import os
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec

from bench.child import MeasurementFailed, Setup
from bench.figures import Figure, cpu_each, details, rates
from bench.meter import Meter

COUNT = 20_000
HANDLER = "bench.page"


def run(setup: Setup) -> list[Figure]:
    count, scratch = setup.count(COUNT), setup.scratch
    data, archive = str(scratch / "data"), str(scratch / "ours.zip")
    setup.bare("bench.archive:fill", count=count, data=data)
    exports, limits = [], []
    for _ in range(setup.repeat):
        exports.append(setup.ours("bench.archive:ours", count=count, data=data, archive=archive))
        limits.append(setup.bare("bench.archive:bare", count=count, archive=archive))
    limit = "zipfile, bytes in memory"
    more = {"count": count, "mib": limits[-1]["mib"], **details(exports)}
    return [
        Figure("archive", "export", "results/s", rates(exports), limit, rates(limits), more=more),
        Figure("archive", "CPU time", "µs/result", cpu_each(exports), limit, cpu_each(limits)),
    ]


async def fill(count: int, data: str, place: str) -> dict[str, Any]:
    """A job with results to export, which stay when the child and its `place` have gone."""
    from bench.belt import TENANT, belt, check_counts, ended
    from conveyor.accept.spec import decode_spec

    spec = {"kind": "python", "handler": HANDLER, "result_layout": "packed", "tasks": list(range(count))}
    async with belt(data, app="bench.app", max_inline_tasks=count) as embedded:
        accepted = await embedded.submit.submit(TENANT, decode_spec(msgspec.json.encode(spec)))
        await check_counts(embedded.system, await ended(embedded, accepted.subject), count)
    return {}


async def ours(count: int, data: str, archive: str, place: str) -> dict[str, Any]:
    from bench.belt import TENANT, store
    from conveyor.serve.export import export_to_file

    async with store(data) as system:
        job = (await system.records.jobs(TENANT, None, 1)).items[0]
        meter = Meter()
        await export_to_file(system.tasks, system.blobs, job, Path(archive))
        spent = meter.stop()
    with zipfile.ZipFile(archive) as made:
        damaged = made.testzip()
        names = made.namelist()
        lines = made.read("manifest.jsonl").count(b"\n")
    if damaged is not None or len(names) != count + 1 or lines != count:
        raise MeasurementFailed(f"the archive has {len(names)} entries, {lines} lines, and a damaged {damaged}")
    return {"count": count, **spent}


def bare(count: int, archive: str, place: str) -> dict[str, Any]:
    with zipfile.ZipFile(archive) as made:
        entries = [(entry.filename, entry.compress_type, made.read(entry)) for entry in made.infolist()]
        crcs = {entry.filename: entry.CRC for entry in made.infolist()}
    copy = f"{place}/bare.zip"
    meter = Meter()
    with open(copy, "wb") as file:  # noqa: PTH123  (what a bare script would do)
        with zipfile.ZipFile(file, "w", compresslevel=1) as written:
            now = time.localtime()[:6]
            for name, method, body in entries:
                written.writestr(zipfile.ZipInfo(name, now), body, method)
        file.flush()
        os.fsync(file.fileno())
    spent = meter.stop()
    with zipfile.ZipFile(copy) as written:
        if {entry.filename: entry.CRC for entry in written.infolist()} != crcs:
            raise MeasurementFailed("the two archives do not hold the same")
    return {"count": count, "mib": round(sum(len(body) for _, _, body in entries) / 2**20, 1), **spent}

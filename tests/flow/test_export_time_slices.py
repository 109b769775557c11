"""Exports are made in time slices. Each makes progress, in every format, however short it is, and in any process."""

import dataclasses
import io
import random
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.engines.local_blobs import LocalBlobs
from conveyor.export import exporter, sorting, writer
from conveyor.export.exports import ExportRecord, ExportState
from conveyor.model import BodyRef, InputJson, Job, OutboxEvent, TaskSeed
from conveyor.read import walk
from conveyor.settings import Settings
from conveyor.system import System, open_system
from tests.flow.test_exports import UNPACK, contents
from tests.support.clocks import ManualClock
from tests.support.export_jobs import ACME, Unordered, asked, end_of, found, made, new_job, parts_of, stored_job, url_of
from tests.support.export_jobs import exporter as new_exporter
from tests.support.places import quick_place

TASKS = 600
# Time slices of a small export, if each does as little as possible.
MAX_SLICES = 150
PARQUET: dict[str, Any] = {"format": "parquet", "bodies": "binary"}
SPECS: list[dict[str, Any]] = [
    {"compression": "none"},
    {"compression": "none", "part_bytes": 65_536},
    {"format": "jsonl", "compression": "none"},
    {"format": "jsonl", "compression": "gzip", "bodies": "base64"},
    {"format": "jsonl", "compression": "zstd", "bodies": "text"},
    {"format": "csv"},
    {"format": "csv", "compression": "gzip", "part_bytes": 65_536},
    PARQUET,
    {"format": "parquet", "compression": "gzip"},
    {**PARQUET, "part_bytes": 65_536},
]


class SlowClock(ManualClock):
    """A second passes whenever somebody looks: a machine on which nothing is done in time."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return super().monotonic() + self.looks


@asynccontextmanager
async def slow_system(by_index: bool = True) -> AsyncIterator[System]:
    """Small steps make a small job a large one."""
    with quick_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "ROWS", 100)
        patch.setattr(sorting, "PAGE", 100)
        patch.setattr(sorting, "_SPOOL_BYTES", 50_000)
        patch.setattr(sorting, "FAN_IN", 3)
        chosen = Settings.load({}, data=place / "data", export_piece_bytes=64 * 1024)
        async with open_system(chosen, SlowClock()) as system:
            if by_index:
                yield system
            else:
                yield dataclasses.replace(system, tasks=Unordered(system.tasks))  # type: ignore[arg-type]


def progress_of(export: ExportRecord) -> tuple[Any, ...]:
    making = export.making
    scan = export.scan, export.columns
    return len(export.parts), making.sorting, scan, making.position, making.size, making.step


async def in_time_slices(system: System, export_id: str, seconds: float, one_process: bool) -> int:
    """Make an export in time slices of this length, check that each makes progress, and count them."""
    role, slices = new_exporter(system), 0
    before = progress_of(await found(system, export_id))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "_SLICE_SECONDS", seconds)
        while (await found(system, export_id)).state in {ExportState.QUEUED, ExportState.RUNNING}:
            slices += 1
            await (role if one_process else new_exporter(system, f"exporter {slices}")).tick()
            now = progress_of(await found(system, export_id))
            assert now != before, f"time slice {slices} made no progress: {now}"
            assert slices <= MAX_SLICES
            before = now
    return slices


async def every_time_slice_makes_progress(
    spec: dict[str, Any] = PARQUET, seconds: float = 0.0, by_index: bool = True, one_process: bool = False
) -> None:
    async with slow_system(by_index) as system:
        job = await stored_job(system, TASKS, per_segment=200)
        export_id = await asked(system, job, **spec)
        slices = await in_time_slices(system, export_id, seconds, one_process)
        assert slices > 1 or seconds > 10
        parts = await parts_of(system, export_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exporter, "_SLICE_SECONDS", 1e9)
            patch.setattr(writer, "_CHECKPOINT_SECONDS", 1e9)
            _, expected = await made(system, job, **spec)
        assert results_in(spec, parts) == results_in(spec, expected)


def results_in(spec: dict[str, Any], parts: list[bytes]) -> Any:
    """Where a compressed part ends depends on where it was put down; what is in all of them does not."""
    if spec.get("format") != "csv":
        return contents(spec, parts)
    return [row for part in parts for row in UNPACK[spec.get("compression", "none")](part).splitlines()[1:]]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.values())))
async def test_every_time_slice_makes_progress_in_every_format(spec: dict[str, Any]) -> None:
    await every_time_slice_makes_progress(spec)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SPECS), st.sampled_from([0.0, 1.0, 3.0, 8.0, 30.0, 100.0]), st.booleans(), st.booleans())
async def test_every_time_slice_makes_progress_however_long_it_is(
    spec: dict[str, Any], seconds: float, by_index: bool, one_process: bool
) -> None:
    await every_time_slice_makes_progress(spec, seconds, by_index, one_process)


async def test_groups_of_many_time_slices_make_one_parquet_file() -> None:
    """It is a file like any other: its groups stand one behind another, and none is empty."""
    import pyarrow.parquet as pq

    async with slow_system() as system:
        job = await stored_job(system, TASKS, per_segment=200)
        export_id = await asked(system, job, **PARQUET)
        await in_time_slices(system, export_id, 0.0, one_process=False)
        (data,) = await parts_of(system, export_id)
        file = pq.ParquetFile(io.BytesIO(data))
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        assert len(groups) > 1
        assert sum(group.num_rows for group in groups) == file.metadata.num_rows == TASKS
        places = [group.column(0).dictionary_page_offset or group.column(0).data_page_offset for group in groups]
        assert places == sorted(set(places))
        # Any group alone, as engines read them beside each other.
        last = file.read_row_group(len(groups) - 1).to_pylist()
        assert [row["index"] for row in last] == list(range(TASKS - len(last), TASKS))


class SlowBlobs(LocalBlobs):
    """A store that takes a second for each piece."""

    clock: ManualClock

    async def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        async for piece in super().stream(key, offset):
            self.clock.advance(1.0)
            yield piece


async def large_body(system: System, pieces: int) -> tuple[Job, bytes]:
    """A job of one task with one large body."""
    job, body = new_job(system, 1), random.Random(1).randbytes(1 << 18) * pieces
    await system.records.jobs.create_job(
        job, OutboxEvent("evt_1", ACME, job.job_id, job.run.run_id, "job.accepted", 1.0, {}), None
    )
    await system.tasks.put(job.key, [TaskSeed(0, InputJson(f'"{url_of(0)}"'))])
    key = f"results/acme/{job.job_id}/0"
    await system.blobs.put(key, body)
    await system.tasks.finish(job.key, [end_of(0, BodyRef(key, len(body), sha256(body).hexdigest()), 2.0)])
    return job, body


async def resuming_takes_no_time_slice() -> None:
    """A body that takes longer to read than a time slice: reading up to the checkpoint does not count."""
    with quick_place() as place:
        clock = ManualClock()
        chosen = Settings.load({}, data=place / "data", export_piece_bytes=64 * 1024)
        async with open_system(chosen, clock) as opened:
            blobs = SlowBlobs(place / "data" / "blobs")
            blobs.clock = clock
            system = dataclasses.replace(opened, blobs=blobs)
            job, body = await large_body(system, pieces=120)
            export_id = await asked(system, job, compression="none")
            slices = 0
            while (await found(system, export_id)).state is not ExportState.READY:
                slices += 1
                assert slices < 10, "slices of 20 pieces each are enough for 120"
                await new_exporter(system, f"exporter {slices}").tick()
            (data,) = await parts_of(system, export_id)
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                assert archive.read(archive.namelist()[0]) == body
            assert slices > 4


async def test_resuming_takes_no_time_slice() -> None:
    await resuming_takes_no_time_slice()

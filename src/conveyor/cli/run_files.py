"""The files of a local run: its archive, and its invalid lines beside it."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conveyor.cli.bar_view import View, view_job
from conveyor.cli.snapshot import Snapshot
from conveyor.model import Job

if TYPE_CHECKING:
    from conveyor.export.growing import GrowingArchive
    from conveyor.export.growing_directory import GrowingDirectory
    from conveyor.export.request import ExportSpec
    from conveyor.system import System

    GrowingOutput = GrowingArchive | GrowingDirectory

Show = Callable[[View], None]


def growing_output(
    system: "System", job: Job, out: Path, spec: "ExportSpec | None", is_directory: bool
) -> AbstractAsyncContextManager["GrowingOutput | None"]:
    """The output that is begun while the job runs: files in a directory, or a zip with bodies; a table is written when
    the job has finished."""
    from conveyor.client.export_folder import remove_listed
    from conveyor.export.growing import growing_archive
    from conveyor.export.growing_directory import growing_directory

    names = None if spec is None else spec.names
    if is_directory:
        # Of an earlier run that --overwrite replaces, or of a list that could not be read to its end.
        remove_listed(out)
        with_bodies = spec is None or spec.bodies != "none"
        return growing_directory(system.tasks, system.blobs, system.clock, job, out, names, with_bodies)
    if spec is None or (spec.format == "zip" and spec.bodies in (None, "file")):
        return growing_archive(system.tasks, system.blobs, system.clock, job, out, names)
    return nullcontext()


async def write_output(
    system: "System",
    job: Job,
    out: Path,
    spec: "ExportSpec | None",
    final: dict[str, Any],
    show: Show,
    archive: "GrowingOutput | None",
) -> int:
    """Write the file, or finish the archive that grew while the job ran. Returns its size."""
    from conveyor.cli.output_file import form_of
    from conveyor.export.direct import ExportProgress, export_to_file

    def report(now: ExportProgress) -> None:
        share = min(now.tasks / max(job.run.total, 1), 1.0)
        show(view_job(replace(Snapshot.of(final), note=f"writing the results, {share:.0%}")))

    if archive is not None and await archive.is_sound():
        size = await archive.finish(job, report)
    else:
        form = None if spec is None else form_of(spec, job)
        names = None if spec is None else spec.names
        size = await export_to_file(system.tasks, system.blobs, job, out, form=form, report=report, names=names)
    show(view_job(Snapshot.of(final)))
    return size


async def write_invalid(system: "System", job: Job, out: Path) -> Path:
    """Write the invalid lines to a durable file beside the archive: the data directory, which has them too, is
    removed."""
    from conveyor.disk import sync_directory
    from conveyor.export.direct import seal
    from conveyor.read.invalid_lines import invalid_lines

    path = out.with_name(out.name + ".invalid.jsonl")
    with path.open("wb") as file:
        async for lines in invalid_lines(system.blobs, job):
            file.write(lines)
        seal(file)
    sync_directory(path.parent)
    return path

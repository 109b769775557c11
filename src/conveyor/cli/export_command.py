"""`conveyor export`: have the server export a job's results, and download the files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.shared_options import RUN_HELP, AsJson, Bodies, Data, JobArgument, Names, Overwrite, Server
from conveyor.errors import BadInput
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client, Export

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SELECT = "Tasks to export"


def export(
    job: JobArgument,
    out: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="File to write. Its suffix sets the format: .zip, .jsonl, .csv or .parquet; .jsonl and .csv may be "
            "followed by .gz or .zst. DIR/ is a directory that gets each body as a file.",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="URL",
            help="Write into your own bucket instead, with your own credentials: s3://BUCKET/PREFIX/, gs:// or az://, "
            "or file:///DIR/. By default .jsonl.gz in files of 128 MiB; --format and --part-size choose others.",
        ),
    ] = None,
    by_server: Annotated[
        bool,
        typer.Option(
            "--by-server",
            help="With --to: the server writes the files, with its own credentials, below a place that its operator "
            "lists in CONVEYOR_EXPORT_BUCKETS.",
        ),
    ] = False,
    kind: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="zip, jsonl, csv or parquet. [from the file name]")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression", metavar="HOW", help="none, deflate (zip only), gzip or zstd. [from the file name]"
        ),
    ] = None,
    bodies: Bodies = None,
    names: Names = None,
    part_size: Annotated[
        str | None,
        typer.Option(
            "--part-size", metavar="SIZE", help="Split the export into files of at most this size, such as 500M or 2G."
        ),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            rich_help_panel=_SELECT,
            help="Only tasks in this state: pending, succeeded, failed or cancelled.",
        ),
    ] = None,
    error_code: Annotated[
        str | None,
        typer.Option(
            "--error-code",
            "--error",
            metavar="CODE",
            rich_help_panel=_SELECT,
            help="Only tasks that failed with this error code.",
        ),
    ] = None,
    http_status: Annotated[
        int | None, typer.Option("--http", rich_help_panel=_SELECT, help="Only tasks with this HTTP status.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", rich_help_panel=_SELECT, help="Only tasks with this tag.")] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", rich_help_panel=_SELECT, help=RUN_HELP),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed",
            rich_help_panel=_SELECT,
            help="Only tasks of the latest run that succeeded and are not unchanged.",
        ),
    ] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Export the results so far while the job is still running.")
    ] = False,
    export_id: Annotated[
        str | None,
        typer.Option("--id", metavar="EXPORT", help="Download this existing export instead of starting a new one."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Export a job's results to a file: every task, with its latest outcome over all runs.

    A zip or a directory has one file per body and a manifest.jsonl; the other formats are tables with one row per task.
    """
    from conveyor.cli.connection import connect
    from conveyor.cli.export_copies import export_to_bucket, export_to_directory
    from conveyor.cli.run_directory import check_out
    from conveyor.client.export_folder import is_folder

    if (out is None) == (to is None):
        raise BadInput("Pass either -o FILE or --to URL.")
    if by_server and to is None:
        raise BadInput("--by-server needs --to URL.")
    path = None if out is None or is_folder(out) else Path(out)
    if path is not None:
        # An export that is named is downloaded again, or to its end.
        check_out(path, overwrite or export_id is not None)
    options: dict[str, Any] = {
        "format": kind,
        "compression": compression,
        "bodies": bodies,
        "names": names,
        "part_bytes": None if part_size is None else _bytes(part_size),
        "partial": partial,
        "status": status,
        "error_code": error_code,
        "http_status": http_status,
        "tag": tag,
        "run": run,
        "changed": changed or None,
    }
    with connect(Settings.load(url=url, data=data)) as client:
        if path is None:
            if to is not None:
                export_to_bucket(client, job, to, {**options, "by_server": by_server}, overwrite, export_id, as_json)
            else:
                export_to_directory(client, job, out or "", options, overwrite, export_id, as_json)
            return
        handle = _start(client, job, path, options) if export_id is None else client.export(export_id)
        _download(handle, job, path)
    _print_files(handle.data, job, path, as_json)


def _start(client: "Client", job: str, out: Path, options: dict[str, Any]) -> "Export":
    from conveyor.client.export_files import FORMATS, named_form

    spec = {**named_form(out), **{name: value for name, value in options.items() if value is not None}}
    if "format" not in spec:
        raise BadInput(f"Unknown format of {out.name}. End the name with {', '.join(FORMATS)} or /, or pass --format.")
    return client.job(job).start_export(**spec)


def _download(export: "Export", job: str, out: Path) -> None:
    """Wait until the export is ready, then download its files."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.bar_view import view_bytes, view_export
    from conveyor.cli.guard import complain

    try:
        with progress_bar(out.name) as show:
            export.wait(lambda now: show(view_export(now)))
            export.download(out, lambda size, total: show(view_bytes("downloading", size, total)))
    except KeyboardInterrupt:
        complain(
            f"Stopped waiting; the export continues. `conveyor export {job} -o {out} --id {export.id}` downloads it."
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_files(export: dict[str, Any], job: str, out: Path, as_json: bool) -> None:
    from conveyor.cli import formatting as text
    from conveyor.cli.guard import complain
    from conveyor.cli.output import print_json
    from conveyor.client.export_files import part_paths

    if export.get("warning"):
        complain(export["warning"].replace(" JOB ", f" {job} "))
    files = part_paths(out, len(export["parts"]))
    size = sum(part["size"] for part in export["parts"])
    if as_json:
        print_json(
            {
                "job": job,
                "export": export["id"],
                "archive": str(out) if len(files) == 1 else None,
                "archive_bytes": size,
                "files": [str(path) for path in files],
                "counts": export["counts"],
            }
        )
        return
    for path, part in zip(files, export["parts"], strict=True):
        print(f"{path} ({text.size(part['size'])})")


def _bytes(text: str) -> int:
    number, unit = text.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        return int(float(number) * _UNITS[unit])
    except (ValueError, OverflowError):
        raise BadInput(f"--part-size: invalid size {text!r}. Use a number with a unit, such as 500M or 2G.") from None

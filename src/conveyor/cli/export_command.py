"""`conveyor export`: a job's results as files of a chosen form, made by the server and downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conveyor.cli import EXIT_INTERRUPTED
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Server
from conveyor.errors import BadInput
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.client import Client, Export

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SELECT = "Which tasks"


def export(
    job: JobArgument,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="The file to write. Its name says the form: .zip, .jsonl, .csv, .parquet; .jsonl and .csv also .gz "
            "and .zst.",
        ),
    ],
    kind: Annotated[
        str | None, typer.Option("--format", metavar="FORMAT", help="zip, jsonl, csv or parquet. [by the name]")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option("--compression", metavar="HOW", help="none, deflate (zip), gzip or zstd. [by the name]"),
    ] = None,
    bodies: Annotated[
        str | None,
        typer.Option(
            "--bodies",
            metavar="FORM",
            help="zip: file or none; jsonl: none, text or base64; parquet: none or binary. [file in a zip, else none]",
        ),
    ] = None,
    part_size: Annotated[
        str | None,
        typer.Option("--part-size", metavar="SIZE", help="Split into files of at most so much, as 500M or 2G."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", rich_help_panel=_SELECT, help="pending, succeeded, failed or cancelled."),
    ] = None,
    error_code: Annotated[
        str | None,
        typer.Option("--error", metavar="CODE", rich_help_panel=_SELECT, help="Those that failed so."),
    ] = None,
    http_status: Annotated[
        int | None, typer.Option("--http", rich_help_panel=_SELECT, help="Those with this HTTP status.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", rich_help_panel=_SELECT, help="Those with this tag.")] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run", rich_help_panel=_SELECT, help="Of this run, or latest-per-task: each as it came out last. [latest]"
        ),
    ] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Take what is there while the job goes on.")] = False,
    export_id: Annotated[
        str | None, typer.Option("--id", metavar="EXPORT", help="Take up an export that was begun before.")
    ] = None,
    as_json: AsJson = False,
    url: Server = None,
    data: Data = None,
) -> None:
    """Write a job's results to a file: a zip with a file per body and manifest.jsonl, or jsonl, csv or Parquet."""
    from conveyor.cli.connection import connect
    from conveyor.cli.run_directory import check_out

    check_out(out)
    options: dict[str, Any] = {
        "format": kind,
        "compression": compression,
        "bodies": bodies,
        "part_bytes": None if part_size is None else _bytes(part_size),
        "partial": partial,
        "status": status,
        "error_code": error_code,
        "http_status": http_status,
        "tag": tag,
        "run": run,
    }
    with connect(Settings.load(url=url, data=data)) as client:
        begun = _begun(client, job, out, options) if export_id is None else client.export(export_id)
        _carry_out(begun, job, out)
    _say(begun.data, job, out, as_json)


def _begun(client: "Client", job: str, out: Path, options: dict[str, Any]) -> "Export":
    from conveyor.client.export_files import FORMATS, named_form

    named = named_form(out)
    given = {**named, **{name: value for name, value in options.items() if value is not None}}
    if "format" not in given:
        raise BadInput(f"What is {out.name} to be? Give it an ending out of {', '.join(FORMATS)}, or --format.")
    return client.job(job).start_export(**given)


def _carry_out(export: "Export", job: str, out: Path) -> None:
    """Wait for it, and have all of it on this disk."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.bar_view import of_bytes
    from conveyor.cli.guard import complain

    try:
        with progress_bar(out.name) as show:
            export.wait(lambda now: show(_view(now)))
            export.download(out, lambda size, total: show(of_bytes("downloading", size, total)))
    except KeyboardInterrupt:
        complain(f"Stopped; the export goes on. `conveyor export {job} -o {out} --id {export.id}` takes it up again.")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _view(export: dict[str, Any]) -> Any:
    from conveyor.cli import formatting as text
    from conveyor.cli.bar_view import View

    progress = export["progress"]
    done = f"{text.count(progress['tasks'])} of {text.count(progress['total'])} tasks, {text.size(progress['bytes'])}"
    return View("exporting", progress["tasks"], progress["total"] or None, done)


def _say(export: dict[str, Any], job: str, out: Path, as_json: bool) -> None:
    from conveyor.cli import formatting as text
    from conveyor.cli.output import print_json
    from conveyor.client.export_files import part_paths

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
        raise BadInput(f"--part-size: {text!r} is no size; write 500M or 2G.") from None

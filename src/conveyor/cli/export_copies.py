"""`conveyor export` to where several files go: the caller's own bucket (--to), or a directory (-o DIR/). The server
makes the export, and the command copies its files as they are made."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from conveyor.cli import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from conveyor.client import Client
    from conveyor.client.export_files import CopyProgress


def export_to_bucket(
    client: "Client",
    job: str,
    to: str,
    options: dict[str, Any],
    overwrite: bool,
    export_id: str | None,
    as_json: bool,
) -> None:
    """Write the files into the bucket, and print their URLs."""
    from conveyor.cli import formatting as text
    from conveyor.cli.output import print_json

    rest = (
        f"Stopped waiting; the server continues to write below {to}."
        if options["by_server"]
        else _rest(job, f"--to {to}")
    )
    with _copying(to, rest, "writing") as progress:
        done = client.job(job).export_to(to, overwrite, progress, export_id=export_id, **options)
    _warn(done.data, job)
    if as_json:
        size = sum(part["size"] for part in done.data["parts"])
        counts = done.data["counts"]
        print_json({"job": job, "export": done.data["id"], "bytes": size, "files": done.urls, "counts": counts})
        return
    for url, part in zip(done.urls, done.data["parts"], strict=True):
        print(f"{url} ({text.size(part['size'])})")
    print(done.manifest)


def export_to_directory(
    client: "Client",
    job: str,
    to: str,
    options: dict[str, Any],
    overwrite: bool,
    export_id: str | None,
    as_json: bool,
) -> None:
    """Write each body as a file into the directory, and print where the manifest is."""
    from conveyor.cli import formatting as text
    from conveyor.cli.output import print_json

    with _copying(to, _rest(job, f"-o {to}"), "downloading") as progress:
        export = client.job(job).export_files(to, overwrite, progress, export_id=export_id, **options)
    _warn(export.data, job)
    counts = export.data["counts"]
    if as_json:
        print_json({"job": job, "export": export.id, "directory": to, "counts": counts})
        return
    print(f"{Path(to)}/ ({text.count(counts['bodies'])} files, {text.size(counts['body_bytes'])})")


def _rest(job: str, flag: str) -> str:
    return f"Stopped; the export continues on the server. `conveyor export {job} {flag}` copies the rest."


@contextmanager
def _copying(to: str, stopped: str, verb: str) -> Iterator["CopyProgress"]:
    """Show the progress of the export and of the copy. `stopped` is said after a Ctrl-C."""
    from conveyor.cli.bar import progress_bar
    from conveyor.cli.bar_view import view_bytes, view_export
    from conveyor.cli.guard import complain
    from conveyor.client.export_files import CopyProgress

    try:
        with progress_bar(to) as show:
            yield CopyProgress(
                lambda now: show(view_export(now)), lambda size, total: show(view_bytes(verb, size, total))
            )
    except KeyboardInterrupt:
        complain(stopped)
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _warn(export: dict[str, Any], job: str) -> None:
    from conveyor.cli.guard import complain

    if export.get("warning"):
        complain(export["warning"].replace(" JOB ", f" {job} "))

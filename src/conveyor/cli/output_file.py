"""What the name of an output file, and the flags beside it, say about its form."""

from pathlib import Path
from typing import Any

import msgspec

from conveyor.client.export_files import FORMATS, named_form
from conveyor.errors import BadInput
from conveyor.export.part_forms import PartForm
from conveyor.export.request import (
    ExportFormat,
    ExportSpec,
    checked_bodies,
    checked_compression,
    checked_template,
    load_parquet,
)
from conveyor.model import Job


def output_spec(
    out: Path, bodies: str | None = None, names: str | None = None, is_directory: bool = False
) -> ExportSpec:
    """The form of a file by its name, or of the files in a directory, validated before anything runs. Raises
    BadInput."""
    named: dict[str, Any] = {"format": "zip"} if is_directory else named_form(out)
    if "format" not in named:
        raise BadInput(
            f"Unknown format of {out.name}. End the name with {', '.join(FORMATS)}, or with / for a directory of files."
        )
    try:
        spec = msgspec.convert({**named, "bodies": bodies, "names": names}, ExportSpec)
    except msgspec.ValidationError as error:
        raise BadInput(f"--bodies: {error}") from None
    checked_compression(spec)
    checked_bodies(spec)
    checked_template(spec)
    if spec.format is ExportFormat.PARQUET:
        load_parquet()
    return spec


def form_of(spec: ExportSpec, job: Job) -> PartForm:
    """The form of the one file that a run writes."""
    return PartForm(spec.format, checked_compression(spec), checked_bodies(spec), job.run.created_at, job.kind)

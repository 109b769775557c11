"""Responses about exports."""

from conveyor.api.schemas.shape import Shape
from conveyor.model import JobId, RunId, TaskError


class ExportProgressShape(Shape, frozen=True):
    """Tasks read so far, tasks in total, and bytes written."""

    tasks: int
    total: int
    bytes: int


class ExportCountsShape(Shape, frozen=True):
    """Contents of the files."""

    tasks: int
    pending: int
    succeeded: int
    failed: int
    cancelled: int
    bodies: int
    body_bytes: int
    damaged: int


class ExportPartShape(Shape, frozen=True):
    """A complete file of an export."""

    number: int
    name: str
    size: int
    sha256: str
    tasks: int
    url: str
    # Where the server wrote it.
    to: str | None


class ExportSelectShape(Shape, frozen=True):
    """The tasks that an export contains."""

    status: str | None
    error_code: str | None
    http_status: int | None
    tag: str | None
    run: str
    # Without unchanged tasks.
    changed: bool


class ExportShape(Shape, frozen=True):
    """An export: queued, running, ready or failed."""

    id: str
    job_id: JobId
    state: str
    error: TaskError | None
    warning: str | None
    format: str
    compression: str
    bodies: str
    select: ExportSelectShape
    part_bytes: int | None
    names: str | None
    # The place that the server writes it to.
    to: str | None
    run_ids: list[RunId]
    created_at: str
    started_at: str | None
    finished_at: str | None
    expires_at: str
    progress: ExportProgressShape
    counts: ExportCountsShape
    parts: list[ExportPartShape]


class ExportFileShape(Shape, frozen=True):
    """A file in the manifest."""

    name: str
    size: int
    sha256: str
    tasks: int


class ExportManifestShape(Shape, frozen=True):
    """The files of an export, with counts and checksums."""

    export_id: str
    job_id: JobId
    run_ids: list[RunId]
    format: str
    compression: str
    bodies: str
    select: ExportSelectShape
    created_at: str
    counts: ExportCountsShape
    parts: list[ExportFileShape]


class ExportsPage(Shape, frozen=True):
    """Exports, oldest first."""

    items: list[ExportShape]
    next_cursor: str | None

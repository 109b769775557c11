"""Export and AsyncExport: an export of a job, and how to wait for it and download it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from conveyor.client import export_files as exports
from conveyor.client import wording as text
from conveyor.client.client_session import ClientSession
from conveyor.client.export_files import CopyProgress
from conveyor.client.io import drive
from conveyor.client.progress_display import TextDisplay, display_bytes, display_progress
from conveyor.client.transport import Json
from conveyor.client.upload_file import BytesProgress


class ExportView:
    """The last known status of an export. `data` is the full JSON of the API."""

    def __init__(self, session: ClientSession, data: Json) -> None:
        self._session = session
        self.data = data

    @property
    def id(self) -> str:
        return str(self.data["id"])

    @property
    def state(self) -> str:
        """queued, running, ready or failed."""
        return str(self.data["state"])

    def summary(self) -> str:
        """The status as one line."""
        return _summary(self.data)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.removesuffix('Handle')} {self.id}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return TextDisplay(f"{self.id}: {self.summary()}")._repr_html_()

    def _update(self, data: Json) -> Self:
        self.data = data
        return self

    def _set(self, data: Json) -> None:
        self.data = data

    @contextmanager
    def _on_status(self, progress: bool | Callable[[Json], None]) -> Iterator[Callable[[Json], None]]:
        if not isinstance(progress, bool):
            yield progress
        elif not progress:
            yield self._set
        else:
            with display_progress(str(self.data["job_id"])) as show:
                yield lambda data: show(self._update(data))


class ExportHandle(ExportView):
    """An export of a job."""

    def refresh(self) -> Self:
        """Fetch the current status."""
        return self._update(drive(self._session.export(self.id)))

    def wait(self, progress: bool | Callable[[Json], None] = False) -> Self:
        """Wait until the export is ready. Raises ExportFailed. `progress`: True shows it; a function gets its JSON."""
        with self._on_status(progress) as on_status:
            return self._update(drive(exports.wait_for_export(self._session, self.id, on_status)))

    def download(self, to: str | Path, progress: bool | BytesProgress = False) -> list[Path]:
        """Download the files. Several parts get numbers in their names, and a manifest beside them. After a failure,
        the next call resumes."""
        with display_bytes(progress, Path(to).name, "downloading") as report:
            return drive(exports.save_export(self._session, self.data, Path(to), report))

    def manifest(self) -> Json:
        """Get the manifest: the files with their counts and sha256."""
        return drive(self._session.manifest(self.id))

    def delete(self) -> None:
        """Delete the export and its files."""
        drive(self._session.delete("exports", self.id))


class AsyncExport(ExportView):
    """Export for asyncio."""

    async def refresh(self) -> Self:
        """As Export.refresh."""
        return self._update(await self._session.export(self.id))

    async def wait(self, progress: bool | Callable[[Json], None] = False) -> Self:
        """As Export.wait."""
        with self._on_status(progress) as on_status:
            return self._update(await exports.wait_for_export(self._session, self.id, on_status))

    async def download(self, to: str | Path, progress: bool | BytesProgress = False) -> list[Path]:
        """As Export.download."""
        with display_bytes(progress, Path(to).name, "downloading") as report:
            return await exports.save_export(self._session, self.data, Path(to), report)

    async def manifest(self) -> Json:
        """As Export.manifest."""
        return await self._session.manifest(self.id)

    async def delete(self) -> None:
        """As Export.delete."""
        await self._session.delete("exports", self.id)


@contextmanager
def display_copy(progress: bool | CopyProgress, title: str) -> Iterator[CopyProgress]:
    """Yield what shows an export and the copy of its files, if `progress`."""
    if not isinstance(progress, bool) or not progress:
        yield progress or CopyProgress()
        return
    with display_progress(title) as show:

        def on_status(data: Json) -> None:
            show(TextDisplay(_summary(data)))

        def on_bytes(size: int, total: int | None) -> None:
            show(TextDisplay(f"writing, {text.size(size)} of {text.size(total or size)}"))

        yield CopyProgress(on_status, on_bytes)


def _summary(data: Json) -> str:
    progress = data["progress"]
    tasks = f"{text.count(progress['tasks'])} of {text.count(progress['total'])} tasks"
    return f"export {data['state']}, {tasks}, {text.size(progress['bytes'])}"

"""Export and AsyncExport: results as files, while the server makes them and when they are there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from conveyor.client import export_files as exports
from conveyor.client import wording as text
from conveyor.client.client_session import ClientSession
from conveyor.client.io import drive
from conveyor.client.progress_display import Words, moving, showing
from conveyor.client.transport import Json
from conveyor.client.upload_file import Moved


class ExportView:
    """What is known of an export. `data` is all of it, as the API shows it."""

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
        """One line."""
        progress = self.data["progress"]
        tasks = f"{text.count(progress['tasks'])} of {text.count(progress['total'])} tasks"
        return f"export {self.state}, {tasks}, {text.size(progress['bytes'])}"

    def __repr__(self) -> str:
        return f"<Export {self.id}: {self.summary()}>"

    def _repr_html_(self) -> str:
        return Words(f"{self.id}: {self.summary()}")._repr_html_()

    def _seen(self, data: Json) -> Self:
        self.data = data
        return self

    def _keep(self, data: Json) -> None:
        self.data = data

    @contextmanager
    def _watched(self, progress: bool | Callable[[Json], None]) -> Iterator[Callable[[Json], None]]:
        if not isinstance(progress, bool):
            yield progress
        elif not progress:
            yield self._keep
        else:
            with showing(str(self.data["job_id"])) as show:
                yield lambda data: show(self._seen(data))


class ExportHandle(ExportView):
    """An export as it was last seen, and what can be done with it."""

    def refresh(self) -> Self:
        """See it as it is now."""
        return self._seen(drive(self._session.export(self.id)))

    def wait(self, progress: bool | Callable[[Json], None] = False) -> Self:
        """Wait until it is ready. Raises ExportFailed. `progress`: show it, or call this with its data."""
        with self._watched(progress) as seen:
            return self._seen(drive(exports.wait_for_export(self._session, self.id, seen)))

    def download(self, to: str | Path, progress: bool | Moved = False) -> list[Path]:
        """Write its files here; several parts get numbers in their names, and a manifest beside them. If it breaks
        off, the next call goes on."""
        with moving(progress, Path(to).name, "downloading") as moved:
            return drive(exports.save_export(self._session, self.data, Path(to), moved))

    def manifest(self) -> Json:
        """What its files hold, with counts and the sha256 of each."""
        return drive(self._session.manifest(self.id))

    def delete(self) -> None:
        """Remove it with its files."""
        drive(self._session.delete("exports", self.id))


class AsyncExport(ExportView):
    """As Export, on an event loop."""

    async def refresh(self) -> Self:
        """As Export.refresh."""
        return self._seen(await self._session.export(self.id))

    async def wait(self, progress: bool | Callable[[Json], None] = False) -> Self:
        """As Export.wait."""
        with self._watched(progress) as seen:
            return self._seen(await exports.wait_for_export(self._session, self.id, seen))

    async def download(self, to: str | Path, progress: bool | Moved = False) -> list[Path]:
        """As Export.download."""
        with moving(progress, Path(to).name, "downloading") as moved:
            return await exports.save_export(self._session, self.data, Path(to), moved)

    async def manifest(self) -> Json:
        """As Export.manifest."""
        return await self._session.manifest(self.id)

    async def delete(self) -> None:
        """As Export.delete."""
        await self._session.delete("exports", self.id)

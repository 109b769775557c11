"""The last known status of a job: as properties, as text, and as a card for a notebook."""

from typing import Any

from conveyor.client import wording as text
from conveyor.client.transport import Json
from conveyor.states import ENDED, RunState

_COLOURS = {"completed": "#2e7d32", "failed": "#c62828", "cancelled": "#6d6d6d", "paused": "#b26a00"}
_RUNNING = "#1565c0"
_BAR = "height:6px;border-radius:3px;overflow:hidden;background:rgba(128,128,128,.25);margin:6px 0;display:flex"


class JobView:
    """The last known status of a job. `data` is the full JSON of the API. Counts are by the latest outcome of each
    task, over all runs."""

    def __init__(self, data: Json) -> None:
        self.data = data

    @property
    def id(self) -> str:
        return str(self.data["id"])

    @property
    def name(self) -> str | None:
        return self.data.get("name")

    @property
    def kind(self) -> str:
        return str(self.data["kind"])

    @property
    def state(self) -> str:
        """ingesting, running, paused, completed, failed or cancelled."""
        return str(self.data["state"])

    @property
    def reason(self) -> str | None:
        """Why the job is in this state, if there is a particular reason."""
        return self.data.get("reason")

    @property
    def reason_code(self) -> str | None:
        """The same for programs: a stable code, such as `list_unreadable` or `failure_threshold`."""
        return self.data.get("reason_code")

    @property
    def ended(self) -> bool:
        """Whether the job has finished: completed, failed or cancelled."""
        return self.state in ENDED

    @property
    def ok(self) -> bool:
        """Whether the job is completed and every task succeeded."""
        return self.state == RunState.COMPLETED and self.succeeded == self.total

    @property
    def total(self) -> int:
        """Number of tasks; during the ingest, the tasks ingested so far."""
        # A server of an earlier version shows the latest run alone.
        return int(self.data.get("total", self.data["run"]["total"]))

    @property
    def succeeded(self) -> int:
        return self._count("succeeded")

    @property
    def failed(self) -> int:
        return self._count("failed")

    @property
    def cancelled(self) -> int:
        return self._count("cancelled")

    @property
    def unchanged(self) -> int:
        """Number of succeeded tasks with the body of an earlier run, after a rerun with `changed_only`."""
        return self._count("unchanged")

    @property
    def done(self) -> int:
        """Number of finished tasks: succeeded, failed or cancelled."""
        return self.succeeded + self.failed + self.cancelled

    @property
    def invalid(self) -> int:
        """Number of invalid lines in the list."""
        return int(self.data.get("invalid_lines") or 0)

    @property
    def rate(self) -> float | None:
        """Throughput, in tasks per second."""
        return self.data.get("rate")

    @property
    def eta(self) -> float | None:
        """Estimated time until the job finishes, in seconds."""
        return self.data.get("eta")

    @property
    def errors(self) -> dict[str, int]:
        """The most frequent error codes of failed tasks, with their counts."""
        return {error["code"]: error["count"] for error in self.data.get("top_errors") or ()}

    def summary(self) -> str:
        """The status as one line."""
        parts = [self.state, self._progress()]
        parts += [f"{text.count(self.unchanged)} unchanged"] if self.unchanged else []
        parts += [f"{text.count(number)} {word}" for word, number in self._problems()]
        waiting = self.data.get("waiting")
        if not self.ended:
            parts += [text.rate(self.rate)] if self.rate else []
            parts += [f"eta {text.duration(self.eta)}"] if self.eta is not None else []
            if waiting and waiting["code"] != self.state:
                parts.append(f"waiting: {waiting['detail'].removeprefix('waiting: ')}")
        parts += [self.reason] if self.reason and not (waiting and waiting["detail"] == self.reason) else []
        return text.printable(", ".join(part for part in parts if part))

    def __repr__(self) -> str:
        name = f" {text.printable(self.name)!r}" if self.name else ""
        return f"<{type(self).__name__.removesuffix('Handle')} {self.id}{name}: {self.summary()}>"

    def _repr_html_(self) -> str:
        """A card for notebooks. It has no scripts and no URLs, and all text is escaped."""
        colour = _COLOURS.get(self.state, _RUNNING)
        title = text.escaped(self.name or self.id)
        rows = [(text.escaped(code), text.count(number)) for code, number in self.errors.items()]
        table = "".join(f"<div><code>{code}</code> {number}</div>" for code, number in rows)
        return (
            '<div style="border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:10px 14px;max-width:560px;'
            'font-family:system-ui,sans-serif;font-size:13px">'
            f'<div><b>{title}</b> <span style="color:#fff;background:{colour};border-radius:9px;padding:1px 8px;'
            f'font-size:11px">{text.escaped(self.state)}</span></div>'
            f'<div style="opacity:.65;font-size:11px">{text.escaped(self.id)}</div>'
            f"{self._bar(colour)}<div>{text.escaped(self.summary())}</div>"
            f'<div style="opacity:.8;margin-top:4px;font-size:12px">{table}</div></div>'
        )

    def _bar(self, colour: str) -> str:
        counts, total = self._shown_counts()
        bad_count = counts.get("failed", 0) + counts.get("cancelled", 0)
        good, bad = (min(100.0, 100.0 * part / total) if total else 0.0 for part in (counts["succeeded"], bad_count))
        return (
            f'<div role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{good + bad:.0f}" '
            f'style="{_BAR}"><div style="width:{good:.2f}%;background:{colour}"></div>'
            f'<div style="width:{bad:.2f}%;background:#c62828"></div></div>'
        )

    def _shown_counts(self) -> tuple[Json, int]:
        """The counts and the total of the progress: of a rerun while it runs, otherwise of the job."""
        run = self.data["run"]
        if run.get("number", 1) > 1 and not self.ended:
            return run["counts"], int(run["total"])
        return self.data.get("counts", run["counts"]), self.total

    def _progress(self) -> str:
        ingest: Any = self.data.get("ingest")
        if self.state == RunState.INGESTING and ingest:
            return f"{text.count(ingest['tasks'])} tasks read, {text.count(self.done)} done"
        counts, total = self._shown_counts()
        done = sum(counts.get(status, 0) for status in ("succeeded", "failed", "cancelled"))
        return f"{text.count(done)} of {text.count(total)} done"

    def _problems(self) -> list[tuple[str, int]]:
        problems = [("failed", self.failed), ("cancelled", self.cancelled), ("invalid lines", self.invalid)]
        return [(word, number) for word, number in problems if number]

    def _count_added(self, tasks: int, invalid: int) -> int:
        self.data = {**self.data, "invalid_lines": self.invalid + invalid}
        return tasks

    def _count(self, status: str) -> int:
        return int(self.data.get("counts", self.data["run"]["counts"]).get(status, 0))

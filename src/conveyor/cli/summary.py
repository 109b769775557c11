"""What a run came to, as a table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.cli import formatting as text
from conveyor.cli.output import number_of_lines
from conveyor.cli.snapshot import Snapshot
from conveyor.errors import ConveyorError

# What a first run stumbles over, and is mended by another flag.
_HINTS = {"target_refused": ": on a private network, see --allow-private-targets"}


@dataclass(frozen=True)
class RunReport:
    """A job that ended here, and its archive."""

    job: dict[str, Any]
    archive: Path
    archive_bytes: int
    # Of this process, and what ended in that time: a resumed run had a head start.
    seconds: float
    ended_here: int
    # The lines that were no task, if there were any.
    left_out: Path | None = None
    # Why the archive is not of the whole list, if it is not.
    fault: ConveyorError | None = None

    @property
    def rate(self) -> float:
        return self.ended_here / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        # Without the options: headers and gateways carry secrets.
        return {
            "job": {name: value for name, value in self.job.items() if name != "options"},
            "archive": str(self.archive),
            "archive_bytes": self.archive_bytes,
            "complete": self.fault is None,
            "invalid_list": str(self.left_out) if self.left_out else None,
            "seconds": round(self.seconds, 3),
            "tasks_per_second": round(self.rate, 1),
        }


def print_summary(report: RunReport) -> None:
    """Counts, rate, errors by code, where the archive is."""
    from rich.console import Console
    from rich.table import Table

    now = Snapshot.of(report.job)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Job", f"{now.job_id} ({now.state.value}{f': {now.reason}' if now.reason else ''})")
    table.add_row("Tasks", text.count(now.total))
    table.add_row("Succeeded", f"[green]{text.count(now.succeeded)}")
    if now.failed:
        table.add_row("Failed", f"[red]{text.count(now.failed)}")
        for code, number in now.errors:
            table.add_row("", f"{text.count(number):>{len(text.count(now.failed))}}  {code}{_HINTS.get(code, '')}")
    if now.cancelled:
        table.add_row("Cancelled", text.count(now.cancelled))
    if now.total > now.done:
        table.add_row("Not run", f"[yellow]{text.count(now.total - now.done)}")
    if now.invalid:
        table.add_row("Left out", f"[yellow]{number_of_lines(now.invalid)} no task, see {report.left_out}")
    table.add_row("Time", f"{text.duration(report.seconds)}, {text.rate(report.rate)}")
    incomplete = ", [yellow]incomplete" if report.fault else ""
    table.add_row("Results", f"{report.archive} ({text.size(report.archive_bytes)}){incomplete}")
    console = Console(highlight=False)
    console.print()
    console.print(table)

"""The summary of a local run, as a table or JSON."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conveyor.cli import formatting as text
from conveyor.cli.output import count_invalid_lines
from conveyor.cli.snapshot import Snapshot
from conveyor.errors import ConveyorError

# Errors that many first runs meet, and that a flag solves.
_HINTS = {
    "target_refused": " (private address: see --allow-private-targets)",
    "target_down": " (the host was down: run the list again, or see --patience)",
}


@dataclass(frozen=True)
class RunReport:
    """A finished job and its archive."""

    job: dict[str, Any]
    archive: Path
    archive_bytes: int
    # Time spent and tasks finished by this process; a resumed run had finished some before.
    seconds: float
    finished_here: int
    # File with the invalid lines, if there are any.
    invalid_file: Path | None = None
    # Why the archive does not cover the whole list, if it does not.
    fault: ConveyorError | None = None

    @property
    def rate(self) -> float:
        return self.finished_here / self.seconds if self.seconds > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        # Without the options: headers and gateways carry secrets.
        return {
            "job": {name: value for name, value in self.job.items() if name != "options"},
            "archive": str(self.archive),
            "archive_bytes": self.archive_bytes,
            "complete": self.fault is None,
            "invalid_list": str(self.invalid_file) if self.invalid_file else None,
            "seconds": round(self.seconds, 3),
            "tasks_per_second": round(self.rate, 1),
        }


def print_summary(report: RunReport) -> None:
    """Print counts, errors by code, throughput and the path of the archive."""
    from rich.console import Console
    from rich.table import Table

    now = Snapshot.of(report.job)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("Job", f"{now.job_id} ({now.state.value}{f': {now.reason}' if now.reason else ''})")
    table.add_row("Tasks", text.count(now.total))
    table.add_row("Succeeded", f"[green]{text.count(now.succeeded)}")
    if now.unchanged:
        table.add_row("Unchanged", text.count(now.unchanged))
    if now.failed:
        table.add_row("Failed", f"[red]{text.count(now.failed)}")
        for code, number in now.errors:
            table.add_row("", f"{text.count(number):>{len(text.count(now.failed))}}  {code}{_HINTS.get(code, '')}")
    if now.cancelled:
        table.add_row("Cancelled", text.count(now.cancelled))
    if now.total > now.done:
        table.add_row("Not run", f"[yellow]{text.count(now.total - now.done)}")
    if now.invalid:
        table.add_row("Skipped", f"[yellow]{count_invalid_lines(now.invalid)}, see {report.invalid_file}")
    table.add_row("Time", f"{text.duration(report.seconds)}, {text.rate(report.rate)}")
    incomplete = ", [yellow]incomplete" if report.fault else ""
    table.add_row("Results", f"{report.archive} ({text.size(report.archive_bytes)}){incomplete}")
    console = Console(highlight=False)
    console.print()
    console.print(table)

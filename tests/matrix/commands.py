"""The command line as a way in: in this process, in a thread of its own, against the API of the world."""

import asyncio
import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import typer

from conveyor.cli.command_list import app
from conveyor.cli.guard import run_guarded
from tests.matrix.entries import Refusal
from tests.matrix.world import World

# The flags that set an option, by their name.
FLAGS = {
    "--concurrency": "concurrency",
    "--rate": "rate_per_host",
    "--pace": "pace",
    "--attempts": "attempts",
    "--timeout": "timeout",
    "--max-failed": "failure_threshold.failed",
    "--on-invalid": "on_invalid",
    "--retention-days": "retention_days",
    "--max-lifetime": "max_lifetime",
    "--patience": "breaker.patience",
    "--on-exhausted": "on_exhausted",
}
# Flags of a job that say something else, or whose text is not the value itself.
OTHER_FLAGS = {
    "--name",
    "--header",
    "--gateway",
    "--insecure",
    "--http2",
    "--handler",
    "--extract",
    "--drop-bodies",
    "--download",
    "--export",
    "--no-breaker",
    "--url-column",
    "--option",
    "--options",
}
COMMANDS = ("run", "submit", "rerun", "change", "schedules create")


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    error: str

    @property
    def refusal(self) -> Refusal:
        """What it printed for a user, who gave it something wrong."""
        assert self.code == 2, self
        message, _, code = self.error.strip().removeprefix("conveyor: ").rpartition(" ")
        return Refusal(code.strip("[]"), message)


def flags_of(command: str) -> list[str]:
    """The options of a job that a command has flags for."""
    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    return [param.opts[0] for param in found.params if getattr(param, "rich_help_panel", None) == "Job"]


async def command(*arguments: str) -> Said:
    out, error = io.StringIO(), io.StringIO()

    def run() -> int:
        with redirect_stdout(out), redirect_stderr(error):
            return run_guarded(arguments)

    return Said(await asyncio.to_thread(run), out.getvalue(), error.getvalue())


def arguments_of(world: World, name: str, place: Path, job_id: str) -> list[str]:
    """A command that is right but for the option that is put behind it."""
    urls = place / "urls.txt"
    urls.write_text(f"{world.address}/ok\n{world.address}/status/404\n")
    server = ["--url", world.api.url]
    return {
        "run": ["run", str(urls), "-o", str(place / "out.zip"), "--overwrite"],
        "submit": ["submit", str(urls), *server],
        "rerun": ["rerun", job_id, "--all", *server],
        "change": ["change", job_id, *server],
        "schedules create": ["schedules", "create", "0 0 * * *", str(urls), *server],
    }[name]

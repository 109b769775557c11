"""All commands, in the order of `conveyor --help`. Each is a function in the file of its subject, which is imported
when it is called: the help of the whole needs the summaries alone."""

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import typer

from conveyor.cli.version_command import root

_LOCAL = "Run without a server"
_SERVER = "Work with a server"
_ROLES = "Run single roles on shared engines"
_ADMIN = "Administer"


class _ListedCommand(NamedTuple):
    """A command, or a group of commands if its function is `app`."""

    name: str
    # The beginning of its help.
    summary: str
    module: str
    function: str
    panel: str


_COMMANDS = (
    _ListedCommand("run", "Run a list of tasks and write the results to a file.", "run_command", "run", _LOCAL),
    _ListedCommand("demo", "Fetch 10,000 pages of a small built-in site.", "demo_command", "demo", _LOCAL),
    _ListedCommand("up", "Start a server with the API, the dashboard and workers.", "up_command", "up", _SERVER),
    _ListedCommand(
        "dashboard",
        "Print a link that opens the dashboard and signs you in. It works once, and expires after an hour.",
        "dashboard_command",
        "dashboard",
        _SERVER,
    ),
    _ListedCommand(
        "submit", "Submit a list of tasks and print the id of the job.", "submit_command", "submit", _SERVER
    ),
    _ListedCommand("jobs", "List jobs, newest first.", "job_commands", "jobs", _SERVER),
    _ListedCommand("show", "Show a job: state, counts, throughput, errors and runs.", "job_commands", "show", _SERVER),
    _ListedCommand(
        "errors",
        "Show why tasks failed and were retried: errors by code and host, with messages.",
        "breakdown_commands",
        "errors",
        _SERVER,
    ),
    _ListedCommand(
        "hosts",
        "Show the hosts of a job: throughput, latency, errors, breaker and pace.",
        "breakdown_commands",
        "hosts",
        _SERVER,
    ),
    _ListedCommand("watch", "Show the progress of a job until it finishes.", "watch_command", "watch", _SERVER),
    _ListedCommand(
        "results",
        "List the tasks of a job, each with its latest outcome over all runs; --run lists one run.",
        "job_commands",
        "results",
        _SERVER,
    ),
    _ListedCommand(
        "export",
        "Export a job's results to a file: every task, with its latest outcome over all runs.",
        "export_command",
        "export",
        _SERVER,
    ),
    _ListedCommand(
        "invalid", "List the invalid lines of a job's list, with reasons.", "invalid_command", "invalid", _SERVER
    ),
    _ListedCommand("rerun", "Rerun tasks of a job, by default the failed ones.", "rerun_command", "rerun", _SERVER),
    _ListedCommand(
        "duplicate",
        "Submit a new job with the list and the options of a job.",
        "duplicate_command",
        "duplicate",
        _SERVER,
    ),
    _ListedCommand(
        "cancel",
        "Cancel a job: start no more tasks. Results so far are kept; `rerun --cancelled` runs the rest.",
        "control_commands",
        "cancel",
        _SERVER,
    ),
    _ListedCommand("pause", "Pause a job: start no more tasks until `resume`.", "control_commands", "pause", _SERVER),
    _ListedCommand("resume", "Resume a paused job.", "control_commands", "resume", _SERVER),
    _ListedCommand(
        "change",
        "Change the options of a running job. Workers apply them within a second.",
        "control_commands",
        "change",
        _SERVER,
    ),
    _ListedCommand(
        "delete", "Delete a job and all its results. A running job stops first.", "delete_command", "delete", _SERVER
    ),
    _ListedCommand(
        "schedules",
        "Start jobs on a cron schedule. Without a command, list the schedules.",
        "schedule_commands",
        "app",
        _SERVER,
    ),
    _ListedCommand(
        "webhooks",
        "Manage webhook endpoints and their deliveries. Endpoints get job events as signed requests.",
        "webhook_commands",
        "app",
        _SERVER,
    ),
    _ListedCommand("api", "Run only the API server. Other processes run the tasks.", "role_commands", "api", _ROLES),
    _ListedCommand(
        "work",
        "Run only workers, which run tasks. Start as many of these processes as you need.",
        "role_commands",
        "work",
        _ROLES,
    ),
    _ListedCommand("ingest", "Run only the ingester, which turns lists into tasks.", "role_commands", "ingest", _ROLES),
    _ListedCommand(
        "sweep",
        "Run only the sweeper, which repairs runs and purges data. It also makes exports and delivers webhooks.",
        "role_commands",
        "sweep",
        _ROLES,
    ),
    _ListedCommand("schedule", "Run only the scheduler, which fires schedules.", "role_commands", "schedule", _ROLES),
    _ListedCommand(
        "monitor",
        "Run only the monitor, which finds stuck tasks, dead workers and overdue runs.",
        "role_commands",
        "monitor",
        _ROLES,
    ),
    _ListedCommand(
        "intake",
        "Run only the intake, which accepts jobs from queues. CONVEYOR_INTAKE names the queues.",
        "role_commands",
        "intake",
        _ROLES,
    ),
    _ListedCommand("migrate", "Create or upgrade tables, queues and buckets.", "role_commands", "migrate", _ROLES),
    _ListedCommand(
        "breakers",
        "List and reset breakers. A breaker keeps tasks from a target that is down, until it is back.",
        "breaker_commands",
        "app",
        _ADMIN,
    ),
    _ListedCommand(
        "dead-letters",
        "List and redrive dead letters. A dead letter is an ingest or a task that was set aside after its retries.",
        "dead_letter_commands",
        "app",
        _ADMIN,
    ),
    _ListedCommand("keys", "Create, list and revoke API keys. No server is needed.", "key_commands", "app", _ADMIN),
    _ListedCommand(
        "move-tasks",
        "Move the tasks of finished jobs to Postgres, and wait for unfinished jobs to finish.",
        "move_command",
        "move_tasks",
        _ADMIN,
    ),
    _ListedCommand("deploy", "Show how to put Conveyor elsewhere.", "deploy_command", "app", _ADMIN),
    _ListedCommand("doctor", "Check the installation and say what to fix.", "doctor_command", "doctor", _ADMIN),
    _ListedCommand(
        "backup",
        "Back up the data directory, also of a running server, and verify the copy.",
        "backup_command",
        "backup",
        _ADMIN,
    ),
    _ListedCommand(
        "restore", "Restore a backup into a new data directory, and verify it.", "backup_command", "restore", _ADMIN
    ),
    _ListedCommand(
        "verify",
        "Check all stored data: counts, bodies, lists, exports, and objects that nothing refers to.",
        "verify_command",
        "verify",
        _ADMIN,
    ),
    _ListedCommand("version", "Print the version.", "version_command", "version", _ADMIN),
)
_HELP = ("-h", "--help")
# Options of the whole, which need no command.
_OPTIONS = (*_HELP, "--version", "--install-completion", "--show-completion")
# Set by a shell that completes a command.
_COMPLETE = "_CONVEYOR_COMPLETE"
_NAMES = frozenset(entry.name for entry in _COMMANDS)


def make_app(first: str | None = None) -> typer.Typer:
    """The command line for these first arguments: with the one command that they name, or with no more than the names
    of all, for the help. Anything else gets all commands."""
    if _COMPLETE in os.environ:  # noqa: TID251  (it belongs to the shell, and is no setting)
        return _whole_app()
    if first is None or first in _OPTIONS:
        return _made(_COMMANDS, _stub)
    return _made([entry for entry in _COMMANDS if first not in _NAMES or entry.name == first], _load)


def _made(entries: Sequence[_ListedCommand], load: Callable[[_ListedCommand], Any]) -> typer.Typer:
    app = typer.Typer(
        rich_markup_mode=None,
        name="conveyor",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": [*_HELP]},
    )
    app.callback()(root)
    for entry in entries:
        called = load(entry)
        if isinstance(called, typer.Typer):
            app.add_typer(called, name=entry.name, rich_help_panel=entry.panel)
        else:
            app.command(entry.name, rich_help_panel=entry.panel)(called)
    return app


def _load(entry: _ListedCommand) -> Any:
    return getattr(import_module(f"conveyor.cli.{entry.module}"), entry.function)


def _stub(entry: _ListedCommand) -> Any:
    """What the help shows of a command."""
    if entry.function == "app":
        return typer.Typer(help=entry.summary)

    def command() -> None: ...

    command.__doc__ = entry.summary
    return command


@cache
def _whole_app() -> typer.Typer:
    return _made(_COMMANDS, _load)


def __getattr__(name: str) -> Any:
    """`app`, with all commands, for those who show or check them."""
    if name == "app":
        return _whole_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

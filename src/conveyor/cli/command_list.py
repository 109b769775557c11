"""All commands, in the order of `conveyor --help`. Each is a function in the file of its subject."""

import typer

from conveyor.cli import backup_command as backups
from conveyor.cli import breaker_commands as breakers
from conveyor.cli import control_commands as control
from conveyor.cli import dashboard_command as dashboard
from conveyor.cli import dead_letter_commands as dead_letters
from conveyor.cli import delete_command as delete
from conveyor.cli import demo_command as demo
from conveyor.cli import doctor_command as doctor
from conveyor.cli import export_command as exports
from conveyor.cli import invalid_command as invalid
from conveyor.cli import job_commands as jobs
from conveyor.cli import key_commands as keys
from conveyor.cli import move_command as move
from conveyor.cli import rerun_command as rerun
from conveyor.cli import role_commands as roles
from conveyor.cli import run_command as run
from conveyor.cli import schedule_commands as schedules
from conveyor.cli import submit_command as submit
from conveyor.cli import up_command as up
from conveyor.cli import verify_command as verify
from conveyor.cli import version_command as version
from conveyor.cli import watch_command as watch
from conveyor.cli import webhook_commands as webhooks

app = typer.Typer(
    rich_markup_mode=None,
    name="conveyor",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.callback()(version.root)

_LOCAL = "Run without a server"
_SERVER = "Work with a server"
_ROLES = "Run single roles on shared engines"
_ADMIN = "Administer"

app.command("run", rich_help_panel=_LOCAL)(run.run)
app.command("demo", rich_help_panel=_LOCAL)(demo.demo)
app.command("up", rich_help_panel=_SERVER)(up.up)
app.command("dashboard", rich_help_panel=_SERVER)(dashboard.dashboard)
app.command("submit", rich_help_panel=_SERVER)(submit.submit)
app.command("jobs", rich_help_panel=_SERVER)(jobs.jobs)
app.command("show", rich_help_panel=_SERVER)(jobs.show)
app.command("watch", rich_help_panel=_SERVER)(watch.watch)
app.command("results", rich_help_panel=_SERVER)(jobs.results)
app.command("export", rich_help_panel=_SERVER)(exports.export)
app.command("invalid", rich_help_panel=_SERVER)(invalid.invalid)
app.command("rerun", rich_help_panel=_SERVER)(rerun.rerun)
app.command("cancel", rich_help_panel=_SERVER)(control.cancel)
app.command("pause", rich_help_panel=_SERVER)(control.pause)
app.command("resume", rich_help_panel=_SERVER)(control.resume)
app.command("change", rich_help_panel=_SERVER)(control.change)
app.command("delete", rich_help_panel=_SERVER)(delete.delete)
app.add_typer(schedules.app, name="schedules", rich_help_panel=_SERVER)
app.add_typer(webhooks.app, name="webhooks", rich_help_panel=_SERVER)
app.command("api", rich_help_panel=_ROLES)(roles.api)
app.command("work", rich_help_panel=_ROLES)(roles.work)
app.command("ingest", rich_help_panel=_ROLES)(roles.ingest)
app.command("sweep", rich_help_panel=_ROLES)(roles.sweep)
app.command("schedule", rich_help_panel=_ROLES)(roles.schedule)
app.command("monitor", rich_help_panel=_ROLES)(roles.monitor)
app.command("intake", rich_help_panel=_ROLES)(roles.intake)
app.command("migrate", rich_help_panel=_ROLES)(roles.migrate)
app.add_typer(breakers.app, name="breakers", rich_help_panel=_ADMIN)
app.add_typer(dead_letters.app, name="dead-letters", rich_help_panel=_ADMIN)
app.add_typer(keys.app, name="keys", rich_help_panel=_ADMIN)
app.command("move-tasks", rich_help_panel=_ADMIN)(move.move_tasks)
app.command("doctor", rich_help_panel=_ADMIN)(doctor.doctor)
app.command("backup", rich_help_panel=_ADMIN)(backups.backup)
app.command("restore", rich_help_panel=_ADMIN)(backups.restore)
app.command("verify", rich_help_panel=_ADMIN)(verify.verify)
app.command("version", rich_help_panel=_ADMIN)(version.version)

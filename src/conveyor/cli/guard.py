"""Runs a command; every failure becomes one line on standard error, `conveyor: <message> [code]`, never a traceback.

With CONVEYOR_LOG_LEVEL=debug the traceback of an unexpected error is shown too.
"""

import sys
from collections.abc import Sequence

import typer

from conveyor.cli import EXIT_BAD_INPUT, EXIT_ERROR, EXIT_INTERRUPTED, missing
from conveyor.errors import BadInput, ConveyorError


def guarded(arguments: Sequence[str] | None) -> int:
    """The exit code of the command."""
    from conveyor.cli.command_list import app

    try:
        code = typer.main.get_command(app).main(arguments, prog_name="conveyor", standalone_mode=False)
    except ConveyorError as error:
        return _fail(_short(error.message), error.code, EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_ERROR)
    except typer.TyperException as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("Interrupted.", "interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        return _fail(_of_system(error), "os_error", EXIT_ERROR)
    except Exception as error:  # the last door before the user: one line for a bug too
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("conveyor"):
            complain(missing(error))
            return EXIT_ERROR
        _show_traceback()
        return _fail(f"Unexpected {type(error).__name__}: {error}", "internal_error", EXIT_ERROR)
    return code if isinstance(code, int) else 0


def complain(message: str) -> None:
    """One line on standard error."""
    from conveyor.telemetry.redact import redacted

    print(f"conveyor: {redacted(' '.join(message.split()))}", file=sys.stderr, flush=True)


def _short(message: str) -> str:
    """A message with a list under it, with the first item of that."""
    head, *items = message.splitlines() or [""]
    if not items:
        return head
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    return f"{head} {items[0].strip()}{more}"


def _fail(message: str, code: str, exit_code: int) -> int:
    complain(f"{message} [{code}]")
    return exit_code


def _misused(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    # Nothing was asked for: its message is the help.
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.message)
        return EXIT_BAD_INPUT
    message = error.format_message().rstrip(".")
    if not message:
        # No command was given: typer has shown the help.
        return EXIT_BAD_INPUT
    command = context.command_path if context else "conveyor"
    return _fail(f"{message}. See `{command} --help`.", "usage", EXIT_BAD_INPUT)


def _of_system(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{what}: {error.filename}" if error.filename else what


def _show_traceback() -> None:
    import traceback

    from conveyor.settings import Settings

    try:
        wanted = Settings.load().log_level.lower() == "debug"
    except ConveyorError:
        wanted = False
    if wanted:
        traceback.print_exc()

"""Run a command. Every failure becomes one line on standard error, `conveyor: <message> [code]`, never a traceback.

With CONVEYOR_LOG_LEVEL=debug an unexpected error prints its traceback too.
"""

import gc
import sys
from collections.abc import Sequence

import typer

from conveyor.cli import EXIT_BAD_INPUT, EXIT_ERROR, EXIT_INTERRUPTED, missing
from conveyor.errors import BadInput, ConveyorError


def run_guarded(arguments: Sequence[str] | None) -> int:
    """Run the command and return its exit code."""
    from conveyor.cli.command_list import make_app

    given = sys.argv[1:] if arguments is None else arguments
    try:
        group = typer.main.get_command(make_app(given[0] if given else None))
        gc.enable()
        code = group.main(arguments, prog_name="conveyor", standalone_mode=False)
    except ConveyorError as error:
        return _fail(_short(error.message), error.code, EXIT_BAD_INPUT if isinstance(error, BadInput) else EXIT_ERROR)
    except typer.TyperException as error:
        return _report_misuse(error)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("Interrupted.", "interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        return _fail(_system_message(error), "os_error", EXIT_ERROR)
    except Exception as error:  # a bug, too, is reported in one line
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("conveyor"):
            complain(missing(error))
            return EXIT_ERROR
        _show_traceback()
        return _fail(f"Unexpected {type(error).__name__}: {error}", "internal_error", EXIT_ERROR)
    return code if isinstance(code, int) else 0


def complain(message: str) -> None:
    """Print one line on standard error, without secrets."""
    from conveyor.telemetry.redact import redact

    print(f"conveyor: {redact(' '.join(message.split()))}", file=sys.stderr, flush=True)


def _short(message: str) -> str:
    """Shorten a message with a list of items to its head and the first item."""
    head, *items = message.splitlines() or [""]
    if not items:
        return head
    more = f" (and {len(items) - 1} more)" if len(items) > 1 else ""
    return f"{head} {items[0].strip()}{more}"


def _fail(message: str, code: str, exit_code: int) -> int:
    complain(f"{message} [{code}]")
    return exit_code


def _report_misuse(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    # Called without a command: the message of the error is the help.
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.message)
        return EXIT_BAD_INPUT
    message = error.format_message().removesuffix(".")
    if not message:
        # Typer has shown the help already.
        return EXIT_BAD_INPUT
    command = context.command_path if context else "conveyor"
    end = "" if message.endswith("?") else "."
    return _fail(f"{message}{end} See `{command} --help`.", "usage", EXIT_BAD_INPUT)


def _system_message(error: OSError) -> str:
    message = error.strerror or str(error) or type(error).__name__
    return f"{message}: {error.filename}" if error.filename else message


def _show_traceback() -> None:
    import traceback

    from conveyor.settings import Settings

    try:
        is_debug = Settings.load().log_level.lower() == "debug"
    except ConveyorError:
        is_debug = False
    if is_debug:
        traceback.print_exc()

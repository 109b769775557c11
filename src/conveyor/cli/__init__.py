"""The command line. `main` runs one command and turns whatever goes wrong into one line and an exit code.

Nothing heavy is imported before a command asks for it: `conveyor --help` is quick.
"""

import sys
from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
# Some tasks of the job failed; everything else went well.
EXIT_TASKS_FAILED = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> None:
    """The `conveyor` command."""
    try:
        from conveyor.cli.guard import guarded
    except ModuleNotFoundError as error:
        sys.exit(f"conveyor: {missing(error)}")
    sys.exit(guarded(arguments))


def missing(error: ModuleNotFoundError) -> str:
    """What to do about a library that is not there. The SDK alone is installed without those of the command line."""
    return (
        f"The command line and the server need more than the SDK (there is no {error.name}). "
        "Install them: pip install 'conveyor-jobs[server]' [not_installed]"
    )

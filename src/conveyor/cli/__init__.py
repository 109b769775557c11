"""The command line. `main` runs one command and turns any failure into one line and an exit code.

Commands import heavy modules inside their functions, so that `conveyor --help` stays fast.
"""

import gc
import sys
from collections.abc import Sequence

EXIT_ERROR = 1
EXIT_BAD_INPUT = 2
# The job finished, but some of its tasks did not succeed.
EXIT_TASKS_FAILED = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `conveyor` command and exit with its code."""
    # Collections would go over what is imported, again and again.
    gc.disable()
    try:
        from conveyor.cli.guard import run_guarded
    except ModuleNotFoundError as error:
        sys.exit(f"conveyor: {missing(error)}")
    sys.exit(run_guarded(arguments))


def missing(error: ModuleNotFoundError) -> str:
    """The error for a missing library: `pip install conveyor-jobs` alone installs only the SDK."""
    return (
        f"The module {error.name} is missing: only the SDK is installed. "
        "Install the command line and the server: pip install 'conveyor-jobs[server]' [not_installed]"
    )

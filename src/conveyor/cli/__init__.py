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
    from conveyor.cli.guard import guarded

    sys.exit(guarded(arguments))

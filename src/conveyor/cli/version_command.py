"""`conveyor version` and `conveyor --version`: print the version."""

from typing import Annotated

import typer

from conveyor import __version__


def version(
    # As in shared_options.py, which imports the model.
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON on standard output.")] = False,
) -> None:
    """Print the version."""
    if as_json:
        from conveyor.cli.output import print_json

        print_json({"version": __version__})
    else:
        print(f"conveyor {__version__}")


def _print_and_exit(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_and_exit, is_eager=True, help="Print the version and exit.")
]


def root(_: VersionOption = False) -> None:
    """Run durable bulk jobs: submit a list of tasks, watch the job, export the results."""

"""Bugs in how options of jobs are checked."""

from typing import Annotated

import pytest
import typer

from conveyor.cli.submit_command import submit
from tests.faults.planted import Planted
from tests.flow.test_option_matrix import test_a_rate_that_the_server_takes_is_taken_by_the_command_line


def _bound_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """The command line refused what every other way takes."""
    patch.setitem(submit.__annotations__, "rate", Annotated[float | None, typer.Option("--rate", min=0.001)])


PLANTED = [
    Planted(
        "the command line has bounds of its own",
        _bound_of_its_own,
        test_a_rate_that_the_server_takes_is_taken_by_the_command_line,
    ),
]

"""A function for jobs to call."""

from typing import Any

import conveyor


@conveyor.task("tests.echo")
def echo(given: Any) -> Any:
    return given

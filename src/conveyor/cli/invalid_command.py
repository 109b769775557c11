"""`conveyor invalid`: list the lines of a list that are not valid tasks."""

import itertools
from typing import Any

from conveyor.cli.output import print_json_array, print_lines
from conveyor.cli.shared_options import AsJson, Data, JobArgument, Limit, Server
from conveyor.settings import Settings

_COLUMNS = [("line", 9), ("reason", 60), ("text", 0)]


def invalid(
    job: JobArgument, limit: Limit = None, as_json: AsJson = False, url: Server = None, data: Data = None
) -> None:
    """List the invalid lines of a job's list, with reasons."""
    from conveyor.cli.connection import connect

    with connect(Settings.load(url=url, data=data)) as client:
        lines = itertools.islice((line.as_dict() for line in client.job(job).invalid_lines()), limit)
        if as_json:
            print_json_array(lines)
        else:
            print_lines(_COLUMNS, map(_row, lines), "No invalid lines.")


def _row(line: dict[str, Any]) -> list[object]:
    return [line["line"], line["reason"], line["text"]]

"""Functions for jobs to call."""

from typing import Any

import conveyor


@conveyor.task("tests.echo")
def echo(given: Any) -> Any:
    return given


@conveyor.task("tests.broken")
def broken(_given: Any) -> Any:
    raise LookupError("never found")


@conveyor.task("tests.product")
def product(page: conveyor.Page) -> dict[str, Any]:
    return {"title": page.text.partition("<h1>")[2].partition("</h1>")[0], "filler": "x" * 1500}


@conveyor.task("tests.fussy")
def fussy(page: conveyor.Page) -> dict[str, Any]:
    if page.url.endswith("3"):
        raise LookupError("no title")
    return product(page)

"""The functions that the load calls. Each version can import them."""

from typing import Any

import conveyor


@conveyor.task("upgrade.echo")
def echo(given: Any) -> Any:
    return given


@conveyor.task("upgrade.size")
def size(page: Any) -> dict[str, int]:
    return {"size": len(page.text)}

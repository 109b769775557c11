"""The functions that jobs of the everyday load call."""

import asyncio
import time
from typing import Any

import conveyor


@conveyor.task("everyday.quick")
def quick(given: Any) -> Any:
    if given["page"] == "broken":
        raise LookupError(f"nothing for {given['n']}")
    return given


@conveyor.task("everyday.slow")
def slow(given: Any) -> Any:
    time.sleep(0.02)
    return quick(given)


@conveyor.task("everyday.async")
async def patient(given: Any) -> Any:
    await asyncio.sleep(0.05)
    return quick(given)

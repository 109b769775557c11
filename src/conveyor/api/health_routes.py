"""Health: is the process there, and can it answer. Without a key, and without a word about what is inside."""

import asyncio

from litestar import Response, get

from conveyor.api import schemas as shapes
from conveyor.api.dependencies import SystemPart, answer
from conveyor.errors import Unavailable

_PATIENCE = 2.0
# A name that no key has: the read is a real one and finds nothing.
_NO_KEY = "readyz"


@get("/healthz", summary="Is the process alive", responses=shapes.shaped(shapes.HealthShape))
async def healthz() -> Response[bytes]:
    """It is, if this answers."""
    return answer({"status": "ok"})


@get("/readyz", summary="Can the process serve", responses=shapes.shaped(shapes.HealthShape))
async def readyz(system: SystemPart) -> Response[bytes]:
    """It can, if the records answer."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await system.records.access.key(_NO_KEY)
    except Exception as error:
        raise Unavailable(f"The records do not answer: {error!r}") from error
    return answer({"status": "ok"})

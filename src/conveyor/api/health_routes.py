"""Health checks. They need no key and reveal nothing."""

import asyncio

from litestar import Response, get

from conveyor.api.dependencies import SystemPart, answer
from conveyor.api.problems import unready
from conveyor.api.response_specs import shaped
from conveyor.api.schemas.session_shapes import HealthShape
from conveyor.disk import disk_problem
from conveyor.errors import Unavailable
from conveyor.settings import blob_directory

_PATIENCE = 2.0
# No key has this id, so the read reaches the store and returns nothing.
_NO_KEY = "readyz"


@get("/healthz", summary="Check that the process is alive", responses=shaped(HealthShape))
async def healthz() -> Response[bytes]:
    """Always 200 while the process responds."""
    return answer({"status": "ok"})


@get("/readyz", summary="Check that the process can serve", responses=shaped(HealthShape))
async def readyz(system: SystemPart) -> Response[bytes]:
    """200 if the database responds and the disk of the data directory can be written, 503 with the reason if not."""
    settings = system.settings
    used = settings.data if settings.records is None or settings.blobs is None else blob_directory(settings)
    if used is not None:
        problem = await asyncio.to_thread(disk_problem, used)
        if problem is not None:
            return unready(problem)
    try:
        async with asyncio.timeout(_PATIENCE):
            await system.records.access.key(_NO_KEY)
    except Exception as error:
        raise Unavailable(f"The database does not respond: {error!r}") from error
    return answer({"status": "ok"})

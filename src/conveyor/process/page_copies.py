"""Copies of pages: an unchanged task of a job that compares with another job gets a copy of the page that is stored
there, and of what was extracted from it, so that no row refers to a job that may be deleted."""

import asyncio
from collections.abc import Sequence

import msgspec
import structlog

from conveyor.clock import Clock
from conveyor.engines.blobs import Blobs
from conveyor.errors import BodyDamaged, Unavailable
from conveyor.model import Outcome, ResultDetail, Task
from conveyor.process.changed_pages import EarlierPage
from conveyor.read.body_reader import as_extracted, read_all
from conveyor.read.results import stream_body

log = structlog.get_logger()

# Bytes of pages that are copied together, and how often at once.
WINDOW_BYTES = 8 * 1024 * 1024
_WINDOWS = 4
# How long to wait for a store that failed; each failure in a row doubles it.
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0


class PageCopies:
    """One for each worker."""

    def __init__(self, blobs: Blobs, clock: Clock) -> None:
        self._blobs = blobs
        self._clock = clock
        self._reading = asyncio.Semaphore(_WINDOWS)

    async def copy(self, pages: Sequence[EarlierPage], outcomes: Sequence[Outcome]) -> list[bool]:
        """Give each outcome its page. False for one whose page is gone or damaged: it has to be fetched. While the
        store fails, the tasks wait."""
        tasks = [page.task for page in pages]
        bodies = await self._read(tasks)
        extracted = await self._read([_extracted(page, outcome) for page, outcome in zip(pages, outcomes, strict=True)])
        copied = []
        for page, outcome, body, value in zip(pages, outcomes, bodies, extracted, strict=True):
            detail = page.task.detail
            is_whole = (body is not None or detail.body is None) and (
                value is not None or detail.extracted is None or not outcome.keeps_extracted
            )
            if is_whole:
                outcome.body, outcome.extracted = body, value
                outcome.content_type = outcome.content_type or detail.content_type
            copied.append(is_whole)
        return copied

    async def _read(self, tasks: Sequence[Task]) -> list[bytes | None]:
        pause = _FIRST_PAUSE
        while True:
            async with self._reading:
                try:
                    return await self._read_once(tasks)
                except Unavailable as error:
                    problem = error
            log.warning("stored pages not read; retrying", error=repr(problem), seconds=pause)
            await self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, 2 * pause)

    async def _read_once(self, tasks: Sequence[Task]) -> list[bytes | None]:
        bodies, damaged = await read_all(self._blobs, tasks)
        read: list[bytes | None] = []
        for place, task in enumerate(tasks):
            body, ref = bodies[place], task.detail.body
            if body is None and ref is not None and place not in damaged:
                try:
                    body = b"".join([piece async for piece in stream_body(self._blobs, ref)])
                except BodyDamaged:
                    body = None
            read.append(None if body is None else bytes(body))
        return read


def _extracted(page: EarlierPage, outcome: Outcome) -> Task:
    """The task with what was extracted in the place of its body, if the outcome keeps that."""
    if outcome.keeps_extracted:
        return as_extracted(page.task)
    return msgspec.structs.replace(page.task, detail=ResultDetail())

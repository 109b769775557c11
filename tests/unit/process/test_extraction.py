"""Extraction from bodies that are stored: what becomes of the tasks while the store fails."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

from structlog.testing import capture_logs

from conveyor.errors import EngineFailed
from conveyor.model import BodyRef, InputJson, Job, JobKind, Outcome, TaskRef
from conveyor.process.executors.python.handler_calls import CallResult, PageCall
from conveyor.process.extraction import Extractor
from conveyor.states import TaskStatus
from tests.support.clocks import ManualClock
from tests.support.make_jobs import make_job


class FailingBlobs:
    """Objects by their keys. The first `failures` calls fail."""

    def __init__(self, objects: dict[str, bytes], failures: int) -> None:
        self._objects = objects
        self._failures = failures

    async def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes | None:
        self._fail()
        found = self._objects.get(key)
        return None if found is None else found[offset:][:length]

    async def stream(self, key: str, offset: int = 0) -> AsyncIterator[bytes]:
        self._fail()
        yield self._objects[key][offset:]

    def _fail(self) -> None:
        if self._failures:
            self._failures -= 1
            raise EngineFailed("for a moment")


class Measuring:
    """Calls a function that returns the length of each page."""

    def __init__(self) -> None:
        self.called: list[int] = []

    async def extract(self, job: Job, calls: Sequence[PageCall]) -> list[CallResult]:
        self.called += [call.index for call in calls]
        return [CallResult(b"%d" % call.page.length) for call in calls if call.page is not None]


def kept(key: str, body: bytes) -> Outcome:
    ref = BodyRef(key, len(body), sha256(body).hexdigest())
    return Outcome(TaskStatus.SUCCEEDED, 200, detail="{}", kept=ref)


async def test_while_the_store_fails_tasks_wait_and_nothing_is_called_twice() -> None:
    clock, caller = ManualClock(), Measuring()
    objects = {"a": b"page", "b": b"a longer page"}
    blobs: Any = FailingBlobs(objects, failures=9)
    fetched = Outcome(TaskStatus.SUCCEEDED, 200, body=b"new")
    outcomes = [fetched, *(kept(key, body) for key, body in objects.items()), kept("gone", b"gone")]
    refs = [TaskRef(index, InputJson('"http://site.test/"')) for index in range(len(outcomes))]
    job = make_job(clock, kind=JobKind.FETCH, extract="measure")
    with capture_logs() as logs:
        extracting = asyncio.ensure_future(Extractor(caller, blobs, clock).extract(job, refs, outcomes))
        while not extracting.done():
            clock.advance(5.0)
            await asyncio.sleep(0)
        await extracting
    assert [outcome.extracted for outcome in outcomes] == [b"3", b"4", b"13", None]
    assert caller.called == [0, 1, 2]
    assert outcomes[3].error is not None
    assert outcomes[3].error.code == "extract_failed"
    assert {entry["event"] for entry in logs} == {"stored bodies not read; retrying"}

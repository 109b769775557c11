"""The python executor, in its simple form: handlers run inside the worker. Gets references whose input is any JSON
value, calls the job's handler with each, and hands on what it returned, as JSON, or how it failed.

| Code | Meaning |
|---|---|
| handler_missing | no function is registered under the job's `handler` |
| handler_raised | the function raised; the message has the type and the text, never the traceback |
| result_not_json | the function returned what JSON can not hold |
| timeout | the function took longer than `timeout`; one that is not async goes on in its thread |

Isolation in processes of their own comes to stand behind the same `attempt`.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from conveyor.clock import Clock
from conveyor.handlers import Handler, Handlers
from conveyor.model import Job, JobId, Outcome, TaskError, TaskRef
from conveyor.process.executors.kept import Kept
from conveyor.process.executors.threads import Threads
from conveyor.states import TaskStatus

MAX_GRAIN = 256
# One hop to a thread and back costs some 50 µs: worth it for one slow call, not for each of many quick ones.
QUICK_HOP = 0.005
SLOW_HOP = 0.05
MAX_MESSAGE = 500
MAX_JOBS = 1024
CONTENT_TYPE = "application/json"


class PythonExecutor:
    """Runs tasks of kind python. Async handlers run on the event loop, others in at most `threads` threads."""

    def __init__(self, handlers: Handlers, clock: Clock, threads: int = 64) -> None:
        self._handlers = handlers
        self._clock = clock
        self._threads = Threads("handler")
        self._slots = asyncio.Semaphore(threads)
        self._grains: Kept[JobId, int] = Kept(MAX_JOBS)

    def grain(self, job: Job) -> int:
        return self._grains.get(job.job_id) or 1

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        handler = self._handlers.find(job.options.handler)
        if handler is None:
            return [self._missing(job.options.handler) for _ in refs]
        run = self._on_loop if handler.is_async else self._in_threads
        return await run(job, handler, refs)

    async def close(self) -> None:
        self._threads.close()

    async def _on_loop(self, job: Job, handler: Handler, refs: Sequence[TaskRef]) -> list[Outcome]:
        started = self._clock.monotonic()
        outcomes = [await self._awaited(handler, ref, job.options.timeout) for ref in refs]
        self._adapt(job, len(refs), self._clock.monotonic() - started)
        return outcomes

    async def _awaited(self, handler: Handler, ref: TaskRef, timeout: float) -> Outcome:
        started = self._clock.monotonic()
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                outcome = succeeded(await handler.function(msgspec.json.decode(ref.input)))
        except asyncio.CancelledError:
            # The worker is stopping, or else the handler cancelled itself and that is its failure.
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            outcome = failed("handler_raised", "CancelledError")
        except (Exception, SystemExit) as error:
            outcome = _timed_out(timeout) if scope.expired() else raised(error)
        outcome.elapsed = self._clock.monotonic() - started
        return outcome

    async def _in_threads(self, job: Job, handler: Handler, refs: Sequence[TaskRef]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        while len(outcomes) < len(refs):
            async with self._slots:
                outcomes += await self._hop(job, Batch(handler, refs[len(outcomes) :], self._clock))
        return outcomes

    async def _hop(self, job: Job, batch: "Batch") -> list[Outcome]:
        """What the thread got done; with a call that is stuck, up to that one, and the thread is written off."""
        timeout = job.options.timeout
        done = self._threads.run(batch.run)
        try:
            while not done.done():
                left = batch.left(timeout)
                if left <= 0 and (ended := batch.give_up(timeout)) is not None:
                    return ended
                await asyncio.wait((done,), timeout=max(left, 0))
        finally:
            batch.stopped = True
        self._adapt(job, len(batch.outcomes), batch.elapsed)
        return batch.outcomes

    def _adapt(self, job: Job, count: int, seconds: float) -> None:
        grain = self.grain(job)
        if seconds < QUICK_HOP and count >= grain:
            grain = min(grain * 2, MAX_GRAIN)
        elif seconds > SLOW_HOP:
            grain = max(grain // 2, 1)
        self._grains.put(job.job_id, grain)

    def _missing(self, name: str | None) -> Outcome:
        known = ", ".join(self._handlers.names()) or "none; is --app set?"
        what = "the job names no handler" if name is None else f"no task is registered as {name!r}"
        return failed("handler_missing", f"{what} (known: {known})")


class Batch:
    """References that one thread runs one after the other, while the event loop watches."""

    def __init__(self, handler: Handler, refs: Sequence[TaskRef], clock: Clock) -> None:
        self._handler = handler
        self._refs = refs
        self._clock = clock
        # Held by the thread as it goes from one call to the next, by the loop as it decides that a call is stuck:
        # no call is begun after that, so none is made here and by the next batch too.
        self._turn = threading.Lock()
        self._begun = 0
        self._since: float | None = None
        self.outcomes: list[Outcome] = []
        self.elapsed = 0.0
        self.stopped = False

    def run(self) -> None:
        function = self._handler.function
        monotonic = self._clock.monotonic
        started = now = monotonic()
        for ref in self._refs:
            with self._turn:
                if self.stopped:
                    return
                self._begun += 1
                self._since = began = now
            outcome = called(function, ref)
            now = monotonic()
            outcome.elapsed = now - began
            self.outcomes.append(outcome)
        self.elapsed = now - started

    def left(self, timeout: float) -> float:
        """Seconds that the call under way still has; all of them while the thread has not begun."""
        return timeout if self._since is None else self._since + timeout - self._clock.monotonic()

    def give_up(self, timeout: float) -> list[Outcome] | None:
        """Stop before the next call, unless the thread went on to one just now. What came of those begun."""
        with self._turn:
            if self.left(timeout) > 0:
                return None
            self.stopped = True
            ended = list(self.outcomes)
        return ended if len(ended) == self._begun else [*ended, _timed_out(timeout)]


def called(function: Callable[[Any], Any], ref: TaskRef) -> Outcome:
    """What one call came to. A handler may raise anything, and a thread must live on."""
    try:
        return succeeded(function(msgspec.json.decode(ref.input)))
    except BaseException as error:
        return raised(error)


def succeeded(result: Any) -> Outcome:
    try:
        body = msgspec.json.encode(result)
    except Exception as error:
        return failed("result_not_json", f"the result can not be kept as JSON: {_text(error)}")
    return Outcome(TaskStatus.SUCCEEDED, body=body, content_type=CONTENT_TYPE)


def raised(error: BaseException) -> Outcome:
    return failed("handler_raised", f"{type(error).__name__}: {_text(error)}")


def failed(code: str, message: str) -> Outcome:
    return Outcome(TaskStatus.FAILED, error=TaskError(code, message[:MAX_MESSAGE]))


def _timed_out(timeout: float) -> Outcome:
    return failed("timeout", f"the handler took longer than {timeout:g} seconds")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text can not be read)"

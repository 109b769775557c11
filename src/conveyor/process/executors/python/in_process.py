"""Handlers inside the worker, without isolation: async ones on its event loop, others in threads. For small tests, and
for functions of a main script. A handler that crashes kills the worker, one that blocks the loop delays its leases, and
a thread that is stuck is abandoned.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from conveyor.clock import Clock
from conveyor.handlers import Context, Handler
from conveyor.model import Job, RunId, TaskRef
from conveyor.process.executors.python.handler_calls import CallResult, argued, called, raised, returned, timed_out
from conveyor.process.executors.python.threads import Threads


class HandlerReporter(Protocol):
    """Gets the progress reports of a call."""

    def say(self, position: int, done: int, total: int | None, note: str | None) -> None: ...


class InProcessHandlers:
    """Calls handlers in this process, at most `threads` at once of those that are not async."""

    def __init__(self, threads: int, clock: Clock) -> None:
        self._clock = clock
        self._threads = Threads("handler")
        self._slots = asyncio.Semaphore(threads)
        # Threads of cancelled attempts whose call has not returned: their runs, and when they would have timed out.
        self._cancelled: dict[asyncio.Future[None], tuple[RunId, float]] = {}

    async def run(
        self, job: Job, handler: Handler, refs: Sequence[TaskRef], seconds: float, reporter: HandlerReporter | None
    ) -> list[CallResult]:
        """Return the results. No call begins after so many seconds, but for the first."""
        contexts = _Contexts(job, handler, reporter)
        try:
            if handler.is_async:
                return await self._await_each(job, handler, refs, seconds, contexts)
            return await self._in_threads(job, handler, refs, seconds, contexts)
        except asyncio.CancelledError:
            contexts.cancel()
            raise

    def lingering(self, run_id: RunId) -> int:
        """Return how many calls of a run go on although their attempts were cancelled. One that takes longer than it
        may is abandoned, as any other."""
        now = self._clock.monotonic()
        self._cancelled = {done: entry for done, entry in self._cancelled.items() if not done.done() and now < entry[1]}
        return sum(run == run_id for run, _ in self._cancelled.values())

    def close(self) -> None:
        self._threads.close()

    async def _await_each(
        self, job: Job, handler: Handler, refs: Sequence[TaskRef], seconds: float, contexts: "_Contexts"
    ) -> list[CallResult]:
        results: list[CallResult] = []
        end_at = self._clock.monotonic() + seconds
        for ref in refs:
            if results and self._clock.monotonic() > end_at:
                break
            results.append(await self._awaited(handler, ref, job.options.timeout, contexts))
        return results

    async def _awaited(self, handler: Handler, ref: TaskRef, timeout: float, contexts: "_Contexts") -> CallResult:
        started = self._clock.monotonic()
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                result = returned(await argued(handler, ref, contexts.make(ref)), ref)
        except asyncio.CancelledError:
            # Either the worker stops, or the handler cancelled itself and has failed.
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            result = raised(asyncio.CancelledError())
        except (KeyboardInterrupt, GeneratorExit):
            # These are for this process, not for the handler.
            raise
        except BaseException as error:
            result = timed_out(timeout) if scope.expired() else raised(error)
        return CallResult(result.body, result.code, result.message, self._clock.monotonic() - started)

    async def _in_threads(
        self, job: Job, handler: Handler, refs: Sequence[TaskRef], seconds: float, contexts: "_Contexts"
    ) -> list[CallResult]:
        results: list[CallResult] = []
        while len(results) < len(refs):
            async with self._slots:
                batch = InProcessBatch(handler, refs[len(results) :], seconds, self._clock, contexts.make)
                results += await self._hop(job, batch)
            if batch.is_cut:
                break
        return results

    async def _hop(self, job: Job, batch: "InProcessBatch") -> list[CallResult]:
        """Return the results of the thread. If a call is stuck, it times out and the thread is abandoned."""
        timeout = job.options.timeout
        done = self._threads.run(batch.run)
        try:
            while not done.done():
                left = batch.left(timeout)
                if left <= 0 and (ended := batch.give_up(timeout)) is not None:
                    return ended
                await asyncio.wait((done,), timeout=max(left, 0))
        except asyncio.CancelledError:
            self._cancelled[done] = job.run.run_id, self._clock.monotonic() + timeout
            raise
        finally:
            batch.stopped = True
        return batch.results


class InProcessBatch:
    """Calls that one thread makes one after the other, while the event loop watches."""

    def __init__(
        self,
        handler: Handler,
        refs: Sequence[TaskRef],
        seconds: float,
        clock: Clock,
        context: Callable[[TaskRef], Context | None],
    ) -> None:
        self._handler = handler
        self._refs = refs
        self._seconds = seconds
        self._clock = clock
        self._context = context
        # The thread locks it between two calls, the loop when it decides that a call is stuck. No call begins after
        # that, so none is made twice.
        self._lock = threading.Lock()
        self._begun = 0
        self._since: float | None = None
        self.results: list[CallResult] = []
        self.stopped = False
        # The calls without a result were not begun, because the others took long.
        self.is_cut = False

    def run(self) -> None:
        monotonic = self._clock.monotonic
        now = monotonic()
        end_at = now + self._seconds
        for ref in self._refs:
            with self._lock:
                if self.stopped:
                    return
                if self.results and now > end_at:
                    self.is_cut = True
                    return
                self._begun += 1
                self._since = began = now
            result = called(self._handler, ref, self._context(ref))
            now = monotonic()
            self.results.append(CallResult(result.body, result.code, result.message, now - began))

    def left(self, timeout: float) -> float:
        """Return the seconds that the running call has left; all of them while the thread has not begun."""
        return timeout if self._since is None else self._since + timeout - self._clock.monotonic()

    def give_up(self, timeout: float) -> list[CallResult] | None:
        """Stop before the next call and return the results; None if the thread has just begun another call."""
        with self._lock:
            if self.left(timeout) > 0:
                return None
            self.stopped = True
            ended = list(self.results)
        return ended if len(ended) == self._begun else [*ended, timed_out(timeout)]


class _Contexts:
    """The contexts of the calls of one batch."""

    def __init__(self, job: Job, handler: Handler, reporter: HandlerReporter | None) -> None:
        self._job = job
        self._wanted = handler.wants_context
        self._reporter = reporter
        self._loop = asyncio.get_running_loop()
        self._made: list[Context] = []

    def make(self, ref: TaskRef) -> Context | None:
        if not self._wanted:
            return None
        context = Context(self._job.job_id, self._job.run.run_id, ref.index, ref.attempt, self._say)
        self._made.append(context)
        return context

    def cancel(self) -> None:
        for context in self._made:
            context.cancelled = True

    def _say(self, done: int, total: int | None, note: str | None) -> None:
        """Report progress, from the handler's thread."""
        if self._reporter is not None:
            self._loop.call_soon_threadsafe(self._reporter.say, 0, done, total, note)

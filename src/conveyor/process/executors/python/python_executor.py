"""The python executor. Gets references whose input is any JSON value, calls the job's handler with each in a child
process, and returns its result as JSON, or its error.

| Code | Meaning |
|---|---|
| handler_missing | no function is registered under the job's `handler` |
| handler_raised | the function raised; the message has the type and the text, never the traceback |
| result_not_json | the function returned a value that JSON cannot hold |
| timeout | the function took longer than `timeout`; the process of one that is not async is replaced |
| process_failed | no process could be started |
| worker_lost | the task killed every process that ran it; it is dead-lettered |

`extract` calls the function of a job that fetches, with pages in place of inputs; extraction.py makes errors of it.

Handlers run in child processes (children.py), so that a handler that crashes, blocks, leaks or holds the interpreter
cannot keep the worker from renewing its leases. When a child dies, the call that it ran is repeated alone, in a process
of its own, and the other calls of its batch go to another child. A call that loses CONVEYOR_MAX_LOST_STARTS processes
is dead-lettered, so a poison task costs each other task at most one start.

With CONVEYOR_HANDLER_PROCESSES=0, and for functions of the main script, which no other process can import, handlers run
inside the worker (in_process.py).
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from conveyor.clock import Clock
from conveyor.egress.lru import Lru
from conveyor.engines.records import Records
from conveyor.errors import Unavailable
from conveyor.handlers import Handler, Handlers
from conveyor.model import Job, JobId, Outcome, RunId, TaskRef
from conveyor.process.executors import LocalExecutor
from conveyor.process.executors.python.children import BatchOutcome, Child, NoCapacity, NotStarted
from conveyor.process.executors.python.handler_calls import (
    CallResult,
    PageCall,
    Setup,
    failed,
    missing,
    outcome_of,
    timed_out,
)
from conveyor.process.executors.python.in_process import InProcessHandlers
from conveyor.process.retry import WORKER_LOST
from conveyor.process.task_progress import ProgressBook, Superseded, Track
from conveyor.settings import Settings

log = structlog.get_logger()

MAX_GRAIN = 256
# A message to a child and back costs some 100 µs: worth it for one slow call, not for each of many quick ones.
QUICK_BATCH = 0.005
# How much larger the next batch of calls may be that take next to no time, and how much each takes at least.
_GROWTH = 16
_LEAST_SECONDS = 1e-6
# No further call of a batch begins after this long: the others can run at the same time as they would alone.
BATCH_SECONDS = 0.05
# With how many calls in a batch a job begins, if those of other jobs with the same handler were quick.
MAX_FIRST_GRAIN = 64
MAX_JOBS = 1024
# Batches of async handlers at once.
_ASYNC_BATCHES = 1024
# Bytes of pages in one batch, unless it has one page alone.
_BATCH_BYTES = 4 * 1024 * 1024
_MAX_FAILED_STARTS = 3
# How many children may die with a batch before any of its calls runs.
_MAX_DEATHS = 10
_START_PAUSE = 0.2
_LONGEST_START_PAUSE = 30.0


class PythonExecutor(LocalExecutor):
    """Runs tasks of kind python. `path` is the module search path; `app` is as for handlers.load_app."""

    def __init__(
        self,
        handlers: Handlers,
        settings: Settings,
        clock: Clock,
        records: Records,
        path: Sequence[str],
        app: str | None = None,
    ) -> None:
        self._handlers = handlers
        self._settings = settings
        self._clock = clock
        self._book = ProgressBook(records, clock, settings)
        # By job, and by handler as of the job that changed its own last.
        self._grains: Lru[JobId, int] = Lru(MAX_JOBS)
        self._handler_grains: Lru[str, int] = Lru(MAX_JOBS)
        modules = [] if app is not None else handlers.modules()
        isolated = settings.handler_processes > 0 and "__main__" not in modules
        self._children = Children(Setup(app, modules, list(path)), settings, clock) if isolated else None
        self._inside = None if isolated else InProcessHandlers(settings.handler_threads, clock)
        self._sync = asyncio.Semaphore(max(1, settings.handler_processes) * settings.handler_threads)
        self._async = asyncio.Semaphore(_ASYNC_BATCHES)

    def grain(self, job: Job) -> int:
        return self._grains.get(job.job_id) or self._handler_grains.get(_name_of(job)) or 1

    def target(self, ref: TaskRef) -> str | None:
        return None

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        handler = self._handlers.find(job.options.handler)
        if handler is None:
            return [outcome_of(missing(job.options.handler, self._handlers.names())) for _ in refs]
        if len(refs) == 1 and handler.wants_context:
            return [await self._attempt_reporting(job, handler, refs[0])]
        return [outcome_of(result) for result in await self._results(job, handler, refs, None)]

    async def extract(self, job: Job, calls: Sequence[PageCall]) -> list[CallResult]:
        """Call the function of the job's `extract` with each page, in batches that are made in parallel. The results
        are in the order of the calls."""
        handler = self._handlers.find(job.options.extract)
        if handler is None:
            return [missing(job.options.extract, self._handlers.names())] * len(calls)
        batches = [self._all_results(job, handler, batch) for batch in _page_batches(calls, self.grain(job))]
        return [result for results in await asyncio.gather(*batches) for result in results]

    def lingering(self, run_id: RunId) -> int:
        inside = 0 if self._inside is None else self._inside.lingering(run_id)
        return inside + (0 if self._children is None else self._children.lingering(run_id))

    async def close(self) -> None:
        if self._children is not None:
            await self._children.close()
        if self._inside is not None:
            self._inside.close()

    async def _attempt_reporting(self, job: Job, handler: Handler, ref: TaskRef) -> Outcome:
        """Make one call that may report progress, and store its reports. Raises Superseded."""
        reporter = TaskReporter(self._book, job, ref)
        calling = asyncio.ensure_future(self._results(job, handler, [ref], reporter))
        reporter.on_superseded = calling.cancel
        try:
            (result,) = await calling
        except asyncio.CancelledError:
            calling.cancel()
            await asyncio.wait([calling])
            await reporter.finish(rest=not reporter.superseded)
            if reporter.superseded:
                raise Superseded from None
            raise
        await reporter.finish(rest=result.code is not None)
        return outcome_of(result)

    async def _all_results(self, job: Job, handler: Handler, calls: Sequence[PageCall]) -> list[CallResult]:
        """Return a result for each call. A batch that is cut, because its first calls took long, is continued."""
        results: list[CallResult] = []
        while len(results) < len(calls):
            more = await self._results(job, handler, calls[len(results) :], None)
            assert more, "a batch makes at least one call"
            results += more
        return results

    async def _results(
        self, job: Job, handler: Handler, refs: Sequence[TaskRef], reporter: "TaskReporter | None"
    ) -> list[CallResult]:
        if self._inside is not None:
            results = await self._inside.run(job, handler, refs, BATCH_SECONDS, reporter)
        else:
            results = await self._in_children(job, handler, refs, reporter)
        if handler.wants_context:
            self._grains.put(job.job_id, 1)
        else:
            self._adapt(job, len(results), sum([result.elapsed for result in results]))
        return results

    async def _in_children(
        self, job: Job, handler: Handler, refs: Sequence[TaskRef], reporter: "TaskReporter | None"
    ) -> list[CallResult]:
        """Return the results of all calls, made by as many children as needed; of the first ones if those took long."""
        assert self._children is not None
        results: dict[int, CallResult] = {}
        # Positions in `refs` without a result.
        left = list(range(len(refs)))
        failed_starts = deaths = 0
        capacity = CapacityWait(self._clock)
        while left:
            async with self._async if handler.is_async else self._sync:
                try:
                    child = await self._children.take()
                    ran = await self._call(child, job, handler, [refs[at] for at in left], reporter)
                except NoCapacity as error:
                    await capacity.pause(error)
                    continue
                except NotStarted as error:
                    failed_starts += 1
                    if failed_starts >= _MAX_FAILED_STARTS:
                        results |= {at: failed("process_failed", str(error)) for at in left}
                        break
                    await self._clock.sleep(_START_PAUSE)
                    continue
            results |= dict(zip(left, ran.results, strict=False))
            left = left[len(ran.results) :]
            if ran.stuck:
                results[left.pop(0)] = timed_out(job.options.timeout)
            elif ran.is_cut and not deaths:
                # The lane runs the others at the same time, as far as it may.
                break
            elif ran.lost is not None:
                deaths += 1
                if ran.running >= 0:
                    at = left.pop(ran.running)
                    results[at] = await self._after_death(job, handler, refs[at], reporter, ran.lost)
                elif deaths > _MAX_DEATHS:
                    results |= {at: failed("process_failed", f"process after process ended {ran.lost}") for at in left}
                    break
        return [results[at] for at in range(len(results))]

    async def _after_death(
        self, job: Job, handler: Handler, ref: TaskRef, reporter: "TaskReporter | None", cause: str
    ) -> CallResult:
        """Return the result of the call that a child died with: it took too long and was killed, or it is repeated."""
        if not cause:
            return timed_out(job.options.timeout)
        return await self._alone(job, handler, ref, reporter, cause)

    async def _alone(
        self, job: Job, handler: Handler, ref: TaskRef, reporter: "TaskReporter | None", cause: str
    ) -> CallResult:
        """Repeat a call whose process died, in a process of its own, where it can harm no other task."""
        assert self._children is not None
        lost, limit = 1, max(1, self._settings.max_lost_starts)
        capacity = CapacityWait(self._clock)
        while lost < limit:
            log.warning(
                "child died; repeating its call alone", run=job.run.run_id, index=ref.index, lost=lost, cause=cause
            )
            try:
                async with self._children.alone() as child:
                    ran = await self._call(child, job, handler, [ref], reporter)
            except NoCapacity as error:
                await capacity.pause(error)
                continue
            except NotStarted as error:
                return failed("process_failed", str(error))
            if ran.results:
                return ran.results[0]
            if ran.stuck or not ran.lost:
                return timed_out(job.options.timeout)
            cause = ran.lost
            lost += 1
        return failed(WORKER_LOST, f"The process was lost {lost} times while it ran this task, at last {cause}.")

    async def _call(
        self, child: Child, job: Job, handler: Handler, refs: Sequence[TaskRef], reporter: "TaskReporter | None"
    ) -> BatchOutcome:
        report = None if reporter is None else reporter.say
        return await child.run(job, handler.name, refs, BATCH_SECONDS, is_async=handler.is_async, report=report)

    def _adapt(self, job: Job, count: int, seconds: float) -> None:
        """Decide on the size of the job's batches, after one with so many calls took so long."""
        grain = self.grain(job)
        if seconds < QUICK_BATCH and count >= grain:
            # The next one takes at most twice as long as a quick one, by what these calls took.
            in_time = int(2 * QUICK_BATCH * count / max(seconds, _LEAST_SECONDS))
            grain = min(grain * _GROWTH, max(grain * 2, in_time), MAX_GRAIN)
        elif seconds > BATCH_SECONDS:
            grain = max(min(grain, count) // 2, 1)
        self._grains.put(job.job_id, grain)
        self._handler_grains.put(_name_of(job), min(grain, MAX_FIRST_GRAIN))


def _name_of(job: Job) -> str:
    """The name of the handler that the job calls."""
    return job.options.handler or job.options.extract or ""


def _page_batches(calls: Sequence[PageCall], grain: int) -> list[list[PageCall]]:
    """The calls in batches of at most `grain` pages, and of few bytes if there is more than one page."""
    batches: list[list[PageCall]] = []
    size = 0
    for call in calls:
        length = 0 if call.page is None else len(call.page.body)
        if not batches or size + length > _BATCH_BYTES or len(batches[-1]) >= grain:
            batches.append([])
            size = 0
        size += length
        batches[-1].append(call)
    return batches


class CapacityWait:
    """Growing pauses while the machine has no capacity for another child. They spend no attempt."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds = _START_PAUSE

    async def pause(self, error: NoCapacity) -> None:
        log.error("no capacity for a process for handlers; retrying", error=str(error), seconds=self._seconds)
        await self._clock.sleep(self._seconds)
        self._seconds = min(_LONGEST_START_PAUSE, self._seconds * 2)


class Children:
    """The children of one executor. The first starts with the first call, more start while all are busy."""

    def __init__(self, setup: Setup, settings: Settings, clock: Clock) -> None:
        self._setup = setup
        self._settings = settings
        self._clock = clock
        self._ready: list[Child] = []
        self._all: set[Child] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._problem: NotStarted | None = None
        self._one_alone = asyncio.Semaphore(1)

    async def take(self) -> Child:
        """Return the child with the lowest load. Raises NotStarted."""
        while True:
            ready = [child for child in self._ready if not child.retired]
            idle = min(ready, key=lambda child: child.load, default=None)
            wanted = len(ready) + len(self._starting) < self._settings.handler_processes
            if wanted and (idle is None or idle.load > 0):
                self._start()
            if idle is not None:
                return idle
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
            if self._problem is not None and not self._ready:
                raise self._problem

    def alone(self) -> "Alone":
        """Return a child for one call, in addition to the others."""
        return Alone(self)

    async def make(self) -> Child:
        child = Child(self._setup, self._settings, self._settled)
        self._all.add(child)
        try:
            await child.start()
        except BaseException:
            self._all.discard(child)
            raise
        return child

    def lingering(self, run_id: RunId) -> int:
        return sum(child.lingering(run_id) for child in self._all)

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in list(self._all)))

    @property
    def one_alone(self) -> asyncio.Semaphore:
        return self._one_alone

    def _start(self) -> None:
        task = asyncio.create_task(self._start_one())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self) -> None:
        try:
            self._ready.append(await self.make())
            self._problem = None
        except NotStarted as error:
            log.error("handler process not started", error=str(error))
            self._problem = error
        except Exception as error:
            # Callers of `take` must see the error.
            log.exception("handler process not started")
            self._problem = NotStarted(f"the process cannot be started: {type(error).__name__}")

    def _settled(self, child: Child) -> None:
        if child.retired and child in self._ready:
            self._ready.remove(child)
        if child.ended:
            self._all.discard(child)


class Alone:
    """async with: a child for this caller only; one such child at a time."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._child: Child | None = None

    async def __aenter__(self) -> Child:
        await self._children.one_alone.acquire()
        try:
            self._child = await self._children.make()
        except BaseException:
            self._children.one_alone.release()
            raise
        return self._child

    async def __aexit__(self, *_: object) -> None:
        assert self._child is not None
        try:
            await self._child.end()
        finally:
            self._children.one_alone.release()


class TaskReporter:
    """Stores the progress reports of one call, and learns whether a newer attempt has superseded it."""

    def __init__(self, book: ProgressBook, job: Job, ref: TaskRef) -> None:
        self._book = book
        self._job = job
        self._ref = ref
        self._track: Track | None = None
        self._last: tuple[int, int | None, str | None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self.superseded = False
        self.on_superseded: Callable[[], object] = lambda: None

    def say(self, position: int, done: int, total: int | None, note: str | None) -> None:
        self._last = (done, total, note)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def finish(self, *, rest: bool) -> None:
        """Write the last report; with `rest`, mark that no attempt runs."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._track is not None and rest:
            try:
                await self._track.rest()
            except (Superseded, Unavailable):
                return

    async def _write(self) -> None:
        try:
            while self._last is not None and not self.superseded:
                (done, total, note), self._last = self._last, None
                if self._track is None:
                    self._track = await self._book.begin(self._job, self._ref)
                    await self._track.save(done, total, note=note)
                elif self._track.is_due(done, total) or note != self._track.note:
                    await self._track.save(done, total, note=note)
        except Superseded:
            self.superseded = True
            self.on_superseded()
        except Unavailable as error:
            log.warning("progress not written", run=self._job.run.run_id, index=self._ref.index, error=repr(error))
        finally:
            self._writing = None

"""Children: the handler processes of a worker, seen from the worker. A batch of calls goes out as one message and its
results come back as one; shared memory (handler_calls.CallSlots) shows which call runs.

A child ends in one of three ways. It dies: the worker knows which call ran, and its batches fail. A call takes too
long: it times out, the child gets no more batches, and is killed once its other calls have finished. Or a fresh child
replaces it, because it has made enough calls or uses too much memory.
"""

import asyncio
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol, cast

import structlog

from conveyor.model import Job, RunId, TaskRef
from conveyor.process.executors.fetch.frames import JoinedFrames, read_frame, write_frame
from conveyor.process.executors.python.handler_calls import (
    BatchDone,
    CallBatch,
    CallProgress,
    CallResult,
    CallSlots,
    Cancel,
    GiveUp,
    PageCall,
    Ready,
    Setup,
    decode_answer,
)
from conveyor.settings import Settings, handler_environment
from conveyor.telemetry.child_processes import add_child, remove_child

log = structlog.get_logger()

MODULE = "conveyor.process.executors.python.handler_process"
MAX_BATCHES = 2048
_MIB = 1024 * 1024
_START_SECONDS = 60.0
_END_SECONDS = 2.0
# How long a child has to confirm that a call timed out. If it does not, the call holds the interpreter.
_GIVE_UP_SECONDS = 1.0
# The child times out async handlers itself; this is for one that blocks the loop.
_ASYNC_GRACE = 2.0
_LONGEST_WATCH = 0.5
_SHORTEST_WATCH = 0.02


class NotStarted(Exception):
    """A child could not be started, or could not load the handlers."""


class NoCapacity(NotStarted):
    """The machine has no process, descriptor or memory left for a child. That passes, and no task is to blame."""


# The operating system's errors for that.
_NO_CAPACITY = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)


class ProgressCallback(Protocol):
    """Gets the progress reports of a call."""

    def __call__(self, position: int, done: int, total: int | None, note: str | None) -> None: ...


class BatchOutcome:
    """The results of a batch's first calls, and how it ended if not all have one."""

    __slots__ = ("is_cut", "lost", "results", "running", "stuck")

    def __init__(
        self,
        results: Sequence[CallResult],
        *,
        is_cut: bool = False,
        stuck: bool = False,
        lost: str | None = None,
        running: int = -1,
    ) -> None:
        self.results = results
        # The calls after them were not begun, because these took long.
        self.is_cut = is_cut
        # The call after them timed out.
        self.stuck = stuck
        # Why the child died; the call at `running` ran, -1: none did.
        self.lost = lost
        self.running = running


class _SentBatch:
    """A batch that was sent to a child."""

    def __init__(self, batch: CallBatch, allowed: float, report: ProgressCallback | None) -> None:
        self.batch = batch
        self.allowed = allowed
        self.report = report
        self.ran: asyncio.Future[BatchOutcome] = asyncio.get_running_loop().create_future()
        # The call that timed out, and when the child was asked to abandon it.
        self.abandoned_at: float | None = None
        self.abandoned = -1


class Child:
    """One process. It calls `settled` whenever a batch has finished or the process has ended."""

    def __init__(self, setup: Setup, settings: Settings, settled: Callable[["Child"], None]) -> None:
        self._setup = setup
        self._settings = settings
        self._settled = settled
        self._numbers = itertools.count(1)
        self._free = list(range(MAX_BATCHES))
        self._sent: dict[int, _SentBatch] = {}
        self._calls = 0
        self._writer: JoinedFrames | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._slots: CallSlots | None = None
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._stuck = False
        # Whether it gets no more batches.
        self.retired = False
        self.ended = False

    @property
    def load(self) -> int:
        return len(self._sent)

    def lingering(self, run_id: RunId) -> int:
        """Return how many batches of a run still have a call in progress although their callers were cancelled."""
        return sum(out.batch.run_id == run_id and out.ran.cancelled() for out in self._sent.values())

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it has loaded the handlers. Raises NotStarted."""
        try:
            await self._start()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self.end()
            raise NotStarted(f"the process ended while it loaded the handlers, {self._cause()}") from None
        except OSError as error:
            await self.end()
            kind = NoCapacity if error.errno in _NO_CAPACITY else NotStarted
            raise kind(f"the process cannot be started: {error}") from None
        except BaseException:
            await self.end()
            raise

    async def _start(self) -> None:
        ours = self._launch()
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        self._writer = JoinedFrames(writer)
        async with asyncio.timeout(_START_SECONDS):
            write_frame(self._writer, self._setup)
            ready = decode_answer(await read_frame(reader))
        assert isinstance(ready, Ready)
        if ready.problem is not None:
            raise NotStarted(ready.problem)
        self._listening = asyncio.create_task(self._listen(reader))

    def _launch(self) -> socket.socket:
        """Start the process; returns this side's end of its socket."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, tempfile.TemporaryFile() as table:
                table.truncate(CallSlots.size(MAX_BATCHES))
                self._slots = CallSlots(table.fileno(), MAX_BATCHES)
                self._process = self._popen((theirs.fileno(), table.fileno()))
        except BaseException:
            ours.close()
            raise
        add_child("handler", self._process.pid)
        return ours

    def _popen(self, descriptors: tuple[int, int]) -> "subprocess.Popen[bytes]":
        # What handlers print goes to stderr: standard output may carry data. In a session of its own, so that the kill
        # reaches all processes that its handlers started.
        return subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", MODULE, *map(str, (*descriptors, MAX_BATCHES, os.getpid()))],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=handler_environment(),
            start_new_session=True,
        )

    async def run(
        self,
        job: Job,
        handler: str,
        refs: Sequence[TaskRef],
        seconds: float,
        *,
        is_async: bool,
        report: ProgressCallback | None = None,
    ) -> BatchOutcome:
        """Make these calls and wait for the results; begin none after so many seconds. If the caller is cancelled, so
        are the calls."""
        assert self._writer is not None and not self.ended
        timeout = job.options.timeout
        # A reference is encoded as a call without a page.
        calls = cast("list[PageCall]", list(refs))
        batch = CallBatch(
            next(self._numbers), self._free.pop(), handler, timeout, job.job_id, job.run.run_id, calls, seconds
        )
        out = self._sent[batch.number] = _SentBatch(batch, timeout + (_ASYNC_GRACE if is_async else 0.0), report)
        write_frame(self._writer, batch)
        self._watch()
        try:
            return await out.ran
        except asyncio.CancelledError:
            if not self.ended:
                write_frame(self._writer, Cancel(batch.number))
            raise

    async def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self.retired = True
        self._kill()
        if self._listening is not None:
            await asyncio.wait([self._listening])
        else:
            await self._gone()

    def _watch(self) -> None:
        if self._watching is None and self._sent:
            shortest = min(out.batch.timeout for out in self._sent.values())
            pause = max(_SHORTEST_WATCH, min(_LONGEST_WATCH, shortest / 5))
            self._watching = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        """Find calls that take too long, by the machine's clock, which the child uses too."""
        self._watching = None
        if self.ended or self._slots is None:
            return
        if self._process is not None and self._process.poll() is not None and self._listening is not None:
            # A process that a handler forked may hold the socket open.
            self._listening.cancel()
            return
        now = time.monotonic()
        for out in list(self._sent.values()):
            position, since = self._slots.read(out.batch.slot)
            if out.abandoned_at is None:
                if position >= 0 and now - since > out.allowed:
                    self._abandon(out, position, now)
            elif now - out.abandoned_at > _GIVE_UP_SECONDS:
                self._kill()
                return
        self._watch()

    def _abandon(self, out: _SentBatch, position: int, now: float) -> None:
        assert self._writer is not None
        out.abandoned, out.abandoned_at = position, now
        self._stuck = True
        self.retired = True
        log.warning("handler timed out; replacing its process", handler=out.batch.handler, pid=self.process_id)
        write_frame(self._writer, GiveUp(out.batch.number, position))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                answer = decode_answer(await read_frame(reader))
                if isinstance(answer, BatchDone):
                    self._done(answer)
                elif isinstance(answer, CallProgress):
                    self._report_progress(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await self._gone()

    def _done(self, done: BatchDone) -> None:
        out = self._sent.pop(done.number)
        self._free.append(out.batch.slot)
        stuck = len(done.results) < len(out.batch.refs) and not done.is_cut
        if not out.ran.done():
            out.ran.set_result(BatchOutcome(done.results, is_cut=done.is_cut, stuck=stuck))
        self._calls += len(done.results)
        if self._is_worn(done.memory):
            self.retired = True
        self._end_if_idle()
        self._settled(self)

    def _report_progress(self, said: CallProgress) -> None:
        out = self._sent.get(said.number)
        if out is not None and out.report is not None:
            out.report(said.position, said.done, said.total, said.note)

    def _is_worn(self, memory: int) -> bool:
        most_calls, most_memory = self._settings.handler_calls, self._settings.handler_mib * _MIB
        return 0 < most_calls <= self._calls or 0 < most_memory <= memory

    def _end_if_idle(self) -> None:
        if not self.retired or self._sent or self.ended or self._writer is None:
            return
        if self._stuck:
            # One of its threads would never return.
            self._kill()
        else:
            # It ends by itself when the socket closes.
            self._writer.close()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _gone(self) -> None:
        """Clean up after the process: the socket is closed, or is about to be."""
        self.ended = self.retired = True
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._wait)
            remove_child("handler", self._process.pid, early=bool(self._sent) or self._stuck)
        cause = self._cause()
        sent, self._sent = self._sent, {}
        for batch in sent.values():
            if not batch.ran.done():
                batch.ran.set_result(self._lost(batch, cause))
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        self._settled(self)

    def _lost(self, out: _SentBatch, cause: str) -> BatchOutcome:
        assert self._slots is not None
        position, _ = self._slots.read(out.batch.slot)
        if out.abandoned >= 0 and out.abandoned == position:
            # It was killed for this call. The results of the calls before it are lost.
            return BatchOutcome([], lost="", running=position)
        if self._stuck:
            # It was killed for another batch's call.
            return BatchOutcome([], lost="")
        return BatchOutcome([], lost=cause, running=position)

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _cause(self) -> str:
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "for no known reason"
        if code >= 0:
            return f"with exit code {code}"
        try:
            return f"by {signal.Signals(-code).name}"
        except ValueError:
            return f"by signal {-code}"

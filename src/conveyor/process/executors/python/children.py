"""Children: the processes that run handlers for a worker, seen from the worker. One batch of calls goes out as one
message and its results come back as one; which call of it runs is read from shared memory (calls.Slots).

A child ends in one of three ways. It dies: what it ran is known, and its batches are told. A call takes too long: it
is given up, the child gets nothing more to do, and is killed when its other calls have ended. Or it has made so many
calls, or has so much memory, that a fresh one takes its place.
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
from typing import Protocol

import structlog

from conveyor.model import Job, TaskRef
from conveyor.process.executors.fetch.frames import framed, read_frame
from conveyor.process.executors.python.handler_calls import (
    BatchDone,
    CallBatch,
    CallProgress,
    CallResult,
    CallSlots,
    Cancel,
    GiveUp,
    Ready,
    Setup,
    decode_answer,
)
from conveyor.settings import Settings, foreign_environment
from conveyor.telemetry.child_processes import born, gone

log = structlog.get_logger()

MODULE = "conveyor.process.executors.python.handler_process"
MAX_BATCHES = 2048
_MIB = 1024 * 1024
_START_SECONDS = 60.0
_END_SECONDS = 2.0
# How long a child has to answer that it gives a call up. One that does not is held by a call that never lets go.
_GIVE_UP_SECONDS = 1.0
# Async handlers are timed out by the child itself; this is for one that blocks its loop.
_ASYNC_GRACE = 2.0
_LONGEST_WATCH = 0.5
_SHORTEST_WATCH = 0.02


class NotStarted(Exception):
    """A child could not be started, or could not load the handlers."""


class NoCapacity(NotStarted):
    """The machine has no process, descriptor or memory left for a child. That passes, and is no fault of a task."""


# What the operating system says then.
_NO_CAPACITY = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT}
)


class ProgressCallback(Protocol):
    """Told what a call says of its progress."""

    def __call__(self, position: int, done: int, total: int | None, note: str | None) -> None: ...


class BatchOutcome:
    """What came of a batch: results of its first calls, and how it ended if not all have one."""

    __slots__ = ("lost", "results", "running", "stuck")

    def __init__(
        self, results: Sequence[CallResult], *, stuck: bool = False, lost: str | None = None, running: int = -1
    ) -> None:
        self.results = results
        # The call after them took too long.
        self.stuck = stuck
        # The child died, of this; the call at `running` was under way, -1 if none was.
        self.lost = lost
        self.running = running


class _Out:
    """A batch that a child has."""

    def __init__(self, batch: CallBatch, allowed: float, report: ProgressCallback | None) -> None:
        self.batch = batch
        self.allowed = allowed
        self.report = report
        self.ran: asyncio.Future[BatchOutcome] = asyncio.get_running_loop().create_future()
        # Since when the child was asked to give up the call at this position.
        self.given_up_at: float | None = None
        self.given_up = -1


class Child:
    """One process. `settled` is called whenever it has fewer batches, or has ended."""

    def __init__(self, setup: Setup, settings: Settings, settled: Callable[["Child"], None]) -> None:
        self._setup = setup
        self._settings = settings
        self._settled = settled
        self._numbers = itertools.count(1)
        self._free = list(range(MAX_BATCHES))
        self._out: dict[int, _Out] = {}
        self._calls = 0
        self._writer: asyncio.StreamWriter | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._slots: CallSlots | None = None
        self._listening: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._stuck = False
        # It gets no more batches.
        self.retired = False
        self.ended = False

    @property
    def load(self) -> int:
        return len(self._out)

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Raises NotStarted."""
        try:
            await self._start()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            await self.end()
            raise NotStarted(f"the process ended while it loaded the handlers, {self._cause()}") from None
        except OSError as error:
            await self.end()
            kind = NoCapacity if error.errno in _NO_CAPACITY else NotStarted
            raise kind(f"the process can not be started: {error}") from None
        except BaseException:
            await self.end()
            raise

    async def _start(self) -> None:
        ours = self._launch()
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        async with asyncio.timeout(_START_SECONDS):
            self._writer.write(framed(self._setup))
            ready = decode_answer(await read_frame(reader))
        assert isinstance(ready, Ready)
        if ready.problem is not None:
            raise NotStarted(ready.problem)
        self._listening = asyncio.create_task(self._listen(reader))

    def _launch(self) -> socket.socket:
        """The process, on the other end of what is returned."""
        ours, theirs = socket.socketpair()
        try:
            with theirs, tempfile.TemporaryFile() as table:
                table.truncate(CallSlots.size(MAX_BATCHES))
                self._slots = CallSlots(table.fileno(), MAX_BATCHES)
                self._process = self._popen((theirs.fileno(), table.fileno()))
        except BaseException:
            ours.close()
            raise
        born("handler", self._process.pid)
        return ours

    def _popen(self, descriptors: tuple[int, int]) -> "subprocess.Popen[bytes]":
        # What handlers print is for people: standard output may be somebody's data. In a session of its own, so that
        # it is killed with all that its handlers started.
        return subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", MODULE, *map(str, (*descriptors, MAX_BATCHES, os.getpid()))],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=foreign_environment(),
            start_new_session=True,
        )

    async def run(
        self, job: Job, handler: str, refs: Sequence[TaskRef], *, is_async: bool, report: ProgressCallback | None = None
    ) -> BatchOutcome:
        """Make these calls and wait for what comes of them. If the caller is cancelled, the calls are told."""
        assert self._writer is not None and not self.ended
        timeout = job.options.timeout
        batch = CallBatch(
            next(self._numbers), self._free.pop(), handler, timeout, job.job_id, job.run.run_id, list(refs)
        )
        out = self._out[batch.number] = _Out(batch, timeout + (_ASYNC_GRACE if is_async else 0.0), report)
        self._writer.write(framed(batch))
        self._watch()
        try:
            return await out.ran
        except asyncio.CancelledError:
            if not self.ended:
                self._writer.write(framed(Cancel(batch.number)))
            raise

    async def end(self) -> None:
        """Kill it, and wait until it is gone."""
        self.retired = True
        self._kill()
        if self._listening is not None:
            await asyncio.wait([self._listening])
        else:
            await self._gone()

    def _watch(self) -> None:
        if self._watching is None and self._out:
            shortest = min(out.batch.timeout for out in self._out.values())
            pause = max(_SHORTEST_WATCH, min(_LONGEST_WATCH, shortest / 5))
            self._watching = asyncio.get_running_loop().call_later(pause, self._look)

    def _look(self) -> None:
        """Find calls that take too long, by the machine's own clock: the child goes by no other."""
        self._watching = None
        if self.ended or self._slots is None:
            return
        if self._process is not None and self._process.poll() is not None and self._listening is not None:
            # What a handler has forked may hold the socket open.
            self._listening.cancel()
            return
        now = time.monotonic()
        for out in list(self._out.values()):
            position, since = self._slots.read(out.batch.slot)
            if out.given_up_at is None:
                if position >= 0 and now - since > out.allowed:
                    self._give_up(out, position, now)
            elif now - out.given_up_at > _GIVE_UP_SECONDS:
                self._kill()
                return
        self._watch()

    def _give_up(self, out: _Out, position: int, now: float) -> None:
        assert self._writer is not None
        out.given_up, out.given_up_at = position, now
        self._stuck = True
        self.retired = True
        log.warning("a handler takes too long; its process is replaced", handler=out.batch.handler, pid=self.process_id)
        self._writer.write(framed(GiveUp(out.batch.number, position)))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                answer = decode_answer(await read_frame(reader))
                if isinstance(answer, BatchDone):
                    self._done(answer)
                elif isinstance(answer, CallProgress):
                    self._said(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            await self._gone()

    def _done(self, done: BatchDone) -> None:
        out = self._out.pop(done.number)
        self._free.append(out.batch.slot)
        stuck = len(done.results) < len(out.batch.refs)
        if not out.ran.done():
            out.ran.set_result(BatchOutcome(done.results, stuck=stuck))
        self._calls += len(done.results)
        if self._is_worn(done.memory):
            self.retired = True
        self._end_if_idle()
        self._settled(self)

    def _said(self, said: CallProgress) -> None:
        out = self._out.get(said.number)
        if out is not None and out.report is not None:
            out.report(said.position, said.done, said.total, said.note)

    def _is_worn(self, memory: int) -> bool:
        most_calls, most_memory = self._settings.handler_calls, self._settings.handler_mib * _MIB
        return 0 < most_calls <= self._calls or 0 < most_memory <= memory

    def _end_if_idle(self) -> None:
        if not self.retired or self._out or self.ended or self._writer is None:
            return
        if self._stuck:
            # A thread of it would never come back.
            self._kill()
        else:
            # It ends by itself when the socket does, as a program that has no more to do.
            self._writer.close()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _gone(self) -> None:
        """The socket is at its end, or is to be."""
        self.ended = self.retired = True
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            await asyncio.to_thread(self._wait)
            gone("handler", self._process.pid, early=bool(self._out) or self._stuck)
        cause = self._cause()
        out, self._out = self._out, {}
        for one in out.values():
            if not one.ran.done():
                one.ran.set_result(self._lost(one, cause))
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        self._settled(self)

    def _lost(self, out: _Out, cause: str) -> BatchOutcome:
        assert self._slots is not None
        position, _ = self._slots.read(out.batch.slot)
        if out.given_up >= 0 and out.given_up == position:
            # It was killed for this call; of those before it nothing is known any more.
            return BatchOutcome([], lost="", running=position)
        if self._stuck:
            # It was killed for another.
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

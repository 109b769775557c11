"""A handler process: `python -m conveyor.process.executors.python.handler_process ...`.

Batches of calls in, results out. Async handlers run on the event loop of the main thread, others in threads; one more
thread reads, so that a busy handler does not delay the worker's orders. A handler that crashes, leaks or blocks harms
only this process: the worker keeps renewing its leases, and replaces it.

It ends with the worker, because the socket between them closes; on Linux the kernel kills it even while a handler holds
the interpreter.
"""

import asyncio
import importlib
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import msgspec

from conveyor.handlers import Context, Handler, Handlers, default, describe_error, load_app
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
    argued,
    called,
    decode_order,
    missing,
    raised,
    returned,
    timed_out,
)

_LENGTH = struct.Struct("<I")
# The shortest time between two progress reports of a call.
_REPORT_SECONDS = 0.5
_MEASURE_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1
# If memory runs out, the kernel kills this process before the worker.
_OOM_SCORE = "500"

_encode = msgspec.msgpack.Encoder().encode
_monotonic = time.monotonic


class Work:
    """A running batch. Its lock is taken between two calls, and when a call times out: no call begins after that."""

    def __init__(self, batch: CallBatch) -> None:
        self.batch = batch
        self.lock = threading.Lock()
        self.position = -1
        self.stopped = False
        self.cancelled = False
        # Calls of it are left for another batch.
        self.is_cut = False
        self.results: list[CallResult] = []
        self.context: Context | None = None
        self.task: asyncio.Task[None] | None = None


class Runner:
    """Runs the orders that it reads."""

    def __init__(self, sock: socket.socket, slots: CallSlots, handlers: Handlers) -> None:
        self._sock = sock
        self._slots = slots
        self._handlers = handlers
        self._sending = threading.Lock()
        self._works: dict[int, Work] = {}
        self._queue: SimpleQueue[tuple[Work, Handler]] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._memory = 0
        self._measured_at = 0.0

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        threading.Thread(target=self._read, name="orders", daemon=True).start()
        await self._stopped.wait()

    def _read(self) -> None:
        """Read orders until the socket closes, in a thread of its own."""
        assert self._loop is not None and self._stopped is not None
        try:
            while (frame := read_frame(self._sock)) is not None:
                self._obey(decode_order(frame))
        finally:
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _obey(self, order: Setup | CallBatch | Cancel | GiveUp) -> None:
        match order:
            case CallBatch():
                self._begin(order)
            case Cancel():
                self._cancel(order)
            case GiveUp():
                self._give_up(order)

    def _begin(self, batch: CallBatch) -> None:
        work = self._works[batch.number] = Work(batch)
        handler = self._handlers.find(batch.handler)
        if handler is None:
            work.results = [missing(batch.handler, self._handlers.names())] * len(batch.refs)
            self._finish(work)
        elif handler.is_async:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._start, work, handler)
        else:
            self._queue.put((work, handler))
            if not self._idle.acquire(blocking=False):
                threading.Thread(target=self._serve_calls, daemon=True).start()

    def _serve_calls(self) -> None:
        while True:
            work, handler = self._queue.get()
            with answering():
                self._call_all(work, handler)
            self._idle.release()

    def _call_all(self, work: Work, handler: Handler) -> None:
        slot, mark, results = work.batch.slot, self._slots.mark, work.results
        now = _monotonic()
        end_at = now + work.batch.seconds
        for position, ref in enumerate(work.batch.refs):
            with work.lock:
                if work.stopped:
                    return
                if work.cancelled:
                    break
                if position and now > end_at:
                    work.is_cut = True
                    break
                work.position = position
                mark(slot, position, now)
            result = called(handler, ref, self._context(work, handler, position))
            began, now = now, _monotonic()
            results.append(CallResult(result.body, result.code, result.message, now - began))
        self._finish(work)

    def _start(self, work: Work, handler: Handler) -> None:
        assert self._loop is not None
        work.task = self._loop.create_task(self._await_all(work, handler))

    async def _await_all(self, work: Work, handler: Handler) -> None:
        with answering():
            await self._await_each(work, handler)

    async def _await_each(self, work: Work, handler: Handler) -> None:
        slot = work.batch.slot
        end_at = _monotonic() + work.batch.seconds
        for position in range(len(work.batch.refs)):
            now = _monotonic()
            with work.lock:
                if work.stopped:
                    return
                if work.cancelled:
                    break
                if position and now > end_at:
                    work.is_cut = True
                    break
                work.position = position
                self._slots.mark(slot, position, now)
            result = await self._awaited(work, handler, position)
            work.results.append(CallResult(result.body, result.code, result.message, _monotonic() - now))
        self._finish(work)

    async def _awaited(self, work: Work, handler: Handler, position: int) -> CallResult:
        scope = asyncio.timeout(work.batch.timeout)
        try:
            async with scope:
                context = self._context(work, handler, position)
                ref = work.batch.refs[position]
                return returned(await argued(handler, ref, context), ref)
        except BaseException as error:
            # A handler may also cancel itself or exit: here that is an error like any other.
            return timed_out(work.batch.timeout) if scope.expired() else raised(error)

    def _context(self, work: Work, handler: Handler, position: int) -> Context | None:
        if not handler.wants_context:
            return None
        batch = work.batch
        ref = batch.refs[position]
        say = self._speaker(batch.number, position)
        work.context = Context(batch.job_id, batch.run_id, ref.index, ref.attempt, say)
        work.context.cancelled = work.cancelled
        return work.context

    def _speaker(self, number: int, position: int) -> Callable[[int, int | None, str | None], None]:
        said_at = -_REPORT_SECONDS

        def say(done: int, total: int | None, note: str | None) -> None:
            nonlocal said_at
            now = _monotonic()
            if now - said_at >= _REPORT_SECONDS or done == total:
                said_at = now
                self._send(CallProgress(number, position, done, total, note))

        return say

    def _finish(self, work: Work) -> None:
        with work.lock:
            if work.stopped:
                return
            work.stopped = True
            self._slots.mark(work.batch.slot, -1, 0.0)
        self._works.pop(work.batch.number, None)
        self._send(BatchDone(work.batch.number, work.results, self._measured(), work.is_cut))

    def _cancel(self, order: Cancel) -> None:
        work = self._works.get(order.number)
        if work is None:
            return
        work.cancelled = True
        if work.context is not None:
            work.context.cancelled = True
        if work.task is not None:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(work.task.cancel)

    def _give_up(self, order: GiveUp) -> None:
        work = self._works.get(order.number)
        if work is None:
            return
        with work.lock:
            if work.stopped or work.position != order.position:
                return
            work.stopped = True
            results = list(work.results)
        self._works.pop(order.number, None)
        if len(results) > order.position:
            # The call finished just now.
            results = results[: order.position]
        self._send(BatchDone(order.number, results, self._measured()))

    def _measured(self) -> int:
        now = _monotonic()
        if now - self._measured_at >= _MEASURE_SECONDS:
            self._measured_at = now
            self._memory = memory()
        return self._memory

    def _send(self, answer: Ready | BatchDone | CallProgress) -> None:
        send_frame(self._sock, answer, self._sending)


@contextmanager
def answering() -> Iterator[None]:
    """End the process if a batch cannot be answered: the worker would wait for the answer for ever."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        os._exit(1)


def memory() -> int:
    """Return the resident bytes of this process; their peak where the system tells no more."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def read_frame(sock: socket.socket) -> bytearray | None:
    """Read the next frame; None at the end."""
    head = _read_exactly(sock, _LENGTH.size)
    return None if head is None else _read_exactly(sock, _LENGTH.unpack(head)[0])


def _read_exactly(sock: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except ConnectionError:
            return None
        if got == 0:
            return None
        view = view[got:]
    return data


def send_frame(sock: socket.socket, answer: Ready | BatchDone | CallProgress, lock: threading.Lock) -> None:
    data = _encode(answer)
    with lock, suppress(ConnectionError, BrokenPipeError):
        sock.sendall(_LENGTH.pack(len(data)) + data)


def _protect(parent: int) -> None:
    """Die with the worker, and before it."""
    # Signals are for the worker, which decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform != "linux":
        return
    import ctypes  # noqa: PLC0415  (of no use elsewhere)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _load(setup: Setup) -> Handlers:
    sys.path[:] = setup.path
    if setup.app is not None:
        return load_app(setup.app)
    for module in setup.modules:
        importlib.import_module(module)
    return default


def main() -> None:
    descriptor, table, count, parent = (int(text) for text in sys.argv[1:])
    _protect(parent)
    os.set_inheritable(descriptor, False)
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(True)
    frame = read_frame(sock)
    if frame is None:
        return
    setup = decode_order(frame)
    assert isinstance(setup, Setup)
    lock = threading.Lock()
    try:
        handlers = _load(setup)
    except BaseException as error:
        send_frame(sock, Ready(describe_error(error)), lock)
        return
    send_frame(sock, Ready(), lock)
    slots = CallSlots(table, count)
    os.close(table)
    Runner(sock, slots, handlers).run()


if __name__ == "__main__":
    main()

"""The I/O of the client in two forms: on the caller's event loop, or blocking.

The logic of the client is written once, as coroutines over Io. With an AsyncIo the caller awaits them. With a
BlockingIo every wait blocks, so the coroutines never suspend, and `drive` runs them to completion in place: in any
thread, in a notebook, or under a running loop. Only the HTTP exchange runs on a loop in a thread of its own, so that
Ctrl-C works during a request.
"""

import asyncio
import os
import random
import threading
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import wait
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from conveyor.client.http import Http, HttpRequest, HttpResponse, StreamedResponse

T = TypeVar("T")

_WAIT_SECONDS = 1.0


class ResponseStream(Protocol):
    """A response whose body is read piece by piece."""

    status: int

    @property
    def headers(self) -> dict[str, str]: ...

    async def read(self) -> bytes | None: ...


class Io(Protocol):
    """HTTP, files, time and randomness."""

    # Whether the caller may await other things than this Io.
    is_async: bool

    async def send(self, request: HttpRequest) -> HttpResponse: ...

    def open(self, request: HttpRequest) -> AbstractAsyncContextManager[ResponseStream]: ...

    async def run_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that may block, such as one that reads a file."""

    async def pause(self, seconds: float) -> None: ...

    def monotonic(self) -> float: ...

    def jitter(self) -> float:
        """A number in [0, 1)."""

    async def close(self) -> None: ...


class AsyncIo:
    """Io on the event loop of the caller."""

    is_async = True

    def __init__(self) -> None:
        self._http = Http()

    async def send(self, request: HttpRequest) -> HttpResponse:
        return await self._http.send(request)

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[ResponseStream]:
        incoming = await self._http.begin(request)
        try:
            yield incoming
        finally:
            await incoming.close()

    async def run_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.to_thread(function, *arguments)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    def jitter(self) -> float:
        return random.random()

    async def close(self) -> None:
        await self._http.close()


class BlockingIo:
    """Io that blocks the calling thread. Several threads may share it."""

    is_async = False

    def __init__(self) -> None:
        self._http = Http()
        self._loop = _Loop()

    async def send(self, request: HttpRequest) -> HttpResponse:
        return self._loop.call(self._http.send(request))

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[ResponseStream]:
        incoming = self._loop.call(self._http.begin(request))
        try:
            yield _BlockingResponse(self._loop, incoming)
        finally:
            self._loop.call(incoming.close())

    async def run_blocking(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    async def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    def jitter(self) -> float:
        return random.random()

    async def close(self) -> None:
        self._loop.stop(self._http.close())


class _BlockingResponse:
    """A StreamedResponse that is read from another thread."""

    def __init__(self, loop: "_Loop", incoming: StreamedResponse) -> None:
        self._loop = loop
        self._incoming = incoming
        self.status = incoming.status
        self.headers = incoming.headers

    async def read(self) -> bytes | None:
        return self._loop.call(self._incoming.read())


class _Loop:
    """An event loop in a thread of its own, started by the first call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._finalizer: Callable[[], Any] | None = None

    def call(self, awaited: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. Ctrl-C cancels it."""
        if self._running is not None and self._process != os.getpid():
            awaited.close()
            raise RuntimeError(
                "the client was used before this process was forked. Start processes with the spawn method."
            )
        loop, thread = self._start()
        if thread is threading.current_thread():
            awaited.close()
            raise RuntimeError("a progress callback cannot use the client that calls it. Use another client.")
        future = asyncio.run_coroutine_threadsafe(awaited, loop)
        try:
            # Wait in short turns: a Ctrl-C just before an unlimited wait would be delayed until its end.
            while not wait([future], _WAIT_SECONDS).done:
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine and stop the loop. The next call starts a new one."""
        if self._finalizer is None:
            last.close()
            return
        self.call(last)
        with self._lock:
            finalizer, self._finalizer, self._running = self._finalizer, None, None
        finalizer()

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="conveyor-client", daemon=True)
                thread.start()
                self._running = loop, thread
                self._process = os.getpid()
                # Stops the loop even if the client is never closed: with its last reference, or at exit.
                self._finalizer = weakref.finalize(self, _stop_loop, loop, thread, self._process)
            return self._running


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if process != os.getpid():
        # The loop belongs to the parent process, and runs there.
        return
    loop.call_soon_threadsafe(loop.stop)
    # The last reference may be dropped on the loop's own thread.
    if thread is not threading.current_thread():
        thread.join()
        loop.close()


def drive(awaited: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a BlockingIo to completion, in place, and return its result."""
    try:
        awaited.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    awaited.close()
    raise RuntimeError("the coroutine awaits something other than its Io")


def iterate(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over an async generator over a BlockingIo."""
    try:
        while True:
            try:
                item = drive(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        drive(items.aclose())


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)

"""What the client's logic waits for, in two ways: on the event loop of the caller, or blocking.

The logic is written once, as coroutines over Io. Given an AwaitedIo they are awaited. Given a BlockingIo every wait is
over when it returns, so they never suspend, and `drive` runs them to their end where they are called: in any thread,
in a notebook, under a loop that runs already. Only the exchange itself happens on a loop of its own, in a thread of its
own, so that Ctrl-C is heard while an answer is awaited.
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

from conveyor.client.http import Http, HttpRequest, HttpResponse, Incoming

T = TypeVar("T")

_LISTEN_SECONDS = 1.0


class Opened(Protocol):
    """An answer whose body comes in pieces."""

    status: int

    @property
    def headers(self) -> dict[str, str]: ...

    async def read(self) -> bytes | None: ...


class Io(Protocol):
    """The outside, time and chance."""

    # Whether there is a loop to wait on for what is not of this Io.
    awaits: bool

    async def send(self, request: HttpRequest) -> HttpResponse: ...

    def open(self, request: HttpRequest) -> AbstractAsyncContextManager[Opened]: ...

    async def aside(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what may take a while, such as work on a file."""

    async def pause(self, seconds: float) -> None: ...

    def monotonic(self) -> float: ...

    def jitter(self) -> float:
        """A number in [0, 1)."""

    async def close(self) -> None: ...


class AwaitedIo:
    """Waits on the event loop of the caller."""

    awaits = True

    def __init__(self) -> None:
        self._http = Http()

    async def send(self, request: HttpRequest) -> HttpResponse:
        return await self._http.send(request)

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[Opened]:
        incoming = await self._http.begin(request)
        try:
            yield incoming
        finally:
            await incoming.close()

    async def aside(self, function: Callable[..., T], *arguments: Any) -> T:
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
    """Blocks the thread of the caller; several may use it at once."""

    awaits = False

    def __init__(self) -> None:
        self._http = Http()
        self._loop = _Loop()

    async def send(self, request: HttpRequest) -> HttpResponse:
        return self._loop.call(self._http.send(request))

    @asynccontextmanager
    async def open(self, request: HttpRequest) -> AsyncIterator[Opened]:
        incoming = self._loop.call(self._http.begin(request))
        try:
            yield _Pulled(self._loop, incoming)
        finally:
            self._loop.call(incoming.close())

    async def aside(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(*arguments)

    async def pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def monotonic(self) -> float:
        return time.monotonic()

    def jitter(self) -> float:
        return random.random()

    async def close(self) -> None:
        self._loop.stop(self._http.close())


class _Pulled:
    """Incoming, read from another thread."""

    def __init__(self, loop: "_Loop", incoming: Incoming) -> None:
        self._loop = loop
        self._incoming = incoming
        self.status = incoming.status
        self.headers = incoming.headers

    async def read(self) -> bytes | None:
        return self._loop.call(self._incoming.read())


class _Loop:
    """An event loop in a thread of its own, from the first call on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread] | None = None
        self._end: Callable[[], Any] | None = None

    def call(self, awaited: Coroutine[Any, Any, T]) -> T:
        """What it comes to. Ctrl-C cancels it."""
        if self._running is not None and self._process != os.getpid():
            awaited.close()
            raise RuntimeError("the client was used before this process was forked: start processes by spawn")
        loop, thread = self._started()
        if thread is threading.current_thread():
            awaited.close()
            raise RuntimeError("a progress callback can not use the client that calls it")
        future = asyncio.run_coroutine_threadsafe(awaited, loop)
        try:
            # In turns: a Ctrl-C that comes just before a wait without end would be heard at its end only.
            while not wait([future], _LISTEN_SECONDS).done:
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Do a last thing, and end. The next call starts again."""
        if self._end is None:
            last.close()
            return
        self.call(last)
        with self._lock:
            end, self._end, self._running = self._end, None, None
        end()

    def _started(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="conveyor-client", daemon=True)
                thread.start()
                self._running = loop, thread
                self._process = os.getpid()
                # Also when nobody closes the client: with the last reference to it, or at the end of the process.
                self._end = weakref.finalize(self, _end, loop, thread, self._process)
            return self._running


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    if process != os.getpid():
        # The loop is our parent's, and goes on there.
        return
    loop.call_soon_threadsafe(loop.stop)
    # The last reference may go on the loop's own thread.
    if thread is not threading.current_thread():
        thread.join()
        loop.close()


def drive(awaited: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a BlockingIo to its end, here and now."""
    try:
        awaited.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    awaited.close()
    raise RuntimeError("it waits for something that is not of its Io")


def iterate(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """What an async generator over a BlockingIo gives, one by one."""
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

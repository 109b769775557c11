"""Threads for code that blocks. They are daemons: a function that never returns costs one thread. A ThreadPoolExecutor
would wait for it for ever when the process exits."""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = tuple[Callable[[], None], asyncio.AbstractEventLoop, asyncio.Future[None]]


class Threads:
    """Runs work in idle threads and starts one more if none is idle. The caller limits how many run at once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        # Only the event loop changes these: a thread is idle once the loop knows that its work is done.
        self._idle = 0
        self._started = 0

    def run(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Start `work`, which must not raise; the future is done when it is."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if self._idle:
            self._idle -= 1
        else:
            self._started += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._started}", daemon=True).start()
        self._work.put((work, loop, done))
        return done

    def close(self) -> None:
        """End every thread when it has no more work."""
        for _ in range(self._started):
            self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, loop, done = item
            try:
                work()
            finally:
                self._notify(loop, done)

    def _notify(self, loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
        try:
            loop.call_soon_threadsafe(self._finish, done)
        except RuntimeError:
            # The loop is closed: nothing waits for the result.
            return

    def _finish(self, done: asyncio.Future[None]) -> None:
        self._idle += 1
        if not done.done():
            done.set_result(None)

"""A fetcher process: `python -m conveyor.process.executors.fetch.child FD`.

Orders in, packs of outcomes out. The costly work for each response happens here, away from the threads that write rows:
the request, the digest of the body and its deflate, the JSON of the detail, and, where blobs are a directory, storing
the page (packs.py). It ends with the process that started it, because the socket between them closes.
"""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import msgspec

from conveyor import faults
from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.engines.shared_logs import open_shared_logs
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.changed_pages import Condition
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.process.executors.fetch.frames import (
    Drop,
    FrameReader,
    FrameWriter,
    Order,
    Orders,
    RunningReport,
    decode_order,
    read_frame,
    write_frame,
)
from conveyor.process.executors.fetch.packs import Packer, internal_error
from conveyor.settings import Settings
from conveyor.telemetry.plain import configure_plain_log

log = logging.getLogger(__name__)

# Objects between two collections. Hardly any object of a request is part of a cycle.
_GC_OBJECTS = 50_000


class AttemptsOne(Protocol):
    """An executor that attempts one reference; see LocalExecutor for what it promises."""

    def attempt_one(
        self, job: Job, ref: TaskRef, gateway: int = 0, condition: Condition | None = None
    ) -> Awaitable[Outcome]: ...


class ChildLane:
    """The orders of one lane of a worker. Between two steps of the loop, either `width` of them run or none waits; a
    lane with width 0 has none that wait."""

    def __init__(self, number: int, job: Job) -> None:
        self.number = number
        self.job = job
        self.width = 0
        # Of a lane in which more orders may run than its width: what the worker calls the last change of the width.
        self.narrowing = 0
        self.waiting: deque[Order] = deque()
        self.running: set[asyncio.Task[None]] = set()


class ChildFetcher:
    """Runs orders. The packer sends their outcomes."""

    def __init__(self, executor: AttemptsOne, writer: FrameWriter, packer: Packer) -> None:
        self._executor = executor
        self._writer = writer
        self._packer = packer
        self._lanes: dict[int, ChildLane] = {}
        # Over all lanes.
        self._runners = 0
        # The worker is gone: nobody takes an outcome any more.
        self._is_over = False

    async def serve(self, reader: FrameReader) -> None:
        write_frame(self._writer, True)
        try:
            while True:
                order = decode_order(await read_frame(reader))
                if isinstance(order, Orders):
                    self._accept(order)
                else:
                    self._drop(order)
                await self._writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            self._is_over = True

    def _accept(self, orders: Orders) -> None:
        lane = self._lanes.get(orders.lane)
        if lane is None:
            assert orders.job is not None
            lane = self._lanes[orders.lane] = ChildLane(orders.lane, orders.job)
        elif orders.job is not None:
            lane.job = orders.job
        lane.width, lane.narrowing = orders.width, orders.narrowing
        lane.waiting.extend(orders.orders)
        if lane.width == 0:
            # Other fetchers have the whole width now and can run these.
            self._hand_back(lane)
        self._fill(lane)
        self._report(lane)

    def _report(self, lane: ChildLane) -> None:
        """Tell the worker how many orders run in a lane that was narrowed: it waits for their slots."""
        if lane.narrowing:
            self._packer.report(RunningReport(lane.number, lane.narrowing, len(lane.running)))
            if len(lane.running) <= lane.width:
                lane.narrowing = 0

    def _fill(self, lane: ChildLane) -> None:
        """Start waiting orders, up to the width."""
        while lane.waiting and len(lane.running) < lane.width and not self._is_over:
            self._runners += 1
            self._packer.lag.start()
            lane.running.add(asyncio.create_task(self._run(lane, lane.waiting.popleft())))

    def _hand_back(self, lane: ChildLane) -> None:
        """Return orders to the worker that have not started."""
        if lane.waiting:
            self._packer.hand_back([order.number for order in lane.waiting])
            lane.waiting.clear()

    def _drop(self, drop: Drop) -> None:
        lane = self._lanes.get(drop.lane)
        if lane is None:
            return
        if drop.all:
            del self._lanes[drop.lane]
            lane.waiting.clear()
            for runner in lane.running:
                runner.cancel()
        else:
            self._hand_back(lane)

    async def _run(self, lane: ChildLane, order: Order) -> None:
        """Run one order after the other, while orders wait and the lane has the width for this runner."""
        try:
            await self._attempt(lane, order)
            while lane.waiting and len(lane.running) <= lane.width:
                # What is not recorded is fetched again after a crash, so no more is fetched while the store or the
                # worker is behind.
                if self._packer.is_behind:
                    await self._packer.until_room()
                if lane.waiting:
                    await self._attempt(lane, lane.waiting.popleft())
        except ConnectionError:
            self._is_over = True
        finally:
            # In the same step as the test above, not in a callback: the next runner that ends must not count this one.
            runner = asyncio.current_task()
            assert runner is not None
            lane.running.discard(runner)
            self._runners -= 1
            self._fill(lane)
            if self._runners == 0:
                self._packer.lag.stop()
            self._report(lane)

    async def _attempt(self, lane: ChildLane, order: Order) -> None:
        """Run one order and answer it in any case: the worker would wait for the answer until it kills the process."""
        try:
            attempting = self._executor.attempt_one(lane.job, order.ref, order.gateway, order.condition)
            self._answer(lane, order, await attempting)
        except asyncio.CancelledError:
            runner = asyncio.current_task()
            if runner is not None and runner.cancelling():
                raise
            self._answer(lane, order, internal_error())
        except Exception:
            # An executor must not raise.
            log.exception("executor failed")
            self._answer(lane, order, internal_error())

    def _answer(self, lane: ChildLane, order: Order, outcome: Outcome) -> None:
        has_more = len(lane.waiting) > 0
        is_last = self._runners == 1 and not has_more
        self._packer.put(lane.job, order.number, outcome, is_last=is_last, may_wait=has_more)


async def _main(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    try:
        settings = Settings.load({}, **msgspec.msgpack.decode(await read_frame(reader)))
    except (asyncio.IncompleteReadError, ConnectionError):
        # Started early, and not wanted.
        return
    clock = SystemClock()
    guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
    if settings.crash_at:
        faults.arm(faults.kill_at(settings.crash_at))
    packer = Packer(writer, clock, open_shared_logs(settings))
    executor = FetchExecutor(settings, clock, guard, room=packer.until_room)
    # All that is loaded now stays.
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS)
    await ChildFetcher(executor, writer, packer).serve(reader)


def main() -> None:
    # The parent process decides when to stop; a signal to the whole group is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_plain_log("fetcher")
    try:
        import uvloop  # noqa: PLC0415  (absent on Windows)
    except ImportError:
        run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    else:
        run = uvloop.run
    try:
        run(_main(int(sys.argv[1])))
    except Exception:
        # Not by the interpreter, which would print the error's text.
        log.exception("fetcher failed")
        sys.exit(1)


if __name__ == "__main__":
    main()

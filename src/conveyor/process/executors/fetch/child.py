"""A fetcher process: `python -m conveyor.process.executors.fetch.child FD`.

Orders in, packs of outcomes out. It stores nothing. The costly work for each response happens here, away from the
threads that write rows: the request, the digest of the body, the JSON of the detail. It ends with the process that
started it, because the socket between them closes.
"""

import asyncio
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from conveyor.clock import SystemClock
from conveyor.egress.target_guard import TargetGuard
from conveyor.model import Job, Outcome, TaskError, TaskRef
from conveyor.process.executors.fetch.fetch_executor import FetchExecutor
from conveyor.process.executors.fetch.frames import (
    Drop,
    FrameReader,
    FrameWriter,
    Order,
    Orders,
    OutcomePack,
    PackedOutcome,
    decode_order,
    framed,
    read_frame,
)
from conveyor.process.outcomes import detail_json
from conveyor.settings import Settings
from conveyor.states import TaskStatus
from conveyor.telemetry.plain import configure_plain_log

log = logging.getLogger(__name__)

_PACK_COUNT = 64
_PACK_BYTES = 1024 * 1024
# How long an outcome waits for others of the same pack, in seconds.
_LINGER = 0.004


class AttemptsOne(Protocol):
    """An executor that attempts one reference; see LocalExecutor for what it promises."""

    def attempt_one(self, job: Job, ref: TaskRef) -> Awaitable[Outcome]: ...


class ChildLane:
    """The orders of one lane of a worker. Between two steps of the loop, either `width` of them run or none waits; a
    lane with width 0 has none that wait."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.width = 0
        self.waiting: deque[Order] = deque()
        self.running: set[asyncio.Task[None]] = set()


class ChildFetcher:
    """Runs orders. It reads no clock; a timer of the loop limits how long an outcome waits for its pack."""

    def __init__(self, executor: AttemptsOne, writer: FrameWriter, linger: float = _LINGER) -> None:
        self._executor = executor
        self._writer = writer
        self._linger = linger
        self._lanes: dict[int, ChildLane] = {}
        self._outcomes: list[PackedOutcome] = []
        self._bodies: list[bytes | memoryview] = []
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, reader: FrameReader) -> None:
        self._writer.write(framed(True))
        try:
            while True:
                order = decode_order(await read_frame(reader))
                if isinstance(order, Orders):
                    self._accept(order)
                else:
                    self._drop(order)
                await self._writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _accept(self, orders: Orders) -> None:
        lane = self._lanes.get(orders.lane)
        if lane is None:
            assert orders.job is not None
            lane = self._lanes[orders.lane] = ChildLane(orders.job)
        elif orders.job is not None:
            lane.job = orders.job
        lane.width = orders.width
        lane.waiting.extend(orders.orders)
        if lane.width == 0:
            # Other fetchers have the whole width now and can run these.
            self._hand_back(lane)
        self._fill(lane)

    def _fill(self, lane: ChildLane) -> None:
        """Start waiting orders, up to the width."""
        while lane.waiting and len(lane.running) < lane.width:
            lane.running.add(asyncio.create_task(self._run(lane, lane.waiting.popleft())))

    def _hand_back(self, lane: ChildLane) -> None:
        """Return orders to the worker that have not started."""
        if lane.waiting:
            self._writer.write(framed(OutcomePack([], b"", [order.number for order in lane.waiting])))
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
            await self._attempt(lane.job, order)
            while lane.waiting and len(lane.running) <= lane.width:
                await self._attempt(lane.job, lane.waiting.popleft())
        finally:
            # In the same step as the test above, not in a callback: the next runner that ends must not count this one.
            runner = asyncio.current_task()
            assert runner is not None
            lane.running.discard(runner)
            self._fill(lane)

    async def _attempt(self, job: Job, order: Order) -> None:
        """Run one order and answer it in any case: the worker would wait for the answer until it kills the process."""
        try:
            self._put(order.number, await self._executor.attempt_one(job, order.ref))
        except asyncio.CancelledError:
            runner = asyncio.current_task()
            if runner is not None and runner.cancelling():
                raise
            self._put(order.number, _internal_error())
        except Exception:
            # An executor must not raise.
            log.exception("executor failed")
            self._put(order.number, _internal_error())

    def _put(self, number: int, outcome: Outcome) -> None:
        body, detail = outcome.body, detail_json(outcome)
        self._outcomes.append(
            PackedOutcome(
                number,
                outcome.status,
                outcome.http_status,
                outcome.error,
                outcome.retry_after,
                detail,
                -1 if body is None else len(body),
                "" if body is None else sha256(body).hexdigest(),
                outcome.elapsed,
            )
        )
        if body:
            self._bodies.append(body)
            self._bytes += len(body)
        if len(self._outcomes) >= _PACK_COUNT or self._bytes >= _PACK_BYTES:
            self._send()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._send)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._outcomes:
            self._writer.write(framed(OutcomePack(self._outcomes, b"".join(self._bodies), [])))
            self._outcomes, self._bodies, self._bytes = [], [], 0


def _internal_error() -> Outcome:
    return Outcome(TaskStatus.FAILED, error=TaskError("internal", "the fetch failed inside Conveyor"))


async def _main(fd: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    settings = Settings.load({}, **msgspec.msgpack.decode(await read_frame(reader)))
    clock = SystemClock()
    guard = TargetGuard(allow_private=settings.allow_private_targets, clock=clock)
    executor = FetchExecutor(settings, clock, guard, room=writer.drain)
    await ChildFetcher(executor, writer).serve(reader)


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

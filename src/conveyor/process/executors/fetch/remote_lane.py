"""RemoteLane: a lane whose references are attempted by fetchers. It sends them in batches and is told what came of
them in batches; there is no coroutine and no await for each."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.model import Job, Outcome
from conveyor.process.executors.fetch.fetchers import Fetchers
from conveyor.process.gate import Gate
from conveyor.process.lane import Lane, LeasedRef
from conveyor.process.recorder import LeasedChunk, Recorder


class RemoteLane(Lane):
    """`lost` is told of the messages whose references went down with a fetcher."""

    def __init__(
        self,
        job: Job,
        fetchers: Fetchers,
        recorder: Recorder,
        limits: TargetLimits,
        clock: Clock,
        hungry: Callable[[], None],
        gate: Gate,
        lost: Callable[[Job, list[LeasedChunk]], None],
        *,
        recovery_ratio: int = 4,
    ) -> None:
        super().__init__(job, fetchers, recorder, limits, clock, hungry, gate, recovery_ratio=recovery_ratio)
        self.number = fetchers.port_number()
        self._fetchers = fetchers
        self._lost = lost
        self._out = 0
        self._idle = asyncio.Event()
        self._stopping = False
        # Awaits what sending has to wait for: a target to try, the mark of a start, room in the recorder.
        self._sending: asyncio.Task[None] | None = None

    def spread(self, width: int) -> None:
        self.width = width
        # Also where nothing can be sent now.
        self._fetchers.spread(self)
        self._send()
        if not self._waiting:
            self._fetchers.balance(self)
        self._count(0)

    async def stop(self, grace: float) -> list[LeasedChunk]:
        self._stopping = True
        if self._sending is not None:
            self._sending.cancel()
        return await super().stop(grace)

    async def _drain(self, grace: float) -> None:
        await super()._drain(0.0)
        self._fetchers.drop(self, everything=False)
        self._count(0)
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            pass
        self._fetchers.drop(self, everything=True)

    def came(self, held: list[LeasedRef], outcomes: list[Outcome]) -> None:
        self._count(-len(held))
        self._leave(held)
        self._record(held, outcomes)
        self._send()

    async def room(self) -> None:
        if self._recorder.full:
            await self._recorder.room()

    def hold_back(self) -> None:
        super().hold_back()
        self._fetchers.drop(self, everything=False)

    def dropped(self, held: list[LeasedRef]) -> None:
        self._count(-len(held))
        self._leave(held)
        self._gate.gone(held)
        if not self._stopping:
            self._waiting.extendleft(reversed(held))
            # Once, for all that come back now.
            asyncio.get_running_loop().call_soon(self._send)

    def lost(self, held: list[LeasedRef]) -> None:
        self._count(-len(held))
        self._leave(held)
        self._gate.gone(held)
        chunks = {one.chunk.receipt: one.chunk for one in held if not one.chunk.lost}
        for chunk in chunks.values():
            chunk.lost = True
        self._lost(self.job, list(chunks.values()))

    def _count(self, more: int) -> None:
        self._out += more
        self.active = min(self._out, self.width) if self.width else self._out
        if self._out == 0:
            self._idle.set()
        else:
            self._idle.clear()

    def _send(self) -> None:
        """Hand over as much as there is room for."""
        if self._stopping or self._sending is not None or self._resting is not None:
            return
        if self._recorder.full:
            self._send_later(self._recorder.room())
            return
        held: list[LeasedRef] = []
        room = self._send_room()
        while len(held) < room and (one := self._next()) is not None:
            goes = self._goes(one)
            if goes is None or (goes and one.chunk.suspect):
                self._send_later(self._send_alone(one, enters=goes is None))
                break
            if goes:
                held.append(one)
        self._hand_over(held)
        self._targets.ask()

    def _send_room(self) -> int:
        """How many may be sent now: ahead of those that run, unless their targets count them as running."""
        room = self._fetchers.room(self)
        return min(room, self.width - self._out) if self._targets.limited else room

    async def _send_alone(self, one: LeasedRef, *, enters: bool) -> None:
        """One that tries its target, or of a message that came before: that work on it begins is known before it
        does."""
        if (enters and not await self._enter(one)) or not await self._mark_started([one]):
            return
        one.chunk.suspect = False
        if self._fetchers.room(self) > 0:
            self._hand_over([one])
        else:
            self._targets.leave(one)
            self._waiting.appendleft(one)

    def _send_later(self, first: Coroutine[Any, Any, None]) -> None:
        async def send() -> None:
            try:
                await first
            finally:
                self._sending = None
            self._send()

        self._sending = self._start(send())

    def _hand_over(self, held: list[LeasedRef]) -> None:
        held = self._in_time(held)
        self._count(len(held))
        self._fetchers.start(self, held)

    def _leave(self, held: list[LeasedRef]) -> None:
        for one in held:
            self._targets.leave(one)

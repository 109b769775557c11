"""RemoteLane: a lane whose references are attempted by fetchers. It sends them in batches and is told what came of
them in batches; there is no coroutine and no await for each."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from conveyor.clock import Clock
from conveyor.coordination.limits import TargetLimits
from conveyor.model import Job, Outcome, TaskError
from conveyor.process.fetchers import Fetchers
from conveyor.process.gate import Gate
from conveyor.process.lane import Held, Lane
from conveyor.process.recorder import HeldChunk, Recorder


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
        lost: Callable[[Job, list[HeldChunk]], None],
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
        # Awaits what sending has to wait for: a target's turn, room in the recorder.
        self._sending: asyncio.Task[None] | None = None

    def spread(self, width: int) -> None:
        self.width = width
        # Also where nothing can be sent now.
        self._fetchers.spread(self)
        self._send()
        if not self._waiting:
            self._fetchers.balance(self)
        self._count(0)

    async def stop(self, grace: float) -> list[HeldChunk]:
        self._stopping = True
        if self._sending is not None:
            self._sending.cancel()
        await super().stop(0.0)
        self._fetchers.drop(self, everything=False)
        self._count(0)
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            pass
        self._fetchers.drop(self, everything=True)
        return [chunk for chunk in self.chunks.values() if not chunk.lost]

    def came(self, held: list[Held], outcomes: list[Outcome]) -> None:
        self._count(-len(held))
        self._leave(held)
        self._record(held, outcomes)
        self._send()

    async def room(self) -> None:
        if self._recorder.full:
            await self._recorder.room()

    def hold_back(self) -> None:
        self._fetchers.drop(self, everything=False)

    def dropped(self, held: list[Held]) -> None:
        self._count(-len(held))
        self._leave(held)
        self._gate.gone(held)
        if not self._stopping:
            self._waiting.extendleft(reversed(held))
            # Once, for all that come back now.
            asyncio.get_running_loop().call_soon(self._send)

    def lost(self, held: list[Held]) -> None:
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
        if self._stopping or self._sending is not None:
            return
        if self._limits.limited or self._recorder.full:
            self._send_later(self._send_in_turn() if self._limits.limited else self._recorder.room())
            return
        room = self._fetchers.room(self)
        held: list[Held] = []
        while self._waiting and len(held) < room:
            one = self._waiting.popleft()
            if one.chunk.lost:
                continue
            if self._gate.watching and not self._goes(one):
                if self._sending is not None:
                    break
                continue
            if one.chunk.suspect:
                self._send_later(self._send_marked(one))
                break
            held.append(one)
        self._hand_over(held)

    def _goes(self, one: Held) -> bool:
        """Whether the reference's target is there. One that may try it asks first; others have gone back."""
        verdict = 0.0 if one.canaries else self._gate.verdict(one.ref)
        if verdict is None:
            self._send_later(self._send_canary(one))
        elif isinstance(verdict, TaskError):
            self._refuse(one, verdict)
        elif verdict:
            self._sideline(one, verdict)
        return verdict == 0.0

    async def _send_canary(self, one: Held) -> None:
        wait = await self._gate.enter(one)
        if wait:
            self._sideline(one, wait)
        else:
            await self._send_marked(one)

    def _send_later(self, first: Coroutine[Any, Any, None]) -> None:
        async def send() -> None:
            try:
                await first
            finally:
                self._sending = None
            if self._waiting and not self._limits.limited:
                self._send()

        self._sending = asyncio.create_task(send())
        self._running.add(self._sending)
        self._sending.add_done_callback(self._running.discard)

    async def _send_marked(self, one: Held) -> None:
        """One of a message that came before: that work on it begins is known before it does."""
        if one.chunk.suspect:
            await self._recorder.mark_started(one.chunk)
            one.chunk.suspect = False
        if self._fetchers.room(self) > 0:
            self._hand_over([one])
        else:
            self._waiting.appendleft(one)

    async def _send_in_turn(self) -> None:
        """References whose targets have limits go one by one, each when it is its target's turn."""
        while self._out < self.width and self._fetchers.room(self) > 0:
            if self._recorder.full:
                await self._recorder.room()
            held = await self._take_limited()
            if not held:
                return
            for one in held:
                if one.chunk.suspect:
                    await self._recorder.mark_started(one.chunk)
            self._hand_over(held)

    def _hand_over(self, held: list[Held]) -> None:
        held = self._in_time(held)
        self._count(len(held))
        self._fetchers.start(self, held)

    def _leave(self, held: list[Held]) -> None:
        if self._limits.limited:
            leaving = asyncio.create_task(self._leave_targets(held))
            self._running.add(leaving)
            leaving.add_done_callback(self._running.discard)

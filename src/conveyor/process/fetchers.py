"""Fetchers: the processes that fetch for the workers of this one. The interpreter that reads responses is then not the
one that writes rows, and neither waits for the other; one that crashes costs its attempts and nothing else.

A lane sends more references than it may run at once, and each fetcher keeps to its share of the lane's width: so none
is idle while outcomes travel.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from conveyor.clock import Clock
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors.fetch import host_of
from conveyor.process.frames import Drop, Order, Orders, Pack, Writer, decode_pack, framed, read_frame
from conveyor.process.launch import Launch, Process, launch_fetcher
from conveyor.process.watchdog import GRACE, timeout_of
from conveyor.settings import Settings
from conveyor.telemetry import children

log = structlog.get_logger()

# References that a fetcher has ahead of those that it runs: its share of the width again, and so many.
_AHEAD = 48
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_SETTLED_SECONDS = 10.0


class HeldRef(Protocol):
    """A reference in the hands of a lane."""

    @property
    def ref(self) -> TaskRef: ...


class Port(Protocol):
    """The lane that references come from and outcomes go to."""

    number: int
    job: Job
    width: int

    def came(self, held: list[Any], outcomes: list[Outcome]) -> None:
        """These have an outcome."""

    async def room(self) -> None:
        """Wait until more outcomes can be taken."""

    def dropped(self, held: list[Any]) -> None:
        """These were not begun."""

    def lost(self, held: list[Any]) -> None:
        """The process that had these is gone."""


class Fetcher:
    """One process, as seen from here; it is started again when it dies."""

    def __init__(self, settings: Settings, clock: Clock, launch: Launch) -> None:
        self._settings = settings
        self._clock = clock
        self._launch = launch
        self._writer: Writer | None = None
        self._process: Process | None = None
        self._number = 0
        self._out: dict[int, tuple[Port, HeldRef]] = {}
        self._load: dict[int, int] = {}
        # When it last said anything, or was given something after it had nothing; how long it may be silent.
        self._heard_at = 0.0
        self._patience = 0.0
        # What it was told of each lane: the width and the job.
        self._told: dict[int, tuple[int, Job]] = {}
        self.ready = asyncio.Event()

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep a process at work until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            started, early = self._clock.monotonic(), False
            try:
                await self._serve()
                early = True
            finally:
                await self._end(early)
            if self._clock.monotonic() - started > _SETTLED_SECONDS:
                pause = _FIRST_PAUSE
            log.error("a fetching process ended and is started again", seconds=pause)
            await self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def room(self, port: Port, width: int) -> int:
        """How many more references of this lane it takes."""
        if width == 0 or not self.ready.is_set():
            return 0
        return 2 * width + _AHEAD - self._load.get(port.number, 0)

    def tell(self, port: Port, width: int, held: Sequence[HeldRef]) -> None:
        """Hand references over, or a new width of the lane."""
        if self._writer is None or not self.ready.is_set():
            return
        old_width, old_job = self._told.get(port.number, (0, None))
        new = None if old_job is not None and old_job.options == port.job.options else port.job
        if not held and (old_job is None or (new is None and width == old_width)):
            return
        self._told[port.number] = (width, port.job)
        if not self._out:
            self._heard_at, self._patience = self._clock.monotonic(), 0.0
        orders = []
        for one in held:
            self._patience = max(self._patience, timeout_of(port.job, one.ref))
            self._number += 1
            self._out[self._number] = (port, one)
            orders.append(Order(self._number, one.ref))
        self._load[port.number] = self._load.get(port.number, 0) + len(orders)
        self._writer.write(framed(Orders(port.number, width, orders, new)))

    def watch(self) -> None:
        """Have it replaced if it owes an outcome and has been silent for longer than any attempt can take."""
        silent = self._clock.monotonic() - self._heard_at
        if self._out and self._process is not None and silent > self._patience + GRACE:
            log.error("a fetching process hangs and is killed", seconds=round(silent, 1))
            self._process.kill()

    def drop(self, port: Port, everything: bool) -> None:
        """Have it start nothing more for the lane; with `everything`, forget what it runs for it."""
        if self._writer is not None and port.number in self._told:
            self._writer.write(framed(Drop(port.number, everything)))
        if everything:
            self._out = {number: (other, one) for number, (other, one) in self._out.items() if other is not port}
            self._load.pop(port.number, None)
            self._told.pop(port.number, None)

    async def _serve(self) -> None:
        reader, self._writer, self._process = await self._launch(self._settings)
        children.born("fetcher", self._process.pid)
        try:
            await read_frame(reader)
            self.ready.set()
            while True:
                for port in self._came(decode_pack(await read_frame(reader))):
                    await port.room()
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _came(self, pack: Pack) -> list[Port]:
        """Sort a pack by lanes, and say which they were. What no lane waits for any more is passed over."""
        self._heard_at = self._clock.monotonic()
        bodies, at = memoryview(pack.bodies), 0
        sorted_: dict[int, tuple[Port, list[HeldRef], list[Outcome]]] = {}
        for packed in pack.outcomes:
            body = None
            if packed.length >= 0:
                body = bodies[at : at + packed.length]
                at += packed.length
            if packed.number not in self._out:
                continue
            port, one = self._out.pop(packed.number)
            _, held, outcomes = sorted_.setdefault(port.number, (port, [], []))
            held.append(one)
            outcomes.append(
                Outcome(
                    packed.status,
                    packed.http_status,
                    packed.error,
                    body,
                    elapsed=packed.elapsed,
                    retry_after=packed.retry_after,
                    detail=packed.detail,
                    sha256=packed.sha256,
                )
            )
        for port, held, outcomes in sorted_.values():
            self._load[port.number] -= len(held)
            port.came(held, outcomes)
        for number in pack.dropped:
            if number in self._out:
                port, one = self._out.pop(number)
                self._load[port.number] -= 1
                port.dropped([one])
        return [port for port, _, _ in sorted_.values()]

    async def _end(self, early: bool) -> None:
        """The process is gone, or is to go: it ends with the socket. What it had is lost."""
        self.ready.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        out, self._out = self._out, {}
        self._load.clear()
        self._told.clear()
        ports: dict[int, tuple[Port, list[HeldRef]]] = {}
        for port, one in out.values():
            ports.setdefault(port.number, (port, []))[1].append(one)
        for port, held in ports.values():
            port.lost(held)
        if process is not None:
            children.gone("fetcher", process.pid, early=early)
            process.kill()
            await process.wait()


class Fetchers:
    """All of them. In the place of an executor; lanes that have it send and are told, they do not await."""

    def __init__(self, settings: Settings, clock: Clock, launch: Launch = launch_fetcher) -> None:
        self.members = [Fetcher(settings, clock, launch) for _ in range(settings.fetchers)]
        self._running: list[asyncio.Task[None]] = []
        self._ports = 0

    def grain(self, job: Job) -> int:
        return 1

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref.input)

    async def attempt(self, job: Job, refs: Sequence[TaskRef]) -> list[Outcome]:
        raise NotImplementedError("lanes hand references over to fetchers")

    def open(self) -> None:
        """Start the processes; they are ready some tenths of a second later."""
        self._running = [asyncio.create_task(member.run()) for member in self.members]

    async def until_ready(self) -> None:
        for member in self.members:
            await member.ready.wait()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def watch(self) -> None:
        """Replace those that hang."""
        for member in self.members:
            member.watch()

    def port_number(self) -> int:
        self._ports += 1
        return self._ports

    def room(self, port: Port) -> int:
        """How many more references of this lane are taken now."""
        return sum(max(0, member.room(port, width)) for member, width in self._shares(port))

    def start(self, port: Port, held: Sequence[HeldRef]) -> None:
        """Hand over references, no more than there is room for."""
        at = 0
        shares = sorted(self._shares(port), key=lambda share: -share[0].room(port, share[1]))
        for left, (member, width) in zip(range(len(shares), 0, -1), shares, strict=True):
            part = min(max(0, member.room(port, width)), -(-(len(held) - at) // left))
            member.tell(port, width, held[at : at + part])
            at += part
        while at < len(held):
            # The even split left some over that the first ones still have room for.
            member, width = max(shares, key=lambda share: share[0].room(port, share[1]))
            part = max(1, member.room(port, width))
            member.tell(port, width, held[at : at + part])
            at += part

    def drop(self, port: Port, everything: bool) -> None:
        for member in self.members:
            member.drop(port, everything)

    def _shares(self, port: Port) -> list[tuple[Fetcher, int]]:
        """The lane's width, dealt to those that are ready."""
        ready = [member for member in self.members if member.ready.is_set()]
        if not ready:
            return []
        each, more = divmod(port.width, len(ready))
        # Lanes of width 1 are not all given to the same one.
        turn = port.number % len(ready)
        return [(member, each + (((at - turn) % len(ready)) < more)) for at, member in enumerate(ready)]

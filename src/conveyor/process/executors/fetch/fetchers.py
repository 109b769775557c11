"""Fetchers: the processes that fetch for the workers of this one. The interpreter that reads responses is then not the
one that writes rows, and neither waits for the other; one that crashes costs its attempts and nothing else.

A lane sends more references than it may run at once, and each fetcher keeps to its share of the lane's width: so none
is idle while outcomes travel.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import structlog

from conveyor.clock import Clock
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.executors.fetch.fetch_executor import host_of
from conveyor.process.executors.fetch.frames import (
    Drop,
    FrameWriter,
    Order,
    Orders,
    OutcomePack,
    decode_pack,
    framed,
    read_frame,
)
from conveyor.process.executors.fetch.launch import Launch, LaunchedProcess, launch_fetcher
from conveyor.process.watchdog import GRACE, timeout_of
from conveyor.settings import Settings
from conveyor.telemetry import child_processes as children

log = structlog.get_logger()

# References that a fetcher has ahead of those that it runs: its share of the width again, and so many.
_AHEAD = 48
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_SETTLED_SECONDS = 10.0


class LeasedReference(Protocol):
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


class LaneShare:
    """What one fetcher was told of one lane, and what it owes of it."""

    __slots__ = ("heard_at", "job", "owed", "patience", "port", "width")

    def __init__(self, port: Port) -> None:
        self.port = port
        self.width = 0
        self.job: Job | None = None
        self.owed = 0
        # When it last answered for the lane, or was given something after it owed nothing; how long it may be silent.
        self.heard_at = 0.0
        self.patience = 0.0


class FetcherProcess:
    """One process, as seen from here; it is started again when it dies."""

    def __init__(self, settings: Settings, clock: Clock, launch: Launch) -> None:
        self._settings = settings
        self._clock = clock
        self._launch = launch
        self._writer: FrameWriter | None = None
        self._process: LaunchedProcess | None = None
        self._number = 0
        self._out: dict[int, tuple[Port, LeasedReference]] = {}
        self._shares: dict[int, LaneShare] = {}
        # Since when packs are not read for want of room, and for how long that was before.
        self._deaf_since: float | None = None
        self._deaf = 0.0
        self.ready = asyncio.Event()

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep a process at work until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            started = self._clock.monotonic()
            try:
                await self._run_one()
            except Exception:
                # Whatever went wrong, such as a machine that has no process or descriptor left: others depend on it.
                log.exception("a fetching process failed")
            if self._clock.monotonic() - started > _SETTLED_SECONDS:
                pause = _FIRST_PAUSE
            log.error("a fetching process ended and is started again", seconds=pause)
            await self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def room(self, port: Port, width: int) -> int:
        """How many more references of this lane it takes."""
        if width == 0 or not self.ready.is_set():
            return 0
        return 2 * width + _AHEAD - self.owes(port)

    def owes(self, port: Port) -> int:
        """How many references of this lane it has."""
        share = self._shares.get(port.number)
        return 0 if share is None else share.owed

    def tell(self, port: Port, width: int, held: Sequence[LeasedReference]) -> None:
        """Hand references over, or a new width of the lane."""
        if self._writer is None or not self.ready.is_set():
            return
        share = self._shares.get(port.number)
        if share is None:
            if not held:
                return
            share = self._shares[port.number] = LaneShare(port)
        new = None if share.job is not None and share.job.options == port.job.options else port.job
        if not held and new is None and width == share.width:
            return
        share.width, share.job = width, port.job
        if share.owed == 0:
            share.heard_at, share.patience = self._listened(), 0.0
        orders = []
        for one in held:
            share.patience = max(share.patience, timeout_of(port.job, one.ref))
            self._number += 1
            self._out[self._number] = (port, one)
            orders.append(Order(self._number, one.ref))
        share.owed += len(orders)
        self._writer.write(framed(Orders(port.number, width, orders, new)))

    def watch(self) -> None:
        """Have it replaced if it owes an outcome of a lane and has been silent about that for longer than any attempt
        can take. It is not enough that it speaks of other lanes."""
        if self._process is None:
            return
        now = self._listened()
        for share in self._shares.values():
            silent = now - share.heard_at
            if share.owed and silent > share.patience + GRACE:
                log.error(
                    "a fetching process hangs and is killed",
                    run=share.port.job.run.run_id,
                    owed=share.owed,
                    width=share.width,
                    seconds=round(silent, 1),
                )
                self._process.kill()
                return

    def drop(self, port: Port, everything: bool) -> None:
        """Have it start nothing more for the lane; with `everything`, forget what it runs for it."""
        if self._writer is not None and port.number in self._shares:
            self._writer.write(framed(Drop(port.number, everything)))
        if everything:
            self._out = {number: (other, one) for number, (other, one) in self._out.items() if other is not port}
            self._shares.pop(port.number, None)

    async def _run_one(self) -> None:
        """One process, from its start to its end."""
        early = True
        try:
            await self._serve()
        except asyncio.CancelledError:
            early = False
            raise
        finally:
            await self._end(early)

    async def _serve(self) -> None:
        reader, self._writer, self._process = await self._launch(self._settings)
        children.born("fetcher", self._process.pid)
        try:
            await read_frame(reader)
            self.ready.set()
            while True:
                await self._make_room(self._came(decode_pack(await read_frame(reader))))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def _make_room(self, ports: Sequence[Port]) -> None:
        """Read no more before these can take more."""
        self._deaf_since = self._clock.monotonic()
        try:
            for port in ports:
                await port.room()
        finally:
            self._deaf += self._clock.monotonic() - self._deaf_since
            self._deaf_since = None

    def _listened(self) -> float:
        """A clock that stands still while packs are not read: silence in that time is not the process's."""
        now = self._clock.monotonic() if self._deaf_since is None else self._deaf_since
        return now - self._deaf

    def _came(self, pack: OutcomePack) -> list[Port]:
        """Sort a pack by lanes, and say which they were. What no lane waits for any more is passed over."""
        sorted_: dict[int, tuple[Port, list[int], list[Outcome]]] = {}
        for number, outcome in _outcomes(pack):
            if number in self._out:
                port, _ = self._out[number]
                _, numbers, outcomes = sorted_.setdefault(port.number, (port, [], []))
                numbers.append(number)
                outcomes.append(outcome)
        for port, numbers, outcomes in sorted_.values():
            port.came(self._settled(port, numbers), outcomes)
        dropped: dict[int, tuple[Port, list[int]]] = {}
        for number in pack.dropped:
            if number in self._out:
                port, _ = self._out[number]
                dropped.setdefault(port.number, (port, []))[1].append(number)
        for port, numbers in dropped.values():
            port.dropped(self._settled(port, numbers))
        return [port for port, _, _ in sorted_.values()]

    def _settled(self, port: Port, numbers: list[int]) -> list[LeasedReference]:
        """What these orders were for; the process owes nothing for them any more."""
        share = self._shares[port.number]
        share.owed -= len(numbers)
        share.heard_at = self._listened()
        return [self._out.pop(number)[1] for number in numbers]

    async def _end(self, early: bool) -> None:
        """The process is gone, or is to go: it ends with the socket. What it had is lost."""
        self.ready.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        out, self._out = self._out, {}
        self._shares.clear()
        ports: dict[int, tuple[Port, list[LeasedReference]]] = {}
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
        self.members = [FetcherProcess(settings, clock, launch) for _ in range(settings.fetchers)]
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
        return sum(max(0, member.room(port, width)) for member, width in self._dealt(port))

    def spread(self, port: Port) -> None:
        """Have each keep to its share of the lane's width as it is now."""
        for member, width in self._dealt(port):
            member.tell(port, width, [])

    def balance(self, port: Port) -> None:
        """While one has slots of the lane free, have those that hold more than they may run hand the rest back."""
        dealt = self._dealt(port)
        if any(member.owes(port) < width for member, width in dealt):
            for member, width in dealt:
                if member.owes(port) > width:
                    member.drop(port, everything=False)

    def start(self, port: Port, held: Sequence[LeasedReference]) -> None:
        """Hand over references, no more than there is room for. They come back at once if no process is there."""
        dealt = self._dealt(port)
        if not dealt and held:
            # The last one died after the lane had asked for room.
            port.dropped(list(held))
        slots = [max(0, width - member.owes(port)) for member, width in dealt]
        room = [max(0, member.room(port, width)) for member, width in dealt]
        at = 0
        for (member, width), part in zip(dealt, _parts(len(held), slots, room), strict=True):
            member.tell(port, width, held[at : at + part])
            at += part

    def drop(self, port: Port, everything: bool) -> None:
        for member in self.members:
            member.drop(port, everything)

    def _dealt(self, port: Port) -> list[tuple[FetcherProcess, int]]:
        """The lane's width, dealt to those that are ready."""
        ready = [member for member in self.members if member.ready.is_set()]
        if not ready:
            return []
        each, more = divmod(port.width, len(ready))
        # Lanes of width 1 are not all given to the same one.
        turn = port.number % len(ready)
        return [(member, each + (((at - turn) % len(ready)) < more)) for at, member in enumerate(ready)]


def _parts(count: int, slots: Sequence[int], room: Sequence[int]) -> list[int]:
    """How many of `count` references each gets: what fills free slots first, then even parts within their room."""
    parts = [0] * len(slots)
    for at, free in enumerate(slots):
        parts[at] = min(free, count)
        count -= parts[at]
    ordered = sorted(range(len(slots)), key=lambda at: parts[at] - room[at])
    for left, at in zip(range(len(ordered), 0, -1), ordered, strict=True):
        more = min(room[at] - parts[at], -(-count // left))
        parts[at] += more
        count -= more
    for at in ordered:
        # The even split left some over that the first ones still have room for.
        more = min(room[at] - parts[at], count)
        parts[at] += more
        count -= more
    if parts:
        parts[ordered[0]] += count
    return parts


def _outcomes(pack: OutcomePack) -> Iterator[tuple[int, Outcome]]:
    """Outcomes with the numbers of their orders, each with its part of the pack's bodies."""
    bodies, at = memoryview(pack.bodies), 0
    for packed in pack.outcomes:
        body = None
        if packed.length >= 0:
            body = bodies[at : at + packed.length]
            at += packed.length
        yield (
            packed.number,
            Outcome(
                packed.status,
                packed.http_status,
                packed.error,
                body,
                elapsed=packed.elapsed,
                retry_after=packed.retry_after,
                detail=packed.detail,
                sha256=packed.sha256,
            ),
        )

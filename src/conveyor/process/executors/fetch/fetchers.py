"""Fetchers: child processes that make the requests of this process's workers. One interpreter reads responses while
another writes rows, and neither waits for the other; a crash costs the attempts of one fetcher and nothing else.

A lane sends more references than may run at once, and each fetcher runs its share of the lane's width, so that none is
idle while outcomes travel.
"""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

import structlog

from conveyor.clock import Clock
from conveyor.egress.lru import Lru
from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.changed_pages import Condition
from conveyor.process.executors import Executor
from conveyor.process.executors.fetch.fetch_executor import host_of, input_origin
from conveyor.process.executors.fetch.frames import (
    Drop,
    FrameWriter,
    Order,
    Orders,
    OutcomePack,
    RunningReport,
    StoredPages,
    decode_pack,
    outcomes_of,
    read_frame,
    write_frame,
)
from conveyor.process.executors.fetch.launch import Launch, LaunchedProcess, launch_fetcher
from conveyor.process.executors.fetch.remote_lane import RemoteLane
from conveyor.process.lane import Lane, LaneTools
from conveyor.process.watchdog import GRACE, longest_timeout
from conveyor.settings import Settings
from conveyor.telemetry import child_processes as children

log = structlog.get_logger()

# References that a fetcher gets beyond twice its share of the width: more than a pack of outcomes, so that it does not
# run dry while a full one travels and the next references come.
_AHEAD = 384
_MAX_HOSTS = 1000
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_SETTLED_SECONDS = 10.0


class LeasedReference(Protocol):
    """A reference that a lane has sent."""

    @property
    def ref(self) -> TaskRef: ...

    @property
    def condition(self) -> Condition | None: ...

    # The place of its gateway in the job's pool.
    gateway: int


class Port(Protocol):
    """A lane that sends references and gets outcomes."""

    number: int
    job: Job
    # How many of its attempts may run at once.
    reach: int
    # How late the fetcher whose pack is delivered runs what is due, in seconds.
    lag: float

    def on_outcomes(self, entries: list[Any], outcomes: list[Outcome]) -> None:
        """These references have outcomes."""

    def on_pages(self, entries: list[Any], pages: StoredPages) -> None:
        """These references have succeeded, and the fetcher has stored their pages."""

    async def until_capacity(self) -> None:
        """Wait until the lane can take more outcomes."""

    def on_dropped(self, entries: list[Any]) -> None:
        """A fetcher returned these references without an attempt."""

    def on_lost(self, entries: list[Any]) -> None:
        """A fetcher died with these references."""

    def on_narrowed(self) -> None:
        """Attempts have ended that began while the lane was wider."""


class LaneShare:
    """One lane at one fetcher: the width and job that it was sent, how many outcomes it owes, and at most how many
    attempts it runs."""

    __slots__ = ("heard_at", "job", "most", "narrowing", "owed", "patience", "port", "width")

    def __init__(self, port: Port) -> None:
        self.port = port
        self.width = 0
        self.job: Job | None = None
        self.owed = 0
        # More than the width if it was wider and has not reported since that those attempts ended.
        self.most = 0
        # Numbers the changes of the width, so that a report about an earlier one is not taken for the last.
        self.narrowing = 0
        # When it last answered for the lane, or got references when it owed none; how long it may be silent.
        self.heard_at = 0.0
        self.patience = 0.0

    @property
    def attempts(self) -> int:
        """At most how many attempts run."""
        return min(self.most, self.owed)

    def set_width(self, width: int) -> None:
        if width != self.width:
            self.narrowing += 1
        self.most = max(self.attempts, width)
        self.width = width


class FetcherProcess:
    """One fetcher, as the worker sees it. It is restarted when it dies."""

    def __init__(self, settings: Settings, clock: Clock, launch: Launch) -> None:
        self._settings = settings
        self._clock = clock
        self._launch = launch
        self._writer: FrameWriter | None = None
        self._process: LaunchedProcess | None = None
        self._number = 0
        self._sent: dict[int, tuple[Port, LeasedReference]] = {}
        self._shares: dict[int, LaneShare] = {}
        # Of all lanes.
        self._width = 0
        # Since when this side reads no packs because the recorder is full, and for how long it did so before.
        self._paused_since: float | None = None
        self._paused = 0.0
        self.ready = asyncio.Event()
        # Counts how often a process became ready or ended.
        self.generation = 0

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keep a process running until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            started = self._clock.monotonic()
            try:
                await self._run_one()
            except Exception:
                # Any error, such as a machine without free processes or descriptors: restart it all the same.
                log.exception("fetcher failed")
            if self._clock.monotonic() - started > _SETTLED_SECONDS:
                pause = _FIRST_PAUSE
            log.error("fetcher ended; restarting", seconds=pause)
            await self._clock.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 2)

    def capacity(self, port: Port, width: int) -> int:
        """Return how many more references of this lane it takes."""
        if width == 0 or not self.ready.is_set():
            return 0
        owed = self.owes(port)
        # Many small lanes share what may be ahead: all of it is attempted again if this process dies with it.
        total = 2 * self._width + _AHEAD - len(self._sent)
        return max(2 * width - owed, min(2 * width + _AHEAD - owed, total))

    def owes(self, port: Port) -> int:
        """Return how many references of this lane it has."""
        share = self._shares.get(port.number)
        return 0 if share is None else share.owed

    def attempts(self, port: Port) -> int:
        """Return at most how many attempts of this lane it runs."""
        share = self._shares.get(port.number)
        return 0 if share is None else share.attempts

    def in_progress(self, port: Port) -> list[int]:
        """Return the indexes of the tasks of this lane that it attempts: it begins with those that it got first."""
        attempts = self.attempts(port)
        entries = (entry for owner, entry in self._sent.values() if owner is port)
        return [entry.ref.index for entry in islice(entries, attempts)]

    def send(self, port: Port, width: int, entries: Sequence[LeasedReference]) -> None:
        """Send references, or a changed width or job of the lane."""
        if self._writer is None or not self.ready.is_set():
            return
        share = self._shares.get(port.number)
        if share is None:
            if not entries:
                return
            share = self._shares[port.number] = LaneShare(port)
        new_job = None if share.job is not None and share.job.options == port.job.options else port.job
        is_plain = not entries and new_job is None
        if is_plain and width == share.width:
            return
        runs_all = share.owed <= min(width, share.width)
        self._width += width - share.width
        share.set_width(width)
        share.job = port.job
        if is_plain and runs_all:
            # It runs what it has either way; the next references carry the width.
            return
        if share.owed == 0:
            share.heard_at, share.patience = self._reading_time(), 0.0
        refs = [entry.ref for entry in entries]
        if refs:
            share.patience = max(share.patience, longest_timeout(port.job, refs))
        numbers = range(self._number + 1, self._number + 1 + len(refs))
        self._number += len(refs)
        self._sent.update(zip(numbers, [(port, entry) for entry in entries], strict=True))
        gateways, conditions = [entry.gateway for entry in entries], [entry.condition for entry in entries]
        orders = list(map(Order, numbers, refs, gateways, conditions))
        share.owed += len(orders)
        narrowing = share.narrowing if share.most > width else 0
        write_frame(self._writer, Orders(port.number, width, orders, new_job, narrowing))

    def watch(self) -> None:
        """Kill the process if it owes outcomes of a lane and was silent about that lane for longer than an attempt can
        take, even if it answers for other lanes."""
        if self._process is None:
            return
        now = self._reading_time()
        for share in self._shares.values():
            silent = now - share.heard_at
            if share.owed and silent > share.patience + GRACE:
                log.error(
                    "fetcher hangs; killing it",
                    run=share.port.job.run.run_id,
                    owed=share.owed,
                    width=share.width,
                    seconds=round(silent, 1),
                )
                self._process.kill()
                return

    def drop(self, port: Port, everything: bool) -> None:
        """Return references of the lane that have not started; with `everything`, cancel and forget the others too."""
        if self._writer is not None and port.number in self._shares:
            write_frame(self._writer, Drop(port.number, everything))
        if everything:
            self._sent = {number: sent for number, sent in self._sent.items() if sent[0] is not port}
            share = self._shares.pop(port.number, None)
            self._width -= 0 if share is None else share.width

    async def _run_one(self) -> None:
        """Run one process, from its start to its end."""
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
        children.add_child("fetcher", self._process.pid)
        try:
            await read_frame(reader)
            self.ready.set()
            self.generation += 1
            while True:
                await self._until_capacity(self._deliver(decode_pack(await read_frame(reader))))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def _until_capacity(self, ports: Sequence[Port]) -> None:
        """Wait until these lanes can take more outcomes."""
        self._paused_since = self._clock.monotonic()
        try:
            for port in ports:
                await port.until_capacity()
        finally:
            self._paused += self._clock.monotonic() - self._paused_since
            self._paused_since = None

    def _reading_time(self) -> float:
        """Return a clock that stops while this side reads no packs: the process cannot be heard then."""
        now = self._clock.monotonic() if self._paused_since is None else self._paused_since
        return now - self._paused

    def _deliver(self, pack: OutcomePack) -> list[Port]:
        """Hand a pack to its lanes and return those that got outcomes. Orders that were dropped are ignored."""
        ports: dict[Port, None] = {}
        for pages in pack.pages:
            for port, entries, part in self._pages_by_port(pages):
                ports[port] = None
                self._settle(port, len(entries))
                port.lag = pack.lag
                port.on_pages(entries, part)
        by_port: dict[Port, tuple[list[LeasedReference], list[Outcome]]] = {}
        for number, outcome in outcomes_of(pack):
            order = self._sent.pop(number, None)
            if order is not None:
                parts = by_port.get(order[0])
                if parts is None:
                    parts = by_port[order[0]] = ([], [])
                parts[0].append(order[1])
                parts[1].append(outcome)
        for port, (entries, outcomes) in by_port.items():
            ports[port] = None
            self._settle(port, len(entries))
            port.lag = pack.lag
            port.on_outcomes(entries, outcomes)
        dropped: dict[Port, list[LeasedReference]] = {}
        for number in pack.dropped:
            order = self._sent.pop(number, None)
            if order is not None:
                dropped.setdefault(order[0], []).append(order[1])
        for port, entries in dropped.items():
            self._settle(port, len(entries))
            port.on_dropped(entries)
        for report in pack.reports:
            self._note_running(report)
        return list(ports)

    def _note_running(self, report: RunningReport) -> None:
        share = self._shares.get(report.lane)
        if share is not None and share.narrowing == report.narrowing:
            share.most = max(share.width, report.running)
            share.port.on_narrowed()

    def _pages_by_port(self, pages: StoredPages) -> Iterator[tuple[Port, list[LeasedReference], StoredPages]]:
        """Stored pages by lane, without those whose orders were dropped. Nearly always they are all of one lane."""
        orders = [self._sent.pop(number, None) for number in pages.numbers]
        known = [order for order in orders if order is not None]
        ports = dict.fromkeys([port for port, _ in known])
        if len(ports) == 1 and len(known) == len(orders):
            yield known[0][0], [entry for _, entry in known], pages
            return
        for port in ports:
            places = [place for place, order in enumerate(orders) if order is not None and order[0] is port]
            yield port, [entry for owner, entry in known if owner is port], pages.at(places)

    def _settle(self, port: Port, count: int) -> None:
        """Count orders of a lane as answered."""
        share = self._shares[port.number]
        share.owed -= count
        share.heard_at = self._reading_time()

    async def _end(self, early: bool) -> None:
        """End the process by closing its socket. References that it had are lost."""
        self.ready.clear()
        self.generation += 1
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        process, self._process = self._process, None
        sent, self._sent = self._sent, {}
        self._shares.clear()
        self._width = 0
        ports: dict[int, tuple[Port, list[LeasedReference]]] = {}
        for port, entry in sent.values():
            ports.setdefault(port.number, (port, []))[1].append(entry)
        for port, entries in ports.values():
            port.on_lost(entries)
        if process is not None:
            children.remove_child("fetcher", process.pid, early=early)
            process.kill()
            await process.wait()


class Fetchers(Executor):
    """The executor for fetches. It makes no attempts itself: its lanes send references to the processes."""

    def __init__(self, settings: Settings, clock: Clock, launch: Launch = launch_fetcher) -> None:
        self.members = [FetcherProcess(settings, clock, launch) for _ in range(settings.fetchers)]
        self._running: list[asyncio.Task[None]] = []
        self._ports = 0
        # How long attempts at a host took a lane lately, and when that was.
        self.host_seconds: Lru[str, tuple[float, float]] = Lru(_MAX_HOSTS)

    def target(self, ref: TaskRef) -> str | None:
        return host_of(ref.input)

    def origin(self, ref: TaskRef) -> str | None:
        return input_origin(ref.input)

    def lane(self, job: Job, tools: LaneTools) -> Lane:
        self._ports += 1
        return RemoteLane(job, self, self._ports, tools)

    def open(self) -> None:
        """Start the processes. They are ready some tenths of a second later."""
        self._running = [asyncio.create_task(member.run()) for member in self.members]

    @property
    def generation(self) -> int:
        """Changes with the processes that are ready."""
        return sum([member.generation for member in self.members])

    async def until_ready(self) -> None:
        for member in self.members:
            await member.ready.wait()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def watch(self) -> None:
        """Kill processes that hang; they are restarted."""
        for member in self.members:
            member.watch()

    def capacity(self, port: Port) -> int:
        """Return how many more references of this lane the fetchers take now."""
        if port.reach == 0:
            return 0
        return sum(max(0, member.capacity(port, width)) for member, width in self._shares(port))

    def attempts(self, port: Port) -> int:
        """Return at most how many attempts of this lane run."""
        return sum([member.attempts(port) for member in self.members])

    def in_progress(self, port: Port) -> list[int]:
        """Return the indexes of the tasks of this lane that are attempted now."""
        return [index for member in self.members for index in member.in_progress(port)]

    def update_width(self, port: Port) -> None:
        """Send each fetcher its share of the lane's present width."""
        for member, width in self._shares(port):
            member.send(port, width, [])

    def balance(self, port: Port) -> None:
        """If a fetcher has free slots of the lane, have the others return references that they cannot run yet."""
        shares = self._shares(port)
        if any(member.owes(port) < width for member, width in shares):
            for member, width in shares:
                if member.owes(port) > width:
                    member.drop(port, everything=False)

    def start(self, port: Port, entries: Sequence[LeasedReference]) -> None:
        """Send references, at most as many as `capacity` says. They are dropped at once if no process is ready."""
        shares = self._shares(port)
        if not shares and entries:
            # The last process died after the lane had asked for the capacity.
            port.on_dropped(list(entries))
        slots = [max(0, width - member.owes(port)) for member, width in shares]
        capacities = [max(0, member.capacity(port, width)) for member, width in shares]
        at = 0
        for (member, width), part in zip(shares, _parts(len(entries), slots, capacities), strict=True):
            member.send(port, width, entries[at : at + part])
            at += part

    def drop(self, port: Port, everything: bool) -> None:
        for member in self.members:
            member.drop(port, everything)

    def _shares(self, port: Port) -> list[tuple[FetcherProcess, int]]:
        """Divide the lane's width among the fetchers that are ready."""
        ready = [member for member in self.members if member.ready.is_set()]
        if not ready:
            return []
        share, rest = divmod(port.reach, len(ready))
        # Lanes of width 1 do not all go to the same fetcher.
        first = port.number % len(ready)
        widths = [share + (((at - first) % len(ready)) < rest) for at in range(len(ready))]
        return list(zip(ready, _within(widths, [member.attempts(port) for member in ready]), strict=True))


def _within(widths: list[int], attempts: list[int]) -> list[int]:
    """Lower widths of fetchers while attempts beyond the width of others have not ended."""
    excess = sum([max(0, running - width) for width, running in zip(widths, attempts, strict=True)])
    if not excess:
        return widths
    lowered = []
    for width, running in zip(widths, attempts, strict=True):
        less = min(excess, max(0, width - running))
        excess -= less
        lowered.append(width - less)
    return lowered


def _parts(count: int, slots: Sequence[int], capacities: Sequence[int]) -> list[int]:
    """Divide `count` references: first fill free slots, then give even parts up to each capacity."""
    parts = [0] * len(slots)
    for at, free in enumerate(slots):
        parts[at] = min(free, count)
        count -= parts[at]
    ordered = sorted(range(len(slots)), key=lambda at: parts[at] - capacities[at])
    for left, at in zip(range(len(ordered), 0, -1), ordered, strict=True):
        more = min(capacities[at] - parts[at], -(-count // left))
        parts[at] += more
        count -= more
    for at in ordered:
        # What the even split left over goes to the first ones that have capacity.
        more = min(capacities[at] - parts[at], count)
        parts[at] += more
        count -= more
    if parts:
        parts[ordered[0]] += count
    return parts

"""RemoteLane: a lane whose references are attempted by fetchers. References go out and outcomes come back in batches;
no coroutine and no await is spent on a single one."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, Any

import structlog

from conveyor.model import Job, Outcome, TaskRef
from conveyor.process.changed_pages import has_base
from conveyor.process.earlier_outcomes import needs_look
from conveyor.process.executors.fetch.frames import StoredPages
from conveyor.process.extraction import has_page
from conveyor.process.lane import Lane, LaneTools, LeasedRef
from conveyor.process.page_copies import WINDOW_BYTES
from conveyor.process.recorded_outcomes import RecordedPages, page_outcomes
from conveyor.process.recorder import LeasedChunk

if TYPE_CHECKING:
    from conveyor.process.executors.fetch.fetchers import Fetchers


log = structlog.get_logger()

# Pages that may wait for `extract` in one lane, or twice its width, and their bytes: above either it sends no more.
_EXTRACTING = 256
_EXTRACTING_BYTES = 64 * 1024 * 1024
# Bytes above which no pack is read. The packs of a fetcher are for all lanes, so what was sent before should fit in.
_MAX_EXTRACTING_BYTES = 4 * _EXTRACTING_BYTES


# Lanes whose attempts take less than this get slots in portions, so that few of many small runs are served at a time:
# what orders, outcomes and flushes cost for each run is then shared by several tasks.
_QUICK_SECONDS = 0.25
_PORTION = 16
# A lane with no more references than this that are not done, of a run that is here as a whole, gets larger portions: it
# is finished before others begin, instead of all of them little by little.
_NEARLY_DONE = 256
_LAST_PORTION = 64
# For so long a new lane is taken to be as quick as others were at the same host.
_HOST_SECONDS = 10.0
# Fewer references are not sent while fetchers have enough to do.
_LEAST_SENT = 32
# References of a host without room that are passed by at a time.
_PASSED_BY = 100
# Slots that a lane asks for at most, where the pace of its host lets it use fewer: a multiple of its share, which may
# double soon, and so many at least.
_SHARES_OF_SLOTS = 4
_LEAST_SLOTS = 32
_SMOOTHING = 0.2


class RemoteLane(Lane):
    """A port (fetchers.py) of the fetchers. `number` names it in frames."""

    def __init__(self, job: Job, fetchers: "Fetchers", number: int, tools: LaneTools) -> None:
        super().__init__(job, fetchers.target, tools)
        self.number = number
        self.lag = 0.0
        # How many attempts fetchers may run at once: the width, or less by the pace of the only host.
        self.reach = 0
        self._paced.keep_part()
        # Whether fewer slots were asked for than there is work, because of the pace.
        self._is_modest = False
        self._fetchers = fetchers
        self._sent = 0
        self._idle = asyncio.Event()
        self._stopping = False
        # Whether attempts may run beyond the width.
        self._is_over = False
        # Whether references or options came since the last `set_width`, and which fetchers were ready then.
        self._has_news = False
        self._generation = -1
        # How long attempts took lately.
        self._seconds: float | None = None
        # Of the first reference.
        self._host: str | None = None
        self._heard_at = -inf
        # Set while sending waits for a call: to probe a breaker, to mark a start, or for the recorder.
        self._sending: asyncio.Task[None] | None = None
        # Calls of the job's `extract`, and the bytes of their pages; set when one of them is done.
        self._extractions: set[asyncio.Task[None]] = set()
        self._extracting_bytes = 0
        self._extracted = asyncio.Event()

    @property
    def attempts(self) -> int:
        return self._fetchers.attempts(self) if self._sent else 0

    @property
    def demand(self) -> int:
        demand = super().demand
        if self._paced.is_on:
            # What fetchers have beyond the lane's part runs as soon as that grows.
            demand += self._sent - self.active
        # More slots than the host can use soon are better used by other lanes.
        modest = max(_LEAST_SLOTS, _SHARES_OF_SLOTS * self._paced.share)
        self._is_modest = modest < demand
        return min(demand, modest)

    @property
    def portion(self) -> int:
        if self._seconds is None:
            # Others may have heard from its host since it began.
            self._learn_of_host()
        if self._seconds is None or self._seconds >= _QUICK_SECONDS:
            return 1
        left = self._sent + len(self._waiting)
        return _LAST_PORTION if left <= _NEARLY_DONE and self.has_whole_run else _PORTION

    @property
    def _is_quick(self) -> bool:
        """Whether attempts end so soon that no fetcher waits long for what another one has."""
        is_fresh = self._clock.monotonic() - self._heard_at < _QUICK_SECONDS
        return is_fresh and self._seconds is not None and self._seconds < _QUICK_SECONDS

    def in_progress(self) -> list[int]:
        return [] if self._is_quick or not self._sent else self._fetchers.in_progress(self)

    def is_settled(self, width: int) -> bool:
        """Outcomes make the lane send more by themselves; what was fed, and what fetchers must return, needs a call."""
        is_paced = (width > 0 and len(self._paced) > 0) or self.reach != self._find_reach(width)
        is_plain = not (self._targets.is_limited or is_paced or self._gate.is_watching or self._is_over)
        is_idle = self._sent == 0 and not self._waiting
        has_sent_all = len(self._waiting) > 0 and not self._has_news and self._backing_off is None
        is_known = width == self.width and self._generation == self._fetchers.generation
        return is_plain and is_known and (is_idle or has_sent_all)

    def feed(self, chunk: LeasedChunk, refs: list[TaskRef]) -> None:
        super().feed(chunk, refs)
        self._has_news = True
        if self._host is None and refs:
            self._host = self._target(refs[0])
            self._learn_of_host()
        if refs:
            self._paced.expect(refs[0])

    def _learn_of_host(self) -> None:
        """Begin with how long attempts at the host of the first reference took other lanes a moment ago."""
        known = None if self._host is None else self._fetchers.host_seconds.get(self._host)
        if known is not None and self._clock.monotonic() - known[1] < _HOST_SECONDS:
            self._seconds = known[0]

    def follow(self, job: Job) -> None:
        super().follow(job)
        # Fetchers get the job's options with the next width.
        self._has_news = True

    def set_width(self, width: int) -> None:
        self.width = width
        self._paced.set_slots(width)
        self._set_reach(self._find_reach(width))
        self._has_news, self._generation = False, self._fetchers.generation
        # Fetchers need the width even when there is nothing to send.
        self._fetchers.update_width(self)
        self._is_over = self.attempts > width
        self._send()
        if not (self._waiting or self._paced or self._is_quick):
            self._fetchers.balance(self)
        self._count_sent(0)

    def _find_reach(self, width: int) -> int:
        return min(width, self._paced.part)

    def _set_reach(self, reach: int) -> None:
        if reach > self.reach and self._is_modest:
            # It may use more slots by now.
            self._is_modest = False
            self._owner.request_tick()
        self.reach = reach
        if self._paced.width != reach:
            self._paced.set_width(reach)

    def _follow_pace(self) -> None:
        """Tell fetchers how many attempts they may run, if the pace has changed that."""
        if self._paced.is_on and (reach := self._find_reach(self.width)) != self.reach:
            self._set_reach(reach)
            self._fetchers.update_width(self)
            self._count_sent(0)

    async def stop(self, grace: float) -> list[LeasedChunk]:
        self._stopping = True
        if self._sending is not None:
            self._sending.cancel()
        return await super().stop(grace)

    async def _drain(self, grace: float) -> None:
        await self._finish_running(0.0)
        if self._sent:
            self._fetchers.drop(self, everything=False)
        self._count_sent(0)
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
                if self._extractions:
                    await asyncio.wait(self._extractions)
        except TimeoutError:
            pass
        self._fetchers.drop(self, everything=True)
        await self._cancel_extractions()

    async def _cancel_extractions(self) -> None:
        for task in self._extractions:
            task.cancel()
        if self._extractions:
            await asyncio.wait(self._extractions)

    def on_outcomes(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        self._learn(max([outcome.elapsed for outcome in outcomes], default=0.0))
        self._paced.learn(entries, outcomes, self.lag)
        self._return(entries)
        self._reuse_pages(entries, outcomes)
        if has_base(self.job):
            entries, outcomes = self._copy_later(entries, outcomes)
        self._finish(entries, outcomes)
        self._send()

    def _finish(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        if not entries:
            return
        if self.job.options.extract is None:
            self._record(entries, outcomes)
        else:
            self._record_after_extraction(entries, outcomes)

    def _copy_later(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> tuple[list[LeasedRef], list[Outcome]]:
        """Start to copy the pages of unchanged outcomes, which finishes them; returns the others."""
        pairs = list(zip(entries, outcomes, strict=True))
        copied = [pair for pair in pairs if pair[1].unchanged]
        if copied:
            size = sum([_page_bytes(entry) for entry, _ in copied])
            self._extracting_bytes += size
            copying = asyncio.create_task(self._copy_and_finish(copied))
            self._extractions.add(copying)
            copying.add_done_callback(partial(self._on_extracted, size))
        others = [pair for pair in pairs if not pair[1].unchanged]
        return [entry for entry, _ in others], [outcome for _, outcome in others]

    async def _copy_and_finish(self, pairs: list[tuple[LeasedRef, Outcome]]) -> None:
        """Copy pages, a bounded number of bytes at a time. Those that cannot be read are fetched."""
        while pairs:
            taken = _window(pairs)
            entries, outcomes = [entry for entry, _ in pairs[:taken]], [outcome for _, outcome in pairs[:taken]]
            pairs = pairs[taken:]
            try:
                copied = await self._copy_pages(entries, outcomes)
            except Exception:
                log.exception("pages not copied", run=self.job.run.run_id)
                self._gate.release(entries)
                self._lose(entries)
                continue
            gone = [entry for entry, is_copied in zip(entries, copied, strict=True) if not is_copied]
            if gone:
                self._gate.release(gone)
                self._waiting.extendleft(reversed(gone))
            self._finish(
                [entry for entry, is_copied in zip(entries, copied, strict=True) if is_copied],
                [outcome for outcome, is_copied in zip(outcomes, copied, strict=True) if is_copied],
            )
            if self._recorder.full:
                await self._recorder.until_capacity()

    def _learn(self, seconds: float) -> None:
        """Learn how long the slowest attempt of a batch took."""
        self._seconds = seconds if self._seconds is None else self._seconds + _SMOOTHING * (seconds - self._seconds)
        self._heard_at = self._clock.monotonic()
        if self._host is not None:
            self._fetchers.host_seconds.put(self._host, (self._seconds, self._heard_at))

    def _record_after_extraction(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        """Record what failed; the others once their bodies went through the job's `extract`."""
        self._gate.record(entries, outcomes)
        pairs = list(zip(entries, outcomes, strict=True))
        others = [pair for pair in pairs if not has_page(pair[1])]
        if others:
            self._add_outcomes([entry for entry, _ in others], [outcome for _, outcome in others])
        pages = [pair for pair in pairs if has_page(pair[1])]
        self._extract_later([entry for entry, _ in pages], [outcome for _, outcome in pages])

    def _extract_later(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        """Start the extraction from the bodies of these outcomes, which records them."""
        if entries:
            # At once, and not when the task begins: what follows decides by it.
            size = sum([len(outcome.body or b"") for outcome in outcomes])
            self._extracting_bytes += size
            extracting = asyncio.create_task(self._extract_pages(entries, outcomes))
            self._extractions.add(extracting)
            extracting.add_done_callback(partial(self._on_extracted, size))

    async def _extract_pages(self, entries: list[LeasedRef], outcomes: list[Outcome]) -> None:
        if await self._extract(entries, outcomes):
            self._add_outcomes(entries, outcomes)

    def _on_extracted(self, size: int, task: "asyncio.Task[None]") -> None:
        self._extracting_bytes -= size
        self._extractions.discard(task)
        self._extracted.set()
        self._send()

    def on_pages(self, entries: list[LeasedRef], pages: StoredPages) -> None:
        if self._gate.is_recording:
            # A breaker wants to know what each of them says about its target.
            self.on_outcomes(entries, page_outcomes(pages))
            return
        self._learn(max(pages.elapsed))
        self._paced.learn_pages(entries, pages.elapsed, self.lag)
        self._return(entries)
        self._gate.note_answers(entries)
        self._recorder.add_pages(
            RecordedPages(self.job, [entry.chunk for entry in entries], [entry.ref for entry in entries], pages)
        )
        self._on_recorded(len(entries))
        self._send()

    async def until_capacity(self) -> None:
        if self._recorder.full:
            await self._recorder.until_capacity()
        while self._extracting_bytes > _MAX_EXTRACTING_BYTES:
            self._extracted.clear()
            await self._extracted.wait()

    async def _until_extracted(self) -> None:
        while self._is_extracting_enough:
            self._extracted.clear()
            await self._extracted.wait()

    @property
    def _is_extracting_enough(self) -> bool:
        """Whether to fetch no more: what waits for `extract` is fetched again after a crash."""
        return self._extracting > max(_EXTRACTING, 2 * self.width) or self._extracting_bytes > _EXTRACTING_BYTES

    def recheck_targets(self) -> None:
        super().recheck_targets()
        if self._gate.is_watching:
            self._fetchers.drop(self, everything=False)

    def on_dropped(self, entries: list[LeasedRef]) -> None:
        self._return(entries)
        self._gate.release(entries)
        if not self._stopping:
            self._waiting.extendleft(reversed(entries))
            # Once for all batches that come back in this step of the loop.
            asyncio.get_running_loop().call_soon(self._send)

    def on_lost(self, entries: list[LeasedRef]) -> None:
        self._return(entries)
        self._gate.release(entries)
        self._lose(entries)

    def on_narrowed(self) -> None:
        if not self._stopping:
            # Fetchers whose share was kept low meanwhile may have it now.
            self.set_width(self.width)
        self._owner.on_slots_freed(self)

    def _return(self, entries: list[LeasedRef]) -> None:
        """Count references as no longer sent and free the slots of their targets."""
        self._count_sent(-len(entries))
        self._paced.release(entries)
        for entry in entries:
            if entry.slot is not None:
                self._targets.free_slot(entry)
        if self._is_over:
            self._is_over = self.attempts > self.width
            self._owner.on_slots_freed(self)
        if self._sent < self.width and not self._waiting:
            self._owner.on_slots_idle(self)

    def _count_sent(self, change: int) -> None:
        self._sent += change
        # Beyond the width, what began when it was larger goes on.
        self.active = min(self._sent, max(self.reach, self.attempts)) if self.width else self._sent
        if self._sent == 0:
            self._idle.set()
        else:
            self._idle.clear()

    def _send(self) -> None:
        """Send as many references as the fetchers take."""
        if self._stopping or self._sending is not None or self._backing_off is not None:
            return
        if self._recorder.full:
            self._recorder.when_capacity(self._send)
            return
        if self._is_extracting_enough:
            self._send_after(self._until_extracted)
            return
        self._follow_pace()
        capacity = self._capacity()
        entries: list[LeasedRef] = []
        if not self._targets.is_limited and not self._gate.is_watching:
            entries = self._take_paced(capacity) if self._paced.is_on else self._waiting.take_plain(capacity)
        while len(entries) < capacity and (entry := self._next()) is not None:
            may_start = self._check_gate(entry)
            if may_start is None or (may_start and entry.chunk.suspect):
                self._send_after(partial(self._send_one, entry, probes=may_start is None))
                break
            if may_start:
                entries.append(entry)
        # These may be the first of their host.
        self._follow_pace()
        self._hand_over(entries)
        self._targets.request()

    def _take_paced(self, capacity: int) -> list[LeasedRef]:
        """Take references whose hosts have room, as long as nothing else is to be asked for any of them. Those of a
        host that has none are passed by, so that those of others are found."""
        entries: list[LeasedRef] = []
        while len(entries) < capacity or self.reach < self.width:
            left = capacity - len(entries)
            if left > 0 and self._paced.has_ready:
                entries += self._paced.take(left)
                left = capacity - len(entries)
            count = max(left, _PASSED_BY) if self.reach < self.width else left
            plain = [] if self.is_crowded else self._waiting.take_plain(count)
            if not plain:
                break
            entries += self._paced.admit(plain, left)
        return entries

    def _hold_back(self) -> None:
        self._fetchers.drop(self, everything=False)

    def _capacity(self) -> int:
        """Return how many references to send now: more than run at once, unless a target counts each as running."""
        capacity = self._fetchers.capacity(self)
        if self._targets.is_limited:
            return min(capacity, self.width - self._sent)
        # A frame costs as much for one reference as for many.
        is_little = capacity < min(len(self._waiting), _LEAST_SENT)
        return 0 if is_little and self._sent >= 2 * self.reach else capacity

    async def _send_one(self, entry: LeasedRef, *, probes: bool) -> None:
        """Send a reference that probes a breaker or belongs to a redelivered chunk, whose start is marked first."""
        # It counts as sent during the calls: without any demand the lane would lose its slots, and the reference its
        # turn at its target.
        self._count_sent(1)
        try:
            may_start = (not probes or await self._acquire_probe(entry)) and await self._mark_started([entry])
        finally:
            self._count_sent(-1)
        if not may_start:
            return
        entry.chunk.suspect = False
        if self._fetchers.capacity(self) > 0:
            self._hand_over([entry])
        else:
            # It must not keep a probe that others could use meanwhile.
            self._gate.release([entry])
            self._free(entry)
            self._waiting.appendleft(entry)

    def _send_after(self, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def send() -> None:
            try:
                await first()
            finally:
                self._sending = None
            self._send()

        self._sending = self._spawn(send())

    def _hand_over(self, entries: list[LeasedRef]) -> None:
        if not entries and not self._sent:
            # Nothing runs, and the next references carry the width.
            return
        entries = self._fail_late(entries)
        self._gate.assign_gateways(entries)
        self._count_sent(len(entries))
        if entries and needs_look(self.job):
            self._spawn(self._start_or_reuse(entries))
        else:
            self._fetchers.start(self, entries)

    async def _start_or_reuse(self, entries: list[LeasedRef]) -> None:
        """Send the references that have no stored body to extract from, with the pages to compare with."""
        assert self._earlier is not None
        try:
            stored, pages = await self._earlier.look(self.job, [entry.ref for entry in entries])
        except Exception as error:
            log.warning("earlier outcomes not read", run=self.job.run.run_id, error=repr(error))
            self._return(entries)
            self._put_back(entries, error)
            return
        except BaseException:
            self._return(entries)
            raise
        self._note_earlier(entries, pages)
        reused = [entry for entry in entries if entry.ref.index in stored]
        self._return(reused)
        self._gate.release(reused)
        self._extract_later(reused, [stored[entry.ref.index] for entry in reused])
        self._fetchers.start(self, [entry for entry in entries if entry.ref.index not in stored])


def _page_bytes(entry: LeasedRef) -> int:
    body = None if entry.earlier is None else entry.earlier.task.detail.body
    return 0 if body is None else body.length


def _window(pairs: list[tuple[LeasedRef, Outcome]]) -> int:
    """How many of these pages to copy together, at least one."""
    sizes = accumulate(_page_bytes(entry) for entry, _ in pairs)
    return max(1, sum(1 for size in sizes if size <= WINDOW_BYTES))

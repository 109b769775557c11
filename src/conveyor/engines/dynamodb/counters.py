"""The stored counts of a run: a few items, each incremented once per batch of finished tasks.

An ADD that is sent twice counts twice, so each addition carries a number of its writer's lane (announcements.py), and
an item accepts each number once. If the writer dies between moving tasks and adding them, another process adds them in
its place within seconds (late_counts.py).

A recount sets all items of a run to the counted values, on the condition that no addition happened since it began, and
starts a new epoch. An addition names the epoch that its writer knew before it moved the tasks: the recount may or may
not have seen these tasks, so an item refuses an addition of an earlier epoch, and the writer recounts too. So the
counts may lag after a crash between moving and adding, but never lead.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable

import msgspec
from aiodynamo.expressions import Condition, F, HashKey, RangeKey, UpdateExpression
from aiodynamo.operations import Operation, Put, Update

from conveyor.clock import Clock
from conveyor.engines.dynamodb.announcements import SLOTS, Announcement, announcement_item, announcement_of, slot_of
from conveyor.engines.dynamodb.layout import announcement_key, count_key
from conveyor.engines.dynamodb.lifetimes import while_in_use
from conveyor.engines.dynamodb.table import Item, Table, plain
from conveyor.engines.dynamodb.wire import DynamoRefused
from conveyor.faults import crashpoint
from conveyor.model import UNCHANGED, Counts, Replaced, RunKey, count_replaced, counts_by_status
from conveyor.states import TaskStatus

# Maximum number of error codes per item: items are bounded, the error codes of handlers are not.
_MAX_CODES = 200
_LONGEST_CODE = 200
# Another process recounts rarely, and only when no task has finished for a while.
_EPOCH_SECONDS = 2.0
_MAX_RUNS = 1000
# Lanes of a process in a run. A few calls run at once; those of failed calls are kept.
_MAX_LANES = 64

_STATUSES = ("succeeded", "failed", "cancelled", "unchanged")
# Prefixes of attributes: of error codes, of replaced outcomes by status, and of their error codes.
_CODE = "e:"
_REPLACED = "replaced_"
_REPLACED_CODE = "p:"


class Tally(msgspec.Struct, frozen=True):
    """Finished tasks by status, failed tasks by code, and the earlier outcomes that those of a rerun replace."""

    counts: Counts
    codes: Counter[str]
    replaced: Replaced = Replaced()


def tally_of(ends: Iterable[tuple[TaskStatus, str | None, str | None]]) -> Tally:
    """Count finished tasks, each with its status, its error code and its earlier outcome."""
    statuses: Counter[TaskStatus] = Counter()
    codes: Counter[str] = Counter()
    priors: Counter[tuple[TaskStatus, str | None]] = Counter()
    unchanged = 0
    for status, code, prior in ends:
        statuses[status] += 1
        priors[status, prior] += 1
        if status is TaskStatus.FAILED and code:
            codes[code] += 1
        elif status is TaskStatus.SUCCEEDED and code == UNCHANGED:
            unchanged += 1
    return Tally(counts_by_status(statuses, unchanged), codes, count_replaced(priors.elements()))


class Added(msgspec.Struct, frozen=True):
    """Whether an addition is in the counts. If not: the tasks that are, because another process has added them for this
    one; None after a recount, which may or may not have seen them."""

    done: bool
    counted: frozenset[int] | None = None


class _Known:
    """This process's knowledge of a run's counts, and the lanes that its calls use now."""

    def __init__(self) -> None:
        self.lanes: set[int] = set()
        self.epoch = 0
        self.epoch_until = 0.0
        self.codes: set[str] = set()


class Counters:
    """The counters of one process: it is one writer, and adds to one item of each run."""

    def __init__(self, table: Table, clock: Clock, writer: str) -> None:
        self._table = table
        self._clock = clock
        self._writer = writer
        self._slot = slot_of(writer)
        # One for all runs: a run that was evicted here and is known again must not reuse a number, which its item would
        # take for an addition that it has.
        self._numbers = itertools.count(1)
        self._runs: OrderedDict[tuple[str, str], _Known] = OrderedDict()

    async def epoch(self, run: RunKey) -> int:
        """The current epoch. Ask before moving tasks."""
        known = self._known(run)
        if known.epoch_until <= self._clock.monotonic():
            self._learn(known, await self._table.get(count_key(run, self._slot)) or {})
        return known.epoch

    async def announce(self, run: RunKey, epoch: int, indexes: Iterable[int]) -> Announcement:
        """Write down which tasks a call is about to move. It uses a lane until `close`."""
        known = self._known(run)
        if len(known.lanes) >= _MAX_LANES:
            # Two calls in one lane are safe: the addition of one is refused, and it recounts.
            known.lanes.clear()
        lane = next(lane for lane in itertools.count() if lane not in known.lanes)
        known.lanes.add(lane)
        announcement = Announcement(
            self._writer, lane, next(self._numbers), epoch, tuple(sorted(indexes)), self._clock.now()
        )
        await self._put(run, announcement)
        return announcement

    def close(self, run: RunKey, announcement: Announcement) -> None:
        """All that the call has moved is counted: the next one may use its lane. The lane of a call that failed stays
        as it is, until another process has settled it."""
        self._known(run).lanes.discard(announcement.lane)

    async def withdraw(self, run: RunKey, announcement: Announcement) -> None:
        """Remove the announcement of a call that has moved nothing."""
        key = announcement_key(run, self._writer, announcement.lane)
        await self._table.wire.call("DeleteItem", self._table.remove(key).to_request_payload()["Delete"])

    async def add(self, run: RunKey, announcement: Announcement, tally: Tally) -> Added:
        """Add the moved tasks."""
        known = self._known(run)
        update = addition(self._table.name, run, announcement, tally, known.codes, self._clock.now())
        payload = {**update.to_request_payload()["Update"], "ReturnValues": "ALL_NEW"}
        crashpoint("tasks.count.before")
        try:
            answer = await self._table.wire.call("UpdateItem", payload)
        except DynamoRefused:
            return await self._refused(run, known, announcement)
        self._learn(known, plain(answer["Attributes"]))
        crashpoint("tasks.count.after")
        return Added(done=True)

    async def add_rest(self, run: RunKey, announcement: Announcement, tally: Tally) -> Added:
        """Add the tasks that another process, which added some of them for this one, has not seen."""
        return await self.add(run, msgspec.structs.replace(announcement, number=next(self._numbers)), tally)

    async def _refused(self, run: RunKey, known: _Known, announcement: Announcement) -> Added:
        """An earlier attempt has added them, and its answer was lost; or another process has; or a recount came in
        between."""
        item = await self._table.get(count_key(run, self._slot)) or {}
        self._learn(known, item)
        if item.get(announcement.attribute, 0) < announcement.number:
            return Added(done=False)
        stored = await self._table.get(announcement_key(run, self._writer, announcement.lane))
        if stored is None or stored["number"] > announcement.number:
            return Added(done=False)
        counted = announcement_of(stored).counted if stored["number"] == announcement.number else None
        return Added(done=counted is None, counted=counted)

    async def _put(self, run: RunKey, announcement: Announcement) -> None:
        key = announcement_key(run, self._writer, announcement.lane)
        item = {**key._asdict(), **announcement_item(announcement), "ttl": while_in_use(self._clock.now())}
        crashpoint("tasks.announce.before")
        await self._table.wire.call("PutItem", Put(self._table.name, item).to_request_payload()["Put"])
        crashpoint("tasks.announce.after")

    async def read(self, run: RunKey) -> Tally:
        return sum_of(item for item in await self._slots(run) if item is not None)

    async def mend(self, run: RunKey, before: "CountItems", truth: Tally) -> bool:
        """Set the counts, unless an addition happened since `before`."""
        if sum_of(item for item in before.items if item is not None) == truth:
            return True
        epoch = max((item.get("epoch", 0) for item in before.items if item is not None), default=0) + 1
        writes = [self._absolute(run, slot, item, epoch, truth) for slot, item in enumerate(before.items)]
        try:
            await self._table.write(writes)
        except DynamoRefused:
            return False
        finally:
            self._known(run).epoch_until = 0.0
        return True

    async def standing(self, run: RunKey) -> "CountItems":
        """All count items of a run. Read them before counting its tasks."""
        return CountItems(await self._slots(run))

    def forget(self, run: RunKey) -> None:
        self._runs.pop((run.tenant, run.run_id), None)

    async def _slots(self, run: RunKey) -> list[Item | None]:
        first = count_key(run, 0)
        where = HashKey("pk", first.pk) & RangeKey("sk").between(first.sk, count_key(run, SLOTS - 1).sk)
        counters = {item["sk"]: item for item in await self._table.query(where)}
        return [counters.get(count_key(run, slot).sk) for slot in range(SLOTS)]

    def _known(self, run: RunKey) -> _Known:
        key = (run.tenant, run.run_id)
        known = self._runs.get(key)
        if known is None:
            known = self._runs[key] = _Known()
        self._runs.move_to_end(key)
        if len(self._runs) > _MAX_RUNS:
            oldest = next(iter(self._runs))
            if not self._runs[oldest].lanes or len(self._runs) > 2 * _MAX_RUNS:
                del self._runs[oldest]
        return known

    def _learn(self, known: _Known, item: Item) -> None:
        known.epoch = item.get("epoch", 0)
        known.epoch_until = self._clock.monotonic() + _EPOCH_SECONDS
        known.codes = code_names(item)

    def _absolute(self, run: RunKey, slot: int, item: Item | None, epoch: int, truth: Tally) -> Operation:
        key = count_key(run, slot)._asdict()
        kept: Item = {**key, "epoch": epoch, "rev": 1 if item is None else item["rev"] + 1}
        kept["ttl"] = while_in_use(self._clock.now())
        if slot == 0:
            kept |= {status: getattr(truth.counts, status) for status in _STATUSES}
            if truth.replaced != Replaced():
                kept |= {f"{_REPLACED}{status}": getattr(truth.replaced.counts, status) for status in _STATUSES}
            replaced_codes = Counter(truth.replaced.codes).most_common(_MAX_CODES)
            most = Tally(
                truth.counts,
                Counter(dict(truth.codes.most_common(_MAX_CODES))),
                Replaced(truth.replaced.counts, dict(replaced_codes)),
            )
            kept |= _by_code(most)
        condition = F("pk").does_not_exist() if item is None else F("rev").equals(item["rev"])
        return Put(self._table.name, kept, condition)


class CountItems(msgspec.Struct, frozen=True):
    """The count items of a run at one moment; None for a missing item."""

    items: list[Item | None]


def addition(table: str, run: RunKey, announcement: Announcement, tally: Tally, known: set[str], now: float) -> Update:
    """The write that adds what an announced call has moved. `known` are the code attributes that the item has."""
    expression = F(announcement.attribute).set(announcement.number) & F("rev").add(1)
    expression &= F("ttl").set(while_in_use(now))
    for status in _STATUSES:
        if amount := getattr(tally.counts, status):
            expression &= F(status).add(amount)
        if amount := getattr(tally.replaced.counts, status):
            expression &= F(f"{_REPLACED}{status}").add(amount)
    for name, amount in _by_code(tally).most_common():
        expression &= _code(known, name, amount)
    lane = F(announcement.attribute)
    fresh: Condition = lane.does_not_exist() | lane.lt(announcement.number)
    epoch = F("epoch")
    same = epoch.equals(announcement.epoch) if announcement.epoch else epoch.does_not_exist()
    return Update(table, count_key(run, announcement.slot)._asdict(), expression, same & fresh)


def code_names(item: Item) -> set[str]:
    """The attributes of a count item that count by error code."""
    return {name for name in item if name.startswith((_CODE, _REPLACED_CODE))}


def _code(known: set[str], name: str, amount: int) -> UpdateExpression:
    if name not in known:
        if sum(code[:2] == name[:2] for code in known) >= _MAX_CODES:
            return UpdateExpression()
        known.add(name)
    return F(name).add(amount)


def sum_of(items: Iterable[Item]) -> Tally:
    totals: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    replaced_codes: Counter[str] = Counter()
    for item in items:
        for name, value in item.items():
            if name in _STATUSES or name.startswith(_REPLACED):
                totals[name] += value
            elif name.startswith(_CODE):
                codes[name.removeprefix(_CODE)] += value
            elif name.startswith(_REPLACED_CODE):
                replaced_codes[name.removeprefix(_REPLACED_CODE)] += value
    replaced = Counts(*(totals[f"{_REPLACED}{status}"] for status in _STATUSES))
    return Tally(Counts(*(totals[status] for status in _STATUSES)), codes, Replaced(replaced, dict(replaced_codes)))


def _by_code(tally: Tally) -> Counter[str]:
    """The amounts of all attributes that count by error code."""
    amounts: Counter[str] = Counter()
    for prefix, codes in ((_CODE, tally.codes), (_REPLACED_CODE, tally.replaced.codes)):
        for code, count in codes.items():
            amounts[f"{prefix}{code[:_LONGEST_CODE]}"] += count
    return amounts

"""Sends many items in calls of a few items each. Each partition has a lane: lanes run concurrently, and a throttled
lane delays no other. The remainders of several lanes share a call once; items that it did not accept return to their
own lane."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from conveyor.engines.dynamodb.wire import Pauses, Transient, Wire

T = TypeVar("T")

# Sends items and returns those to send again. If it raises Transient, all are sent again.
Send = Callable[[list[T]], Awaitable[Sequence[T]]]

# Concurrent calls, over all lanes of one request, and in one lane.
_CALLS = 16
_MIN_IN_A_LANE = 2
_MAX_IN_A_LANE = 8


class Way(NamedTuple):
    """How items are sent."""

    wire: Wire
    # Items per call.
    size: int
    # Concurrent calls in a lane.
    width: int


async def drain(wire: Wire, lanes: Collection[Sequence[T]], size: int, send: Send[T]) -> None:
    """Send every item of every lane, `size` per call, until all are accepted."""
    filled = [lane for lane in lanes if lane]
    if not filled:
        return
    width = max(_MIN_IN_A_LANE, min(_MAX_IN_A_LANE, _CALLS // len(filled)))
    way = Way(wire, size, width)
    whole, rest = _divide(filled, size)
    steps = [*(_lane(way, lane, send) for lane in whole), *(_shared(way, batch, send) for batch in rest)]
    done = await _together(steps)
    assert sum(done) == sum(map(len, filled)), "every item that was sent has an answer"


def _divide(lanes: Sequence[Sequence[T]], size: int) -> tuple[list[Sequence[T]], list[list[list[T]]]]:
    """The items that fill calls of their own lane, and for each shared call, the items by lane."""
    if len(lanes) == 1:
        return list(lanes), []
    whole = [lane[: len(lane) - len(lane) % size] for lane in lanes if len(lane) >= size]
    shared: list[list[list[T]]] = []
    room = 0
    for lane in lanes:
        rest = list(lane[len(lane) - len(lane) % size :])
        while rest:
            if room == 0:
                shared.append([])
                room = size
            shared[-1].append(rest[:room])
            rest, room = rest[room:], room - min(room, len(rest))
    return whole, shared


async def _shared(way: Way, parts: list[list[T]], send: Send[T]) -> int:
    """One call for the remainders of several lanes. Items that it did not accept return to their lanes."""
    batch = [item for part in parts for item in part]
    try:
        left = await send(batch)
    except Transient:
        left = batch
    if not left:
        return len(batch)
    known = {id(item) for item in left}
    own = [[item for item in part if id(item) in known] for part in parts]
    if sum(map(len, own)) != len(left):
        # The call returned copies.
        own = [list(left)]
    done = await _together(_lane(way, lane, send) for lane in own if lane)
    return len(batch) - len(left) + sum(done)


async def _lane(way: Way, items: Sequence[T], send: Send[T]) -> int:
    waiting = list(reversed(items))
    calls = min(way.width, -(-len(waiting) // way.size))
    return sum(await _together(_sender(way.wire.pauses(), waiting, way.size, send) for _ in range(calls)))


async def _sender(pauses: Pauses, waiting: list[T], size: int, send: Send[T]) -> int:
    """Send from the lane until it is empty. Returns how many items were accepted. This sender retries its own items."""
    done = 0
    mine: list[T] = []
    while batch := mine or _take(waiting, size):
        try:
            mine = list(await send(batch))
        except Transient as failure:
            mine = batch
            await pauses.after(failure)
            continue
        done += len(batch) - len(mine)
        if len(mine) < len(batch):
            pauses.progress()
        if mine:
            await pauses.after(Transient(f"{len(mine)} of {len(batch)} items were not taken", unsure=False))
    return done


def _take(waiting: list[T], size: int) -> list[T]:
    batch = waiting[: -size - 1 : -1]
    del waiting[len(waiting) - len(batch) :]
    return batch


async def _together(steps: Iterable[Awaitable[int]]) -> list[int]:
    """Run all of them. If one fails, cancel the others, then raise its error."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

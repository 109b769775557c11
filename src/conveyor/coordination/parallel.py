"""Work on several items at once, of which nothing is left under way when it returns or raises."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

# How many items a role works on at once: most of the time of each is the wait for an engine.
AT_ONCE = 32


async def at_once(items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
    """Work on several items at once. After an error no further item is started; it is raised when the work under way is
    done."""
    waiting = list(items)[::-1]

    async def run() -> None:
        while waiting:
            item = waiting.pop()
            try:
                await work(item)
            except BaseException:
                waiting.clear()
                raise
            # Some engines answer without a wait: others run in between all the same.
            await asyncio.sleep(0)

    await together(*(run() for _ in range(min(AT_ONCE, len(waiting)))))


async def together(*calls: Awaitable[T]) -> list[T]:
    """Await all of them, even if some fail; then raise the first error. Nothing is left under way."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results

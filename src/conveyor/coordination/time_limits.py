"""Time limits of calls that mostly answer at once: those need no timer."""

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def call_within(seconds: float, call: Coroutine[Any, Any, T]) -> T:
    """The result of a call, which is cancelled after so many seconds. Raises TimeoutError. A call that does not wait is
    over before there is a timer."""
    try:
        waits_for = call.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    async with asyncio.timeout(seconds):
        return await _rest(call, waits_for)


@coroutine
def _rest(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """What is left of a call that has begun, and waits for this."""
    try:
        while True:
            try:
                sent = yield waits_for
            except GeneratorExit:
                call.close()
                raise
            except BaseException as error:
                waits_for = call.throw(error)
            else:
                waits_for = call.send(sent)
    except StopIteration as ended:
        result: T = ended.value
        return result

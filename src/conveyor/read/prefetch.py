"""Prefetch: read the next item of a stream while the current one is in use."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def prefetch(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same items, read one ahead. It closes `items`."""
    async with aclosing(items):
        upcoming = asyncio.ensure_future(anext(items, None))
        try:
            while (item := await upcoming) is not None:
                upcoming = asyncio.ensure_future(anext(items, None))
                yield item
        finally:
            # A generator can only be closed once its pending step has stopped.
            upcoming.cancel()
            await asyncio.wait({upcoming})

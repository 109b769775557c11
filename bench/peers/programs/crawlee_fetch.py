"""Crawlee for Python: HttpCrawler at a fixed concurrency, its storage on disk (the default), each body pushed to the
dataset."""

import asyncio
import os
import time
from pathlib import Path

from crawlee import ConcurrencySettings
from crawlee.crawlers import HttpCrawler, HttpCrawlingContext
from marks import arguments, report


async def main() -> None:
    asked = arguments()
    count, wide = asked["count"], asked["concurrency"]
    os.chdir(asked["place"])
    crawler = HttpCrawler(
        concurrency_settings=ConcurrencySettings(min_concurrency=wide, desired_concurrency=wide, max_concurrency=wide),
        configure_logging=False,
    )
    kept = 0

    @crawler.router.default_handler
    async def keep(context: HttpCrawlingContext) -> None:
        nonlocal kept
        body = (await context.http_response.read()).decode()
        await context.push_data({"url": context.request.url, "body": body})
        kept += 1

    started = time.perf_counter()
    await crawler.run([f"{asked['url']}/{number}" for number in range(count)])
    seconds = time.perf_counter() - started
    stored = sum(1 for _ in (Path("storage") / "datasets" / "default").glob("0*.json"))
    if kept != count or stored != count:
        raise SystemExit(f"{kept} pages handled and {stored} stored of {count}")
    report(seconds=seconds)


if __name__ == "__main__":
    asyncio.run(main())

"""Scrapy: one spider over the list, with its settings for broad crawls (no logs, cookies, delays or console), each
body written to a file in the callback."""

import time
from pathlib import Path
from typing import Any

import scrapy
from marks import arguments, report
from scrapy.crawler import CrawlerProcess

asked = arguments()
_bodies = Path(asked["place"]) / "bodies"


class PageSpider(scrapy.Spider):
    name = "pages"

    async def start(self) -> Any:
        for number in range(asked["count"]):
            url = f"{asked['url']}/{number}"
            yield scrapy.Request(url, callback=self.parse, dont_filter=True, cb_kwargs={"number": number})

    def parse(self, response: Any, number: int) -> None:
        (_bodies / str(number)).write_bytes(response.body)


def main() -> None:
    _bodies.mkdir()
    process = CrawlerProcess(
        {
            "CONCURRENT_REQUESTS": asked["concurrency"],
            "CONCURRENT_REQUESTS_PER_DOMAIN": asked["concurrency"],
            "DOWNLOAD_DELAY": 0,
            "LOG_ENABLED": False,
            "COOKIES_ENABLED": False,
            "TELNETCONSOLE_ENABLED": False,
            "ROBOTSTXT_OBEY": False,
            "AUTOTHROTTLE_ENABLED": False,
        }
    )
    process.crawl(PageSpider)
    started = time.perf_counter()
    process.start()
    report(seconds=time.perf_counter() - started)


if __name__ == "__main__":
    main()

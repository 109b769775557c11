"""Functions for `extract`, in a module of their own: the processes that run them import it."""

import os
import re
import signal
import time
from typing import Any

from conveyor import Handlers, Page

parsers = Handlers()

_TITLE = re.compile(r"<h1>(.*?)</h1>")
_PRICE = re.compile(r"class=price>(\d+)")


@parsers.task("product")
def product(page: Page) -> dict[str, Any]:
    title, price = _TITLE.search(page.text), _PRICE.search(page.text)
    assert title is not None and price is not None
    return {"title": title[1], "price": int(price[1]), "url": page.final_url, "status": page.status, "id": page.id}


@parsers.task("product-async")
async def product_async(page: Page) -> dict[str, Any]:
    return product(page)


@parsers.task("offers")
def offers(page: Page) -> list[dict[str, Any]]:
    title = _TITLE.search(page.text)
    assert title is not None
    return [{"title": title[1], "offer": offer} for offer in re.findall(r"<li>(.*?)</li>", page.text)]


@parsers.task("nothing")
def nothing(page: Page) -> None:
    return None


@parsers.task("long")
def long(page: Page) -> dict[str, Any]:
    return {"text": page.text * 400}


@parsers.task("fussy")
def fussy(page: Page) -> dict[str, Any]:
    """It has a mistake: it cannot read products whose number ends in 3."""
    if page.url.endswith("3"):
        raise LookupError("no price")
    return product(page)


@parsers.task("wrong")
def wrong(page: Page) -> str:
    return page.text


@parsers.task("troubled")
def troubled(page: Page) -> dict[str, Any]:
    """It hangs at product 1, and is killed with product 2."""
    if page.url.endswith("/1"):
        time.sleep(60)
    if page.url.endswith("/2"):
        os.kill(os.getpid(), signal.SIGKILL)
    return product(page)

"""Turns the page of a product into a row."""

import re

from conveyor import Page, task


@task("product")
def product(page: Page) -> dict[str, object]:
    title = re.search(r"<h1>(.*?)</h1>", page.text)
    price = re.search(r'class="price">([0-9.]+)', page.text)
    if title is None or price is None:
        raise LookupError("the page has no title or no price")
    return {"title": title[1], "price": float(price[1])}

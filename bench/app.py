"""The functions that the benches run as tasks of kind python."""

from conveyor.handlers import task

_WORDS = "The belt carries one page after the other. "


@task("bench.noop")
def noop(_: object) -> None:
    """Nothing: what is left is the cost of a task."""


@task("bench.page")
def page(number: int) -> str:
    """A page of about 2 KB, another one for each number."""
    head = f"page {number}\n"
    return (head + _WORDS * 50)[:2000]

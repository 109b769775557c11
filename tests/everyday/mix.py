"""The mix: which jobs people submit, drawn from a seed. The n-th job is the same whichever client takes it."""

import random
from typing import Any, NamedTuple

from tests.everyday.site import FAST, SLOW, Site

ATTEMPTS = 3
# Short waits, so that a run does not end in a minute of backoff.
BACKOFF = {"base": 0.1, "rate": 2.0, "cap": 0.5}
# Longest time until a retry begins, with the time that a queue takes to hand it out again.
RETRY_SECONDS = 2.0

# Upper ends of the classes of sizes, and how many of a hundred jobs are of each.
CLASSES = (1, 10, 100, 1_000, 10_000)
_SHARES = (28, 34, 28, 9, 1)
# A job in so many is as large as the load allows; the first comes right behind the burst.
_LARGE_EVERY = 150


class Job(NamedTuple):
    """One job, and what is done with it."""

    number: int
    kind: str
    pages: list[str]
    hosts: list[str]
    options: dict[str, Any]
    way: str = "submit"
    watched: bool = False
    paused: bool = False
    cancelled: bool = False
    # Widths that it is changed to while it runs.
    widths: tuple[int, ...] = ()
    rerun: bool = False
    export: str | None = None
    deleted: bool = False

    @property
    def size(self) -> int:
        return len(self.pages)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but its size decides how long it takes."""
        slow = any(host in SLOW for host in self.hosts) or "rate_per_host" in self.options
        return not (slow or self.paused or self.cancelled or self.widths or self.way == "open")

    def inputs(self, site: Site) -> list[Any]:
        if self.kind == "python":
            return [{"n": index, "page": page} for index, page in enumerate(self.pages)]
        hosts = self.hosts
        return [site.url(hosts[index % len(hosts)], self.number, index, page) for index, page in enumerate(self.pages)]

    def fails(self, index: int) -> bool:
        return self.pages[index] in ("missing", "broken")

    def requests(self, index: int) -> int:
        """How often the site is asked for this task, if nothing breaks an attempt off."""
        return {"flaky": 2, "broken": ATTEMPTS}.get(self.pages[index], 1)

    def __str__(self) -> str:
        said = [name for name in ("watched", "paused", "cancelled", "rerun", "deleted") if getattr(self, name)]
        said += [f"widths {self.widths}"] if self.widths else []
        said += [self.export] if self.export else []
        return f"job {self.number}: {self.kind} of {self.size} {self.options} {' '.join([self.way, *said])}"


def class_of(size: int) -> int:
    return next(end for end in CLASSES if size <= end)


def job_of(seed: int, number: int, burst: int, largest: int) -> Job:
    """The n-th job of a load. The first ones are small, and submitted at once."""
    chance = random.Random(seed * 1_000_003 + number)
    if number < burst:
        return _job(chance, number, chance.randint(5, 25), "fetch")
    if (number - burst) % _LARGE_EVERY == 0:
        return _job(chance, number, largest, "fetch")
    index = chance.choices(range(len(CLASSES)), _SHARES)[0]
    least = CLASSES[index - 1] + 1 if index else 1
    size = min(chance.randint(least, CLASSES[index]), largest)
    return _job(chance, number, size, "python" if chance.random() < 0.25 else "fetch")


def _job(chance: random.Random, number: int, size: int, kind: str) -> Job:
    small, large = size <= 100, size > 1000
    hosts = list(FAST)
    if small and chance.random() < 0.2:
        hosts = list(SLOW) if chance.random() < 0.5 else [*FAST, SLOW[0]]
    options: dict[str, Any] = {"attempts": ATTEMPTS, "backoff": BACKOFF}
    if kind == "python":
        options |= {"handler": chance.choice(["everyday.quick", "everyday.slow", "everyday.async"])}
        if size > 300:
            options["handler"] = "everyday.quick"
    options |= _limits(chance, kind, small)
    return Job(
        number=number,
        kind=kind,
        pages=_pages(chance, kind, size),
        hosts=hosts,
        options=options,
        way="open" if size > 1 and chance.random() < 0.15 else "submit",
        watched=chance.random() < 0.3 or large,
        paused=size >= 20 and chance.random() < 0.15,
        cancelled=size >= 20 and not large and chance.random() < 0.04,
        widths=(chance.randint(1, 8), chance.randint(20, 100)) if size >= 50 and chance.random() < 0.3 else (),
        rerun=chance.random() < 0.3,
        export=chance.choice(["zip", "jsonl", "csv"]) if chance.random() < 0.2 or large else None,
        deleted=chance.random() < 0.05,
    )


def _limits(chance: random.Random, kind: str, small: bool) -> dict[str, Any]:
    drawn = chance.random()
    if drawn < 0.3:
        return {"concurrency": chance.choice([1, 4, 16, 200]) if small else chance.choice([32, 128, 500])}
    if kind == "fetch" and drawn < 0.4:
        return {"rate_per_host": 20.0 if small else 500.0}
    if kind == "fetch" and drawn < 0.5:
        return {"concurrency_per_host": chance.choice([1, 4]) if small else 16}
    return {}


def _pages(chance: random.Random, kind: str, size: int) -> list[str]:
    pages, shares = (
        (["ok", "broken"], [97, 3]) if kind == "python" else (["ok", "flaky", "missing", "broken"], [90, 6, 3, 1])
    )
    return chance.choices(pages, shares, k=size)

"""What a load came to: figures to print, and what is wrong."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.everyday.mix import Job, class_of


class Bounds(NamedTuple):
    """In seconds: how long nothing may move, of the server and of one job that may run, and how long a job may take
    for which nothing but its size decides that."""

    stall: float
    wait: float
    latency: float
    latency_per_task: float


@dataclass
class Figures:
    """Gathered while the load runs."""

    seconds: float = 0.0
    jobs: int = 0
    tasks: int = 0
    requests: int = 0
    # Seconds in which work was pending that might run, and nothing moved: of the whole server, and of one job.
    longest_stall: float = 0.0
    longest_wait: float = 0.0
    waiting_job: str = ""
    # Of the loop that measures: what is below is not known any better.
    longest_lag: float = 0.0
    # Seconds that submitting took, and requests of other jobs that the site had before the first of a new one.
    answers: list[float] = field(default_factory=list)
    overtaken: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    duplicated: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    # Size, seconds from submit to the end, and whether nothing but its size decided that.
    latencies: list[tuple[int, float, bool]] = field(default_factory=list)

    warnings: Counter[str] = field(default_factory=Counter)
    # What else was waited for, by what it was: the longest, and whose.
    longest: dict[str, tuple[float, str]] = field(default_factory=dict)

    @asynccontextmanager
    async def timed(self, what: str, job: Job) -> AsyncIterator[None]:
        began = time.monotonic()
        yield
        took = (time.monotonic() - began, str(job))
        self.longest[what] = max(self.longest.get(what, took), took)

    def ended(self, job: Job, seconds: float) -> None:
        self.jobs += 1
        self.tasks += job.size
        self.latencies.append((job.size, seconds, job.is_plain))

    @property
    def wrong(self) -> list[str]:
        """What no slow machine excuses."""
        return [*self.lost, *self.duplicated, *self.unexpected]

    def missed(self, bounds: "Bounds") -> list[str]:
        """Which times are beyond their bounds."""
        late = [
            f"a job of {size} took {seconds:.1f} s, beyond {bounds.latency + size * bounds.latency_per_task:.1f} s"
            for size, seconds, plain in self.latencies
            if plain and seconds > bounds.latency + size * bounds.latency_per_task
        ]
        if self.longest_stall > bounds.stall:
            late.append(f"nothing moved for {self.longest_stall:.1f} s, beyond {bounds.stall:.1f} s")
        if self.longest_wait > bounds.wait:
            late.append(f"{self.waiting_job} waited for {self.longest_wait:.1f} s, beyond {bounds.wait:.1f} s")
        return late

    def __str__(self) -> str:
        lines = [
            f"{self.jobs} jobs, {self.tasks:,} tasks, {self.requests:,} requests in {self.seconds:.1f} s: "
            f"{self.tasks / max(self.seconds, 0.001):,.0f} tasks/s",
            f"longest stall {self.longest_stall:.2f} s; longest wait of one job {self.longest_wait:.2f} s "
            f"({self.waiting_job or 'none'}); the loop that measures was late by at most {self.longest_lag:.2f} s",
        ]
        overtaken = sorted(self.overtaken)
        lines.append(
            f"submitting took {_shown(sorted(self.answers))}; before its first, a new job was overtaken by requests: "
            f"p50 {quantile(overtaken, 0.5):.0f}, p95 {quantile(overtaken, 0.95):.0f}, at most {max([0, *overtaken])}"
        )
        by_class = defaultdict(list)
        for size, seconds, plain in self.latencies:
            by_class[class_of(size)].append((seconds, size, plain))
        for largest in sorted(by_class):
            every = sorted(seconds for seconds, _, _ in by_class[largest])
            of_plain = sorted(seconds for seconds, _, plain in by_class[largest] if plain)
            tasks = sum(size for _, size, _ in by_class[largest])
            lines.append(
                f"jobs of up to {largest:>6,}: {len(every):>4} jobs, {tasks:>7,} tasks; latency {_shown(every)}; "
                f"of plain ones {_shown(of_plain)}"
            )
        lines += [
            f"{what} took at most {seconds:.2f} s ({job})" for what, (seconds, job) in sorted(self.longest.items())
        ]
        lines += [f"warned {count} times: {event}" for event, count in self.warnings.most_common()]
        for name in ("lost", "duplicated", "unexpected"):
            found = getattr(self, name)
            lines.append(f"{name}: {len(found)}")
            lines += [f"  {what}" for what in found[:20]]
        return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    return f"p50 {quantile(values, 0.5):6.2f} s, p95 {quantile(values, 0.95):6.2f} s"


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else 0.0

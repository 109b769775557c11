"""Figures: a measured number beside its bare limit, as a row of a table and as a line of JSON."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number of ours against one of a bare limit, over all repetitions; paired, because a machine has its moods."""

    bench: str
    name: str
    unit: str
    ours: Sequence[float]
    limit: str
    bare: Sequence[float]
    # What the ratio should be, as ("at least", 0.4) or ("at most", 1.25).
    goal: tuple[str, float] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> list[float]:
        return [ours / bare for ours, bare in zip(self.ours, self.bare, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        word, bound = self.goal
        return self.ratio >= bound if word == "at least" else self.ratio <= bound

    def row(self) -> list[str]:
        low, high = min(self.ratios), max(self.ratios)
        spread = f"{self.ratio:.2f}" if len(self.ratios) == 1 else f"{self.ratio:.2f} ({low:.2f} to {high:.2f})"
        verdict = {None: "", True: "met", False: "missed"}[self.met]
        goal = f"{self.goal[0]} {self.goal[1]:g}: {verdict}" if self.goal else ""
        return [
            self.bench,
            self.name,
            f"{_short(statistics.median(self.ours))} {self.unit}",
            self.limit,
            f"{_short(statistics.median(self.bare))} {self.unit}",
            spread,
            goal,
        ]

    def as_json(self) -> str:
        return json.dumps(
            {
                "bench": self.bench,
                "figure": self.name,
                "unit": self.unit,
                "ours": round(statistics.median(self.ours), 3),
                "limit": self.limit,
                "bare": round(statistics.median(self.bare), 3),
                "ratio": round(self.ratio, 4),
                "ratios": [round(ratio, 4) for ratio in self.ratios],
                "goal": f"{self.goal[0]} {self.goal[1]:g}" if self.goal else None,
                "met": self.met,
                **self.more,
            }
        )


def rates(measured: Sequence[dict[str, Any]], what: str = "seconds") -> list[float]:
    """Tasks a second."""
    return [each["count"] / each[what] for each in measured]


def cpu_each(measured: Sequence[dict[str, Any]]) -> list[float]:
    """Microseconds of CPU for each task: what a busy machine changes least."""
    return [each["cpu_seconds"] / each["count"] * 1e6 for each in measured]


def details(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a line of JSON says beside the figure: where the CPU time of the last run went, and what disturbed each."""
    last = measured[-1]
    kept = ("seconds", "cpu_seconds", "server_cpu_seconds", "peak_mib")
    return {
        **{name: round(last[name], 2) for name in kept},
        "cpu_by_thread": last["cpu_by_thread"],
        "disturbed": [round(each["disturbed"], 2) for each in measured],
    }


HEAD = ["bench", "figure", "ours", "bare limit", "its figure", "ratio", "goal"]


def table(figures: Sequence[Figure]) -> str:
    """In Markdown, with columns that line up in a terminal too."""
    rows = [HEAD, *(figure.row() for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:,.1f}"

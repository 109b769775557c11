"""Page: the tables and the chart of docs/explanation/performance.md, made from the recorded rows."""

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "bench" / "peers.jsonl"
CHART = ROOT / "docs" / "explanation" / "performance.svg"

_TITLES = {"noop": "No-op tasks per second", "fetch": "Pages fetched and kept per second"}
_WIDTH, _BAR, _LABEL = 720, 22, 150


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def peers_table() -> str:
    """One table for each job, the fastest first."""
    parts = []
    for job, title in _TITLES.items():
        lines = [
            f"### {title}",
            "",
            "| | version | per second | rounds | tasks | how | keeps |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in _ranked(job):
            rounds = ", ".join(f"{rate:,}" for rate in row["rates"])
            lines.append(
                f"| {row['peer']} | {row['version']} | {row['rate']:,.0f} | {rounds} | {row['count']:,} "
                f"| {row['way']} | {row['keeps']} |"
            )
        parts.append("\n".join(lines))
    last = rows()[-1]
    disturbed = max(row["disturbed"] for row in rows())
    parts.append(
        f"Measured on {last['date']}: {last['machine']}. Other processes had up to {disturbed:.2f} of a core meanwhile."
    )
    return "\n\n".join(parts)


def write_chart() -> None:
    CHART.write_text(chart())


def chart() -> str:
    """Bars for each job, in the colours of the reader's theme."""
    parts: list[str] = []
    y = 0
    for job, title in _TITLES.items():
        y += 28
        parts.append(f'<text x="0" y="{y}" font-weight="600">{escape(title)}</text>')
        ranked = _ranked(job)
        longest = max(row["rate"] for row in ranked)
        for row in ranked:
            y += 8
            length = max(1.0, row["rate"] / longest * (_WIDTH - _LABEL - 80))
            shade = "#2563eb" if row["peer"].startswith("Conveyor") else "#94a3b8"
            middle = y + _BAR - 6
            parts.append(f'<text x="0" y="{middle}">{escape(row["peer"])}</text>')
            parts.append(f'<rect x="{_LABEL}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="3" fill="{shade}"/>')
            parts.append(f'<text x="{_LABEL + length + 6:.1f}" y="{middle}">{row["rate"]:,.0f}</text>')
            y += _BAR
        y += 12
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" role="img" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#475569">'
    )
    return "\n".join([head, "<title>Throughput of Conveyor and its peers</title>", *parts, "</svg>"]) + "\n"


def _ranked(job: str) -> list[dict[str, Any]]:
    return sorted((row for row in rows() if row["job"] == job), key=lambda row: -row["rate"])

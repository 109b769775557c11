"""The table of metrics, made from the catalogue."""

from conveyor.telemetry.instruments import Metric, Values
from conveyor.telemetry.metrics import CATALOGUE

# More values than these are not listed.
_LISTED = 8


def table() -> str:
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    rows += [f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} |" for metric in CATALOGUE]
    return "\n".join(rows)


def _labels(metric: Metric) -> str:
    return "; ".join(f"`{label}`{_shown(values)}" for label, values in metric.values.items())


def _shown(values: Values) -> str:
    return f" {', '.join(values)}" if values is not None and len(values) <= _LISTED else ""

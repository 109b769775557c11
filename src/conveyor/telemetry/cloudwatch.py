"""Embedded metrics: figures as a line of JSON that CloudWatch Logs turns into metrics."""

from collections.abc import Mapping

import msgspec


def embedded_metrics(namespace: str, at: float, figures: Mapping[str, tuple[float, str]]) -> str:
    """One line without dimensions: each figure by its name, with its unit."""
    metrics = [{"Name": name, "Unit": unit} for name, (_, unit) in figures.items()]
    directive = {"Namespace": namespace, "Dimensions": [[]], "Metrics": metrics}
    values = {name: value for name, (value, _) in figures.items()}
    line = {"_aws": {"Timestamp": int(at * 1000), "CloudWatchMetrics": [directive]}, **values}
    return msgspec.json.encode(line).decode()

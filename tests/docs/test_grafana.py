"""What stands under deploy/grafana names metrics and labels that there are; and every metric is in SPEC §12."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from conveyor.telemetry.metrics import CATALOGUE

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "deploy/grafana"
KNOWN = {metric.name: metric for metric in CATALOGUE}
# Labels that Prometheus itself gives, and the one that a histogram has.
GIVEN = {"job", "instance", "le"}


def dashboard() -> dict[str, Any]:
    shown: dict[str, Any] = json.loads((PLACE / "dashboard.json").read_text())
    return shown


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((PLACE / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for rule in alerts():
        yield rule["alert"], rule["expr"]


def metric_of(name: str) -> str:
    return name if name in KNOWN else re.sub(r"_(bucket|sum|count)$", "", name)


def test_queries_name_metrics_and_labels_that_there_are() -> None:
    for title, query in queries():
        check(title, query)


def check(title: str, query: str) -> None:
    named = [metric_of(name) for name in re.findall(r"\bconveyor_\w+", query)]
    assert set(named) <= KNOWN.keys(), title
    assert named or "process_" in query, title
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), title
    labels = {label for name in named for label in KNOWN[name].labels} | GIVEN
    chosen = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', query)
    grouped = [label.strip() for found in re.findall(r"\bby \(([^)]*)\)", query) for label in found.split(",")]
    assert {label for label, _ in chosen} | set(grouped) <= labels, title
    for label, value in chosen:
        values = {each for name in named for each in KNOWN[name].values.get(label) or ()}
        if values:
            assert set(value.split("|")) <= values, (title, label, value)


def test_legends_show_labels_that_are_left() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\bby \(([^)]*)\)", target["expr"]))))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            named = {metric_of(name) for name in re.findall(r"\bconveyor_\w+", target["expr"])}
            every = {label for name in named for label in KNOWN[name].labels} | GIVEN
            assert shown <= (grouped or every), panel["title"]


def test_every_metric_is_on_the_dashboard_and_in_the_specification() -> None:
    shown = {metric_of(name) for _, query in queries() for name in re.findall(r"\bconveyor_\w+", query)}
    assert shown == KNOWN.keys()
    spec = (ROOT / "SPEC.md").read_text()
    described = spec[spec.index("\n## 12") :]
    assert set(re.findall(r"^\| `(conveyor_\w+)`", described, re.MULTILINE)) == KNOWN.keys()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def test_alerts_say_how_bad_it_is_and_what_it_is() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(names) == len(set(names))
    for rule in alerts():
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"]["summary"]
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            assert re.search(rf"\bby \([^)]*\b{label}\b", rule["expr"]), rule["alert"]


def test_prometheus_is_told_of_the_rules_and_of_a_key() -> None:
    config = yaml.safe_load((PLACE / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert config["scrape_configs"][0]["authorization"]["credentials_file"].endswith("local.key")
    targets = [
        target for job in config["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    ]
    assert len(targets) == len(set(targets))

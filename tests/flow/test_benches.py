"""Each bench, at a size at which its figures say nothing: that it still measures. A bench is run seldom, and what it
uses of the package may have changed since."""

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as benches
from bench import aws, fleet, house, ingest, latency, pace, small
from bench.child import ROOT, Setup
from bench.figures import table

_ON_SERVERS = {"postgres", "aws", "small", "latency"}
# Results have two pages of a hundred.
_LEAST = 200
# More than run at once: a run is cancelled on its way.
_LEAST_SERVED = 2000
_MEASURED = {"warm": 4.0, "seconds": 4.0}


@dataclass(frozen=True)
class OnceEach(Setup):
    """Measures with each function once, and once on Postgres; for other sizes, the answers are the same."""

    answers: dict[object, dict[str, Any]] = field(default_factory=dict)

    def _measure(self, function: str, profile: bool, arguments: dict[str, Any]) -> dict[str, Any]:
        key = (function, arguments.get("postgres") is None)
        if key not in self.answers:
            self.answers[key] = super()._measure(function, profile, arguments)
        return self.answers[key]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no size scales."""
    monkeypatch.setattr(aws, "SMALL", _LEAST)
    monkeypatch.setattr(ingest, "SMALL", _LEAST)
    monkeypatch.setattr(pace, "WIDTHS", pace.WIDTHS[:1])
    monkeypatch.setattr(small, "SHAPES", small.SHAPES[-1:])
    monkeypatch.setattr(house, "QUIET_RUNS", 10)
    monkeypatch.setattr(latency, "IDLE_JOBS", 2)
    monkeypatch.setattr(latency, "STARTS", 1)
    monkeypatch.setattr(fleet, "SIZES", ((10, 20), (10, 40), (10, 60)))
    # A copy of the source may come without its history: the design of before is today's here.
    monkeypatch.setattr(fleet, "_source_before", lambda scratch: ROOT / "src")
    for name in ("QUIET", "BUSY", "BUSY_SMALLEST", "QUIET_BEFORE", "BUSY_BEFORE"):
        monkeypatch.setattr(fleet, name, _MEASURED)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.server] if name in _ON_SERVERS else []) for name in benches.BENCHES]
)
def test_a_bench_still_measures(name: str) -> None:
    # Not in pytest's directory: for root, Postgres runs as another user, who cannot enter that.
    least = _LEAST_SERVED if name == "serve" else _LEAST
    with tempfile.TemporaryDirectory(prefix="conveyor-bench-") as scratch:
        setup = OnceEach(Path(scratch), size=1e-6, least=least, least_seconds=0.6)
        figures = list(benches.BENCHES[name].run(setup))
    assert {figure.bench for figure in figures} == {name}
    assert len(table(figures).splitlines()) == len(figures) + 2
    for figure in figures:
        assert json.loads(figure.as_json())["unit"] == figure.unit

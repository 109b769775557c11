"""How figures are written for people."""

import pytest

from conveyor.cli.formatting import latency
from conveyor.client.wording import rate


@pytest.mark.parametrize(
    ("per_second", "shown"),
    [
        (None, "-"),
        (0, "0.0/s"),
        (0.0001, "0.4/h"),
        (0.05, "3.0/min"),
        (0.1, "0.1/s"),
        (9.94, "9.9/s"),
        (1234, "1,234/s"),
    ],
)
def test_a_low_rate_is_one_of_a_minute_or_an_hour(per_second: float | None, shown: str) -> None:
    assert rate(per_second) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (0.0001, "< 1 ms"), (0.0498, "50 ms"), (1.25, "1.2 s"), (75, "1 min 15 s")]
)
def test_a_latency_is_one_of_milliseconds_below_a_second(seconds: float | None, shown: str) -> None:
    assert latency(seconds) == shown

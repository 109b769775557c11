"""Options of a file, of `--option` and of flags are put together, and nothing is lost on the way."""

import pytest

from conveyor.cli.shared_options import merged_options
from conveyor.errors import BadInput


def test_later_ones_go_before_earlier_ones() -> None:
    merged = merged_options({"attempts": 3}, ["attempts=2", "timeout=9"], {"attempts": 1, "timeout": 1, "tag": "x"})
    assert merged == {"attempts": 3, "timeout": 9, "tag": "x"}


def test_parts_of_an_option_are_kept_beside_those_of_a_flag() -> None:
    flags = {"gateway": {"url": "https://gate.example/{url}"}, "headers": {"a": "1"}}
    merged = merged_options(flags, ["gateway.headers.X-Key=secret"], {"headers": {"b": "2"}})
    assert merged == {
        "gateway": {"url": "https://gate.example/{url}", "headers": {"X-Key": "secret"}},
        "headers": {"a": "1", "b": "2"},
    }


@pytest.mark.parametrize("name", ["tasks", "source", "mode", "replaces", "url_column", "format"])
def test_what_is_not_an_option_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} is not an option"):
        merged_options({}, [f"{name}=x"])

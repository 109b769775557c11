"""The detail of an outcome is bounded, whatever the target sends."""

import msgspec

from conveyor.model import Outcome, ResultDetail, TaskError
from conveyor.process import outcomes
from conveyor.process.outcomes import detail_json
from conveyor.states import TaskStatus


def detail_of(outcome: Outcome) -> tuple[ResultDetail, int]:
    text = detail_json(outcome)
    return msgspec.json.decode(text, type=ResultDetail), len(text.encode())


def test_a_usual_detail_is_kept_whole() -> None:
    headers = [("set-cookie", f"{number}={'x' * 1000}") for number in range(50)]
    outcome = Outcome(
        TaskStatus.FAILED,
        error=TaskError("http_500", "x" * 10_000),
        headers=headers,
        content_type="text/html; " + "x" * 2000,
        final_url="https://example.com/",
        elapsed=1.5,
    )
    detail, size = detail_of(outcome)
    assert size <= 64 * 1024 + 10
    assert (detail.headers, detail.error, detail.content_type) == (headers, outcome.error, outcome.content_type)


def huge_headers_are_bounded() -> None:
    """In order; one that does not fit hides none that does. Control characters are six bytes each in JSON."""
    huge = [(f"x-{number}", "y" * 1000) for number in range(2000)]
    pairs = [("first", "1"), ("long", "\x7f\x01" * 300_000), *huge, ("last", "\xff")]
    outcome = Outcome(
        TaskStatus.FAILED,
        error=TaskError("odd", "\x01" * 1_000_000),
        headers=pairs,
        content_type="\x01" * 1_000_000,
        final_url="https://example.com/" + "x" * 1_000_000,
    )
    detail, size = detail_of(outcome)
    assert size <= 80 * 1024
    assert detail.headers is not None
    assert detail.headers == [pairs[0], *huge[: len(detail.headers) - 2], pairs[-1]]
    assert len(detail.headers) > 30
    assert detail.final_url is None
    assert detail.error is not None and detail.error.code == "odd"


def test_huge_headers_are_bounded() -> None:
    huge_headers_are_bounded()


def test_the_bound_leaves_room_for_the_longest_input() -> None:
    assert outcomes._MAX_DETAIL + 256 * 1024 < 350 * 1024

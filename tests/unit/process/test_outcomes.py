"""The detail of an outcome is bounded, whatever the target sends."""

import msgspec

from conveyor.model import BodyRef, Outcome, ResultDetail, StoredAs, TaskError
from conveyor.process import outcomes
from conveyor.process.outcomes import detail_json, page_place, with_body, with_pages
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


def test_the_places_of_many_pages_are_those_of_each() -> None:
    key = 'results/acme/job/run/seg "\\é=00=1f'
    stored = StoredAs("deflate", 7, 4294967295, 0)
    details = ["{}", detail_json(Outcome(TaskStatus.SUCCEEDED, content_type='a"é', elapsed=0.25))]
    pages = [(detail, 20, "ab" * 32, offset, how) for detail in details for offset in (0, 5) for how in (None, stored)]
    each = [
        with_body(detail, BodyRef(key, length, digest, offset, stored=how))
        for detail, length, digest, offset, how in pages
    ]
    places = [page_place(length, digest, offset, how) for _, length, digest, offset, how in pages]
    assert with_pages(key, [detail for detail, *_ in pages], places) == each
    assert msgspec.json.decode(each[-1], type=ResultDetail).body == BodyRef(key, 20, "ab" * 32, 5, stored=stored)

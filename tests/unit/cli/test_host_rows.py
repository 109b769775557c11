"""What `conveyor hosts` prints of a host."""

from conveyor.cli.breakdown_commands import _host_row


def test_the_most_frequent_errors_are_named_and_the_others_counted() -> None:
    errors = [{"code": "http_503", "count": 24}, {"code": "timeout", "count": 9}]
    host = {"host": "a.example", "attempts": 99, "failed": 20, "retried": 20, "rate": 0.05, "p50": 0.05, "p95": None}
    row = _host_row({**host, "errors": errors, "breaker": None, "pace": None})
    assert row == [
        "99",
        "20",
        "20",
        "3.0/min",
        "50 ms",
        "-",
        "closed",
        "",
        "a.example",
        "http_503 24, timeout 9, others 7",
    ]
    assert _host_row({**host, "errors": errors, "retried": 13})[-1] == "http_503 24, timeout 9"
    # All other hosts together have no codes.
    assert _host_row(host)[-1] == ""

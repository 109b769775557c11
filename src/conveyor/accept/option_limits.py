"""The limits of every option. Gets a decoded JobSpec, raises InvalidField for the first value out of range.

A comparison is always written as "within", so that a NaN from a Python caller is out of range too.
"""

import re
from collections.abc import Mapping, Sequence

from conveyor.accept.spec import JobSpec
from conveyor.errors import InvalidField
from conveyor.lists.inputs import gateway_problem, headers_problem
from conveyor.lists.templates import export_problem
from conveyor.model import MAX_RETENTION_DAYS, Backoff, ExportApi, FailureThreshold, Gateway, JobKind, Outage

GIB = 1024**3
MAX_NAME = 200
MAX_HANDLER = 200
MAX_URL = 8192

# Minimum and maximum, both allowed but for the minimum of those in _ABOVE.
RANGES: dict[str, tuple[float, float]] = {
    "concurrency": (1, 10_000),
    "rate_per_host": (0, 1_000_000),
    "concurrency_per_host": (1, 10_000),
    "attempts": (1, 100),
    "timeout": (0.1, 86_400),
    "connect_timeout": (0.1, 86_400),
    "max_body_bytes": (0, GIB),
    "max_redirects": (0, 20),
    "priority": (-1000, 1000),
    "retention_days": (0, MAX_RETENTION_DAYS),
    "chunk_size": (1, 1000),
    "idle_timeout": (1, 30 * 86_400),
    "task_deadline": (1, 365 * 86_400),
    "deadline": (1, 365 * 86_400),
    "stuck_after": (1, 86_400),
}
_OUTAGE: dict[str, tuple[float, float]] = {"quick_tries": (1, 100), "delay": (0, 86_400)}
_BREAKER: dict[str, tuple[float, float]] = {"patience": (0, 30 * 86_400)}
MAX_UPSTREAM = 200
MAX_CODES = 100
_BACKOFF: dict[str, tuple[float, float]] = {"base": (0, 3600), "rate": (1, 100), "cap": (0, 86_400)}
_DOWNLOAD: dict[str, tuple[float, float]] = {
    "max_bytes": (0, 5 * 1024 * GIB),
    "min_rate": (0, GIB),
    "min_rate_seconds": (1, 86_400),
}
_POLL: dict[str, tuple[float, float]] = {
    "first": (0.1, 3600),
    "rate": (1, 100),
    "cap": (0.1, 3600),
    "timeout": (1, 30 * 86_400),
}
_RETRY: dict[str, tuple[float, float]] = {"retries": (0, 100), "base": (0, 3600), "rate": (1, 100), "cap": (0, 3600)}
_THRESHOLD: dict[str, tuple[float, float]] = {"failed": (1, 1 << 40), "ratio": (0, 1), "after": (0, 1 << 40)}
# Zero would mean never, or nothing.
_ABOVE = frozenset({"rate_per_host", "retention_days", "failure_threshold.ratio"})
_STATUS = (100, 599)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,99}")
_HANDLER = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")


def check_limits(spec: JobSpec) -> None:
    """Raise InvalidField naming the field and its limit."""
    _check_name(spec.name)
    for field, limits in RANGES.items():
        _within(field, getattr(spec, field), limits)
    _check_backoff(spec.backoff)
    _check_statuses("retry_statuses", spec.retry_statuses)
    _check_statuses("success_statuses", spec.success_statuses)
    _check_each("outage", spec.outage or Outage(), _OUTAGE)
    _check_each("breaker", spec.breaker, _BREAKER)
    _check_upstream(spec.upstream)
    _check_codes(spec.retry_errors)
    _check_headers(spec.headers)
    _check_gateway(spec.gateway)
    _check_threshold(spec.failure_threshold)
    _check_handler(spec.kind, spec.handler)
    _check_each("download", spec.download, _DOWNLOAD)
    _check_export(spec.kind, spec.export)


def _within(field: str, value: float | None, limits: tuple[float, float]) -> None:
    if value is None:
        return
    lowest, highest = limits
    if field in _ABOVE:
        if not lowest < value <= highest:
            raise InvalidField(f"`{field}` must be above {lowest:g} and at most {highest:.12g}.", field=field)
    elif not lowest <= value <= highest:
        raise InvalidField(f"`{field}` must be between {lowest:g} and {highest:.12g}.", field=field)


def _check_name(name: str | None) -> None:
    if name is not None and (len(name) > MAX_NAME or _CONTROL.search(name)):
        raise InvalidField(f"`name` must be at most {MAX_NAME} characters, without control characters.", field="name")


def _check_backoff(backoff: Backoff) -> None:
    _check_each("backoff", backoff, _BACKOFF)


def _check_each(name: str, value: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    for field, limits in ranges.items():
        _within(f"{name}.{field}", getattr(value, field), limits)


def _check_statuses(field: str, statuses: Sequence[int]) -> None:
    lowest, highest = _STATUS
    if len(statuses) > highest - lowest + 1 or not all(lowest <= status <= highest for status in statuses):
        raise InvalidField(f"`{field}` must be HTTP statuses between {lowest} and {highest}.", field=field)


def _check_upstream(name: str | None) -> None:
    if name is not None and (not 0 < len(name) <= MAX_UPSTREAM or not _HANDLER.fullmatch(name)):
        raise InvalidField(
            f"`upstream` must be a name of at most {MAX_UPSTREAM} characters, without blanks.", field="upstream"
        )


def _check_codes(codes: Sequence[str] | None) -> None:
    if codes is not None and (len(codes) > MAX_CODES or not all(_CODE.fullmatch(code) for code in codes)):
        raise InvalidField(
            f"`retry_errors` must be at most {MAX_CODES} error codes, such as connect_failed.", field="retry_errors"
        )


def _check_headers(headers: Mapping[str, str]) -> None:
    problem = headers_problem(headers)
    if problem is not None:
        raise InvalidField(f"`headers`: {problem}.", field="headers")


def _check_gateway(gateway: Gateway | None) -> None:
    if gateway is None:
        return
    if len(gateway.proxy or gateway.url or "") > MAX_URL:
        raise InvalidField(f"`gateway`: its URL can have at most {MAX_URL} characters.", field="gateway")
    problem = gateway_problem(gateway)
    if problem is not None:
        raise InvalidField(f"`gateway`: {problem}.", field="gateway")


def _check_threshold(threshold: FailureThreshold | None) -> None:
    if threshold is None:
        return
    if threshold.failed is None and threshold.ratio is None:
        raise InvalidField("`failure_threshold` must have `failed` or `ratio`.", field="failure_threshold")
    _check_each("failure_threshold", threshold, _THRESHOLD)


def _check_handler(kind: JobKind, handler: str | None) -> None:
    if kind is not JobKind.PYTHON:
        if handler is not None:
            raise InvalidField('`handler` is only for kind "python".', field="handler")
    elif handler is None or len(handler) > MAX_HANDLER or not _HANDLER.fullmatch(handler):
        raise InvalidField(
            f'A job of kind "python" needs `handler`, the name of a registered function, at most {MAX_HANDLER} '
            "characters.",
            field="handler",
        )


def _check_export(kind: JobKind, export: ExportApi | None) -> None:
    if kind is not JobKind.EXPORT_DOWNLOAD:
        if export is not None:
            raise InvalidField('`export` is only for kind "export_download".', field="export")
        return
    if export is None:
        raise InvalidField('A job of kind "export_download" needs `export`.', field="export")
    _check_each("export.poll", export.poll, _POLL)
    if export.retry is not None:
        _check_each("export.retry", export.retry, _RETRY)
    problem = export_problem(export)
    if problem is not None:
        raise InvalidField(f"`export.{problem.field}`: {problem.message}.", field=f"export.{problem.field}")

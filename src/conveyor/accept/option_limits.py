"""The limits of every option. Gets a JobSpec of the right shape, raises InvalidField at the first value out of range.

A comparison is always written as "within", so that a NaN from a Python caller is out of range too.
"""

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from conveyor.accept.spec import JobSpec
from conveyor.egress.body_budget import largest_body
from conveyor.egress.routes import operator_gateway
from conveyor.errors import InvalidField
from conveyor.jobs.secrets import HIDDEN
from conveyor.lists.gateways import gateway_problem, insecure_problem
from conveyor.lists.inputs import headers_problem
from conveyor.lists.templates import export_problem
from conveyor.model import (
    MAX_RETENTION_DAYS,
    PACED_KINDS,
    ExportApi,
    FailureThreshold,
    Gateway,
    JobKind,
    Options,
    RobotsMode,
)
from conveyor.settings import Settings

GIB = 1024**3
MAX_NAME = 200
MAX_HANDLER = 200

# Least and most of every option that is a number, by the path to it; both allowed but for those in ABOVE.
RANGES: dict[str, tuple[float, float]] = {
    "concurrency": (1, 10_000),
    "rate_per_host": (0, 1_000_000),
    "concurrency_per_host": (1, 10_000),
    "attempts": (1, 100),
    "backoff.base": (0, 3600),
    "backoff.rate": (1, 100),
    "backoff.cap": (0, 86_400),
    "outage.quick_tries": (1, 100),
    "outage.delay": (0, 86_400),
    "breaker.patience": (0, 30 * 86_400),
    "task_deadline": (1, 365 * 86_400),
    "deadline": (1, 365 * 86_400),
    "max_lifetime": (1, 3650 * 86_400),
    "stuck_after": (1, 86_400),
    "timeout": (0.1, 86_400),
    "connect_timeout": (0.1, 86_400),
    "max_body_bytes": (0, GIB),
    "max_redirects": (0, 20),
    "download.max_bytes": (0, 5 * 1024 * GIB),
    "download.min_rate": (0, GIB),
    "download.min_rate_seconds": (1, 86_400),
    "export.poll.first": (0.1, 3600),
    "export.poll.rate": (1, 100),
    "export.poll.cap": (0.1, 3600),
    "export.poll.timeout": (1, 30 * 86_400),
    "export.retry.retries": (0, 100),
    "export.retry.base": (0, 3600),
    "export.retry.rate": (1, 100),
    "export.retry.cap": (0, 3600),
    "priority": (-1000, 1000),
    "retention_days": (0, MAX_RETENTION_DAYS),
    "failure_threshold.failed": (1, 1 << 40),
    "failure_threshold.ratio": (0, 1),
    "failure_threshold.after": (0, 1 << 40),
    "chunk_size": (1, 1000),
    "idle_timeout": (1, 30 * 86_400),
}
# Zero itself would mean never, or nothing.
ABOVE = frozenset({"rate_per_host", "retention_days", "failure_threshold.ratio"})
# The options that are numbers, or have parts that are, and the paths to these.
_PATHS: dict[str, list[str]] = {}
for _path in RANGES:
    _PATHS.setdefault(_path.split(".")[0], []).append(_path)
_FIELDS = tuple(_PATHS)
_read_fields = attrgetter(*_FIELDS)
_DEFAULTS = _read_fields(JobSpec())
MAX_UPSTREAM = 200
MAX_CODES = 100
_STATUS = (100, 599)

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_CODE = re.compile(r"[a-z][a-z0-9_]{0,99}")
_JOB_ID = re.compile(r"job_[0-9a-z]{26}")
_HANDLER = re.compile(r"[^\s\x00-\x1f\x7f-\x9f]+")


def check_limits(spec: JobSpec) -> None:
    """Raise InvalidField naming the field and its limit."""
    _check_name(spec.name)
    _check_threshold(spec.failure_threshold)
    # Most options of most jobs are the defaults.
    for field, value, default in zip(_FIELDS, _read_fields(spec), _DEFAULTS, strict=True):
        if value is not default:
            for path in _PATHS[field]:
                _within(path, _value(spec, path), RANGES[path])
    _check_statuses("retry_statuses", spec.retry_statuses)
    _check_statuses("success_statuses", spec.success_statuses)
    _check_upstream(spec.upstream)
    _check_codes(spec.retry_errors)
    _check_headers(spec.headers)
    _check_gateway(spec.gateway)
    if spec.robots is RobotsMode.OBEY and spec.kind not in PACED_KINDS:
        raise InvalidField('`robots: obey` is for the kinds "fetch" and "download".', field="robots")
    for field in ("insecure", "http2"):
        if spec.kind is JobKind.PYTHON and getattr(spec, field):
            raise InvalidField(f'`{field}` is not for kind "python", which makes no requests.', field=field)
    _check_handler(spec.kind, spec.handler)
    _check_extract(spec)
    _check_changed_from(spec)
    _check_export(spec.kind, spec.export)


def check_body_budget(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidField for bodies that no worker with these settings reads. The default is lowered to what fits."""
    if spec.kind is not JobKind.FETCH:
        return
    largest = max(largest_body(settings.body_budget_bytes, settings.fetchers), Options().max_body_bytes)
    if spec.max_body_bytes > largest:
        raise InvalidField(
            f"`max_body_bytes` may be at most {largest} here: CONVEYOR_BODY_BUDGET_BYTES has no room for larger bodies."
            " Raise that setting, or use the kind `download`, which keeps no file in memory.",
            field="max_body_bytes",
        )


def check_insecure(spec: JobSpec, settings: Settings) -> None:
    """Raise InvalidField for a job that would leave certificates unverified, where the operator does not allow it."""
    if not spec.insecure:
        return
    wrong = insecure_problem(spec.gateway, operator_gateway(settings.gateway), settings.allow_insecure)
    if wrong is not None:
        raise InvalidField(f"`insecure`: {wrong}.", field="insecure")


def _value(spec: JobSpec, path: str) -> Any:
    """The option at a path; None if it, or what it belongs to, is not given."""
    value: Any = spec
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _within(field: str, value: float | None, limits: tuple[float, float]) -> None:
    if value is None:
        return
    least, largest = limits
    if field in ABOVE:
        if not least < value <= largest:
            raise InvalidField(f"`{field}` must be above {least:g} and at most {largest:.12g}.", field=field)
    elif not least <= value <= largest:
        raise InvalidField(f"`{field}` must be between {least:g} and {largest:.12g}.", field=field)


def _check_name(name: str | None) -> None:
    if name is not None and (len(name) > MAX_NAME or _CONTROL.search(name)):
        raise InvalidField(f"`name` must be at most {MAX_NAME} characters, without control characters.", field="name")


def _check_statuses(field: str, statuses: Sequence[int]) -> None:
    least, largest = _STATUS
    if len(statuses) > largest - least + 1 or not all(least <= status <= largest for status in statuses):
        raise InvalidField(f"`{field}` must be HTTP statuses between {least} and {largest}.", field=field)


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
    if HIDDEN in headers.values():
        raise InvalidField(
            "`headers` was copied from an answer, which hides the values. Send the values, or leave `headers` out.",
            field="headers",
        )
    wrong = headers_problem(headers)
    if wrong is not None:
        raise InvalidField(f"`headers`: {wrong}.", field="headers")


def _check_gateway(gateway: Gateway | None) -> None:
    if gateway is None:
        return
    values = [value for each in gateway.members for value in (each.proxy, each.url, *each.headers.values())]
    if HIDDEN in values:
        raise InvalidField(
            "`gateway` was copied from an answer, which hides it. Send its values, or leave `gateway` out.",
            field="gateway",
        )
    wrong = gateway_problem(gateway)
    if wrong is not None:
        raise InvalidField(f"`gateway`: {wrong}.", field="gateway")


def _check_threshold(threshold: FailureThreshold | None) -> None:
    if threshold is None:
        return
    if threshold.failed is None and threshold.ratio is None:
        raise InvalidField("`failure_threshold` must have `failed` or `ratio`.", field="failure_threshold")


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


def _check_extract(spec: JobSpec) -> None:
    name = spec.extract
    if name is not None:
        if spec.kind is JobKind.PYTHON:
            raise InvalidField('`extract` is not for kind "python": its `handler` gets the input.', field="extract")
        if len(name) > MAX_HANDLER or not _HANDLER.fullmatch(name):
            raise InvalidField(
                f"`extract` must be the name of a registered function, at most {MAX_HANDLER} characters.",
                field="extract",
            )
    if not spec.keep_bodies and (name is None or spec.kind is not JobKind.FETCH):
        raise InvalidField('`keep_bodies` can be false only with `extract`, for kind "fetch".', field="keep_bodies")


def _check_changed_from(spec: JobSpec) -> None:
    if spec.changed_from is None:
        return
    if spec.kind is not JobKind.FETCH:
        raise InvalidField('`changed_from` is only for kind "fetch".', field="changed_from")
    if not _JOB_ID.fullmatch(spec.changed_from):
        raise InvalidField("`changed_from` must be the id of a job.", field="changed_from")


def _check_export(kind: JobKind, export: ExportApi | None) -> None:
    if kind is not JobKind.EXPORT_DOWNLOAD:
        if export is not None:
            raise InvalidField('`export` is only for kind "export_download".', field="export")
        return
    if export is None:
        raise InvalidField('A job of kind "export_download" needs `export`.', field="export")
    wrong = export_problem(export)
    if wrong is not None:
        raise InvalidField(f"`export.{wrong.field}`: {wrong.message}.", field=f"export.{wrong.field}")

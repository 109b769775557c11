"""Configures the log of a command: on standard error, above the live bar, at the level of the settings. Readable lines
on a terminal, JSON elsewhere. Redaction is the last step for every line, also those of libraries."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog
from structlog.typing import Processor

from conveyor.errors import BodyDamaged, ConveyorError, DiskUnwritable, InvalidSetting
from conveyor.telemetry import metrics
from conveyor.telemetry.redact import printable, redact_event

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Events that the progress of a run shows in words.
_SHOWN = frozenset({"breaker opened", "breaker closed"})


class _StandardError:
    """The current standard error: a live bar replaces sys.stderr."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_log(level: str, quiet: bool = False, form: str = "auto") -> None:
    """Configure structlog and the standard logging. `quiet`, for commands with a live bar, drops the level info,
    and what the bar tells by itself."""
    number = _LEVELS.get(level.lower())
    if number is None:
        raise InvalidSetting(f"Unknown log level {level!r}. Set CONVEYOR_LOG_LEVEL to one of {', '.join(_LEVELS)}.")
    if quiet and number == logging.INFO:
        number = logging.WARNING
    every: list[Processor] = [
        *([_drop_shown] if quiet and number >= logging.WARNING else []),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _explain_disk,
        structlog.processors.format_exc_info,
        _count,
    ]
    last = [redact_event, _renderer(form)]
    structlog.configure(
        processors=[*every, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
    )
    _configure_libraries([structlog.stdlib.add_logger_name, *every], last)


def _renderer(form: str) -> Processor:
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if form == "json" or (form == "auto" and not terminal):
        return structlog.processors.JSONRenderer(ensure_ascii=False)
    render = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)

    def rendered(logger: Any, method: str, event: MutableMapping[str, Any]) -> str:
        for name, value in event.items():
            if isinstance(value, str) and name != "exception":
                event[name] = printable(value)
        return render(logger, method, event)

    return rendered


def _configure_libraries(before: list[Processor], last: list[Processor]) -> None:
    """Route warnings of libraries, which use the standard logging, into the same log."""
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    handler = logging.StreamHandler(cast(TextIO, _StandardError()))
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processors=[remove, *last]))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)


def _drop_shown(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.get("event") in _SHOWN:
        raise structlog.DropEvent
    return event


def _explain_disk(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A disk that cannot be written, or that damaged a body, is no mistake in the code: its error says what to do, and
    needs no traceback."""
    given = event.get("exc_info")
    error = sys.exc_info()[1] if given is True else given[1] if isinstance(given, tuple) else given
    cause = _cause_of(error)
    if isinstance(cause, (DiskUnwritable, BodyDamaged)):
        del event["exc_info"]
        event.setdefault("error", str(cause))
    return event


def _cause_of(error: object) -> object:
    """The error itself, or the only one that it was raised from: a framework raises its own while it streams."""
    while isinstance(error, BaseException) and not isinstance(error, ConveyorError):
        inner = error.exceptions if isinstance(error, BaseExceptionGroup) else (error.__cause__,)
        if len(inner) != 1 or inner[0] is None:
            return error
        error = inner[0]
    return error


def _count(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    level = "error" if event["level"] == "critical" else event["level"]
    if level in ("warning", "error"):
        metrics.LOGGED.add(1, level)
    return event

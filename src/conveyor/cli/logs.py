"""The log of a command: on standard error, above the live bar, at the level of the settings."""

import logging
import sys
from typing import TextIO, cast

import structlog

from conveyor.errors import InvalidSetting

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _StandardError:
    """Whatever standard error is at the moment: a live bar puts itself in its place."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def configure_log(level: str, quiet: bool = False) -> None:
    """`quiet` is for commands that show a bar: information is what the bar is for."""
    number = _LEVELS.get(level.lower())
    if number is None:
        raise InvalidSetting(f"CONVEYOR_LOG_LEVEL must be one of {', '.join(_LEVELS)}, not {level!r}")
    if quiet and number == logging.INFO:
        number = logging.WARNING
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
    )

"""The log of a child process: messages of the interpreter and of libraries go to standard error, in the parent's format
and redacted. It does without structlog, which takes longer to import than the rest of such a process."""

import logging

import msgspec

from conveyor.clock import iso_text
from conveyor.telemetry.redact import redact


class _Lines(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "timestamp": iso_text(record.created),
            "level": record.levelname.lower(),
            "event": redact(record.getMessage()),
            "logger": record.name,
            "role": self._role,
        }
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def configure_plain_log(role: str) -> None:
    """Log as `role`, without structlog."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines(role))
    logging.getLogger().handlers = [handler]

"""The log of tests and of the processes that they start."""

import structlog


def be_plain() -> None:
    """By default structlog draws a traceback in boxes, which takes a second."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["level", "event"]),
        ]
    )

"""Conveyor: durable bulk jobs. Hand over a list, watch it run, take the results away, whole, once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from conveyor.errors import ConveyorError
from conveyor.handlers import Cancelled, Context, Handlers, task
from conveyor.handlers import FetchedPage as Page

if TYPE_CHECKING:
    from conveyor.client import (
        AsyncClient,
        AsyncExport,
        AsyncJob,
        Client,
        Event,
        Export,
        Job,
        Progress,
        RemoteList,
        Result,
    )

__all__ = [
    "AsyncClient",
    "AsyncExport",
    "AsyncJob",
    "Cancelled",
    "Client",
    "Context",
    "ConveyorError",
    "Event",
    "Export",
    "Handlers",
    "Job",
    "Page",
    "Progress",
    "RemoteList",
    "Result",
    "task",
]

__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """The SDK, when it is asked for: a worker, and `conveyor --help`, do without it."""
    if name in __all__:
        return getattr(import_module("conveyor.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

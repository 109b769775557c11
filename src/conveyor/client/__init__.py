"""The SDK: Client, AsyncClient, and the values they return. The command line uses it to talk to a server.

It imports nothing from the server, and needs only msgspec and pyreqwest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conveyor.client.client import AsyncClient, Client
    from conveyor.client.export import AsyncExport
    from conveyor.client.export import ExportHandle as Export
    from conveyor.client.job import AsyncJob
    from conveyor.client.job import JobHandle as Job
    from conveyor.client.job_options import ExportOptions, Filter, JobOptions
    from conveyor.client.resources import Event, InvalidLine, Progress, RemoteList, Result, Upload
    from conveyor.client.transport import path_of

__all__ = [
    "AsyncClient",
    "AsyncExport",
    "AsyncJob",
    "Client",
    "Event",
    "Export",
    "ExportOptions",
    "Filter",
    "InvalidLine",
    "Job",
    "JobOptions",
    "Progress",
    "RemoteList",
    "Result",
    "Upload",
    "path_of",
]

# Where each of these names is defined, and its name there.
_PLACES = {
    "AsyncClient": ("client", "AsyncClient"),
    "AsyncExport": ("export", "AsyncExport"),
    "AsyncJob": ("job", "AsyncJob"),
    "Client": ("client", "Client"),
    "Event": ("resources", "Event"),
    "Export": ("export", "ExportHandle"),
    "ExportOptions": ("job_options", "ExportOptions"),
    "Filter": ("job_options", "Filter"),
    "InvalidLine": ("resources", "InvalidLine"),
    "Job": ("job", "JobHandle"),
    "JobOptions": ("job_options", "JobOptions"),
    "Progress": ("resources", "Progress"),
    "RemoteList": ("resources", "RemoteList"),
    "Result": ("resources", "Result"),
    "Upload": ("resources", "Upload"),
    "path_of": ("transport", "path_of"),
}


def __getattr__(name: str) -> Any:
    """The names above, when they are asked for: a server uses a few modules of the SDK, and does without the others."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _PLACES[name]
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), own)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""The SDK: Client, AsyncClient, and the values they return. The command line uses it to talk to a server.

It imports nothing from the server, and needs only msgspec and pyreqwest.
"""

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

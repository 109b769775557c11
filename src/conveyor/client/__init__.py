"""The SDK: Client and AsyncClient, and what they hand out. The command line talks to a server with it too.

It imports nothing of the server, and needs msgspec and pyreqwest only.
"""

from conveyor.client.client import AsyncClient, Client
from conveyor.client.export import AsyncExport
from conveyor.client.export import ExportHandle as Export
from conveyor.client.job import AsyncJob
from conveyor.client.job import JobHandle as Job
from conveyor.client.job_options import ExportOptions, Filter, JobOptions
from conveyor.client.resources import Event, InvalidLine, Progress, Result, Upload
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
    "Result",
    "Upload",
    "path_of",
]

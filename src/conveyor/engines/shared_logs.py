"""Shared logs: blobs to which other processes of this machine append. A module of its own, because a fetcher imports it
and nothing else of the engines: it starts in half the time.
"""

from conveyor.engines.blobs import SharedLogs
from conveyor.engines.local_blobs import LocalBlobs
from conveyor.settings import Settings, blob_directory


def open_shared_logs(settings: Settings) -> SharedLogs | None:
    """The logs of the blobs; None where they are not a directory."""
    directory = blob_directory(settings)
    return None if directory is None else LocalBlobs(directory)

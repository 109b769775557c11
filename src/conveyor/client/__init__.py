"""The HTTP client of Conveyor: what the command line talks to a server with."""

from conveyor.client.client import Client

__all__ = ["Client"]

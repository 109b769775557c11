"""Conveyor: durable bulk jobs. Hand over a list, watch it run, take the results away, whole, once."""

from conveyor.handlers import Cancelled, Context, Handlers, task

__all__ = ["Cancelled", "Context", "Handlers", "task"]

__version__ = "0.1.0"

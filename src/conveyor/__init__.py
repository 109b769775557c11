"""Conveyor: durable bulk jobs. Hand over a list, watch it run, take the results away, whole, once."""

__version__ = "0.1.0"

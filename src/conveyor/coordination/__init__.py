"""Coordination: policies (limits per target), once, over the coordinator's primitives."""

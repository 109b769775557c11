"""Coordination: policies over the coordinator's primitives, such as limits and breakers for each target."""

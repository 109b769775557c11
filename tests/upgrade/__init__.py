"""Upgrades: the version before on the schema of the next one, with real processes, under load."""

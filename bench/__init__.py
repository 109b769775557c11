"""Bench: what Conveyor gets done, each figure as a ratio to a bare limit that is measured in the same run."""

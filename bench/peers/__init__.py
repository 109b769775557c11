"""Peers: the same two jobs, done by other tools and by Conveyor, in one run on one machine."""

"""Putting Conveyor on AWS: the template with its three sizes, what they cost, and the commands that make a stack."""

"""`CONVEYOR_CRASH_HITS=all`: crash tests die at every hit of a point in every scenario, not at some of them."""

import os

ALL_HITS = os.environ.get("CONVEYOR_CRASH_HITS") == "all"

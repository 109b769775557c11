"""Power-loss replay: what is left of an installation when the power fails at any moment.

A real embedded system runs a few jobs while every write, truncate, hole, rename, unlink and sync of its directory is
recorded, of the database by a VFS of SQLite (`vfs.py`) and of everything else by the functions of `os` (`recorder.py`).
A ledger (`ledger.py`) keeps each answer that a client got, with its place in the record.

Then the power fails, many times: at a cut of the record (`disk.py`) what was synced is on the disk, and of the rest
nothing, everything, some of it, or torn pieces (`states.py`). A system is started on that disk, runs all to its end,
and is held to what the ledger had at the cut (`check.py`).

`python -m tests.powerloss --states 5000` prints the figures.
"""
